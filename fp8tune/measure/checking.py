"""Is every byte right? A problem's tensors, and the checks of them before and after the clock.

A check finds outputs that differ from the reference in a byte, bytes written beside outputs, and inputs that were
written. Before each launch that is checked, outputs hold what cannot be right (every bit the complement, then large
values, which an atomic maximum would keep), new memory is filled, and other bytes lie beside the inputs.

A fault that shows in one launch in fifty is found with probability ``1 - 0.98 ** checks``. A config is checked twice
on its problem and twice on each edge. It is checked once after each timed block, at the last launch of dozens. A
screen of three rounds comes to 5 checks of the problem: 10 %. If the fault shows on 25 edges too, there are 55
checks: 67 %.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from fp8tune.measure import edges, guards
from fp8tune.measure.edges import problem_place
from fp8tune.records import NamedInts, Problem
from fp8tune_kernels.spec import Edge, KernelSpec

LAUNCHES = 2
"""Looked at, on the problem and on each edge: the second finds what the first left behind."""

TOO_SLOW_RATIO = 1.5
"""Times the best block so far: above the ratio (1.3) within which the later rounds repeat a config."""

LARGE = 0x7B
"""In every byte: a large finite value of every floating-point type, positive as an integer too."""

_BESIDE_FLOATS = (0xFF, LARGE)
"""Beside inputs, in turn: NaN of every floating-point type, then what is larger than any input."""

_BESIDE_INTEGERS = (0xFF, 0x00)
"""Minus one and zero: a kernel that takes these for group ends does no harm."""

_CHUNK_WORDS = 1 << 20
_ELEMENTS_AT_ONCE = 1 << 24


@dataclass
class Tensors:
    """A problem's tensors on a device, with the reference's outputs to compare with."""

    spec: KernelSpec
    problem: Problem
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    """Between guards, see :mod:`fp8tune.measure.guards`."""
    expected: tuple[Any, ...]
    """Empty where nothing is checked."""
    place: str = ""
    """For messages; empty: the problem."""
    watch: Watch | None = None
    """What became of the inputs; None where they are not between guards."""
    passed: set[NamedInts] = field(default_factory=set)
    """Configs that were checked in this process, on this problem and on every edge."""
    best_us: float = math.inf

    @property
    def too_slow_us(self) -> float:
        """Slower than this a config gets no whole block."""
        return TOO_SLOW_RATIO * self.best_us

    @cached_property
    def refusal(self) -> str | None:
        """Why these inputs must not be timed; None where they may."""
        constant = next((index for index, given in enumerate(self.inputs) if is_constant(given)), None)
        if constant is None:
            return None
        return f"input {constant} has one value throughout: a GPU runs faster on such data"

    def launch(self, config: NamedInts) -> None:
        """Enqueue the kernel with this config on the current stream."""
        self.spec.launch(config, self.inputs, self.outputs)

    def check(self, config: NamedInts, launches: Sequence[int] = range(LAUNCHES)) -> str | None:
        """Launch as often as there are numbers in ``launches``, which choose the poison; what is wrong, or None."""
        for count, number in enumerate(launches, 1):
            self.poison(number)
            with _filling() if number % 2 == 0 else contextlib.nullcontext():
                self.launch(config)
            if wrong := self.wrong():
                return f"launch {count}: {wrong}" if count > 1 else wrong
        return None

    def poison(self, number: int = 0) -> None:
        """Write into outputs what cannot be right, and beside the tensors what none of them holds."""
        import torch

        for output, expected in zip(self.outputs, self.expected, strict=True):
            if number % 2 == 0:
                torch.bitwise_not(bits(expected), out=bits(output))
            else:
                _large(output)
            guards.fill(output)
        if self.watch is not None:
            self.watch.begin(number)

    def wrong(self) -> str | None:
        """What is wrong since :meth:`poison`, or None. Inputs that were written are as they were afterwards."""
        place = self.place or problem_place(self.problem)
        if self.watch is not None and (written := self.watch.written()):
            return f"{written} on {place}"
        for index, (output, expected) in enumerate(zip(self.outputs, self.expected, strict=True)):
            if wrong := difference(output, expected) or guards.overwritten(output):
                return f"output {index}: {wrong} on {place}"
        return None


def build(spec: KernelSpec, problem: Problem, device: str) -> Tensors:
    """The tensors of the problem that is timed, with what the reference makes of them."""
    return build_edge(spec, Edge("", problem), device, problem_place(problem))


def build_edge(spec: KernelSpec, edge: Edge, device: str, place: str = "") -> Tensors:
    """The tensors of an edge, with what the reference makes of them."""
    watch = Watch(edges.inputs(spec, edge, device), lambda: edges.inputs(spec, edge, device))
    expected = tuple(_apart(each, watch.inputs) for each in spec.reference(*watch.inputs))
    watch.written()  # a reference may work in place
    outputs = tuple(guards.guarded(like, device) for like in spec.outputs(*spec.inputs(edge.problem, "meta")))
    _same_form(outputs, expected)
    return Tensors(spec, edge.problem, watch.inputs, outputs, expected, place or edges.place(edge), watch)


def build_unchecked(spec: KernelSpec, problem: Problem, device: str) -> Tensors:
    """The tensors of a problem alone: no reference is computed."""
    outputs = tuple(guards.guarded(like, device) for like in spec.outputs(*spec.inputs(problem, "meta")))
    return Tensors(spec, problem, spec.inputs(problem, device), outputs, ())


def _apart(expected: Any, inputs: tuple[Any, ...]) -> Any:
    """A reference may return a view of an input, which a kernel that writes there would change."""
    storages = {each.untyped_storage().data_ptr() for each in inputs if _is_tensor(each)}
    return expected.clone() if expected.untyped_storage().data_ptr() in storages else expected


def _same_form(outputs: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    forms = [[(str(each.dtype), tuple(each.shape)) for each in tensors] for tensors in (outputs, expected)]
    if forms[0] != forms[1]:
        raise ValueError(f"the spec's outputs are {forms[0]}, its reference gives {forms[1]}")


@dataclass
class Watch:
    """Whether inputs that lie between guard bytes are still what they were."""

    inputs: tuple[Any, ...]
    rebuild: Callable[[], tuple[Any, ...]]
    """The inputs anew, between guards."""

    def __post_init__(self) -> None:
        self._prints = tuple(fingerprint(each) if _is_tensor(each) else None for each in self.inputs)
        self.begin(0)

    def begin(self, number: int) -> None:
        """Paint other bytes beside the inputs than at the number before."""
        self._beside = (_BESIDE_FLOATS[number % 2], _BESIDE_INTEGERS[number % 2])
        for each in filter(_is_tensor, self.inputs):
            guards.fill(each, self._filled(each))

    def written(self) -> str | None:
        """Which input was written, or None. All are as they were afterwards."""
        found = next(filter(None, map(self._written, range(len(self.inputs)))), None)
        if found is not None:
            self._restore()
        return found

    def _written(self, index: int) -> str | None:
        each = self.inputs[index]
        if not _is_tensor(each):
            return None
        if fingerprint(each) != self._prints[index]:
            return f"input {index} was written"
        beside = guards.overwritten(each, self._filled(each))
        return f"input {index}: {beside}" if beside else None

    def _restore(self) -> None:
        for each, right in zip(self.inputs, self.rebuild(), strict=True):
            if _is_tensor(each):
                guards.own_bytes(each).copy_(guards.own_bytes(right))
                guards.fill(each, self._filled(each))

    def _filled(self, tensor: Any) -> int:
        return self._beside[0] if tensor.is_floating_point() else self._beside[1]


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def fingerprint(tensor: Any) -> int:
    """64 bits of all that lies between the guard bytes of a tensor.

    One changed word changes them for certain; more words leave them as they were once in about 2 ** 60 times.
    """
    import torch

    own = guards.own_bytes(tensor)
    whole = len(own) // 8 * 8
    tail = torch.zeros(8, dtype=torch.uint8, device=own.device)
    tail[: len(own) - whole] = own[whole:]
    total = tail.view(torch.int64)[0]
    for words in own[:whole].view(torch.int64).split(_CHUNK_WORDS):
        total = total * _MULTIPLIER + (words * _weights(own.device)[: len(words)]).sum()  # modulo 2 ** 64
    return int(total)


_MULTIPLIER = 0x5851F42D4C957F2D
"""Odd, so that nothing is lost by it."""


@cache
def _weights(device: Any) -> Any:
    """Odd numbers, so that a word that changes changes its product."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    least, most = -(2**62), 2**62
    return torch.randint(least, most, (_CHUNK_WORDS,), device=device, generator=generator) * 2 + 1


