"""Hash of the code on a kernel's timed path, computed from text, so that any git revision can be read.

Results belong to a kernel by this hash. It covers what ``launch`` and ``outputs`` of the spec reach through imports
within the kernel's own package: no comments, docstrings, formatting, names of helpers and modules, and nothing of the
reference, the inputs, the grid and other kernels. A kernel function without a spec is hashed with all it mentions,
except for ``triton.autotune``; so is a spec that is not a call with a ``launch=`` keyword. Names reached through
strings, ``getattr``, ``torch.ops`` or side effects of an import are not seen, nor is the code of other packages.
"""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import importlib.util
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from fp8tune import errors, registry
from fp8tune.revisions import git
from fp8tune.revisions.reference import KernelReference
from fp8tune.revisions.walk import Module, Read, Walk, candidates

NOT_TIMED = frozenset(
    f"fp8tune_kernels.{name}" for name in ("spec", "catalog", "tables", "runtime", "lookup", "launching")
)
"""Modules of our own that a kernel file uses around the timed path only."""

FOLDER = "fp8tune_kernels.quantize."
"""Where the kernels of this package lie; before November 2026 they lay beside ``spec.py``."""

SOURCE_ROOTS = ("kernels", "src", "")
"""Where a repository keeps its packages."""


class NoSuchKernel(errors.UsageError):
    """The code declares no such kernel."""


class Reference(NamedTuple):
    """Module and attribute of a kernel; of a ``path.py:ATTRIBUTE``, ``root`` is the folder its imports start from."""

    module: str
    attribute: str
    root: Path | None = None

    @property
    def package(self) -> str:
        """The outermost package."""
        return self.module.partition(".")[0]


def parse_reference(text: str) -> Reference:
    """Return where the text of a :class:`KernelReference` has its kernel. Raises UsageError for any other text."""
    text = KernelReference.parse(text).kernel
    if text in (registered := registry.kernels()):
        module, _, attribute = registered[text].partition(":")
        return Reference(module, attribute)
    where, colon, attribute = text.rpartition(":")
    if not colon:
        raise errors.unknown("kernel", text, registered)
    attribute, _, _ = attribute.partition("[")  # a kernel inside a dict is hashed with all of it
    if not all(part.isidentifier() for part in attribute.split(".")):
        raise errors.UsageError(f"{attribute!r} in {text!r} is no attribute name: write module:ATTRIBUTE")
    if where.endswith(".py"):  # imports of a file start above the outermost package it lies in
        file = Path(where).absolute()
        root, parts = file.parent, [file.stem]
        while (root / "__init__.py").is_file():
            root, parts = root.parent, [root.name, *parts]
        return Reference(".".join(parts), attribute, root)
    if not all(part.isidentifier() for part in where.split(".")):
        raise errors.UsageError(f"{where!r} in {text!r} is no module name: write module:ATTRIBUTE or path.py:ATTRIBUTE")
    return Reference(where, attribute)


# Readers of code


def installed(kernel: str) -> Read:
    """Return a reader of the code that would run here; nothing is imported."""
    return in_folder(_root(kernel))


def in_folder(folder: Path, roots: tuple[str, ...] = ("",)) -> Read:
    """Return a reader of files below a folder, which tries each source root in turn."""

    def text(path: str) -> str | None:
        file = folder / path
        return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else None

    return _in_roots(text, roots)


def at_commit(repository: Path, commit: str, roots: tuple[str, ...] = SOURCE_ROOTS) -> Read:
    """Return a reader of the files that a commit of a git repository has."""
    names = functools.cache(functools.partial(git.files, repository, commit))  # most paths that are tried are none
    return _in_roots(lambda path: git.show(repository, commit, path) if path in names() else None, roots)


def _in_roots(text: Read, roots: tuple[str, ...]) -> Read:
    @functools.cache
    def read(path: str) -> str | None:
        texts = (text(str(PurePosixPath(root, path))) for root in roots)
        return next((text for text in texts if text is not None), None)

    return read


def _root(kernel: str) -> Path:
    """Return the folder an installed kernel's imports start from; the current one comes last, as in an import."""
    reference = parse_reference(kernel)
    if reference.root is not None:
        return reference.root
    package = reference.package
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # __main__, and whatever a program put into sys.modules by hand
        raise NoSuchKernel(f"{package} has no file of its own: name the kernel's file as path.py:ATTRIBUTE") from None
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).parent
    if spec is not None:
        return Path(spec.origin or ".").parent
    if any(Path(path).is_file() for path in candidates(package)):
        return Path.cwd()
    raise NoSuchKernel(f"no module named {package!r}: install it, or name the file as path.py:ATTRIBUTE")


# Hashes


def source_hash(kernel: str, read: Read) -> str:
    """Return 16 hex digits for the code on the timed path of a kernel (its name or reference), as ``read`` shows it.

    Raises NoSuchKernel where the module or attribute does not exist, UsageError where a file does not parse.
    """
    return _hash(kernel, read, ("launch", "outputs"))


