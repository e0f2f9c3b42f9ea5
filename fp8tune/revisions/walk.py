"""What a piece of Python reaches, followed name by name through the text of its modules; nothing is imported.

A :class:`Walk` starts at an expression and collects, as canonical text, each module-level statement it depends on.
Names bound at module level are numbered in the order of their first mention. So a rename of a helper, a move of a
definition, a rename or a split of a module changes nothing; using another definition does.
"""

from __future__ import annotations

import ast
import copy
import symtable
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fp8tune.errors import UsageError

Read = Callable[[str], str | None]
"""A file's path relative to the import root (``fp8tune_kernels/spec.py``) -> its text, None where absent."""


@dataclass(frozen=True)
class Module:
    """A parsed module: which top-level statements bind a name, and what its imports stand for."""

    name: str
    package: str
    """What relative imports start from."""
    statements: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)
    """Name bound here -> dotted name of the module, or of the thing in a module, that it stands for."""
    stars: list[str] = field(default_factory=list)
    """Modules of ``from x import *``."""


@dataclass(frozen=True)
class _Place:
    """A name bound at the top level of a module; ``name`` empty: the module itself, passed around."""

    module: str
    name: str = ""


@dataclass
class Walk:
    """Collects in ``entries`` what is reached, in the order in which it is first mentioned.

    A name of the code that is followed becomes its number in that order, a name of foreign code its full dotted name.
    """

    read: Read
    package: str | None = None
    """Follow imports within this outermost package only; None follows whatever ``read`` has."""
    ignored: frozenset[str] = frozenset()
    """Modules never followed, nor those below them: a name of theirs becomes one and the same word."""
    entries: list[str] = field(default_factory=list)
    _numbers: dict[_Place, int] = field(default_factory=dict)
    _waiting: list[_Place] = field(default_factory=list)
    _entered: set[int] = field(default_factory=set)
    _modules: dict[str, Module | None] = field(default_factory=dict)

    def enter(self, module: Module, node: ast.AST) -> None:
        """Add an expression of a module and all it depends on."""
        self._add(module, node)
        while self._waiting:
            place = self._waiting.pop(0)
            reached = self._modules[place.module]
            assert reached is not None
            if not place.name:
                for name in reached.statements:
                    self._number(_Place(reached.name, name))
            for statement in reached.statements.get(place.name, ()):
                if id(statement) not in self._entered:
                    self._entered.add(id(statement))
                    self._add(reached, statement)

    def module(self, name: str) -> Module | None:
        """A module this walk may follow, parsed; None for any other. Raises UsageError where it is not Python."""
        if name not in self._modules:
            self._modules[name] = self._load(name)
        return self._modules[name]

    def _load(self, name: str) -> Module | None:
        if self.package not in (None, name.partition(".")[0]) or self._is_ignored(name):
            return None
        for path in candidates(name):
            text = self.read(path)
            if text is not None:
                package = name if path.endswith("/__init__.py") else name.rpartition(".")[0]
                return _parsed(Module(name, package), path, text)
        return None

    def _is_ignored(self, name: str) -> bool:
        above = name.split(".")
        return any(".".join(above[: depth + 1]) in self.ignored for depth in range(len(above)))

    def _add(self, module: Module, node: ast.AST) -> None:
        self.entries.append(canonical(_Numbered(self, module, node).visit(copy.deepcopy(node))))

    def _number(self, place: _Place) -> str:
        if place not in self._numbers:
            self._numbers[place] = len(self._numbers)
            self._waiting.append(place)
        return f"#{self._numbers[place]}"

    def label(self, module: Module, chain: tuple[str, ...], within: frozenset[_Place] = frozenset()) -> str:
        """What a name of a module, and the attributes taken of it, becomes in an entry."""
        place = _Place(module.name, chain[0])
        if place in within:  # modules that import each other's names
            return ".".join(chain)
        within |= {place}
        if place.name in module.statements:
            number = self._number(place)
            if place.name in module.imports:  # bound twice: in a branch each, or in try and except
                self._imported(module.imports[place.name], (), within)
            return ".".join([number, *chain[1:]])
        if place.name in module.imports:
            return self._imported(module.imports[place.name], chain[1:], within)
        for star in filter(None, map(self.module, module.stars)):
            if self._binds(star, place.name):
                return self.label(star, chain, within)
        return ".".join(chain)

    def _imported(self, target: str, attributes: tuple[str, ...], within: frozenset[_Place]) -> str:
        """``a.b`` may be module b of package a, or b in module a: the first module that binds the next name decides."""
        parts = [*target.split("."), *attributes]
        for depth in range(1, len(parts) + 1):
            module = self.module(".".join(parts[:depth]))
            if module is None:
                continue
            if depth == len(parts):  # the module itself is passed around: anything in it may be used
                return self._number(_Place(module.name))
            if self._binds(module, parts[depth]):
                return self.label(module, tuple(parts[depth:]), within)
        return "ignored" if self._is_ignored(target) else ".".join(parts)

    def _binds(self, module: Module, name: str, within: frozenset[str] = frozenset()) -> bool:
        if name in module.statements or name in module.imports:
            return True
        within = within | {module.name}
        stars = [star for star in map(self.module, module.stars) if star is not None and star.name not in within]
        return any(self._binds(star, name, within) for star in stars)


