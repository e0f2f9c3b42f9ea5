"""One cell of ``fp8tune bench``, in the worker that owns the tensors: a contender on a problem, checked and timed, or
with a reason.

Every contender is timed as callers run it: ours launches its exported config on outputs that are there already, the
others allocate theirs. What they write is compared with our reference before their time counts
(:mod:`fp8tune.bench.checking`). Knows no database and no terminal.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fp8tune.bench import checking
from fp8tune.bench.checking import Checked
from fp8tune.bench.counterparts import Contender, compiled, counterpart
from fp8tune.bench.plain import expression
from fp8tune.bench.warming import run_once, tune_in_short_blocks
from fp8tune.errors import Fp8tuneError, UsageError
from fp8tune.measure import memory
from fp8tune.measure.host import host_us
from fp8tune.measure.timing import Timer, Trial, make_timer
from fp8tune.measure.trial import copy_ceiling_gb_per_s, failure
from fp8tune.measure.worker import Poisoned
from fp8tune.plan.problems import problems
from fp8tune.records import NamedInts, Problem, Status
from fp8tune.revisions.loading import load_spec
from fp8tune.stats import block_value
from fp8tune_kernels import catalog
from fp8tune_kernels.spec import KernelSpec

OURS = "fp8tune"
TORCH_COMPILE = "torch.compile"
TORCHAO = "torchao"
TORCH_ADD = "torch.add"
"""The yardstick of host time: the addition of two 64x64 matrices."""

HOST_ROW = NamedInts(M=64, K=64, N=64, E=1)
LONGEST_REASON = 160

COPY_BYTES = 2 * (512 << 20)
"""Read plus written by the copy behind the ceiling."""


@dataclass(frozen=True)
class Timing:
    """Microseconds, or why there are none, or why they do not count."""

    time_us: float | None = None
    reason: str = ""
    """Beside a time: the output was wrong, or could not be checked."""
    config: NamedInts | None = None
    """What ours was launched with."""
    checked: Checked | None = None
    """How the output compares with the reference; None where it was not compared."""
    sqnr_db: Mapping[str, float] | None = None
    """Of a grouped GEMM's results, instead: see :mod:`fp8tune.bench.sqnr`."""

    def judged(self, check: Timing) -> Timing:
        """This time with what a check found. Where the check could not be made, the time does not count either."""
        if self.time_us is None:
            return self
        made = check.checked is not None or check.sqnr_db is not None or not check.reason
        reason = check.reason if made else f"not checked: {check.reason}"
        return replace(self, reason=reason, checked=check.checked, sqnr_db=check.sqnr_db)

    @property
    def valid_us(self) -> float | None:
        """The time of work that was done right: what ratios, rates and means are made of."""
        return None if self.reason else self.time_us


# What the worker is asked


def time_copy(timer_name: str) -> Timing:
    """The device-to-device copy of :mod:`fp8tune.ceiling`, as a sweep measures it."""
    timer = make_timer(timer_name)
    if timer.runs_kernels:
        return guarded(lambda: COPY_BYTES / copy_ceiling_gb_per_s() / 1e3)
    return guarded(lambda: block_us(timer, Trial("copy", 0, COPY_BYTES), lambda: _nothing))


def check_contender(name: str, reference: str, problem: Problem, timer_name: str) -> Timing:
    """Launch a contender once and compare its outputs with the reference: a Timing without a time.

    Its reason says what is wrong, or why nothing could be compared. Where no kernels run nothing is checked. Raises
    Poisoned as :func:`time_contender` does.
    """
    if not make_timer(timer_name).runs_kernels:
        return Timing()
    tune_in_short_blocks()
    found: list[Checked] = []

    def check() -> float:
        found.append(_checked(name, reference, problem))
        return 0.0

    failed = guarded(check)
    return Timing(reason=found[0].wrong, checked=found[0]) if found else failed


def time_contender(name: str, reference: str, problem: Problem, timer_name: str, round: int) -> Timing:
    """One block of ``fp8tune``, ``torch.compile`` or ``torchao`` on a problem.

    Raises Poisoned with a Timing where the process must not be used again.
    """
    timer = make_timer(timer_name)
    spec = load_spec(reference)
    _forget_expected()
    trial = Trial(f"{name} {problem}", round, spec.bytes_moved(problem.shape))
    timing = guarded(lambda: block_us(timer, trial, lambda: _contender(name, reference, problem).launch))
    if name != OURS:
        return timing
    return replace(timing, config=_exported_config(spec, problem, "cuda" if timer.runs_kernels else "cpu"))


def time_host(name: str, reference: str, timer_name: str) -> Timing:
    """Host time of one operator call on a 64x64 input: ``fp8tune``'s public wrapper, ``torchao`` or ``torch.add``.

    The median over calls that only enqueue, each clocked on its own; the device's queue is drained between batches.
    """
    timer = make_timer(timer_name)
    spec = load_spec(reference)
    if not timer.runs_kernels:
        return guarded(lambda: block_us(timer, Trial(f"host {name} {spec.name}", 0, 0), lambda: _nothing))
    return guarded(lambda: host_us(_host_call(name, spec)))


def warm_up(name: str, reference: str, problem: Problem) -> None:
    """Compile what a contender needs on a problem (:mod:`fp8tune.bench.warming`)."""
    run_once(lambda: _contender(name, reference, problem).launch)
    with contextlib.suppress(Exception):
        _forget()


