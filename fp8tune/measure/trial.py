"""One trial, in the worker that owns the tensors: check the bytes, then time. Knows no database and no terminal.

The check comes before the clock: outputs are poisoned with the complement of what is right, the config runs on the
problem itself and on a small problem of every group layout, every byte must be the reference's, and none beside the
outputs may be written.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from fp8tune.code.loading import load_spec
from fp8tune.measure import device, fences, machine, memory
from fp8tune.measure.clock import Slot
from fp8tune.measure.compiling import one_line
from fp8tune.measure.timing import DoBenchTimer, Timer, Trial, make_timer
from fp8tune.measure.worker import Poisoned
from fp8tune.records import NamedInts, Outcome, Problem, Status
from fp8tune.stats import block_value
from fp8tune_kernels.spec import ROUTINGS, KernelSpec

LAYOUT_CHECK_ROWS = 1021
"""M of the small problems that check the other group layouts: a prime, so that no block divides it. M is not
specialized, so the binary checked is the one that is timed."""


HOPELESS_RATIO = 1.5
"""Times the best block so far: above the ratio (1.3) within which the later rounds repeat a config."""


@cache
def process_name() -> str:
    """A name for this worker process that no other one has: the unit of replication in rows."""
    return f"{os.getpid()}-{os.urandom(4).hex()}"


def copy_ceiling_gb_per_s() -> float:
    """What a device-to-device copy of 512 MiB reaches, counting bytes read plus written, in GB/s."""
    import torch

    source = torch.randint(0, 255, (512 << 20,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    block = DoBenchTimer().block(copy, Trial("copy", 0, 2 * source.numel()))
    return 2 * source.numel() / block_value(block.samples_us) / 1e3


def prepare(reference: str, problem: Problem, torch_device: str) -> None:
    """Build the tensors of a problem before its first trial. What fails here fails again there, as a row."""
    with contextlib.suppress(Exception):
        _prepare(reference, problem, torch_device)
        list(_layout_benches(reference, problem, torch_device))


def run_trial(
    reference: str,
    problem: Problem,
    config: NamedInts,
    timer_name: str,
    torch_device: str,
    number: int,
    position: int = 0,
) -> Outcome:
    """Check ``config`` on ``problem`` (once a process) and time it, in round ``number``. Every failure is an Outcome.

    Raises Poisoned with a ``crashed`` outcome where the process must not be used again.
    """
    timer = make_timer(timer_name)
    trial = replace(trial_of(load_spec(reference), problem, config, number), position=position)
    if not timer.runs_kernels:
        return _timed(timer, trial, lambda: None)

    def checked_and_timed() -> Outcome:
        bench = _prepare(reference, problem, torch_device)
        if config not in bench.passed:
            for checked in (bench, *_layout_benches(reference, problem, torch_device)):
                if wrong := checked.check(config):
                    return Outcome(Status.WRONG, reason=wrong)
            bench.passed.add(config)
        hopeless_us = bench.hopeless_us if number == 0 else None  # the later rounds have nobody to give up on
        outcome = _timed(timer, replace(trial, hopeless_us=hopeless_us), lambda: bench.launch(config))
        bench.best_us = min(bench.best_us, outcome.time_us or math.inf)
        return outcome

    return _guarded(checked_and_timed)


def prepare_final(reference: str, problem: Problem, timer_name: str, torch_device: str) -> None:
    """Build the tensors of a problem for :func:`run_final`, without a reference. Raises what building raises."""
    if make_timer(timer_name).runs_kernels:
        unchecked_bench(reference, problem, torch_device)


def unchecked_bench(reference: str, problem: Problem, torch_device: str) -> Bench:
    """A problem's tensors where configs are launched whose bytes are known to be right: no reference is computed."""
    return _prepare(reference, problem, torch_device, is_checked=False)


def run_final(
    reference: str, problem: Problem, config: NamedInts, timer_name: str, torch_device: str, slot: Slot
) -> Outcome:
    """Time ``config`` in a slot of the finals; the screen has checked its bytes. Fails as :func:`run_trial` does."""
    timer = make_timer(timer_name)
    trial = trial_of(load_spec(reference), problem, config, slot.round)
    trial = replace(trial, process=slot.process, position=slot.position, after=slot.after, twin=slot.twin)
    if not timer.runs_kernels:
        return _timed(timer, trial, lambda: None)

    def timed() -> Outcome:
        bench = unchecked_bench(reference, problem, torch_device)
        return _timed(timer, trial, lambda: bench.launch(config))

    return _guarded(timed)


def _guarded(run: Callable[[], Outcome]) -> Outcome:
    """The border where foreign failures become statuses."""
    try:
        return run()
    except Exception as error:
        outcome = failure(error)
    if outcome.status is Status.CRASHED:
        raise Poisoned(outcome)
    return outcome


def _timed(timer: Timer, trial: Trial, launch: Callable[[], None]) -> Outcome:
    before = device.telemetry()
    block = timer.block(launch, trial)
    if block is None:
        return Outcome(Status.OK)
    return Outcome(
        Status.OK,
        reason=f"the steadiest of {1 + block.thrown_away} blocks" if block.thrown_away else "",
        time_us=block_value(block.samples_us),
        samples_us=block.samples_us,
        tick_us=block.tick_us,
        process=process_name(),
        telemetry=device.telemetry_over(before),
    )


