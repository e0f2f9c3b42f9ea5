"""Which pointer arguments a kernel reads and writes, and which arguments hold addresses, from its compiled code.

:func:`usage_of` reads the text of Triton's first IR (TTIR). A value is followed from an argument through whatever takes
it as an operand, loops, branches and calls. What a load returns is followed no further, unless it becomes a pointer. An
operation that is not known here counts as a load and a store of every pointer it takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Use(NamedTuple):
    """Use of one argument by a kernel."""

    is_loaded: bool = False
    is_stored: bool = False
    """An atomic does both."""
    is_address: bool = False
    """Whether the argument is an integer, or holds values, that become pointers."""


Usage = Mapping[str, Use]
"""Name -> the use of each pointer argument and of each 64-bit integer, which may be an address."""

_VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")
_RESULTS = re.compile(r"((?:%[\w$.-]+(?::\d+)?(?:, )?)+) = ")
_OPERATION = re.compile(r'"?([A-Za-z_]\w*\.[\w.]+)"?')
_SYMBOL = re.compile(r'@("[^"]*"|[\w.$-]+)')
_BLOCK = re.compile(r"\^\w+")
_LOCATION = re.compile(r'(#loc\d*) = loc\("([^"]*)"')
_NAMED = re.compile(r'loc\((?:"([^"]*)"|(#loc\d*))')
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')

_ADDRESSES = re.compile(r"int_to_ptr$|reinterpret_tensor_descriptor$")
"""Operations that make a pointer of what a launch's arguments hold."""

_IN_ASSEMBLY = re.compile(r'elementwise_inline_asm "[^"]*\[')
"""Assembly that has a memory operand, whose address may be an integer."""

_PURE = re.compile(
    r"arith\.|math\.|ub\.|scf\.|cf\.|tt\.(addptr|advance|assert|bitcast|broadcast|cat|expand_dims|fp_to_fp|func|"
    r"int_to_ptr|join|make_tensor_descriptor|make_tensor_ptr|print|ptr_to_int|reshape|return|splat|split|trans|unsplat)$"
)
"""Operations that only compute with the pointers they take."""


def usage_of(ttir: str, parameters: Sequence[str] = ()) -> Usage:
    """What a kernel's TTIR does to each pointer argument (a tensor descriptor is one too).

    ``parameters``: the names of the code's arguments in their order, see :func:`argument_names`. Without as many the
    debug locations name them, which an assignment in the kernel may have renamed. Raises ValueError for a text that
    declares no kernel, and where a name is none of ``parameters``.
    """
    graph = _Graph(dict(_LOCATION.findall(ttir)))
    for line in ttir.splitlines():
        graph.read(line.strip())
    if graph.entry is None:
        raise ValueError("the text declares no tt.func: give the TTIR of a kernel")
    found: dict[str, Use] = {}
    loaded, stored, addresses = graph.sources(graph.loaded), graph.sources(graph.stored), graph.address_sources()
    given = graph.entry.arguments
    names = parameters if len(parameters) == len(given) else [name for _, name, _ in given]
    for name, (value, _, kind) in zip(names, given, strict=True):
        is_pointer = kind.startswith(("!tt.ptr", "!tt.tensordesc"))
        if is_pointer or kind.startswith("i64"):
            if parameters and name not in parameters:
                raise ValueError(f"argument {name!r} of the code is no parameter of the kernel")
            before = found.get(name, Use())
            found[name] = Use(
                before.is_loaded or (is_pointer and value in loaded),
                before.is_stored or (is_pointer and value in stored),
                before.is_address or value in addresses,
            )
    return found


def addresses_in(usage: Usage) -> tuple[str, ...] | None:
    """The arguments that hold addresses; None if nothing is known of the kernel's code."""
    return tuple(name for name, use in usage.items() if use.is_address) if usage else None


def argument_names(signature: Mapping[str, str]) -> list[str]:
    """The arguments of the code for a compiled kernel's signature: constants are none, a descriptor is several."""
    names: list[str] = []
    for name, kind in signature.items():
        if kind.startswith("tensordesc"):  # and the sizes and strides of each dimension of its block
            names += [name] * (1 + 2 * len(kind.partition("[")[2].partition("]")[0].split(",")))
        elif kind != "constexpr":
            names.append(name)
    return names


@dataclass
class _Region:
    """A block of text between braces: its names, and the values that one pass through it hands on."""

    names: dict[str, int] = field(default_factory=dict)
    kind: str = ""
    results: list[int] = field(default_factory=list)
    """Of the operation that the region belongs to."""
    carried: list[int] = field(default_factory=list)
    """What the next pass through a loop begins with."""


@dataclass
class _Function:
    arguments: list[tuple[int, str, str]] = field(default_factory=list)
    """(value, name, the text of its type)"""
    returned: list[int] = field(default_factory=list)


