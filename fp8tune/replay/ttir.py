"""Find out from compiled code which arguments a kernel reads and writes, and which hold addresses.

The text of Triton's first IR (TTIR) is parsed with Triton's own bindings. A value is followed from an argument through
whatever takes it as an operand, loops, branches and calls. What a load returns is followed no further, unless it
becomes a pointer. An unknown operation counts as a load and a store of every pointer it takes.

Launches without code are compiled for sm_90: this is a program of its own, without a GPU and without the interpreter.
"""

from __future__ import annotations

import json
import pickle
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from triton import __version__
from triton._C.libtriton import ir
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.runtime import cache
from triton.runtime.driver import driver

from fp8tune.replay import loading
from fp8tune.replay.launching import Launcher
from fp8tune.replay.recording import Config, Kernel, Launch
from fp8tune.replay.watch.kernel import plain_signature
from fp8tune_kernels.tuners import resolved

_TARGETS = {"nvidia": GPUTarget("cuda", 90, 32), "amd": GPUTarget("hip", "gfx942", 64)}

_PURE = re.compile(
    r"arith\.|math\.|ub\.|scf\.|cf\.|builtin\.|tt\.(addptr|advance|assert|bitcast|broadcast|cat|expand_dims|fp_to_fp|"
    r"func|int_to_ptr|join|make_tensor_descriptor|make_tensor_ptr|print|ptr_to_int|reshape|return|splat|split|trans|"
    r"unsplat)$"
)
"""Operations that only compute with the pointers they take."""

_ENDS = ("scf.yield", "scf.condition", "tt.return")  # operations that hand their operands on to where their region is


class Use(NamedTuple):
    """Use of one argument by a kernel."""

    is_loaded: bool = False
    is_stored: bool = False  # an atomic does both
    is_address: bool = False  # True if the argument is an integer, or holds values, that become pointers


def usage_of(ttir: str, signature: Mapping[str, str]) -> dict[str, Use]:
    """Return the use of each pointer or 64-bit argument. ``signature``: the type of each argument, constants included.

    Raises ValueError for a text that is no kernel, or that has other arguments.
    """
    context = ir.context()
    ir.load_dialects(context)
    for name, target in _TARGETS.items():
        if name in backends:
            backends[name].compiler(target).load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttir") as file:
        file.write(ttir)
        file.flush()
        try:
            module = ir.parse_mlir_module(file.name, context)
        except RuntimeError as error:
            raise ValueError(f"the text cannot be parsed: {error}") from None
    flow = _Flow(module)
    if not flow.functions:
        raise ValueError("the text declares no kernel")
    arguments, names = flow.arguments(module.get_entry_func_name()), list(_argument_names(signature))
    if len(names) != len(arguments):
        raise ValueError(f"the code has {len(arguments)} arguments, the signature {len(names)}")
    loaded, stored, addresses = flow.sources(flow.loaded), flow.sources(flow.stored), flow.address_sources()
    result: dict[str, Use] = {}
    for name, (value, kind) in zip(names, arguments, strict=True):
        if (is_pointer := kind.startswith(("!tt.ptr", "!tt.tensordesc"))) or kind == "i64":
            use = Use(is_pointer and value in loaded, is_pointer and value in stored, value in addresses)
            result[name] = Use(*map(any, zip(use, result.get(name, Use()), strict=True)))
    return result


def _argument_names(signature: Mapping[str, str]) -> Iterator[str]:
    """Yield the names of the code's arguments: constants have none, a descriptor has several."""
    for name, kind in signature.items():
        if kind.startswith("tensordesc"):  # and the sizes and strides of each dimension of its block
            yield from [name] * (1 + 2 * len(kind.partition("[")[2].partition("]")[0].split(",")))
        elif kind != "constexpr":
            yield name


