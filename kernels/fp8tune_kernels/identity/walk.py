"""Follow a piece of Python name by name through the text of its modules; nothing is imported.

A :class:`Walk` starts at an expression and collects each module-level statement that it depends on, as text. Names
bound at module level are numbered by first mention, so that renaming a helper or moving it to another module changes
nothing, but using another definition does. Modules without source get a text that stands in for them.
"""

from __future__ import annotations

import ast
import functools
import itertools
import symtable
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .errors import InvalidCodeError
from .modules import Finder, Place, is_installed, stand_in

LARGEST = 1_000_000  # bytes of source that are followed into another package: about a second

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
UNREADABLE = (OSError, SyntaxError, ValueError, RecursionError, MemoryError)
SCOPES = (*DEFINITIONS, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

Chain = tuple[str, ...]  # a name and the attributes taken of it
Conditions = tuple[ast.stmt, ...]  # tests of the blocks around a statement, and what a try may fail at
Import = tuple[str, str]  # a module and a name in it or a module below it; an empty name for the module itself
Target = tuple[str, str]  # a module and a name bound in it; an empty name for the module itself, passed around


@dataclass(frozen=True)
class Module:
    """Parsed module."""

    name: str
    package: str = ""  # that relative imports start from
    stand_in: str = ""  # of a module without source: distribution and version, or the hash of its file
    # top-level statements that bind a name; under ``name.`` those that change what is imported
    statements: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imports: dict[str, tuple[Import, ...]] = field(default_factory=dict)  # several if branches bind a name
    stars: list[str] = field(default_factory=list)  # module of each ``from x import *``

    def binds(self, name: str) -> bool:
        """Return True if the module has this top-level name."""
        return name in self.statements or name in self.imports

    def add_import(self, name: str, imported: Import) -> None:
        """Add the origin of an imported name."""
        self.imports[name] = tuple(dict.fromkeys((*self.imports.get(name, ()), imported)))


class TooLargeError(Exception):
    """More of a package is reached than is followed. The only argument is the package's name."""


@dataclass
class Walk:
    """Traversal that collects ``entries`` in the order in which they are first mentioned.

    In an entry, a name of code that is followed is its number in that order, a name of other code is dotted.
    """

    finder: Finder
    start: str  # top-level package of the kernel: all of it is followed, and its files have to parse
    ignored: frozenset[str] = frozenset()  # modules not followed, nor those below: their names become one word
    opaque: frozenset[str] = frozenset()  # packages that are too large to follow
    entries: list[str] = field(default_factory=list)
    _numbers: dict[Target, int] = field(default_factory=dict)
    _waiting: list[Target] = field(default_factory=list)
    _entered: set[ast.stmt] = field(default_factory=set)
    _modules: dict[str, Module | None] = field(default_factory=dict)
    _bytes: dict[str, int] = field(default_factory=dict)

    def enter(self, module: Module, node: ast.AST) -> None:
        """Add an expression of a module and everything it depends on."""
        self._add(module, node)
        while self._waiting:
            module_name, name = self._waiting.pop(0)
            reached = self._modules[module_name]
            assert reached is not None
            for bound in () if name else reached.statements:
                self._number((module_name, bound))
            for statement in reached.statements.get(name, ()):
                if statement not in self._entered:
                    self._entered.add(statement)
                    self._add(reached, statement)

    def module(self, name: str) -> Module | None:
        """Return a module, or None if there is none to follow. Raises InvalidCodeError for one that does not parse."""
        if name in self._modules:
            return self._modules[name]
        self._modules[name] = None
        place = None if self._is_ignored(name) else self.finder.find(name)
        if place is None:
            return None
        read = self._read(name, place)
        # walks share the parsed module, and each adds names of its own
        module = self._modules[name] = replace(read, statements=dict(read.statements), imports=dict(read.imports))
        for star in filter(None, map(self.module, module.stars)):
            for name in {**star.statements, **star.imports}:
                if not read.binds(name):
                    module.add_import(name, (star.name, name))
        return module

    def _read(self, name: str, place: Place) -> Module:
        top = name.partition(".")[0]
        package = name if place.folders is not None else name.rpartition(".")[0]
        if not place.file:
            return Module(name)
        if not place.has_source or (top in self.opaque and is_installed(place)):
            return Module(name, stand_in=stand_in(name, place))
        if top in self.opaque:
            return Module(name, stand_in=self.finder.whole_text(top))
        try:
            source = Path(place.file).read_bytes()
            self._bytes[top] = self._bytes.get(top, 0) + len(source)
            if top != self.start and self._bytes[top] > LARGEST:
                raise TooLargeError(top)
            return parsed(name, package, source)
        except UNREADABLE as error:
            return Module(name, stand_in=self._unread(name, error))

    def _unread(self, name: str, error: Exception) -> str:
        """Return the stand-in of a module that cannot be read. Raises InvalidCodeError for one of the kernel's own."""
        place = self.finder.find(name)
        assert place is not None
        if name.partition(".")[0] != self.start:
            return stand_in(name, place)
        reason = (
            "it nests too deeply" if isinstance(error, RecursionError | MemoryError) else " ".join(str(error).split())
        )
        what = "cannot be read" if isinstance(error, OSError) else "is not Python"
        raise InvalidCodeError(f"{place.file} {what} ({reason}): fix the file") from None

    def _is_ignored(self, name: str) -> bool:
        return f"{name}.".startswith(tuple(f"{ignored}." for ignored in self.ignored))

    def _add(self, module: Module, node: ast.AST) -> None:
        try:
            chains, parts, local = template(node, module.package)
        except UNREADABLE as error:
            self.entries.append(self._unread(module.name, error))
            return
        labels = [self._label(module, chain) or ".".join(chain) for chain in chains]
        self.entries.append("".join(repr(labels[int(part)]) if i % 2 else part for i, part in enumerate(parts)))
        for origin, *attributes in local:
            self._imported(origin, attributes)

    def _number(self, target: Target) -> str:
        if target not in self._numbers:
            self._numbers[target] = len(self._numbers)
            self._waiting.append(target)
        return f"#{self._numbers[target]}"

    def _label(self, module: Module, chain: Sequence[str], within: frozenset[Target] = frozenset()) -> str | None:
        """Return the text in an entry for a name of a module and its attributes; None for circular imports."""
        name, *attributes = chain
        target = (module.name, name)
        own = ".".join([self._number(target), *attributes]) if name in module.statements else None
        labels = [
            self._imported(origin, [*filter(None, [inner]), *attributes], within | {target})
            for origin, inner in module.imports.get(name, ())
        ]
        if f"{name}." in module.statements and any(label and label.startswith("#") for label in labels):
            self._number((module.name, f"{name}."))
        if own or not module.binds(name):
            return own or self._of_stars(module, ".".join(chain))
        return " or ".join(dict.fromkeys(filter(None, labels))) or None

    def _of_stars(self, module: Module, dotted: str) -> str:
        """Return a name that a module does not bind: perhaps one of a module without source."""
        unknown = [star.stand_in for star in map(self.module, module.stars) if star is not None and star.stand_in]
        return " of ".join([dotted, *unknown])

    def _imported(self, origin: str, chain: Sequence[str], within: frozenset[Target] = frozenset()) -> str | None:
        """Return the label for a chain of attributes in the module ``origin``: names in it, or modules below it."""
        dotted = ".".join([origin, *chain])
        if self._is_ignored(dotted):
            return "ignored"
        module, *missing = self._deepest(origin)
        chain = [*missing, *chain]
        while module is not None and not module.stand_in and chain:
            name = chain[0]
            is_bound, is_new = module.binds(name), (module.name, name) not in within
            if is_bound and is_new and (label := self._label(module, chain, within)):
                return label
            below = self.module(f"{module.name}.{name}")  # a package may bind its own module
            if below is None and is_bound:
                return None
            if below is None and module.binds("__getattr__"):
                return ".".join([self._label(module, ["__getattr__"], within) or "", *chain])
            if below is None:
                return self._of_stars(module, dotted)
            module, chain = below, chain[1:]
        if module is None:
            return dotted
        # passed around: anything in it may be used
        return f"{dotted} of {module.stand_in}" if module.stand_in else self._number((module.name, ""))

    def _deepest(self, name: str) -> tuple[Module | None, *tuple[str, ...]]:
        """Return the module of this name, or else the deepest one above it and the names below that one."""
        parts, module = name.split("."), None
        for depth in range(1, len(parts) + 1):
            below = self.module(".".join(parts[:depth]))
            if below is None:
                return module, *parts[depth - 1 :]
            module = below
        return (module,)


@functools.lru_cache(4096)  # of trees that are parsed once: kernels share most of what they reach
def template(node: ast.AST, package: str = "") -> tuple[tuple[Chain, ...], tuple[str, ...], tuple[Chain, ...]]:
    """Return the names that code takes from its module or binds there, its text around them, and its own imports.

    The order of names is that of the tree. In the text, every other part is the index of the name that fills a gap.
    There is no layout and no comment, and Python versions agree, unlike ``ast.dump``: fields that newer ones add are
    empty in older code, and left out.
    """
    own = _bound_names(node) if isinstance(node, ast.stmt) else set[str]()
    source = ast.unparse(node)
    names = _global_names(source) | own
    chains: list[Chain] = []

    def gap(*chain: str) -> str:
        chains.append(chain)
        return f"\0{len(chains) - 1}\0"  # Python's source has no such byte

    def text(value: object) -> str:
        if isinstance(value, list):
            return f"[{', '.join(map(text, value))}]"
        if not isinstance(value, ast.AST):
            return repr(value)
        root: ast.AST = value
        attributes: list[str] = []
        while isinstance(root, ast.Attribute):
            attributes.insert(0, root.attr)
            root = root.value
        if isinstance(root, ast.Name) and root.id in names:
            return f"Name(ctx=Load(), id={gap(root.id, *attributes)})"
        is_own = isinstance(value, ast.FunctionDef | ast.ClassDef) and value.name in own
        pairs = [(name, inner) for name, inner in ast.iter_fields(value) if inner is not None and inner != []]
        fields = [(name, gap(inner) if is_own and name == "name" else text(inner)) for name, inner in pairs]
        return f"{type(value).__name__}({', '.join(f'{name}={inner}' for name, inner in sorted(fields))})"

    parts = tuple(text(node).split("\0"))
    return tuple(chains), parts, tuple(_local_imports(node, package)) if "import " in source else ()


@functools.lru_cache(256)  # the kernels of a package share most of what they reach
def parsed(name: str, package: str, source: bytes) -> Module:
    """Return a module without the names of its stars. Raises what the parser raises."""
    module = Module(name, package)
    tree = ast.parse(source)
    _drop_prose(tree.body)
    tests: dict[str, list[ast.stmt]] = {}
    for statement, conditions in _statements(tree.body):
        for node in _outside_scopes(statement):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for name, imported in _imports(node, package):
                    module.add_import(name, imported) if name != "*" else module.stars.append(imported[0])
        bound = _bound_names(statement)
        for name in sorted(bound):
            tests.setdefault(name, []).extend(conditions)
            if not isinstance(statement, ast.Import | ast.ImportFrom):
                module.statements.setdefault(name, []).append(statement)
    for name, above in tests.items():  # they choose between definitions
        if above and len(module.statements.get(name, ())) + len(module.imports.get(name, ())) > 1:
            module.statements.setdefault(name, []).extend(above)
    for statement, _ in _statements(tree.body):
        for name, is_certain in sorted(_changed_names(statement, has_globals=b"global " in source).items()):
            if name in module.statements:
                module.statements[name].append(statement)
            elif name in module.imports and is_certain:
                module.statements.setdefault(f"{name}.", []).append(statement)
    return module


def _imports(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[tuple[str, Import]]:
    """Yield the names that a statement binds, with what it imports; ``*`` with a module."""
    is_relative = isinstance(node, ast.ImportFrom) and node.level > 0
    above = package.split(".") if is_relative and package else []  # a file in no package: its neighbours
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            origin = ".".join([*above[: len(above) - node.level + 1], *filter(None, [node.module])])
            yield alias.asname or alias.name, (origin, alias.name) if origin else (alias.name, "")
        else:
            first = alias.name.partition(".")[0]
            yield alias.asname or first, (alias.name if alias.asname else first, "")


def _drop_prose(body: Sequence[ast.AST]) -> None:
    """Drop docstrings and the annotations of plain functions, which no computation depends on.

    Decorated functions keep their annotations: ``tl.constexpr`` is one.
    """
    for node in body:
        if isinstance(node, ast.FunctionDef) and not node.decorator_list:
            node.returns = None
            every = node.args
            for argument in (*every.posonlyargs, *every.args, *every.kwonlyargs, every.vararg, every.kwarg):
                if argument is not None:
                    argument.annotation = None
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            _drop_prose(getattr(node, name, ()))


def _statements(body: Sequence[ast.stmt], conditions: Conditions = ()) -> Iterator[tuple[ast.stmt, Conditions]]:
    """Yield top-level statements, and the statements of a block that defines something, with their conditions.

    ``if has_triton():`` around every kernel of a module does not make one kernel of them.
    """
    for statement in body:
        defines = any(isinstance(node, DEFINITIONS) for node in _outside_scopes(statement))
        if isinstance(statement, ast.If | ast.Try | ast.With) and defines:
            own = conditions
            if isinstance(statement, ast.If):
                own += (ast.Expr(statement.test),)
            if isinstance(statement, ast.Try):
                own += tuple(inner for inner in statement.body if not isinstance(inner, DEFINITIONS))
            for name in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(statement, name, ()):
                    yield from _statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner], own)
        else:
            yield statement, conditions


