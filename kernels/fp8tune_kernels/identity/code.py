"""Hashes of the code that a kernel's declaration names, computed from text; nothing is imported.

The timed path is what ``launch`` and ``outputs`` of the spec reach through names and imports; not comments, docstrings,
formatting, names of helpers and modules, the reference, the inputs, the grid and other kernels. A kernel without a spec
is hashed with all it mentions, and of ``triton.autotune`` with the hooks alone; so is a spec that is not a call with a
``launch=`` keyword.
The hash misses names reached through strings, ``getattr``, ``torch.ops`` or side effects of an import.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeGuard

from .errors import InvalidCodeError, UnknownCodeError
from .modules import Finder
from .walk import Module, TooLargeError, Walk

# Modules of our own that a kernel file uses around the timed path only.
NOT_TIMED = frozenset(
    f"fp8tune_kernels.{name}" for name in ("spec", "catalog", "tables", "runtime", "lookup", "launching")
)

HOOKS = ("pre_hook", "post_hook", "reset_to_zero", "restore_value")  # of triton.autotune and triton.Config

FOLDER = "fp8tune_kernels.quantize."  # of our kernels; before November 2026 they lay beside ``spec.py``


class Location(NamedTuple):
    """Module and attribute of a kernel."""

    module: str
    attribute: str
    root: Path | None = None  # folder that the imports of a file start from


def locate(kernel: str, file: Path | None = None) -> Location:
    """Return the location of ``module:ATTRIBUTE`` or ``path.py:ATTRIBUTE``.

    ``file``: of a module that cannot be found by its name. Raises InvalidCodeError if the text names no attribute.
    """
    module, _, attribute = kernel.rpartition(":")
    attribute, _, _ = attribute.partition("[")  # a kernel inside a dict is hashed with all of it
    if not module or not all(part.isidentifier() for part in attribute.split(".")):
        raise InvalidCodeError(f"{attribute!r} in {kernel!r} is not an attribute name: write module:ATTRIBUTE")
    if file is not None or module.endswith(".py"):  # imports of a file start above its outermost package
        file = Path(file or module).absolute()
        root, parts = file.parent, [] if file.name == "__init__.py" else [file.stem]
        while (root / "__init__.py").is_file():
            root, parts = root.parent, [root.name, *parts]
        return Location(".".join(parts), attribute, root)
    if not all(part.isidentifier() for part in module.split(".")):
        raise InvalidCodeError(
            f"{module!r} in {kernel!r} is not a module name: write module:ATTRIBUTE or path.py:ATTRIBUTE"
        )
    return Location(module, attribute)


def fields_hash(location: Location, finder: Finder, fields: Sequence[str], required: str) -> str:
    """Return 16 hex digits for these fields of a spec, or all of it if ``required`` is not among its keywords.

    Without fields ``triton.autotune`` counts as well.

    Raises UnknownCodeError if the module or attribute does not exist, InvalidCodeError if a file does not parse.
    """
    opaque = frozenset[str]()
    while True:
        try:
            declared = declaration(location, finder, opaque, keep_configs=not fields)
            names = declared.keywords
            parts = [names[name] for name in fields if name in names] if required in names else [declared.node]
            for part in (*parts, *declared.others):
                declared.walk.enter(declared.module, part)
            return digest("\n".join(declared.walk.entries).encode())
        except TooLargeError as error:
            opaque |= {str(error)}


def declared_name(location: Location, finder: Finder) -> str | None:
    """Return the ``name=`` that a spec declares, empty if it is no literal; None for a kernel without a spec."""
    node = declaration(location, finder).node
    if isinstance(node, ast.FunctionDef | ast.ClassDef) or _calls(node, "jit", "heuristics"):
        return None
    name = _keywords(node).get("name")
    return str(name.value) if isinstance(name, ast.Constant) else ""


def digest(data: bytes) -> str:
    """Return 16 hex digits of data."""
    return hashlib.sha256(data).hexdigest()[:16]


@dataclass(frozen=True)
class Declaration:
    """Expression that a spec is assigned from, or a kernel itself."""

    walk: Walk
    module: Module
    node: ast.expr | ast.stmt
    others: tuple[ast.AST, ...] = ()  # statements that replace or change it, and hooks of its configs

    @property
    def keywords(self) -> dict[str | None, ast.expr]:
        """Keywords of the call that makes the spec."""
        return _keywords(self.node)


def declaration(
    location: Location, finder: Finder, opaque: frozenset[str] = frozenset(), *, keep_configs: bool = False
) -> Declaration:
    """Return the declaration of a kernel, with a walk that follows neither ignored nor ``opaque`` modules."""
    walk = Walk(finder, location.module.partition(".")[0], NOT_TIMED, opaque)
    # a kernel inside a class is hashed with all of it
    name, attribute, seen = location.module, location.attribute.partition(".")[0], set[str]()
    if walk.module(name) is None:
        name = name.replace(FOLDER, "fp8tune_kernels.", 1)
    while (module := walk.module(name)) is not None and f"{name}.{attribute}" not in seen:
        seen.add(f"{name}.{attribute}")
        statements, hooks = module.statements.get(attribute, []), list[ast.AST]()
        if not keep_configs:
            hooks = [hook for item in statements for hook in _hooks(item, module)]
            statements = [_without_autotune(item) for item in statements]
        for statement in statements:
            match statement:
                case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
                    others = [item for item in statements if item is not statement]
                    return Declaration(walk, module, value, (*others, *hooks))
                case ast.FunctionDef() | ast.ClassDef():
                    module.statements[attribute] = statements  # it is reached again by its own name
                    return Declaration(walk, module, statement, tuple(hooks))
        if attribute not in module.imports:
            raise UnknownCodeError(f"module {name} assigns no {attribute}: declare it as {attribute} = KernelSpec(...)")
        if len(module.imports[attribute]) > 1:
            return Declaration(walk, module, ast.Name(attribute, ast.Load()))
        name, attribute = module.imports[attribute][0]  # a spec may be re-exported
    raise UnknownCodeError(f"there is no module {name} that assigns {attribute}: check the kernel's name")


def _hooks(statement: ast.stmt, module: Module) -> list[ast.AST]:
    """Return what ``triton.autotune`` runs around each launch, and in the configs that it names: it changes outputs."""
    top = getattr(statement, "decorator_list", [getattr(statement, "value", None)])
    calls = [call for node in top for call in (node, getattr(node, "func", None)) if _is_autotune(call)]
    configs = [node for call in calls for node in (*call.args[:1], _keywords(call).get("configs")) if node is not None]
    names = {inner.id for node in configs for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    lists = [item for name in sorted(names) for item in module.statements.get(name, ())]
    inside = (inner for node in (*configs, *lists) for inner in ast.walk(node) if isinstance(inner, ast.keyword))
    every = [*(keyword for call in calls for keyword in call.keywords if keyword.arg in HOOKS), *inside]
    hooks = {ast.dump(item.value): item.value for item in every if item.arg in HOOKS}
    return [hooks[text] for text in sorted(hooks)]


def _is_autotune(node: ast.AST | None) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and not isinstance(node.func, ast.Call) and _calls(node, "autotune")


def _without_autotune(statement: ast.stmt) -> ast.stmt:
    bare = copy.copy(statement)
    if isinstance(bare, ast.FunctionDef):
        bare.decorator_list = [item for item in bare.decorator_list if not _calls(item, "autotune")]
    if isinstance(bare, ast.Assign | ast.AnnAssign):
        while isinstance(bare.value, ast.Call) and _calls(bare.value.func, "autotune") and bare.value.args:
            bare.value = bare.value.args[0]  # of triton.autotune(...)(kernel)
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