class _Numbered(ast.NodeTransformer):
    """Puts a label for each name that a statement takes from its module, or binds there."""

    def __init__(self, walk: Walk, module: Module, node: ast.AST) -> None:
        self._walk, self._module = walk, module
        self._own = set(_bound_names(node)) if isinstance(node, ast.stmt) else set()
        self._names = _global_names(node) | self._own
        self._node = node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._labelled(node, (node.id,))

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        root: ast.expr = node
        attributes = tuple[str, ...]()
        while isinstance(root, ast.Attribute):
            attributes = (root.attr, *attributes)
            root = root.value
        if isinstance(root, ast.Name) and root.id in self._names:
            return self._labelled(node, (root.id, *attributes))
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._definition(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._definition(node)

    def _definition(self, node: ast.FunctionDef | ast.ClassDef) -> ast.AST:
        if node.name in self._own:
            node.name = self._walk.label(self._module, (node.name,))
        return self.generic_visit(node)

    def _labelled(self, node: ast.expr, chain: tuple[str, ...]) -> ast.AST:
        if chain[0] not in self._names:
            return node
        return ast.Name(self._walk.label(self._module, chain), ast.Load())


def candidates(module: str) -> tuple[str, str]:
    """The files a module may lie in, relative to the import root."""
    path = module.replace(".", "/")
    return f"{path}.py", f"{path}/__init__.py"


def canonical(node: ast.AST) -> str:
    """A syntax tree as text, without layout and comments; the same from every Python version.

    ``ast.dump`` is not: newer Pythons add fields that older trees lack, so empty and absent fields are left out here.
    """
    fields = sorted((name, value) for name, value in ast.iter_fields(node) if value is not None and value != [])
    return f"{type(node).__name__}({', '.join(f'{name}={_canonical_value(value)}' for name, value in fields)})"


def _canonical_value(value: object) -> str:
    if isinstance(value, ast.AST):
        return canonical(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(_canonical_value, value)) + "]"
    return repr(value)


class _WithoutProse(ast.NodeTransformer):
    """Drops what no computation depends on: docstrings, and the annotations of plain functions.

    A decorated function keeps its annotations: ``tl.constexpr`` is one.
    """

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if not node.decorator_list:
            node.returns = None
            for argument in ast.walk(node.args):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
        return self.visit_ClassDef(node)

    def visit_ClassDef(self, node: ast.FunctionDef | ast.ClassDef) -> ast.AST:
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)


def _parsed(module: Module, path: str, text: str) -> Module:
    try:
        tree = _WithoutProse().visit(ast.parse(text))
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{path} is not Python ({error}): fix the file") from None
    for statement in tree.body:
        for node in _run_at_import(statement):
            if isinstance(node, ast.Import):
                _record_import(module, node)
            elif isinstance(node, ast.ImportFrom):
                _record_import_from(module, node)
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            for name in _bound_names(statement):
                module.statements.setdefault(name, []).append(statement)
    return module


def _record_import(module: Module, node: ast.Import) -> None:
    for alias in node.names:
        first = alias.name.partition(".")[0]
        module.imports[alias.asname or first] = alias.name if alias.asname else first


def _record_import_from(module: Module, node: ast.ImportFrom) -> None:
    above = module.package.split(".") if node.level else []
    above = above[: len(above) - node.level + 1]
    origin = ".".join([*above, *([node.module] if node.module else [])])
    for alias in node.names:
        if alias.name == "*":
            module.stars.append(origin)
        else:
            module.imports[alias.asname or alias.name] = f"{origin}.{alias.name}"


def _run_at_import(node: ast.stmt | ast.excepthandler) -> Iterator[ast.AST]:
    """A top-level statement and those inside it that are in no function or class."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.excepthandler):
                yield from _run_at_import(child)


class _WithoutComprehensions(ast.NodeTransformer):
    """Puts None for each comprehension: since Python 3.12 symbol tables show its variables in the scope around it."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            return ast.Constant(None)
        return super().generic_visit(node)


def _bound_names(statement: ast.stmt) -> list[str]:
    plain = _WithoutComprehensions().visit(copy.deepcopy(statement))
    symbols = symtable.symtable(ast.unparse(plain), "<module>", "exec").get_symbols()
    return sorted(symbol.get_name() for symbol in symbols if symbol.is_assigned())


def _global_names(node: ast.AST) -> set[str]:
    """The names code takes from its module: parameters and locals of functions in it are not among them."""

    def walk(table: symtable.SymbolTable) -> Iterator[str]:
        yield from (symbol.get_name() for symbol in table.get_symbols() if symbol.is_global())
        for inner in table.get_children():
            yield from walk(inner)

    # within a function, so that every Python takes the variables of its comprehensions for locals
    inside = "def _():\n" + textwrap.indent(ast.unparse(node), " ")
    return set(walk(symtable.symtable(inside, "<module>", "exec"))) - {"_"}