@cache
def _filling() -> Any:
    """While open, new memory holds large values: never what an earlier launch left, which may be right."""
    import torch
    from torch.overrides import TorchFunctionMode

    uninitialised = {torch.empty, torch.empty_like, torch.empty_strided}
    uninitialised |= {torch.Tensor.new_empty, torch.Tensor.new_empty_strided}

    class Filling(TorchFunctionMode):  # torch's own switch for this imports its compiler, which takes seconds
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = function(*args, **(kwargs or {}))
            if function in uninitialised:
                _large(made)
            return made

    return Filling()


def is_constant(given: Any) -> bool:
    """Whether an input is a floating-point tensor with the same bits in all of at least two elements.

    A GPU draws less power on such data and clocks higher: zeros run up to 15 % faster than random values.
    """
    import torch

    if not isinstance(given, torch.Tensor) or not given.is_floating_point() or given.numel() < 2:
        return False
    all_bits = bits(given)
    return bool((all_bits == all_bits[(0,) * all_bits.ndim]).all())


def difference(output: Any, expected: Any) -> str | None:
    """How two tensors differ, bit for bit (any NaN equals any NaN in float32: payloads differ between backends)."""
    import torch

    unequal = bits(output) != bits(expected)
    if expected.dtype == torch.float32:
        unequal &= ~(output.isnan() & expected.isnan())
    count = int(unequal.sum())
    if not count:
        return None
    first = _first(unequal)
    return (
        f"{count} of {expected.numel()} elements differ, first at {first}: "
        f"expected {_shown(expected[first])}, got {_shown(output[first])}; {_largest(output, expected, unequal)}"
    )


