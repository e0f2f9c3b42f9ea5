"""One trial, in the worker that owns the tensors: check the bytes, then time. Knows no database and no terminal.

The check comes before the clock (:mod:`fp8tune.measure.checking`): on the problem itself and on its edges every byte
must be the reference's. On an edge a config is checked once a process, whichever problem it belongs to. After a timed
block the outputs are looked at once more.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache

from fp8tune.measure import checking, device, machine, memory
from fp8tune.measure.arms import Arm, KernelArm
from fp8tune.measure.checking import Bench, difference
from fp8tune.measure.clock import Slot
from fp8tune.measure.compiling import one_line
from fp8tune.measure.edges import edges_of, place
from fp8tune.measure.timing import DoBenchTimer, Timer, Trial, make_timer, outcome_of
from fp8tune.measure.worker import Poisoned
from fp8tune.plan.seeds import seed_text
from fp8tune.records import NamedInts, Outcome, Problem, Status
from fp8tune.revisions.loading import load_spec
from fp8tune.stats import block_value
from fp8tune_kernels.spec import Edge, KernelSpec

__all__ = [
    "Bench",
    "copy_ceiling_gb_per_s",
    "difference",
    "failure",
    "launch_once",
    "prepare",
    "prepare_final",
    "process_name",
    "run_final",
    "run_trial",
    "trial_of",
    "unchecked_bench",
]


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
    """Build the tensors of a problem before its first trial. What fails here fails again there, as a row.

    Raises Poisoned where the process must not be used again: the row's failure is to be its own.
    """
    try:
        _prepare(reference, problem, torch_device)
        for edge in edges_of(load_spec(reference), problem):
            _edge_bench(reference, edge, torch_device)
    except Exception as error:
        if failure(error).status is Status.CRASHED:
            raise Poisoned(None) from None


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
            if failed := _check(reference, bench, config, torch_device):
                return failed
            bench.passed.add(config)
        hopeless_us = bench.hopeless_us if number == 0 else None  # the later rounds have nobody to give up on
        outcome = _timed_and_looked_at(timer, replace(trial, hopeless_us=hopeless_us), bench, config)
        bench.best_us = min(bench.best_us, outcome.time_us or math.inf)
        return outcome

    return _guarded(checked_and_timed)


def prepare_final(reference: str, problem: Problem, timer_name: str, torch_device: str) -> Outcome:
    """Build the tensors of a problem for :func:`run_final`, without a reference. Fails as :func:`run_trial` does."""

    def built() -> Outcome:
        if make_timer(timer_name).runs_kernels:
            unchecked_bench(reference, problem, torch_device)
        return Outcome(Status.OK)

    return _guarded(built)


def unchecked_bench(reference: str, problem: Problem, torch_device: str) -> Bench:
    """A problem's tensors where configs are launched whose bytes are known to be right: no reference is computed."""
    return _prepare(reference, problem, torch_device, is_checked=False)


def launch_once(reference: str, problem: Problem, config: NamedInts, timer_name: str, torch_device: str) -> Outcome:
    """Launch ``config`` and wait for it, so that :func:`run_final` compiles and allocates nothing in a block.

    What the launch breaks shows here, and not in a later call. Fails as :func:`run_trial` does.
    """
    if not make_timer(timer_name).runs_kernels:
        return Outcome(Status.OK)

    def launched() -> Outcome:
        import torch

        unchecked_bench(reference, problem, torch_device).launch(config)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return Outcome(Status.OK)

    return _guarded(launched)


def run_final(
    reference: str, problem: Problem, config: NamedInts, timer_name: str, torch_device: str, slot: Slot
) -> Outcome:
    """Time ``config`` in a slot of the finals; the screen has checked its bytes. Fails as :func:`run_trial` does."""
    timer = make_timer(timer_name)
    trial = trial_of(load_spec(reference), problem, config, slot.round)
    trial = replace(trial, process=slot.process, position=slot.position, after=slot.after, duplicate=slot.duplicate)
    trial = replace(trial, clock=slot.clock)
    if not timer.runs_kernels:
        return _timed(timer, trial, lambda: None)

    def timed() -> Outcome:
        bench = unchecked_bench(reference, problem, torch_device)
        return _timed(timer, trial, lambda: bench.launch(config))

    return _guarded(timed)


# What a worker is asked of an arm


def build(arm: Arm, torch_device: str) -> Outcome:
    """Build what the arm's group shares. Fails as :func:`run_trial` does."""
    return _guarded(lambda: arm.build(torch_device))


def launch(arm: Arm, torch_device: str) -> Outcome:
    """Launch an arm once and wait for it. What the launch breaks shows here, and not in a later call."""

    def launched() -> None:
        import torch

        arm.launcher(torch_device)()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return _guarded(launched)


def block(arm: Arm, torch_device: str) -> Outcome:
    """Time an arm."""
    return _guarded(lambda: timed(arm.launcher(torch_device)))


