"""A problem's tensors, and the checks of every output before and after the clock.

A check finds outputs that differ from the reference (:mod:`fp8tune.measure.comparing`), bytes written beside outputs,
and inputs that were written. Before each launch that is checked, outputs hold values that cannot be right, new memory
is filled, and other bytes lie beside the inputs. A launch may return its outputs instead of writing into those it is
given; the outputs of the launch before are spoiled before they are freed, as new memory is likely to be theirs.

A fault that shows in one launch in fifty is found with probability ``1 - 0.98 ** checks``. A config is checked twice on
its problem and on each edge, and after each timed block. Besides, a GPU launches it :data:`IN_A_ROW` times in a row,
and a flag on the device says for each launch whether its outputs were right: 155 checks find the fault in 95.6 % of
coarse passes. In a recheck, rivals of the config in use are launched so on one size of their kernel, and those that
fresh processes time on each. The interpreter runs programs in order and shows no race: nothing is launched so there.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

from fp8tune.measure import edges, guards
from fp8tune.measure.comparing import Rule, bits, fill_large
from fp8tune.measure.guards import InputWatch, fingerprint, is_tensor
from fp8tune.measure.timing import Prepared, capture
from fp8tune.records import AGREES, NamedInts, Problem
from fp8tune.replay.case import Case
from fp8tune.replay.lazy import torch
from fp8tune.stats.means import group_by
from fp8tune_kernels.spec import Edge, KernelSpec

LAUNCHES = 2  # launches that are checked on the problem and on each edge: the second shows what the first left behind
IN_A_ROW = 150  # launches of one config: with the checks before and after, 95 % for a fault in one launch of fifty

# Largest inputs and outputs of launches in a row: on the problem if it has no more, else on the largest such edge. 150
# launches of one GiB took 0.25 s a config on an H200, and 1.4 s where it wrote 805 MB. A kernel whose outputs are
# compared within a tolerance adds a 16th: in float64 a comparison moves 16 times as much.
IN_A_ROW_BYTES = 1 << 30

TOO_SLOW_RATIO = 1.5  # times the best block so far: above the ratio (1.3) within which the later rounds repeat a config
SEEDS = 4  # for inputs that may be timed: a sixteenth of values other than zero is in 16 of them in 98.4 % of cases
COPIES_BYTES = 2 << 30  # of all tensors of a graph's launches


@dataclass
class Tensors:
    """A problem's tensors on a device, with the outputs that its reference gives."""

    spec: KernelSpec
    problem: Problem
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]  # between guards, see :mod:`fp8tune.measure.guards`
    expected: tuple[Any, ...]  # empty if no values are compared
    place: str = ""  # for messages
    watch: InputWatch | None = None
    passed: set[NamedInts] = field(default_factory=set)  # configs checked here and on every edge
    without_race: set[NamedInts] = field(default_factory=set)  # configs that were launched many times in a row
    best_us: float = math.inf
    returned: tuple[Any, ...] | None = None  # by the last launch; None if it wrote into the outputs it was given
    copies: list[Tensors] = field(default_factory=list)  # for launches in a graph

    def __post_init__(self) -> None:
        self.rule = Rule.from_spec(self.spec)

    @property
    def written(self) -> tuple[Any, ...]:
        """Outputs of the last launch."""
        return self.outputs if self.returned is None else self.returned

    @cached_property
    def timed(self) -> Tensors:
        """Tensors that are timed: these, unless they are integers for an exact check, or an input is constant.

        A GPU runs faster on simple data. Values are not compared there: their sums depend on the order.
        """
        if self.spec.check != "exact-inputs" and self.refusal is None:
            return self
        spec = replace(self.spec, check="exact") if self.spec.check == "exact-inputs" else self.spec
        device, tensors = str(self.outputs[0].device), self
        for seed in range(self.problem.seed, self.problem.seed + SEEDS):
            problem, outputs = replace(self.problem, seed=seed), self.outputs
            watch = InputWatch(partial(edges.inputs, spec, Edge("", problem), device))
            if problem != self.problem:  # group sizes may depend on the seed, and sizes of outputs on those
                outputs = guarded_outputs(spec, problem, device)
            tensors = Tensors(spec, problem, watch.inputs, outputs, (), self.place, watch)
            if tensors.refusal is None:
                break
        return tensors

    @cached_property
    def refusal(self) -> str | None:
        """The reason why these inputs may not be timed; None if they may."""
        for index, value in enumerate(self.inputs):
            if is_constant(value):
                return f"input {index} has one value throughout: a GPU runs faster on such data"
        return None

    @cached_property
    def remark(self) -> str:
        """Say how much the first config leaves unwritten, where others are compared with it; empty if it writes all."""
        case = self.inputs[-1] if self.inputs else None
        if not isinstance(case, Case) or not case.untouched:
            return ""
        unwritten = sum(int(mask.sum()) for mask in case.untouched.values())
        return f"{AGREES} {unwritten:,} of {sum(output.numel() for output in self.outputs):,} elements unwritten"

    @property
    def in_a_row_bytes(self) -> int:
        """Bytes that a launch in a row moves, as :data:`IN_A_ROW_BYTES` counts them."""
        own = sum(int(value.nbytes) for value in (*self.inputs, *self.outputs) if is_tensor(value))
        return own if self.spec.check == "exact" else 16 * own

    def launch(self, config: NamedInts) -> None:
        """Enqueue the kernel with this config on the current stream, on outputs that are prepared."""
        self.returned = None  # freed before the launch, as callers do
        returned = self.spec.launch(config, self.inputs, self.outputs)
        if isinstance(returned, tuple):  # a function that is called for what it writes may return anything else
            self.returned = returned

    def prepare(self, config: NamedInts) -> None:
        """Enqueue the work that the kernel needs before each launch."""
        for step in (self.spec.prepare, self.spec.unwritten):
            if step is not None:
                step(self.inputs, self.outputs)
        if (hook := getattr(self.spec, "hook", None)) is not None:  # of a recorded kernel
            hook(config, self.inputs, self.outputs)

    def launcher(self, config: NamedInts, in_graph: int = 0) -> Callable[[], object]:
        """Return the launch that is timed, with its preparation beside it.

        With ``in_graph`` it replays a CUDA graph of so many launches, each on tensors of its own: the flush before the
        replay then leaves none of their inputs in the cache. Raises :class:`~fp8tune.measure.timing.CaptureError`.
        """
        if in_graph:
            return self._captured(config, in_graph)
        if self.spec.prepare is None:
            return lambda: self.launch(config)
        return Prepared(lambda: self.prepare(config), lambda: self.launch(config))

    def _captured(self, config: NamedInts, in_graph: int) -> Prepared:
        own_bytes = sum(guards.storage(value).nbytes for value in (*self.inputs, *self.outputs) if is_tensor(value))
        in_graph = max(1, min(in_graph, COPIES_BYTES // max(1, own_bytes)))
        while len(self.copies) < in_graph - 1:
            inputs, outputs = (
                tuple(guards.with_storage(value) if is_tensor(value) else value for value in values)
                for values in (self.inputs, self.outputs)
            )
            own = replace(self, inputs=inputs, outputs=outputs, expected=(), watch=None, copies=[], returned=None)
            self.copies.append(own)
        every = [self, *self.copies[: in_graph - 1]]
        for tensors in every:
            tensors.prepare(config)
        self.launch(config)  # loads modules, which a capture must not
        graph = capture([partial(tensors.launch, config) for tensors in every])
        # The outputs of the launch above are no evidence of a replay.
        returned = self.returned
        self.poison()
        self.prepare(config)
        self.returned = returned

        def prepare() -> None:
            for tensors in every if self.spec.prepare is not None else ():
                tensors.prepare(config)

        return Prepared(prepare, graph.replay, in_graph)

    def check(self, config: NamedInts, launches: Sequence[int] = range(LAUNCHES)) -> str | None:
        """Launch once for each number, which chooses the poison. Return the first fault, or None."""
        for count, number in enumerate(launches, 1):
            self.poison(number)
            self.prepare(config)
            with _filled_memory() if number % 2 == 0 else contextlib.nullcontext():
                self.launch(config)
            if fault := self.wrong():
                return f"launch {count}: {fault}" if count > 1 else fault
        return None

    def check_in_a_row(self, config: NamedInts, launches: int = IN_A_ROW) -> str | None:
        """Launch so many times and compare the outputs of each launch on the device. Return the fault, or None.

        Waits for the device at the end. A fault is shown by checking as often again, if it shows again.
        """
        self.poison()
        flags, spoilers, comparisons = [], self._spoilers(), self._comparisons()
        for number in range(launches):
            for spoil in spoilers if self.returned is None else self._spoilers():
                spoil(number)
            self.prepare(config)
            self.launch(config)
            flags += [is_wrong() for is_wrong in (comparisons if self.returned is None else self._comparisons())]
        count = int(torch.stack(flags).view(launches, -1).any(dim=1).sum())
        if not count:
            return self.wrong()
        shown = self.check(config, range(launches)) or f"on {self.place}"
        return f"{count} of {launches} launches in a row gave wrong outputs: {shown}"

    def poison(self, number: int = 0) -> None:
        """Write values into outputs that cannot be right, and bytes beside the tensors that none of them holds."""
        self._spoil(number)
        for output in self.outputs:
            guards.fill(output)
        if self.watch is not None:
            self.watch.begin(number)

    def wrong(self) -> str | None:
        """Return the first fault since :meth:`poison`, or None. Inputs that were written are restored."""
        if not self._is_faulty():
            return None
        fault = self.watch.written() if self.watch is not None else None
        fault = fault or self._malformed_returns() or self._wrong_values()
        for index, output in enumerate(self.outputs):
            if not fault and (beside := guards.overwritten(output)):
                fault = f"output {index}: {beside}"
        fault = fault or "bytes changed after the launch and then did not: it must write on the current stream"
        if not getattr(self.spec, "agrees", False):
            return f"{fault} on {self.place}"
        # the same for all configs that agree with each other
        group = sum(int(fingerprint(output)) for output in self.outputs) % 10**9
        return f"{fault} on {self.place}; fingerprint {group}"

    def _is_faulty(self) -> bool:
        """Return True if anything is wrong. Waits for the device once, and not for each answer."""
        if self._malformed_returns() is not None:
            return True
        faults = self.watch.faults() if self.watch is not None else []
        faults += map(guards.is_overwritten, self.outputs)
        faults += [is_wrong() for is_wrong in (self._comparisons() if self.expected else ())]
        by_device = group_by(faults, lambda fault: fault.device)  # group ends may be on the host
        return any(bool(torch.stack(same).any()) for same in by_device.values())

    def _wrong_values(self) -> str | None:
        for index, (output, right) in enumerate(zip(self.written, self.expected, strict=bool(self.expected))):
            if fault := self.rule.difference(output, right):
                reason = " disagrees with the first config" if getattr(self.spec, "agrees", False) else ""
                return f"output {index}{reason}: {fault}"
        return None

    def _comparisons(self) -> list[Callable[[], Any]]:
        """Return functions that tell on the device whether an output is wrong."""
        if self._malformed_returns() is not None:
            wrong = torch.ones((), dtype=torch.bool, device=self.outputs[0].device)
            return [lambda: wrong] * len(self.outputs)
        return [self.rule.comparison(*pair) for pair in zip(self.written, self.expected, strict=True)]

    def _spoilers(self) -> list[Callable[[int], object]]:
        """Return functions that spoil the outputs and what the last launch returned, which is freed with them."""
        outputs = self.outputs
        if self.returned is not None and self._malformed_returns() is None:
            outputs = (*self.returned, *self.outputs)
        self.returned = None
        if not self.expected:
            return [partial(_fill_large, output) for output in outputs]
        rights = self.expected * (len(outputs) // len(self.outputs))
        return [self.rule.spoiler(*pair) for pair in zip(outputs, rights, strict=True)]

    def _spoil(self, number: int) -> None:
        for spoil in self._spoilers():
            spoil(number)

    def _malformed_returns(self) -> str | None:
        """Describe returned values that cannot be the launch's outputs."""
        if self.returned is None:
            return None
        if len(self.returned) != len(self.outputs):
            return f"the launch returned {len(self.returned)} outputs, wanted {len(self.outputs)}"
        for index, (output, like) in enumerate(zip(self.returned, self.outputs, strict=True)):
            if not is_tensor(output):
                return f"output {index}: the launch returned {type(output).__name__}, wanted a tensor"
            if _form(output) != _form(like):
                returned, expected = (
                    f"{tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()} on {tensor.device}"
                    for tensor in (output, like)
                )
                return f"output {index}: the launch returned {returned}, wanted {expected}"
        return None


def build(spec: KernelSpec, edge: Edge, device: str) -> Tensors:
    """Build the tensors of an edge, or of the problem that is timed as one without a name, and the right outputs."""
    watch = InputWatch(partial(edges.inputs, spec, edge, device))
    expected = spec.reference(*watch.inputs)
    storages = {value.untyped_storage().data_ptr() for value in watch.inputs if is_tensor(value)}
    # A reference may return a view of an input, which a kernel that writes there would change.
    expected = tuple(right.clone() if right.untyped_storage().data_ptr() in storages else right for right in expected)
    watch.written()  # a reference may work in place
    outputs = guarded_outputs(spec, edge.problem, device)

    def form(tensor: Any) -> tuple[object, ...]:  # within a tolerance the reference has wider types
        return tuple(tensor.shape) if spec.check == "tolerance" else (str(tensor.dtype), tuple(tensor.shape))

    forms = [[form(tensor) for tensor in tensors] for tensors in (outputs, expected)]
    if forms[0] != forms[1]:
        raise ValueError(f"the spec's outputs are {forms[0]}, its reference gives {forms[1]}")
    return Tensors(spec, edge.problem, watch.inputs, outputs, expected, edges.place(edge), watch)


def build_unchecked(spec: KernelSpec, edge: Edge, device: str) -> Tensors:
    """Build the tensors of a problem without a reference."""
    problem = edge.problem
    return Tensors(spec, problem, spec.inputs(problem, device), guarded_outputs(spec, problem, device), ())


def is_constant(value: Any) -> bool:
    """Return True for a floating-point tensor with the same bits in all of at least two elements.

    A GPU draws less power on such data and clocks higher: zeros run up to 15 % faster than random values.
    """
    if not is_tensor(value) or not value.is_floating_point() or value.numel() < 2:
        return False
    all_bits = bits(value)
    return bool((all_bits == all_bits[(0,) * all_bits.ndim]).all())


def guarded_outputs(spec: KernelSpec, problem: Problem, device: str) -> tuple[Any, ...]:
    """Return the outputs of a problem, uninitialised, each between guards."""
    return tuple(guards.guarded(like, device) for like in spec.outputs(*spec.inputs(problem, "meta")))


def _fill_large(output: Any, number: int) -> None:  # called as a spoiler is
    fill_large(output)


def _form(output: Any) -> tuple[object, ...]:
    """Return what a returned output shares with the one that was given; strides of single elements do not matter."""
    strides = [stride for stride, size in zip(output.stride(), output.shape, strict=True) if size > 1]
    return output.dtype, output.device, tuple(output.shape), tuple(strides) if output.numel() else ()


@cache
def _filled_memory() -> Any:
    """Return a context in which new memory holds large values, and not what an earlier launch left there."""
    uninitialised = {torch.empty, torch.empty_like, torch.empty_strided}
    uninitialised |= {torch.Tensor.new_empty, torch.Tensor.new_empty_strided}

    class Filling(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        # torch's own switch for this imports its compiler, which takes seconds
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if function in uninitialised:
                fill_large(result)
            return result

    return Filling()