def _first(unequal: Any) -> tuple[int, ...]:
    import torch

    place, found = int(unequal.view(torch.uint8).flatten().argmax()), []
    for size in reversed(unequal.shape):
        place, index = divmod(place, size)
        found.append(index)
    return tuple(reversed(found))


def _shown(element: Any) -> str:
    """A number with its bits."""
    mask = (1 << 8 * element.element_size()) - 1
    width = 2 * element.element_size()
    value = element.item()
    number = f"{value:.6g}" if isinstance(value, float) else str(value)
    return f"{number} (0x{int(bits(element)) & mask:0{width}x})"


def _largest(output: Any, expected: Any, unequal: Any) -> str:
    """The largest difference between finite elements. In pieces: float64 takes eight times an FP8 output's memory."""
    import torch

    largest = -1.0
    rows = max(1, _ELEMENTS_AT_ONCE * max(1, len(torch.atleast_1d(unequal))) // unequal.numel())
    pieces = [torch.atleast_1d(each).split(rows) for each in (bits(output), bits(expected), unequal)]
    for got, right, where in zip(*pieces, strict=True):
        gap = (got[where].view(output.dtype).double() - right[where].view(expected.dtype).double()).abs()
        gap = gap[gap.isfinite()]
        largest = max(largest, float(gap.max())) if gap.numel() else largest
    return f"largest difference {largest:.6g}" if largest >= 0 else "no difference is finite"


def bits(tensor: Any) -> Any:
    """The tensor's bits as integers of the same size: shares its memory, keeps its strides."""
    import torch

    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _large(output: Any) -> None:
    integers = bits(output)
    integers.fill_(int.from_bytes(bytes([LARGE] * output.element_size())))