def reference_hash(kernel: str, read: Read) -> str:
    """Return the same for what says which bytes are right: what another reference checked is checked anew.

    A kernel without a spec agrees with the first of its configs, so that its own code counts.
    """
    own = _hash(kernel, read, ("inputs", "reference", "edges"), needed="reference")
    named = KernelReference.parse(kernel)
    if not (options := str(replace(named, kernel="", recording=""))):
        return own
    function = [source_hash(named.reference, installed(named.reference))] if named.reference else []
    return _digest("\n".join([own, options, *function]).encode())


def folder_hash(kernel: str) -> str:
    """Return 16 hex digits for the text of every Python file beside an installed kernel's own.

    Far cheaper than following names, but a comment changes it. Exported tables are left out: a sweep does not read
    them. Raises NoSuchKernel if the kernel is not installed.
    """
    reference = parse_reference(kernel)
    start, paths = _root(kernel), candidates(reference.module)
    folder = next(((start / path).parent for path in paths if (start / path).is_file()), None)
    if folder is None:
        raise NoSuchKernel(f"{kernel} is not installed: there is no {paths[0]} below {start}")
    root, files = (start / reference.package, "**/*.py") if kernel in registry.kernels() else (folder, "*.py")
    texts = [path.read_bytes() for path in sorted(root.glob(files)) if "tables" not in path.relative_to(root).parts]
    return _digest(b"\0".join(texts))


def kernel_name(kernel: str, read: Read) -> str:
    """Return the ``name=`` that a referenced spec declares; a kernel function is called as it is referred to.

    Raises as :func:`source_hash` does.
    """
    declared = _declared(kernel, read)[2]
    if isinstance(declared, ast.FunctionDef | ast.ClassDef) or _calls(declared, "jit", "heuristics"):
        return KernelReference.parse(kernel).kernel
    name = _keywords(declared).get("name")
    if isinstance(name, ast.Constant):
        return str(name.value)
    raise errors.UsageError(f'{kernel} gives no plain name: declare it as SPEC = KernelSpec(name="...")')


def _hash(kernel: str, read: Read, fields: tuple[str, ...], needed: str = "launch") -> str:
    """Hash these fields of a spec's declaration; all of it where ``needed`` is not written there."""
    walk, module, spec = _declared(kernel, read)
    keywords = _keywords(spec)
    for expression in [keywords[name] for name in fields if name in keywords] if needed in keywords else [spec]:
        walk.enter(module, expression)
    return _digest("\n".join(walk.entries).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _declared(kernel: str, read: Read) -> tuple[Walk, Module, ast.expr | ast.stmt]:
    """Return a walk, a module, and the expression that its spec is assigned from, or the kernel function itself.

    ``triton.autotune`` around the function is left out.
    """
    reference = parse_reference(kernel)
    # a loose file may use its neighbours; an installed package lies among foreign ones: the walk stays inside it
    walk = Walk(read, package=reference.package if reference.root is None else None, ignored=NOT_TIMED)
    # a kernel inside a class is hashed with all of it
    name, attribute, seen = reference.module, reference.attribute.partition(".")[0], set[str]()
    if walk.module(name) is None:
        name = name.replace(FOLDER, "fp8tune_kernels.", 1)
    while (module := walk.module(name)) is not None and f"{name}.{attribute}" not in seen:
        seen.add(f"{name}.{attribute}")
        for statement in module.statements.get(attribute, ()):
            if isinstance(statement, ast.ClassDef):
                return walk, module, statement
            if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                value = statement.value
                while isinstance(value, ast.Call) and _calls(value.func, "autotune") and value.args:
                    value = value.args[0]  # of triton.autotune(...)(kernel)
                return walk, module, value
            if isinstance(statement, ast.FunctionDef):
                kernels = [_without_autotune(item) for item in module.statements[attribute]]
                module.statements[attribute] = kernels  # it is reached again by its own name
                return walk, module, kernels[0]
        if attribute not in module.imports:
            raise NoSuchKernel(f"module {name} assigns no {attribute}: declare it as {attribute} = KernelSpec(...)")
        name, _, attribute = module.imports[attribute].rpartition(".")  # a spec may be re-exported
    raise NoSuchKernel(f"there is no module {name} that assigns {attribute}: check the kernel's name")


def _without_autotune(statement: ast.stmt) -> ast.stmt:
    if not isinstance(statement, ast.FunctionDef):
        return statement
    bare = copy.copy(statement)
    bare.decorator_list = [item for item in statement.decorator_list if not _calls(item, "autotune")]
    return bare


def _keywords(spec: ast.AST) -> dict[str | None, ast.expr]:
    return {keyword.arg: keyword.value for keyword in spec.keywords} if isinstance(spec, ast.Call) else {}


def _calls(node: ast.AST, *names: str) -> bool:
    """Return True for a call such as ``triton.NAME(...)``, or one of its result."""
    while isinstance(node, ast.Call):
        node = node.func
        if isinstance(node, ast.Name | ast.Attribute):
            return (node.id if isinstance(node, ast.Name) else node.attr) in names
    return False
