"""Is every output right? A problem's tensors, and the checks of them before and after the clock.

A launch writes into the outputs it is given, or returns its own. Those are checked for their shapes and dtypes too, and
what the launch before returned is spoiled before it is freed: new memory is likely to be that.

A check finds outputs that differ from the reference (:mod:`fp8tune.measure.comparing` says what differs), bytes written
beside outputs, and inputs that were written. Before each launch that is checked, outputs hold what cannot be right
(every bit the complement or NaN, then large values, which an atomic maximum would keep), new memory is filled, and
other bytes lie beside the inputs.

A fault that shows in one launch in fifty is found with probability ``1 - 0.98 ** checks``. A config is checked twice
on its problem and twice on each edge, and after each timed block: in a screen of three rounds 5 times on its problem,
which is 10 %. So on a GPU it is launched 150 times in a row besides, and a flag on the device says of each launch
whether its outputs were right. These 155 checks find it in 95.6 % of screens, ``1 - 0.98 ** 155``. That is done on the
problem where it has up to :data:`IN_A_ROW_BYTES`, else on the largest edge that has so few; a fault that does not show
there is found with 10 %. It is done once a process, and not for a config that is too slow to be the pick. A launch in
a row takes as long as the launch and four passes over the outputs, and no less than the host takes to enqueue a dozen
operations, about 0.1 ms: 15 ms a config. The interpreter runs programs in order and shows no race: nothing is launched
in a row there.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from fp8tune.measure import edges, guards
from fp8tune.measure.comparing import LARGE, Rule, bits, fill_large
from fp8tune.measure.edges import problem_place
from fp8tune.measure.timing import Prepared
from fp8tune.records import NamedInts, Problem
from fp8tune.replay.spec import RecordedSpec
from fp8tune_kernels.spec import Edge, KernelSpec

LAUNCHES = 2
"""Looked at, on the problem and on each edge: the second finds what the first left behind."""

IN_A_ROW = 150
"""Launches of one config: with the checks before and after, 95 % for a fault that shows in one launch in fifty."""

IN_A_ROW_BYTES = 1 << 30
"""The most bytes of inputs and outputs. A launch in a row on so much takes less than a millisecond at 4 TB/s. Of a
kernel that adds a 16th: within a tolerance a comparison in float64 moves 16 times as much, and a GEMM takes longer than
its bytes say. On an H200 150 launches of one took 0.25 s a config, and 1.4 s where it wrote 805 MB."""

TOO_SLOW_RATIO = 1.5
"""Times the best block so far: above the ratio (1.3) within which the later rounds repeat a config."""

SEEDS = 4
"""Tried for inputs that may be timed. A sixteenth of values other than zero is in 16 of them in 98.4 % of cases."""

_BESIDE_FLOATS = (0xFF, LARGE)
"""Beside inputs, in turn: NaN of every floating-point type, then what is larger than any input."""

_BESIDE_INTEGERS = (0xFF, 0x00)
"""Minus one and zero: a kernel that takes these for group ends does no harm."""

_CHUNK_WORDS = 1 << 20


@dataclass
class Tensors:
    """A problem's tensors on a device, with the reference's outputs to compare with."""

    spec: KernelSpec
    problem: Problem
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    """Between guards, see :mod:`fp8tune.measure.guards`."""
    expected: tuple[Any, ...]
    """Empty where no values are compared."""
    place: str = ""
    """For messages; empty: the problem."""
    watch: Watch | None = None
    """What became of the inputs; None where they are not between guards."""
    passed: set[NamedInts] = field(default_factory=set)
    """Configs that were checked in this process, on this problem and on every edge."""
    without_race: set[NamedInts] = field(default_factory=set)
    """Configs that were launched many times in a row in this process."""
    best_us: float = math.inf
    returned: tuple[Any, ...] | None = None
    """The outputs that the last launch returned; None where it wrote into those it was given."""

    @property
    def written(self) -> tuple[Any, ...]:
        """Where the last launch left its outputs."""
        return self.outputs if self.returned is None else self.returned

    @property
    def too_slow_us(self) -> float:
        """Slower than this a config gets no whole block."""
        return TOO_SLOW_RATIO * self.best_us

    @cached_property
    def timed(self) -> Tensors:
        """Return what is timed: these, unless they are integers for an exact check, or an input has a single value.

        A GPU runs faster on simple data. Values are not compared there: their sums depend on the order.
        """
        if self.spec.check != "exact-inputs" and self._untimable is None:
            return self
        spec = replace(self.spec, check="exact") if self.spec.check == "exact-inputs" else self.spec
        made = [self]
        for seed in range(self.problem.seed, self.problem.seed + SEEDS):
            made.append(_unchecked(spec, replace(self.problem, seed=seed), self))
            if made[-1]._untimable is None:
                break
        return made[-1]

    @property
    def refusal(self) -> str | None:
        """Return why no seed gives data that may be timed; None if one does."""
        return self.timed._untimable

    @cached_property
    def _untimable(self) -> str | None:
        constant = next((index for index, given in enumerate(self.inputs) if is_constant(given)), None)
        if constant is None:
            return None
        return f"input {constant} has one value throughout: a GPU runs faster on such data"

    def launch(self, config: NamedInts) -> None:
        """Enqueue the kernel with this config on the current stream, on outputs that are prepared."""
        self.returned = None  # freed before the launch, as callers do
        returned = self.spec.launch(config, self.inputs, self.outputs)
        if isinstance(returned, tuple):  # a function that is called for what it writes may return anything else
            self.returned = returned

    def prepare(self, config: NamedInts) -> None:
        """Enqueue what the kernel wants done before each launch."""
        if self.spec.prepare is not None:
            self.spec.prepare(self.inputs, self.outputs)
        if self.spec.unwritten is not None:
            self.spec.unwritten(self.inputs, self.outputs)
        if isinstance(self.spec, RecordedSpec) and self.spec.hook is not None:
            self.spec.hook(config, self.inputs, self.outputs)

    def launcher(self, config: NamedInts) -> Callable[[], object]:
        """What is timed: the launch alone, whatever is prepared before it."""
        if self.spec.prepare is None:
            return lambda: self.launch(config)
        return Prepared(lambda: self.prepare(config), lambda: self.launch(config))

    def check(self, config: NamedInts, launches: Sequence[int] = range(LAUNCHES)) -> str | None:
        """Launch as often as there are numbers in ``launches``, which choose the poison; what is wrong, or None."""
        for count, number in enumerate(launches, 1):
            self.poison(number)
            self.prepare(config)
            with _filling() if number % 2 == 0 else contextlib.nullcontext():
                self.launch(config)
            if wrong := self.wrong():
                return f"launch {count}: {wrong}" if count > 1 else wrong
        return None

    def check_in_a_row(self, config: NamedInts, launches: int = IN_A_ROW) -> str | None:
        """Launch so many times and look at the outputs of each on the device; what is wrong, or None.

        Waits for the device at the end. A fault is shown by checking as often again, if it shows again.
        """
        import torch

        self.poison()
        found = []
        for number in range(launches):
            self._spoil(number)
            self.prepare(config)
            self.launch(config)
            found.append(self._differs())
        count = int(torch.stack(found).sum())
        if not count:
            return self.wrong()
        shown = self.check(config, range(launches)) or f"on {self._place}"
        return f"{count} of {launches} launches in a row gave wrong outputs: {shown}"

    @property
    def in_a_row_bytes(self) -> int:
        """What a launch in a row moves, as :data:`IN_A_ROW_BYTES` counts it."""
        own = sum(int(each.nbytes) for each in (*self.inputs, *self.outputs) if _is_tensor(each))
        return own if self.spec.check == "exact" else 16 * own

    def poison(self, number: int = 0) -> None:
        """Write into outputs what cannot be right, and beside the tensors what none of them holds."""
        self._spoil(number)
        for output in self.outputs:
            guards.fill(output)
        if self.watch is not None:
            self.watch.begin(number)

    def wrong(self) -> str | None:
        """What is wrong since :meth:`poison`, or None. Inputs that were written are as they were afterwards."""
        if self.watch is not None and (written := self.watch.written()):
            return f"{written} on {self._place}"
        if strange := self._strange():
            return f"{strange} on {self._place}"
        for index, (output, given) in enumerate(zip(self.written, self.outputs, strict=True)):
            wrong = self._rule.difference(output, self.expected[index]) if self.expected else None
            if wrong := wrong or guards.overwritten(given):
                if not getattr(self.spec, "agrees", False):
                    return f"output {index}: {wrong} on {self._place}"
                same = sum(map(fingerprint, self.outputs)) % 10**9  # configs that agree with each other have one number
                return f"output {index} disagrees with the first config: {wrong} on {self._place}; fingerprint {same}"
        return None

    def _spoil(self, number: int) -> None:
        if self.returned is not None and self._strange() is None:
            self._spoil_each(self.returned, number)
        self.returned = None
        self._spoil_each(self.outputs, number)

    def _spoil_each(self, outputs: Sequence[Any], number: int) -> None:
        for index, output in enumerate(outputs):
            if self.expected:
                self._rule.spoil(output, self.expected[index], number)
            else:
                fill_large(output)

    def _strange(self) -> str | None:
        """What a launch returned that cannot be its outputs; None where there is nothing of that kind."""
        if self.returned is None:
            return None
        if len(self.returned) != len(self.outputs):
            return f"the launch returned {len(self.returned)} outputs, wanted {len(self.outputs)}"
        for index, (output, like) in enumerate(zip(self.returned, self.outputs, strict=True)):
            if not _is_tensor(output):
                return f"output {index}: the launch returned {type(output).__name__}, wanted a tensor"
            if _form(output) != _form(like):
                return f"output {index}: the launch returned {_form_text(output)}, wanted {_form_text(like)}"
        return None

    def _differs(self) -> Any:
        """Whether any output is wrong, as a tensor on the device."""
        import torch

        if self._strange() is not None:
            return torch.ones((), dtype=torch.bool, device=self.outputs[0].device)
        pairs = zip(self.written, self.expected, strict=True)
        return torch.stack([self._rule.differs(output, expected) for output, expected in pairs]).any()

    @cached_property
    def _rule(self) -> Rule:
        return Rule.of(self.spec)

    @property
    def _place(self) -> str:
        return self.place or problem_place(self.problem)


def build(spec: KernelSpec, problem: Problem, device: str) -> Tensors:
    """The tensors of the problem that is timed, with what the reference makes of them."""
    return build_edge(spec, Edge("", problem), device, problem_place(problem))


def build_edge(spec: KernelSpec, edge: Edge, device: str, place: str = "") -> Tensors:
    """The tensors of an edge, with what the reference makes of them."""
    watch = Watch.of(spec, edge, device)
    expected = tuple(_apart(each, watch.inputs) for each in spec.reference(*watch.inputs))
    watch.written()  # a reference may work in place
    outputs = tuple(guards.guarded(like, device) for like in spec.outputs(*spec.inputs(edge.problem, "meta")))
    _same_form(spec, outputs, expected)
    return Tensors(spec, edge.problem, watch.inputs, outputs, expected, place or edges.place(edge), watch)


def _unchecked(spec: KernelSpec, problem: Problem, checked: Tensors) -> Tensors:
    """The tensors of a problem on the device of others, between guards, with no outputs to compare with."""
    device = str(checked.outputs[0].device)
    watch = Watch.of(spec, Edge("", problem), device)
    outputs = checked.outputs
    if problem != checked.problem:  # group sizes may depend on the seed, and sizes of outputs on those
        outputs = tuple(guards.guarded(like, device) for like in spec.outputs(*spec.inputs(problem, "meta")))
    return Tensors(spec, problem, watch.inputs, outputs, (), checked.place, watch)


def build_unchecked(spec: KernelSpec, problem: Problem, device: str) -> Tensors:
    """The tensors of a problem alone: no reference is computed."""
    outputs = tuple(guards.guarded(like, device) for like in spec.outputs(*spec.inputs(problem, "meta")))
    return Tensors(spec, problem, spec.inputs(problem, device), outputs, ())


def _apart(expected: Any, inputs: tuple[Any, ...]) -> Any:
    """A reference may return a view of an input, which a kernel that writes there would change."""
    storages = {each.untyped_storage().data_ptr() for each in inputs if _is_tensor(each)}
    return expected.clone() if expected.untyped_storage().data_ptr() in storages else expected


def _same_form(spec: KernelSpec, outputs: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    def form(each: Any) -> tuple[object, ...]:  # within a tolerance the reference has wider types
        return tuple(each.shape) if spec.check == "tolerance" else (str(each.dtype), tuple(each.shape))

    forms = [[form(each) for each in tensors] for tensors in (outputs, expected)]
    if forms[0] != forms[1]:
        raise ValueError(f"the spec's outputs are {forms[0]}, its reference gives {forms[1]}")


def _form(output: Any) -> tuple[object, ...]:
    """What a returned output shares with the one that was given; strides of single elements say nothing."""
    strides = [stride for stride, size in zip(output.stride(), output.shape, strict=True) if size > 1]
    return output.dtype, output.device, tuple(output.shape), tuple(strides) if output.numel() else ()


def _form_text(output: Any) -> str:
    return f"{output.dtype} of shape {tuple(output.shape)} and strides {output.stride()} on {output.device}"


@dataclass
class Watch:
    """Whether inputs that lie between guard bytes are still what they were."""

    inputs: tuple[Any, ...]
    rebuild: Callable[[], tuple[Any, ...]]
    """The inputs anew, between guards."""

    @classmethod
    def of(cls, spec: KernelSpec, edge: Edge, device: str) -> Watch:
        """The inputs of an edge and a watch over them."""
        return cls(edges.inputs(spec, edge, device), lambda: edges.inputs(spec, edge, device))

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
                fill_large(made)
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
