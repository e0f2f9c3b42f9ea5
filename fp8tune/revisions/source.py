"""Hash of the code on a kernel's timed path, computed from text; nothing is imported.

Results belong to a kernel by this hash. It covers what ``launch`` and ``outputs`` of the spec reach through imports
within the kernel's own package; not comments, docstrings, formatting, names of helpers and modules, the reference, the
inputs, the grid and other kernels. A kernel without a spec is hashed with all it mentions, except ``triton.autotune``;
so is a spec that is not a call with a ``launch=`` keyword. The hash misses names reached through strings, ``getattr``,
``torch.ops`` or side effects of an import, and the code of other packages.
"""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import importlib.util
from dataclasses import replace
from pathlib import Path

from fp8tune import errors, registry
from fp8tune.revisions.reference import KernelReference, locate
from fp8tune.revisions.walk import Module, Read, Walk, candidates

# Modules of our own that a kernel file uses around the timed path only.
NOT_TIMED = frozenset(
    f"fp8tune_kernels.{name}" for name in ("spec", "catalog", "tables", "runtime", "lookup", "launching")
)

FOLDER = "fp8tune_kernels.quantize."  # of our kernels; before November 2026 they lay beside ``spec.py``

SOURCE_ROOTS = ("kernels", "src", "")  # folders where a repository keeps its packages


class NoSuchKernel(errors.UsageError):
    """The code declares no such kernel."""


def installed(kernel: str) -> Read:
    """Return a reader of the code that would run here; nothing is imported."""
    return in_folder(_root(kernel))


def in_folder(folder: Path, roots: tuple[str, ...] = ("",)) -> Read:
    """Return a reader of files below a folder, such as a checkout, which tries each source root in turn."""

    @functools.cache  # what kernels share is read once
    def read(path: str) -> str | None:
        files = [folder / root / path for root in roots]
        file = next((file for file in files if file.is_file()), None)
        return None if file is None else file.read_text(encoding="utf-8", errors="replace")

    return read


def _root(kernel: str) -> Path:
    """Return the folder that imports of an installed kernel start from; the current one comes last, as in an import."""
    location = locate(kernel)
    if location.root is not None:
        return location.root
    package = location.module.partition(".")[0]
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


def source_hash(kernel: str, read: Read) -> str:
    """Return 16 hex digits for the code on the timed path of a kernel, as ``read`` shows it.

    Raises NoSuchKernel if the module or attribute does not exist, UsageError if a file does not parse.
    """
    return _hash(kernel, read, ("launch", "outputs"), required="launch")


def reference_hash(kernel: str, read: Read) -> str:
    """Return 16 hex digits for the code that decides which bytes are right: another reference needs new checks.

    Configs of a kernel without a spec are compared with the first of them, so that its own code counts.
    """
    own = _hash(kernel, read, ("inputs", "arguments", "reference", "edges"), required="reference")
    named = KernelReference.parse(kernel)
    if not (options := str(replace(named, kernel="", recording=""))):
        return own
    function = [source_hash(named.reference, installed(named.reference))] if named.reference else []
    return _digest("\n".join([own, options, *function]).encode())


def folder_hash(kernel: str) -> str:
    """Return 16 hex digits for the text of every Python file beside an installed kernel's own.

    Far cheaper than following names, but a comment changes it. Exported tables are left out, as a sweep does not read
    them. Raises NoSuchKernel if the kernel is not installed.
    """
    start, module = _root(kernel), locate(kernel).module
    paths = candidates(module)
    folder = next(((start / path).parent for path in paths if (start / path).is_file()), None)
    if folder is None:
        raise NoSuchKernel(f"{kernel} is not installed: there is no {paths[0]} below {start}")
    is_registered = kernel in registry.kernels()
    root, pattern = (start / module.partition(".")[0], "**/*.py") if is_registered else (folder, "*.py")
    texts = [path.read_bytes() for path in sorted(root.glob(pattern)) if "tables" not in path.relative_to(root).parts]
    return _digest(b"\0".join(texts))


def kernel_name(kernel: str, read: Read) -> str:
    """Return the ``name=`` that a referenced spec declares; a kernel without a spec has the name of its reference.

    Raises as :func:`source_hash` does.
    """
    declared = _declared(kernel, read)[2]
    if isinstance(declared, ast.FunctionDef | ast.ClassDef) or _calls(declared, "jit", "heuristics"):
        return KernelReference.parse(kernel).kernel
    name = _keywords(declared).get("name")
    if isinstance(name, ast.Constant):
        return str(name.value)
    raise errors.UsageError(f'{kernel} has no literal name: declare it as SPEC = KernelSpec(name="...")')


def _hash(kernel: str, read: Read, fields: tuple[str, ...], required: str) -> str:
    """Hash these fields of a spec's declaration, or all of it if ``required`` is not among its keywords."""
    walk, module, spec = _declared(kernel, read)
    keywords = _keywords(spec)
    for expression in [keywords[name] for name in fields if name in keywords] if required in keywords else [spec]:
        walk.enter(module, expression)
    return _digest("\n".join(walk.entries).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _declared(kernel: str, read: Read) -> tuple[Walk, Module, ast.expr | ast.stmt]:
    """Return a walk, a module, and the expression that its spec is assigned from, or the kernel itself.

    ``triton.autotune`` around a kernel is left out.
    """
    location = locate(kernel)
    # a loose file may use its neighbours; an installed package lies among foreign ones: the walk stays inside it
    package = location.module.partition(".")[0] if location.root is None else None
    walk = Walk(read, package, ignored=NOT_TIMED)
    # a kernel inside a class is hashed with all of it
    name, attribute, seen = location.module, location.attribute.partition(".")[0], set[str]()
    if walk.module(name) is None:
        name = name.replace(FOLDER, "fp8tune_kernels.", 1)
    while (module := walk.module(name)) is not None and f"{name}.{attribute}" not in seen:
        seen.add(f"{name}.{attribute}")
        for statement in module.statements.get(attribute, ()):
            match statement:
                case ast.ClassDef():
                    return walk, module, statement
                case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
                    while isinstance(value, ast.Call) and _calls(value.func, "autotune") and value.args:
                        value = value.args[0]  # of triton.autotune(...)(kernel)
                    return walk, module, value
                case ast.FunctionDef():
                    bare = [_without_autotune(item) for item in module.statements[attribute]]
                    module.statements[attribute] = bare  # it is reached again by its own name
                    return walk, module, bare[0]
        if attribute not in module.imports:
            raise NoSuchKernel(f"module {name} assigns no {attribute}: declare it as {attribute} = KernelSpec(...)")
        name, _, attribute = module.imports[attribute].rpartition(".")  # a spec may be re-exported
    raise NoSuchKernel(f"there is no module {name} that assigns {attribute}: check the kernel's name")


def _without_autotune(statement: ast.stmt) -> ast.stmt:
    bare = copy.copy(statement)
    if isinstance(bare, ast.FunctionDef):
        bare.decorator_list = [item for item in bare.decorator_list if not _calls(item, "autotune")]
    return bare


def _keywords(spec: ast.AST) -> dict[str | None, ast.expr]:
    return {keyword.arg: keyword.value for keyword in spec.keywords} if isinstance(spec, ast.Call) else {}


def _calls(node: ast.AST, *names: str) -> bool:
    """Return True for a call such as ``triton.NAME(...)``, or a call of its result."""
    while isinstance(node, ast.Call):
        node = node.func
        if isinstance(node, ast.Name | ast.Attribute):
            return (node.id if isinstance(node, ast.Name) else node.attr) in names
    return False