# Contenders


_contenders: dict[str, Contender] = {}
"""Of the problem whose inputs are in :data:`_tensors`: checks and rounds launch what the first of them has built."""


def _contender(name: str, reference: str, problem: Problem) -> Contender:
    inputs = _inputs(reference, problem)
    if name not in _contenders:
        _contenders[name] = _new_contender(name, reference, problem, inputs)
    return _contenders[name]


def _new_contender(name: str, reference: str, problem: Problem, inputs: tuple[Any, ...]) -> Contender:
    spec = load_spec(reference)
    if name == TORCHAO:
        return counterpart(spec.name, inputs)
    if name == TORCH_COMPILE:
        formulas = expression(spec)
        return Contender(compiled(lambda: formulas(*inputs)))
    outputs = spec.outputs(*inputs)
    config = _exported_config(spec, problem, "cuda")
    return Contender(lambda: spec.launch(config, inputs, outputs), lambda _: outputs)


def _checked(name: str, reference: str, problem: Problem) -> Checked:
    """Ours is launched on spoiled outputs; the others get memory that does not hold the answer either."""
    contender = _contender(name, reference, problem)
    expected = _expected_outputs(reference, problem)
    if name == OURS:
        checking.spoil(contender.read(None), expected)
    else:
        memory.give_back()  # no block is left that held another contender's right answer
        checking.spoil_free_memory(expected)
    return checking.compared(contender.read(contender.launch()), expected)


_expected: dict[tuple[str, Problem], tuple[Any, ...]] = {}


def _expected_outputs(reference: str, problem: Problem) -> tuple[Any, ...]:
    """What the reference gives for a problem: computed once, kept until something is timed."""
    if (reference, problem) not in _expected:
        _forget_expected()
        _expected[reference, problem] = load_spec(reference).reference(*_inputs(reference, problem))
    return _expected[reference, problem]


def _forget_expected() -> None:
    if _expected:
        _expected.clear()
        memory.give_back()


def _exported_config(spec: KernelSpec, problem: Problem, torch_device: str) -> NamedInts:
    """What the public wrapper launches on a problem: the table's config, else the declared default."""
    import torch

    from fp8tune_kernels.runtime.lookup import config_for

    key = tuple(spec.lookup_key(problem).values())
    return NamedInts(config_for(spec, key, torch.device(torch_device)))


_tensors: dict[tuple[str, Problem], tuple[Any, ...]] = {}


def _inputs(reference: str, problem: Problem) -> tuple[Any, ...]:
    """The inputs of a problem, kept until another one's are made: a large one fills much of a GPU."""
    if (reference, problem) not in _tensors:
        _forget()
        _tensors[reference, problem] = load_spec(reference).inputs(problem, "cuda")
    return _tensors[reference, problem]


def _forget() -> None:
    """Free a problem's memory and what was compiled for its sizes."""
    import torch

    _tensors.clear()
    _contenders.clear()
    _expected.clear()
    torch.compiler.reset()  # each problem is a first one: no recompilation limit, no dynamic sizes
    memory.give_back()


# Clocks


def block_us(timer: Timer, trial: Trial, make: Callable[[], Callable[[], Any]]) -> float:
    """The value of one block. Where kernels run, the launch is made and run once: nothing compiles on the clock.

    Raises UsageError for a timer that times nothing.
    """
    launch: Callable[[], Any] = _nothing
    if timer.runs_kernels:
        launch = make()
        launch()
    block = timer.block(launch, trial)
    if block is None:
        raise UsageError("this timer times nothing: use do_bench or simulated:SEED")
    return block_value(block.samples_us)


def _host_call(name: str, spec: KernelSpec) -> Callable[[], Any]:
    import torch

    if name == TORCH_ADD:
        x = torch.randn(64, 64, dtype=torch.bfloat16, device="cuda")
        return lambda: torch.add(x, x)
    inputs = spec.inputs(problems(spec, [HOST_ROW])[0], "cuda")
    if name == TORCHAO:
        return counterpart(spec.name, inputs).launch
    wrapper = public_wrapper(spec)
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    return lambda: wrapper(*tensors)


def public_wrapper(spec: KernelSpec) -> Callable[..., Any]:
    """``quantize_colwise`` of ``colwise``. Raises UsageError for a kernel that lives elsewhere."""
    if spec.name not in catalog.KERNELS:
        raise UsageError(f"{spec.name} lives elsewhere: its public wrapper is not known")
    module = importlib.import_module(catalog.module_name(spec.name))
    wrapper: Callable[..., Any] = getattr(module, f"quantize_{spec.name.replace('-', '_')}")
    return wrapper


def _nothing() -> None:
    pass


# Failures


def guarded(measure_us: Callable[[], float]) -> Timing:
    """A time, or the reason why there is none; the border where foreign failures become cells."""
    try:
        return Timing(measure_us())
    except Exception as error:
        missed = Timing(reason=_reason(error))
        if failure(error).status is Status.CRASHED:
            raise Poisoned(missed) from error
        return missed


def _reason(error: Exception) -> str:
    """The first line of what was said: compilers go on with listings and advice."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = said if isinstance(error, Fp8tuneError) else f"{type(error).__name__}: {said}"
    return text[:LONGEST_REASON]