def _outside_scopes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a top-level statement and all nodes in it that are in no function, class or comprehension."""
    waiting = [node]
    for inner in waiting:
        yield inner
        if not isinstance(inner, SCOPES):
            waiting += ast.iter_child_nodes(inner)


def _bound_names(statement: ast.stmt) -> set[str]:
    """Return the names that a top-level statement binds in its module."""
    names = set()
    for node in _outside_scopes(statement):
        match node:
            case ast.Name(name, ast.Store() | ast.Del()) | ast.ExceptHandler(name=str(name)):
                names.add(name)
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                names.add(name)
            case ast.alias(name, alias) if name != "*":
                names.add(alias or name.partition(".")[0])
    return names


def _changed_names(statement: ast.stmt, has_globals: bool) -> dict[str, bool]:
    """Return the names whose values a top-level statement may change, and whether it does: ``NAME[0] = 1``.

    ``NAME.append(1)`` may.
    """
    names: dict[str, bool] = {}
    if has_globals:
        every = (node.names for node in ast.walk(statement) if isinstance(node, ast.Global))
        names |= dict.fromkeys(itertools.chain(*every), True)
    for node in _outside_scopes(statement):
        match node:
            case ast.Subscript(ctx=ast.Store() | ast.Del()) | ast.Attribute(ctx=ast.Store() | ast.Del()):
                root: ast.AST = node
            case ast.Expr(ast.Call(ast.Attribute() as root)):
                pass
            case _:
                continue
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        if isinstance(root, ast.Name):
            names[root.id] = names.get(root.id, False) or not isinstance(node, ast.Expr)
    return names


def _global_names(text: str) -> set[str]:
    """Return the names that code takes from its module, without parameters and locals of functions in it."""
    # Within a function, where variables of a comprehension are locals in every Python: since 3.12 symbol tables show
    # them in the scope around it.
    try:
        tables = [symtable.symtable("def _():\n" + textwrap.indent(text, " "), "<module>", "exec")]
    except SyntaxError:  # an import of * is not allowed there
        tables = [symtable.symtable(text, "<module>", "exec")]
    for table in tables:
        tables += table.get_children()
    return {symbol.get_name() for table in tables for symbol in table.get_symbols() if symbol.is_global()} - {"_"}


def _local_imports(node: ast.AST, package: str) -> Iterator[Chain]:
    """Yield what functions in a statement import, with the attributes that they use."""
    every = list(ast.walk(node))
    above = {item.value: item for item in every if isinstance(item, ast.Attribute)}
    imports = [item for item in every if isinstance(item, ast.Import | ast.ImportFrom)]
    for name, imported in (pair for item in imports for pair in _imports(item, package)):
        for use in every:
            if isinstance(use, ast.Name) and use.id == name:
                chain, attribute = [*filter(None, imported)], above.get(use)
                while attribute is not None:
                    chain, attribute = [*chain, attribute.attr], above.get(attribute)
                yield tuple(chain)
