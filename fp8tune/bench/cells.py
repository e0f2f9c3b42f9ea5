"""One cell of ``fp8tune bench``, in the worker that owns the tensors: a contender on a problem, timed or with a reason.

Every contender is timed as callers run it: ours launches its exported config on outputs that are there already, the
others allocate theirs. Knows no database and no terminal.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fp8tune.bench.counterparts import compiled, counterpart
from fp8tune.bench.plain import expression
from fp8tune.bench.warming import run_once
from fp8tune.code.loading import load_spec
from fp8tune.errors import Fp8tuneError, UsageError
from fp8tune.measure import memory
from fp8tune.measure.host import host_us
from fp8tune.measure.timing import Timer, Trial, make_timer
from fp8tune.measure.trial import failure
from fp8tune.measure.worker import Poisoned
from fp8tune.plan.problems import problems
from fp8tune.records import NamedInts, Problem, Status
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


@dataclass(frozen=True)
class Timing:
    """Microseconds, or why there are none."""

    time_us: float | None = None
    reason: str = ""
    config: NamedInts | None = None
    """What ours was launched with."""


# What the worker is asked


def time_cast(reference: str, problem: Problem, timer_name: str, round: int) -> Timing:
    """The copy ceiling: a plain cast of as many elements as the problem has, from its input dtype to its FP8 dtype."""
    what = elements(load_spec(reference), problem), problem.in_dtype, problem.fp8_dtype
    trial = Trial(f"cast {what}", round, bytes_cast(what[0], problem))
    return guarded(lambda: block_us(make_timer(timer_name), trial, lambda: _cast(*what)))


def time_contender(name: str, reference: str, problem: Problem, timer_name: str, round: int) -> Timing:
    """One block of ``fp8tune``, ``torch.compile`` or ``torchao`` on a problem.

    Raises Poisoned with a Timing where the process must not be used again.
    """
    timer = make_timer(timer_name)
    spec = load_spec(reference)
    trial = Trial(f"{name} {problem}", round, spec.bytes_moved(problem.shape))
    timing = guarded(lambda: block_us(timer, trial, lambda: _launcher(name, reference, problem)))
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
    run_once(lambda: _launcher(name, reference, problem))
    with contextlib.suppress(Exception):
        _forget()


# Contenders


_launchers: dict[str, Callable[[], Any]] = {}
"""Of the problem whose inputs are in :data:`_tensors`: rounds launch what the first of them has built."""


def _launcher(name: str, reference: str, problem: Problem) -> Callable[[], Any]:
    inputs = _inputs(reference, problem)
    if name not in _launchers:
        _launchers[name] = _new_launcher(name, reference, problem, inputs)
    return _launchers[name]


def _new_launcher(name: str, reference: str, problem: Problem, inputs: tuple[Any, ...]) -> Callable[[], Any]:
    spec = load_spec(reference)
    if name == TORCHAO:
        return counterpart(spec.name, inputs)
    if name == TORCH_COMPILE:
        formulas = expression(spec)
        return compiled(lambda: formulas(*inputs))
    outputs = spec.outputs(*inputs)
    config = _exported_config(spec, problem, "cuda")
    return lambda: spec.launch(config, inputs, outputs)


def _exported_config(spec: KernelSpec, problem: Problem, torch_device: str) -> NamedInts:
    """What the public wrapper launches on a problem: the table's config, else the declared default."""
    import torch

    from fp8tune_kernels.lookup import config_for

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
    _launchers.clear()
    torch.compiler.reset()  # each problem is a first one: no recompilation limit, no dynamic sizes
    memory.give_back()


def elements(spec: KernelSpec, problem: Problem) -> int:
    """Elements of the floating-point inputs of a problem, which is what a cast casts."""
    import torch

    inputs = spec.inputs(problem, "meta")
    return sum(x.numel() for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point())


def bytes_cast(count: int, problem: Problem) -> int:
    """Bytes read plus written by a cast of so many elements."""
    import torch

    dtypes = (getattr(torch, name) for name in (problem.in_dtype, problem.fp8_dtype))
    return int(count * sum(dtype.itemsize for dtype in dtypes))


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


def _cast(count: int, in_dtype: str, fp8_dtype: str) -> Callable[[], Any]:
    import torch

    source = torch.randn(count, dtype=getattr(torch, in_dtype), device="cuda")
    target = torch.empty(count, dtype=getattr(torch, fp8_dtype), device="cuda")
    return lambda: target.copy_(source)


def _host_call(name: str, spec: KernelSpec) -> Callable[[], Any]:
    import torch

    if name == TORCH_ADD:
        x = torch.randn(64, 64, dtype=torch.bfloat16, device="cuda")
        return lambda: torch.add(x, x)
    inputs = spec.inputs(problems(spec, [HOST_ROW])[0], "cuda")
    if name == TORCHAO:
        return counterpart(spec.name, inputs)
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
