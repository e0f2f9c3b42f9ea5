"""One contender on one size, in the worker that owns the tensors: it is built, checked, profiled and timed there."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fp8tune.bench.operations import load
from fp8tune.errors import Fp8tuneError
from fp8tune.measure import tensor_cache
from fp8tune.measure.arms import Arm, Work
from fp8tune.measure.comparing import bits
from fp8tune.measure.trial import failure
from fp8tune.measure.worker import Poisoned
from fp8tune.plan.problems import seed_text
from fp8tune.records import Status
from fp8tune.replay.lazy import torch, triton
from fp8tune_kernels.operations.operation import Call, Operation, Size, Unavailable

# A longer step gets a block of five samples: most steps of real layers take longer.
LONG_US = 2000.0
PROFILED_STEPS = 3

# Of torchao's autotuners, for each of 36 configs. Their own 100 ms would take minutes on the sizes of one set.
WARMUP_MS, TUNING_MS = 5, 25


@dataclass(frozen=True)
class Part:
    """One kernel launch of a step, in the order of the step."""

    kernel: str
    time_us: float


@dataclass(frozen=True)
class Result:
    """Findings of a worker about a contender, with its time."""

    reason: str = ""  # why it is not timed
    is_wrong: bool = False
    sqnr_db: dict[str, float] = field(default_factory=dict)  # worst slice of each result
    peak_bytes: int | None = None  # allocated during a step, beside the inputs
    parts: tuple[Part, ...] = ()  # of ours
    time_us: float | None = None


@dataclass(frozen=True)
class Contender(Arm):
    """One contender's step on one size."""

    reference: str
    is_kernel: bool
    name: str
    size: Size
    bytes_moved: int
    long_us: ClassVar[float | None] = LONG_US

    @property
    def work(self) -> Work:
        """Identify the work by contender and size."""
        return Work(f"{self.name} {seed_text(self.size)}", self.bytes_moved)

    def build(self, torch_device: str) -> None:
        """Make the size's inputs."""
        state_of(self, torch_device)

    def launcher(self, torch_device: str) -> Callable[[], object]:
        """Return the step. Nothing of the checks is left in memory."""
        state = state_of(self, torch_device)
        if state.expected is not None:
            state.expected = None
            tensor_cache.give_back_memory()
        return state.call(self.name).step


class _State:
    """Inputs, contenders and expected outputs of one size."""

    def __init__(self, operation: Operation, size: Size, torch_device: str) -> None:
        self.operation, self.inputs = operation, operation.inputs(size, torch_device)
        self.expected: tuple[Any, ...] | None = None
        self._calls: dict[str, Call] = {}

    def call(self, name: str) -> Call:
        if name not in self._calls:
            self._calls[name] = self.operation.contenders[name](self.inputs)
        return self._calls[name]


_states: dict[tuple[str, bool, Size], _State] = {}  # one: a large size fills much of a GPU


def state_of(contender: Contender, torch_device: str) -> _State:
    """Return the state of the contender's size. That of another size is freed first."""
    key = (contender.reference, contender.is_kernel, contender.size)
    if key not in _states:
        _states.clear()
        tensor_cache.give_back_memory()
        operation = load(contender.reference, is_kernel=contender.is_kernel)
        _states[key] = _State(operation, contender.size, torch_device)
    return _states[key]


def check(contender: Contender, torch_device: str = "cuda", *, is_profiled: bool = False) -> Result:
    """Compare a contender's outputs with the reference. Raises Poisoned if the process must not be used again."""
    logging.disable(logging.CRITICAL)  # compilers of others print the code that they refuse
    if torch.cuda.is_available():
        from triton.testing import do_bench

        quick = functools.partial(do_bench, warmup=WARMUP_MS, rep=TUNING_MS)
        triton.runtime.driver.active.get_benchmarker = lambda: quick
    try:
        with warnings.catch_warnings(action="ignore"):  # and advise on their own code
            return _check(contender, torch_device, is_profiled)
    except (Unavailable, Fp8tuneError) as error:
        return Result(str(error))
    except Exception as error:
        outcome = failure(error)
        result = Result(outcome.reason or str(outcome.status))
        if outcome.status is Status.CRASHED:
            raise Poisoned(result) from error
        return result


def _check(contender: Contender, torch_device: str, is_profiled: bool) -> Result:
    state = state_of(contender, torch_device)
    operation, call = state.operation, state.call(contender.name)
    call.step()  # compiles and tunes
    peak_bytes, parts = None, tuple[Part, ...]()
    if torch.cuda.is_available():
        tensor_cache.give_back_memory()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call.step()
        peak_bytes = torch.cuda.max_memory_allocated() - before
        parts = profile(call.step) if is_profiled else ()
    with operation.checked_on(contender.size, state.inputs):
        if call.reference is not None:
            expected = call.reference()
        else:
            state.expected = state.expected or operation.reference(state.inputs)
            expected = state.expected
        for right in expected:
            (~bits(right)).clone()  # freed memory that outputs are likely to get must not hold the answer
        fault, sqnr_db = operation.compare(call.read(call.step()), expected)
    sqnr_db = {name: value for name, value in sqnr_db.items() if math.isfinite(value)}
    return Result(fault, is_wrong=bool(fault), sqnr_db=sqnr_db, peak_bytes=peak_bytes, parts=parts)


def profile(step: Callable[[], object]) -> tuple[Part, ...]:
    """Return the kernel launches of a step with their mean times; none if steps differ in their launches."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    count, rest = divmod(len(events), PROFILED_STEPS)
    steps = [events[start : start + count] for start in range(0, len(events), count or 1)]
    if rest or any(len({event.name for event in launches}) > 1 for launches in zip(*steps, strict=True)):
        return ()
    return tuple(
        Part(launches[0].name, sum(event.time_range.elapsed_us() for event in launches) / PROFILED_STEPS)
        for launches in zip(*steps, strict=True)
    )


def warm_up(contender: Contender, torch_device: str = "cuda") -> None:
    """Run a step once in a process that is thrown away. What it compiles is on disk for the one that times.

    An autotuner launches each config once here: what it picks is its own, later.
    """

    def launch_once(launch: Callable[[], Any], *_: object, **__: object) -> list[float]:
        launch()
        return [1.0, 1.0, 1.0]

    logging.disable(logging.CRITICAL)
    with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):  # fails again where it is timed
        triton.runtime.driver.active.get_benchmarker = lambda: launch_once
        state_of(contender, torch_device).call(contender.name).step()