def checked_block(arm: KernelArm, torch_device: str, round: int, *, times: bool = True) -> Outcome:
    """Check the bytes of a config (once a process) and time it. Every failure is an Outcome.

    In round 0 a config that is too slow to be the pick gets no whole block. After the block its outputs are compared
    once more. Raises Poisoned with a ``crashed`` outcome where the process must not be used again.
    """

    def checked_and_timed() -> Outcome | None:
        bench = _prepare(arm.reference, arm.problem, torch_device)
        if arm.config not in bench.passed:
            if failed := _check(arm.reference, bench, arm.config, torch_device):
                return failed
            bench.passed.add(arm.config)
        if not times:
            return None
        bench.poison()
        outcome = timed(lambda: bench.launch(arm.config), bench.hopeless_us if round == 0 else None)
        if wrong := bench.look():
            bench.passed.discard(arm.config)
            return Outcome(Status.WRONG, reason=f"after timed launches: {wrong}")
        bench.best_us = min(bench.best_us, outcome.time_us or math.inf)
        return outcome

    return _guarded(checked_and_timed)


def timed(launch: Callable[[], object], too_slow_us: float | None = None) -> Outcome:
    """One block on the GPU with the device's state around it."""
    return _timed(DoBenchTimer(), Trial("", 0, 0, too_slow_us), launch)


def _guarded(run: Callable[[], Outcome | None]) -> Outcome:
    """The border where foreign failures become statuses."""
    try:
        return run() or Outcome(Status.OK)
    except Poisoned:
        raise
    except Exception as error:
        outcome = failure(error)
    if outcome.status is Status.CRASHED:
        raise Poisoned(outcome)
    return outcome


def _timed_and_looked_at(timer: Timer, trial: Trial, bench: Bench, config: NamedInts) -> Outcome:
    """The last of the launches that were timed has to be right, too."""
    bench.poison()
    outcome = _timed(timer, trial, lambda: bench.launch(config))
    if outcome.time_us is not None and (wrong := bench.look()):
        bench.passed.discard(config)
        return Outcome(Status.WRONG, reason=f"after timed launches: {wrong}")
    return outcome


def _timed(timer: Timer, trial: Trial, launch: Callable[[], object]) -> Outcome:
    before = device.telemetry()
    block = timer.block(launch, trial)
    if block is None:
        return Outcome(Status.OK)
    return replace(outcome_of(block, process_name()), telemetry=device.telemetry_over(before))


def trial_of(spec: KernelSpec, problem: Problem, config: NamedInts, number: int = 0) -> Trial:
    """What a clock is told of ``config`` on ``problem`` in round ``number``."""
    return Trial(
        identity=f"{seed_text(problem)} {config.canonical}",
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


_benches: dict[tuple[str, Problem, bool], Bench] = {}
_edge_benches: dict[tuple[str, Edge], Bench] = {}
"""Of the problem in hand. Those that the next problem has too stay."""
_judged: dict[tuple[str, Edge, NamedInts], Outcome | None] = {}
"""What a config came to on an edge; None where it is right."""


def _prepare(reference: str, problem: Problem, torch_device: str, *, is_checked: bool = True) -> Bench:
    """The bench of a problem. The previous problem's tensors are let go first: a large one fills much of a GPU."""
    if (reference, problem, is_checked) not in _benches:
        spec = load_spec(reference)
        _forget({(reference, edge) for edge in edges_of(spec, problem)} if is_checked else set())
        build = checking.build if is_checked else checking.build_unchecked
        _repair_interpreter()
        _benches[reference, problem, is_checked] = build(spec, problem, torch_device)
    return _benches[reference, problem, is_checked]


def _edge_bench(reference: str, edge: Edge, torch_device: str) -> Bench:
    if (reference, edge) not in _edge_benches:
        _edge_benches[reference, edge] = checking.build_edge(load_spec(reference), edge, torch_device)
    return _edge_benches[reference, edge]


def _check(reference: str, bench: Bench, config: NamedInts, torch_device: str) -> Outcome | None:
    """What is wrong with a config, on its problem or on an edge; None where it is right everywhere."""
    if wrong := bench.refusal or bench.check(config):
        return Outcome(Status.WRONG, reason=wrong)
    for index, edge in enumerate(edges_of(bench.spec, bench.problem)):
        if (reference, edge, config) not in _judged:
            _judged[reference, edge, config] = _check_edge(reference, edge, config, torch_device, index)
        if failed := _judged[reference, edge, config]:
            return failed
    return None


def _check_edge(reference: str, edge: Edge, config: NamedInts, torch_device: str, index: int) -> Outcome | None:
    """On the interpreter, where a launch takes a good part of a second and runs in order, one launch an edge: poison
    alternates from edge to edge."""
    launches = [index] if torch_device == "cpu" else range(checking.LAUNCHES)
    try:
        wrong = _edge_bench(reference, edge, torch_device).check(config, launches)
    except Exception as error:
        failed = failure(error)
        failed = replace(failed, reason=f"{failed.reason}, on {place(edge)}")
        if failed.status is Status.CRASHED:
            raise Poisoned(failed) from None
        return failed
    return Outcome(Status.WRONG, reason=wrong) if wrong else None


@cache
def _repair_interpreter() -> None:
    """Before any kernel runs: somebody else's file imports none of ours."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        import torch

        from fp8tune_kernels import interpreter

        interpreter.install()
        torch.set_num_threads(1)  # there is a worker for each core


def _forget(kept: Collection[tuple[str, Edge]] = ()) -> None:
    _benches.clear()
    for name in [name for name in _edge_benches if name not in kept]:
        del _edge_benches[name]
    memory.give_back()