def trial_of(spec: KernelSpec, problem: Problem, config: NamedInts, number: int = 0) -> Trial:
    """What a clock is told of ``config`` on ``problem`` in round ``number``."""
    return Trial(
        identity=f"{problem} {config.canonical}",
        round=number,
        bytes_moved=spec.bytes_moved(problem.shape),
        config=f"{problem.kernel} {config.canonical}",
        key=f"{problem.kernel} {spec.lookup_key(problem).canonical}",
    )


def failure(error: Exception) -> Outcome:
    """The status an exception stands for. A device error poisons the GPU context, so it counts as ``crashed``.

    Raises MachineError for what is none of the config's: see :mod:`fp8tune.measure.machine`.
    """
    import torch
    from triton.runtime.errors import OutOfResources

    if isinstance(error, OutOfResources):
        return Outcome(Status.OUT_OF_RESOURCES, reason=one_line(error))
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        _forget()
        return Outcome(Status.OUT_OF_MEMORY, reason=one_line(error))
    machine.raise_if_machine(error)
    text = one_line(error)
    if any(sign in text for sign in ("CUDA error", "HIP error", "AcceleratorError", "illegal memory access")):
        return Outcome(Status.CRASHED, reason=text)
    return Outcome(Status.COMPILE_ERROR, reason=text)


@dataclass
class Bench:
    """A problem's tensors on a device, with the reference's outputs to compare with."""

    spec: KernelSpec
    problem: Problem
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    """Between fences, see :mod:`fp8tune.measure.fences`."""
    expected: tuple[Any, ...]
    """Empty where nothing is checked any more, as in finals."""
    passed: set[NamedInts] = field(default_factory=set)
    """Configs that were checked in this process, on this problem and on every group layout."""
    best_us: float = math.inf

    @property
    def hopeless_us(self) -> float:
        """Slower than this a config gets no whole block."""
        return HOPELESS_RATIO * self.best_us

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

    def check(self, config: NamedInts) -> str | None:
        """Run once on poisoned outputs; None where every byte is the reference's and none beside them was written."""
        if self.refusal:
            return self.refusal
        for output, expected in zip(self.outputs, self.expected, strict=True):
            _bits(output).copy_(~_bits(expected))
            fences.paint(output)
        self.launch(config)
        for index, (output, expected) in enumerate(zip(self.outputs, self.expected, strict=True)):
            if wrong := difference(output, expected) or fences.broken(output):
                return f"output {index}: {wrong} on {self.problem.routing} routing, {self.problem.shape}"
        return None


def is_constant(given: Any) -> bool:
    """Whether an input is a floating-point tensor with the same bits in all of at least two elements.

    A GPU draws less power on such data and clocks higher: zeros run up to 15 % faster than random values.
    """
    import torch

    if not isinstance(given, torch.Tensor) or not given.is_floating_point() or given.numel() < 2:
        return False
    bits = _bits(given)
    return bool((bits == bits[(0,) * bits.ndim]).all())


def difference(output: Any, expected: Any) -> str | None:
    """How two tensors differ, bit for bit (any NaN equals any NaN in float32: payloads differ between backends)."""
    import torch

    unequal = _bits(output) != _bits(expected)
    if expected.dtype == torch.float32:
        unequal &= ~(output.isnan() & expected.isnan())
    count = int(unequal.sum())
    if not count:
        return None
    first = tuple(int(index) for index in unequal.nonzero()[0])
    return f"{count} of {expected.numel()} elements differ, first at {first}"


def _bits(tensor: Any) -> Any:
    """The tensor's bits as integers of the same size: shares its memory, keeps its strides."""
    import torch

    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


_benches: dict[tuple[str, Problem, bool], Bench] = {}


def _prepare(reference: str, problem: Problem, torch_device: str, *, is_checked: bool = True) -> Bench:
    """The bench of a problem. The previous problem's tensors are let go first: a large one fills much of a GPU."""
    if (reference, problem, is_checked) not in _benches:
        _forget()
        _benches[reference, problem, is_checked] = _build(load_spec(reference), problem, torch_device, is_checked)
    return _benches[reference, problem, is_checked]


def _layout_benches(reference: str, problem: Problem, torch_device: str) -> Iterator[Bench]:
    spec = load_spec(reference)
    if spec.routed:
        for routing in ROUTINGS:
            small = layout_problem(problem, routing)
            if small != problem:
                yield _layout_bench(reference, small, torch_device)


def layout_problem(problem: Problem, routing: str) -> Problem:
    """The same kernel, groups and row length on few rows, spread as ``routing`` says."""
    rows = min(problem.shape["M"], LAYOUT_CHECK_ROWS)
    return replace(problem, routing=routing, shape=NamedInts({**problem.shape, "M": rows}))


@cache
def _layout_bench(reference: str, problem: Problem, torch_device: str) -> Bench:
    return _build(load_spec(reference), problem, torch_device)


def _build(spec: KernelSpec, problem: Problem, torch_device: str, is_checked: bool = True) -> Bench:
    inputs = spec.inputs(problem, torch_device)
    expected = spec.reference(*inputs) if is_checked else ()
    outputs = tuple(fences.fenced(like, torch_device) for like in spec.outputs(*spec.inputs(problem, "meta")))
    return Bench(spec, problem, inputs, outputs, expected)


def _forget() -> None:
    _benches.clear()
    _layout_bench.cache_clear()
    memory.give_back()