class _Graph:
    """Values and what each is derived from."""

    def __init__(self, locations: Mapping[str, str]) -> None:
        self.locations = locations
        self.derived: list[set[int]] = []
        self.loaded: set[int] = set()
        self.stored: set[int] = set()
        self.addresses: set[int] = set()
        """What becomes a pointer, though it is none."""
        self.based: set[int] = set()
        """What a pointer became: an integer that is computed from one is no address out of the data."""
        self.read_from: dict[int, list[int]] = {}
        """Result of a load -> the pointer that it was loaded from."""
        self.entry: _Function | None = None
        self._functions: dict[str, _Function] = {}
        self._function = _Function()
        self._blocks: dict[str, list[int]] = {}
        self._regions: list[_Region] = [_Region()]

    def sources(self, values: Iterable[int]) -> set[int]:
        """The values, and all that they are derived from."""
        found, left = set[int](), list(values)
        while left:
            if (value := left.pop()) not in found:
                found.add(value)
                left.extend(self.derived[value])
        return found

    def address_sources(self) -> set[int]:
        """All that addresses are derived from: integers, and pointers to where the addresses are loaded from."""
        found = set[int]()
        for value in self.addresses:
            sources = self.sources([value])
            if not sources & self.based:
                loads = [each for source in sources for each in self.read_from.get(source, ())]
                found |= sources | self.sources(loads)
        return found

    def read(self, line: str) -> None:
        """One line of the text."""
        if line.startswith("#"):
            return
        plain = _TEXT.sub(lambda text: text[0] if _OPERATION.fullmatch(text[0]) else '""', line)
        closed = None
        while plain.startswith("}"):
            closed = self._regions.pop() if len(self._regions) > 1 else None
            plain = plain[1:].lstrip(" )")
        opens = plain.count("{") > plain.count("}")
        if closed is not None:
            if opens:  # else, or the body of a while
                self._regions.append(_Region(kind=closed.kind, results=closed.results, carried=closed.carried))
            return
        region = self._statement(line, plain)
        if opens:
            self._regions.append(region or _Region())

    def _statement(self, line: str, plain: str) -> _Region | None:
        """An operation or a block's label; the region that it opens, if it needs to be known."""
        if label := _BLOCK.match(plain):
            self._label(label[0], [self._define(name) for name in _VALUE.findall(plain)])
            return None
        results: list[int] = []
        if given := _RESULTS.match(plain):
            plain = plain[given.end() :]
            for name, _, count in (one.partition(":") for one in given[1].split(", ")):
                many = int(count or 1)
                results += [self._define(f"{name}#{index}" if count else name) for index in range(many)]
                if count:
                    self._regions[-1].names[name] = results[-many]
        operation = _OPERATION.search(plain)
        if operation is None:
            return None
        name, rest = operation[1], plain[operation.end() :]
        if name == "tt.func":
            return self._begin(line, rest)
        operands = [self._value(each) for each in _VALUE.findall(rest)]
        if name == "scf.for":
            return self._for(rest, results)
        if name == "scf.while":
            return self._loop(rest, results)
        if name in ("scf.yield", "scf.condition"):
            self._hand_on(operands[1:] if name == "scf.condition" else operands)
        elif name == "tt.return":
            self._derive(self._grown(self._function.returned, len(operands)), operands)
        elif name == "tt.call":
            self._call(rest, operands, results)
        elif name in ("cf.br", "cf.cond_br"):
            for block in _BLOCK.finditer(rest):
                arguments = re.match(r"\(([^)]*)\)", rest[block.end() :])
                passed = [self._value(each) for each in _VALUE.findall(arguments[1])] if arguments else []
                self._derive(self._grown(self._blocks.setdefault(block[0], []), len(passed)), passed)
        elif name in ("scf.if", "scf.execute_region"):
            return _Region(kind="scf.if", results=results)
        else:
            self._other(name, operands, results)
            self._note_addresses(name, line, operands, results)
        return None

    def _note_addresses(self, name: str, line: str, operands: list[int], results: list[int]) -> None:
        if _ADDRESSES.search(name) or (" i64" in line and _IN_ASSEMBLY.search(line)):
            self.addresses.update(operands)
        elif name.endswith("ptr_to_int"):
            self.based.update(results)
        elif "load" in name:
            self.read_from |= dict.fromkeys(results, operands[:1])

    def _other(self, name: str, operands: list[int], results: list[int]) -> None:
        """An operation that branches nowhere: what it does to memory, else what it computes."""
        short = name.partition(".")[2]
        address, others = operands[:1], operands[1:]
        if "atomic" in short or short.endswith(("descriptor_reduce", "tma_reduce")):
            self._touch(address, True, True)
        elif re.search(r"store|scatter|local_to_global", short) and "local_store" not in short:
            self._touch(address, False, True)
        elif re.search(r"load|descriptor_gather|tma_gather|global_to_local|prefetch", short):
            self._touch(address, True, False)
        elif _PURE.match(name):
            for result in results:
                self.derived[result].update(operands)
            return
        else:  # it may do anything to what it takes, and hand it on
            self._touch(operands, True, True)
            for result in results:
                self.derived[result].update(operands)
            return
        self._touch(others, True, True)  # a pointer that is stored as a value may be used by anybody

    def _touch(self, values: Iterable[int], loads: bool, stores: bool) -> None:
        values = list(values)
        self.loaded.update(values if loads else ())
        self.stored.update(values if stores else ())

    def _begin(self, line: str, rest: str) -> _Region:
        """The header of a function."""
        symbol = _SYMBOL.search(line)
        self._function = self._of(symbol[1].strip('"') if symbol else "")
        self._blocks = {}
        header = line[symbol.end() :] if symbol else line
        starts = list(re.finditer(r"(%[\w$.-]+): ", header))
        region = _Region(kind="tt.func")
        self._regions.append(region)  # its arguments are its own names
        given = self._grown_arguments(len(starts))
        for index, (start, value) in enumerate(zip(starts, given, strict=True)):
            end = starts[index + 1].start() if index + 1 < len(starts) else len(header)
            text = header[start.end() : end]
            region.names[start[1]] = value
            self._function.arguments[index] = (value, self._name(text, start[1]), text)
        self._regions.pop()
        if self.entry is None and " private " not in line:
            self.entry = self._function
        return region

    def _name(self, text: str, value: str) -> str:
        """The parameter's name as its debug location has it, else as the printed value has it."""
        for text_name, alias in _NAMED.findall(text):
            if name := text_name or self.locations.get(alias, ""):
                return name
        return "" if re.fullmatch(r"%(arg)?\d+", value) else value[1:]

    def _grown_arguments(self, count: int) -> list[int]:
        arguments = self._function.arguments
        arguments += [(self._new(), "", "") for _ in range(count - len(arguments))]
        return [value for value, _, _ in arguments[:count]]

    def _of(self, symbol: str) -> _Function:
        return self._functions.setdefault(symbol, _Function())

    def _call(self, rest: str, operands: list[int], results: list[int]) -> None:
        symbol = _SYMBOL.search(rest)
        caller, self._function = self._function, self._of(symbol[1].strip('"') if symbol else "")
        self._derive(self._grown_arguments(len(operands)), operands)
        self._derive(results, self._grown(self._function.returned, len(results)))
        self._function = caller

    def _for(self, rest: str, results: list[int]) -> _Region:
        region = self._loop(rest.partition("iter_args")[2].partition("->")[0], results)
        if induction := _VALUE.search(rest):
            region.names[induction[0]] = self._new()
        return region

    def _loop(self, rest: str, results: list[int]) -> _Region:
        """A loop: each pass begins with what came in, or with what the pass before handed on."""
        region = _Region(kind="loop", results=results)
        for name, begin in re.findall(r"(%[\w$.-]+) = (%[\w$.-]+(?:#\d+)?)", rest.partition(" : ")[0]):
            region.names[name] = self._new()
            self.derived[region.names[name]].add(self._value(begin))
            region.carried.append(region.names[name])
        self._derive(results, region.carried)
        return region

    def _hand_on(self, operands: list[int]) -> None:
        region = next((one for one in reversed(self._regions) if one.kind in ("loop", "scf.if")), None)
        if region is None:
            self._touch(operands, True, True)
            return
        self._derive(region.results, operands)
        self._derive(region.carried, operands)

    def _label(self, block: str, arguments: list[int]) -> None:
        """A block's own arguments are what the branches to it pass, or what the condition of a while hands on."""
        self._derive(arguments, self._grown(self._blocks.setdefault(block, []), len(arguments)))
        if self._regions[-1].kind == "loop":
            self._derive(arguments, self._regions[-1].carried)
            self._derive(arguments, self._regions[-1].results)

    def _derive(self, values: Sequence[int], origins: Sequence[int]) -> None:
        for value, origin in zip(values, origins, strict=False):
            self.derived[value].add(origin)

    def _grown(self, values: list[int], count: int) -> list[int]:
        values += [self._new() for _ in range(count - len(values))]
        return values

    def _define(self, name: str) -> int:
        names = self._regions[-1].names
        if name not in names:
            names[name] = self._new()
        return names[name]

    def _value(self, name: str) -> int:
        for region in reversed(self._regions):
            if name in region.names:
                return region.names[name]
        # defined in a block that is printed later: a name of the whole function
        return self._regions[min(1, len(self._regions) - 1)].names.setdefault(name, self._new())

    def _new(self) -> int:
        self.derived.append(set())
        return len(self.derived) - 1