class _Flow:
    """Values of a module, each with its origins. Values, regions and blocks are numbers."""

    def __init__(self, module: Any) -> None:
        self.loaded: set[int] = set()
        self.stored: set[int] = set()
        self.functions: dict[str, int] = {}  # name -> region
        self._derived: defaultdict[int, set[int]] = defaultdict(set)
        self._addresses: set[int] = set()  # values that become pointers, though they are none
        self._based: set[int] = set()
        """Integers that a pointer became: what is computed from one is no address out of the data."""
        self._read_from: dict[int, list[int]] = {}  # result of a load -> the pointer that it was loaded from
        self._blocks: defaultdict[int, dict[int, list[tuple[int, str]]]] = defaultdict(dict)
        """Region -> its blocks -> their arguments, as (value, type)."""
        self._ends: defaultdict[int, list[list[int]]] = defaultdict(list)  # region -> operands of what ends it
        operations: list[Any] = []
        module.walk(operations.append)
        for item in operations:
            self._note(item)
        for item in operations:
            self._follow(item)

    def _note(self, item: Any) -> None:
        """Note the block of an operation, the function that it declares, and what it hands on from its region."""
        name, block = item.get_name(), item.get_block()
        if block is None:
            return
        region = block.get_parent().id()
        arguments = [block.get_argument(index) for index in range(block.get_num_arguments())]
        self._blocks[region].setdefault(block.id(), [(value.id(), str(value.get_type())) for value in arguments])
        if name == "tt.func":
            self.functions[item.get_str_attr("sym_name")] = item.get_region(0).id()
        elif name in _ENDS:
            self._ends[region].append(_operands(item)[name == "scf.condition" :])

    def arguments(self, function: str) -> list[tuple[int, str]]:
        """Return the arguments of a function, as (value, type)."""
        return next(iter(self._blocks[self.functions[function]].values()))

    def _follow(self, item: Any) -> None:
        """Note what an operation hands on, else what it does to memory, or computes."""
        name, operands = item.get_name(), _operands(item)
        results = [item.get_result(index).id() for index in range(item.get_num_results())]
        regions = [item.get_region(index).id() for index in range(item.get_num_regions())]
        if name == "tt.call":
            callee = item.get_flat_symbol_ref_attr("callee")
            self._derive([value for value, _ in self.arguments(callee)], operands)
            for returned in self._ends.get(self.functions[callee], ()):
                self._derive(results, returned)
        elif name in ("cf.br", "cf.cond_br"):  # the bindings do not tell which block each operand goes to
            _, *others = self._blocks[item.get_block().get_parent().id()].values()
            for value in (value for arguments in others for value, _ in arguments):
                self._derived[value].update(operands)
        elif name.startswith("scf.") and regions:
            # results and arguments of a loop are its last operands, then what its regions hand on
            begin = [operands] if name in ("scf.for", "scf.while") else []
            blocks = [arguments for region in regions for arguments in self._blocks[region].values()]
            for handed in (*begin, *(end for region in regions for end in self._ends.get(region, ()))):
                for values in (results, *([value for value, _ in arguments] for arguments in blocks)):
                    self._derive(values[::-1], handed[::-1])
        elif name not in _ENDS and name != "tt.func":
            self._compute(name, operands, results)
            if name == "tt.elementwise_inline_asm" and "[" in (item.get_str_attr("asm_string") or ""):
                kinds = (str(item.get_operand(index).get_type()) for index in range(len(operands)))
                self._addresses.update(value for value, kind in zip(operands, kinds, strict=True) if "i64" in kind)

    def _compute(self, name: str, operands: list[int], results: list[int]) -> None:
        short, address, others = name.partition(".")[2], operands[:1], operands[1:]
        if "atomic" in short or short.endswith(("descriptor_reduce", "tma_reduce")):
            self._touch(operands, True, True)
        elif re.search(r"store|scatter|local_to_global", short) and "local_store" not in short:
            self._touch(address, False, True)
            self._touch(others, True, True)  # a pointer that is stored as a value may be used by anybody
        elif re.search(r"load|descriptor_gather|tma_gather|global_to_local|prefetch", short):
            self._touch(address, True, False)
            self._touch(others, True, True)
        else:
            if not _PURE.match(name):  # it may do anything to what it takes, and hand it on
                self._touch(operands, True, True)
            for result in results:
                self._derived[result].update(operands)
        if re.search(r"int_to_ptr$|reinterpret_tensor_descriptor$", name):
            self._addresses.update(operands)
        elif name.endswith("ptr_to_int"):
            self._based.update(results)
        elif "load" in name:
            self._read_from |= dict.fromkeys(results, address)

    def sources(self, values: Iterable[int]) -> set[int]:
        """Return the values with all their origins."""
        result, waiting = set[int](), list(values)
        while waiting:
            if (value := waiting.pop()) not in result:
                result.add(value)
                waiting.extend(self._derived[value])
        return result

    def address_sources(self) -> set[int]:
        """Return the origins of addresses: integers, and pointers to addresses in memory."""
        result = set[int]()
        for sources in (self.sources([value]) for value in self._addresses):
            if not sources & self._based:
                result |= sources | self.sources(item for source in sources for item in self._read_from.get(source, ()))
        return result

    def _touch(self, values: Sequence[int], loads: bool, stores: bool) -> None:
        self.loaded.update(values if loads else ())
        self.stored.update(values if stores else ())

    def _derive(self, values: Sequence[int], origins: Sequence[int]) -> None:
        for value, origin in zip(values, origins, strict=False):
            self._derived[value].add(origin)


def _operands(operation: Any) -> list[int]:
    return [operation.get_operand(index).id() for index in range(operation.get_num_operands())]


def _usage(kernel: Kernel, launch: Launch, code: Any) -> dict[str, Use]:
    """Return the use of arguments from a launch's own code, else from what is compiled here."""
    if code:
        try:
            return usage_of(code[1], code[0])
        except ValueError as error:  # the code of another Triton version
            print(f"{kernel.name}: {error}", file=sys.stderr)
    module_name, _, attribute = kernel.name.rpartition(":")
    launcher = Launcher(kernel, resolved(loading.imported_here(module_name), attribute))
    compiled = launcher.compile(launch, launch.config or next(iter(kernel.configs), Config({})))
    return usage_of(compiled.asm["ttir"], dict(plain_signature(compiled.src.signature)))


def _main() -> None:
    """Read pickled (kernel, launch, code), and print a JSON list: name of an argument -> its use."""
    results, sys.stdout = sys.stdout, sys.stderr  # kernels' modules may print
    answers = {"get_current_target": _TARGETS["nvidia"], "get_current_device": 0, "get_current_stream": 0}
    functions = {name: lambda device=None, answer=answer: answer for name, answer in answers.items()}
    driver.set_active(SimpleNamespace(**functions))  # an H100, which nobody needs to have
    # Triton's own hashes 460 MB of libraries, in half a second; for the use of arguments the version tells enough.
    cache.triton_key = lambda: f"use of arguments, {__version__}"
    uses: list[dict[str, Use]] = []
    for kernel, launch, code in pickle.load(sys.stdin.buffer):
        try:
            uses.append(_usage(kernel, launch, code))
        except Exception as error:  # not known, then
            print(f"{kernel.name}: {error!r}", file=sys.stderr)
            uses.append({})
    print(json.dumps(uses), file=results)


if __name__ == "__main__":
    _main()
