"""Follow a piece of Python name by name through the text of its modules; nothing is imported.

A :class:`Walk` starts at an expression and collects each module-level statement that it depends on, as text. Names
bound at module level are numbered by first mention, so that renaming a helper or moving it to another module changes
nothing, but using another definition does.
"""

from __future__ import annotations

import ast
import functools
import symtable
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from fp8tune.errors import UsageError

Read = Callable[[str], str | None]  # from the path of a file below the import root to its text; None without one

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
SCOPES = (*DEFINITIONS, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

Chain = tuple[str, ...]  # a name and the attributes taken of it
Target = tuple[str, str]  # a module and a name bound in it; an empty name for the module itself, passed around


@dataclass(frozen=True)
class Module:
    """Parsed module."""

    name: str
    statements: dict[str, list[ast.stmt]] = field(default_factory=dict)  # top-level statements that bind a name
    imports: dict[str, str] = field(default_factory=dict)  # name -> dotted module or object that it is imported from
    stars: list[str] = field(default_factory=list)  # module of each ``from x import *``

    def binds(self, name: str) -> bool:
        """Return True if the module has this top-level name."""
        return name in self.statements or name in self.imports


@dataclass
class Walk:
    """Traversal that collects ``entries`` in the order in which they are first mentioned.

    In an entry, a name of code that is followed is its number in that order, a name of other code is dotted.
    """

    read: Read
    package: str | None = None  # outermost package whose imports are followed; None to follow whatever ``read`` has
    ignored: frozenset[str] = frozenset()  # modules not followed, nor those below: their names become one word
    entries: list[str] = field(default_factory=list)
    _numbers: dict[Target, int] = field(default_factory=dict)
    _waiting: list[Target] = field(default_factory=list)
    _entered: set[ast.stmt] = field(default_factory=set)
    _modules: dict[str, Module | None] = field(default_factory=dict)

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
        """Return a parsed module, or None if it is not followed. Raises UsageError if it is not Python."""
        if name in self._modules:
            return self._modules[name]
        self._modules[name] = None
        if self.package not in (None, name.partition(".")[0]) or self._is_ignored(name):
            return None
        for path in candidates(name):
            if (text := self.read(path)) is not None:
                parsed = _parsed(name, path, text)
                # walks share the parsed module, and each adds names of its own
                module = self._modules[name] = Module(name, dict(parsed.statements), dict(parsed.imports), parsed.stars)
                for star in filter(None, map(self.module, module.stars)):
                    names = [name for name in (*star.statements, *star.imports) if not module.binds(name)]
                    module.imports.update({name: f"{star.name}.{name}" for name in names})
                return module
        return None

    def _is_ignored(self, name: str) -> bool:
        return f"{name}.".startswith(tuple(f"{ignored}." for ignored in self.ignored))

    def _add(self, module: Module, node: ast.AST) -> None:
        chains, parts = template(node)
        labels = [self._label(module, chain) for chain in chains]
        self.entries.append("".join(repr(labels[int(part)]) if i % 2 else part for i, part in enumerate(parts)))

    def _number(self, target: Target) -> str:
        if target not in self._numbers:
            self._numbers[target] = len(self._numbers)
            self._waiting.append(target)
        return f"#{self._numbers[target]}"

    def _label(self, module: Module, chain: Sequence[str], within: frozenset[Target] = frozenset()) -> str:
        """Return the text in an entry for a name of a module and its attributes."""
        name, *attributes = chain
        target = (module.name, name)
        if target in within:  # modules that import each other's names
            return ".".join(chain)
        within |= {target}
        if name in module.statements:
            number = self._number(target)
            if name in module.imports:  # bound twice: in a branch each, or in try and except
                self._imported(module.imports[name], [], within)
            return ".".join([number, *attributes])
        return self._imported(module.imports[name], attributes, within) if name in module.imports else ".".join(chain)

    def _imported(self, dotted: str, attributes: Sequence[str], within: frozenset[Target]) -> str:
        """Return the label of an import. ``a.b`` may be module b of package a, or b in module a.

        The first module that binds the next name decides.
        """
        parts = [*dotted.split("."), *attributes]
        for depth in range(1, len(parts) + 1):
            module = self.module(".".join(parts[:depth]))
            if module is not None and depth == len(parts):  # passed around: anything in it may be used
                return self._number((module.name, ""))
            if module is not None and module.binds(parts[depth]):
                return self._label(module, parts[depth:], within)
        return "ignored" if self._is_ignored(dotted) else ".".join(parts)


@functools.lru_cache(4096)  # of trees that are parsed once: kernels share most of what they reach
def template(node: ast.AST) -> tuple[tuple[Chain, ...], tuple[str, ...]]:
    """Return the names that code takes from its module or binds there, and its text around them.

    The order of names is that of the tree. In the text, every other part is the index of the name that fills a gap.
    There is no layout and no comment, and Python versions agree, unlike ``ast.dump``: fields that newer ones add are
    empty in older code, and left out.
    """
    own = _bound_names(node) if isinstance(node, ast.stmt) else set[str]()
    names = _global_names(node) | own
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
    return tuple(chains), parts


def candidates(module: str) -> tuple[str, str]:
    """Return the files that may hold a module, relative to the import root."""
    path = module.replace(".", "/")
    return f"{path}.py", f"{path}/__init__.py"


@functools.lru_cache(256)  # the kernels of a package share most of what they reach
def _parsed(name: str, path: str, text: str) -> Module:
    """Parse a module; the names of stars are still missing."""
    package = name if path.endswith("/__init__.py") else name.rpartition(".")[0]
    module = Module(name)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{path} is not Python ({error}): fix the file") from None
    _drop_prose(tree)
    for statement in _statements(tree.body):
        for node in _outside_scopes(statement):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    module.imports[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".") if node.level else []
                origin = ".".join([*above[: len(above) - node.level + 1], *filter(None, [node.module])])
                names = {alias.asname or alias.name: f"{origin}.{alias.name}" for alias in node.names}
                if names.pop("*", None):
                    module.stars.append(origin)
                module.imports.update(names)
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            for bound in sorted(_bound_names(statement)):
                module.statements.setdefault(bound, []).append(statement)
    return module


def _drop_prose(tree: ast.Module) -> None:
    """Drop docstrings and the annotations of plain functions, which no computation depends on.

    Decorated functions keep their annotations: ``tl.constexpr`` is one.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.decorator_list:
            node.returns = None
            for argument in ast.walk(node.args):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield top-level statements, and the statements of a block that defines something.

    ``if has_triton():`` around every kernel of a module does not make one kernel of them.
    """
    for statement in body:
        defines = any(isinstance(node, DEFINITIONS) for node in _outside_scopes(statement))
        if isinstance(statement, ast.If | ast.Try | ast.With) and defines:
            for name in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(statement, name, ()):
                    yield from _statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])
        else:
            yield statement


def _outside_scopes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a top-level statement and all nodes in it that are in no function, class or comprehension."""
    yield node
    if not isinstance(node, SCOPES):
        for child in ast.iter_child_nodes(node):
            yield from _outside_scopes(child)


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


def _global_names(node: ast.AST) -> set[str]:
    """Return the names that code takes from its module, without parameters and locals of functions in it."""
    # Within a function, where variables of a comprehension are locals in every Python: since 3.12 symbol tables show
    # them in the scope around it.
    inside = "def _():\n" + textwrap.indent(ast.unparse(node), " ")
    tables = [symtable.symtable(inside, "<module>", "exec")]
    for table in tables:
        tables += table.get_children()
    return {symbol.get_name() for table in tables for symbol in table.get_symbols() if symbol.is_global()} - {"_"}
