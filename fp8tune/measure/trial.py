"""One trial, in the worker that owns the tensors: check the bytes, then time. Knows no database and no terminal.

The check comes before the clock (:mod:`fp8tune.measure.checking`): on the problem and on its edges every byte must be
the reference's. A config is checked on an edge once a process, whichever problem the edge belongs to.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial, wraps
from typing import ParamSpec, cast

from fp8tune.errors import UsageError, one_line
from fp8tune.measure import checking, device, machine, tensor_cache, timing
from fp8tune.measure.arms import Arm, KernelArm
from fp8tune.measure.checking import Tensors
from fp8tune.measure.comparing import bits
from fp8tune.measure.edges import edges_of, place
from fp8tune.measure.timing import CaptureError
from fp8tune.measure.worker import Poisoned
from fp8tune.records import NamedInts, Outcome, Problem, Status
from fp8tune.replay.lazy import torch, triton
from fp8tune.replay.loading import load_spec
from fp8tune.replay.spec import RecordedSpec
from fp8tune.revisions.reference import KernelReference
from fp8tune.stats.means import trimmed_mean
from fp8tune_kernels.spec import Edge

P = ParamSpec("P")

GEMM_SIZE = 8192  # M, N and K of the GEMM that measures what the device can compute


@cache
def process_name() -> str:
    """Return a unique name for this worker process, the unit of replication in rows."""
    return f"{os.getpid()}-{os.urandom(4).hex()}"


def copy_ceiling_gb_per_s() -> float:
    """Measure a device-to-device copy of 512 MiB, in GB/s of bytes read plus written."""
    source = torch.randint(0, 255, (512 << 20,), dtype=torch.uint8, device="cuda")
    copy = partial(torch.empty_like(source).copy_, source)
    return 2 * int(source.numel()) / trimmed_mean(timing.block(copy).samples_us) / 1e3


def gemm_flop_per_s(in_dtype: str) -> float:
    """Measure a dense GEMM of 8192 x 8192 x 8192, in flop/s. Raises if there is none of the dtype."""
    return 2e6 * GEMM_SIZE**3 / trimmed_mean(timing.block(gemm(in_dtype, "cuda")).samples_us)


def gemm(in_dtype: str, torch_device: str) -> Callable[[], object]:
    """Return a function that multiplies two random matrices of a dtype; float32 without TF32."""
    dtype = getattr(torch, in_dtype)
    first, second = (torch.randn(2, GEMM_SIZE, GEMM_SIZE, device=torch_device) * 10).to(dtype)
    if dtype == torch.int8:
        return partial(torch._int_mm, first, second.T)
    if dtype.itemsize == 1:
        if dtype == torch.float8_e5m2:  # two of them have no GEMM
            second = second.to(torch.float8_e4m3fn)
        scale = torch.ones((), device=torch_device)
        return partial(torch._scaled_mm, first, second.T, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
    torch.set_float32_matmul_precision("highest")
    return partial(torch.mm, first, second)


def guarded(run: Callable[P, Outcome | None]) -> Callable[P, Outcome]:
    """Convert third-party exceptions of a function into outcomes; None is ``ok``."""

    @wraps(run)
    def call(*args: P.args, **kwargs: P.kwargs) -> Outcome:
        try:
            return run(*args, **kwargs) or Outcome(Status.OK)
        except Poisoned:
            raise
        except Exception as error:
            outcome = failure(error)
        if outcome.status is Status.CRASHED:
            raise Poisoned(outcome)
        return outcome

    return call


@guarded
def prepare(reference: str, problem: Problem, torch_device: str) -> None:
    """Build the tensors of a problem before its first trial. What fails here fails again there, as a row."""
    tensor_cache.tensors(reference, problem, torch_device)
    for edge in edges_of(load_spec(reference), problem):
        tensor_cache.edge_tensors(reference, edge, torch_device)


def edge_failure(reference: str, torch_device: str) -> str | None:
    """Explain why a recorded kernel cannot be checked on its edge cases; None if it can.

    The config declared first must run on each and agree with itself: the kernel may not expect odd sizes at all.
    """
    tensor_cache.use_one_thread()
    spec = cast(RecordedSpec, load_spec(str(replace(KernelReference.parse(reference), reference=""))))
    for edge in {edge: None for problem in spec.recorded for edge in edges_of(spec, problem)}:
        try:
            tensors = checking.build(spec, edge, torch_device)
            if wrong := tensors.check(spec.first(edge.problem)):
                return wrong
        except Exception as error:
            return one_line(error)
    return None


def capture_failure(arm: KernelArm, torch_device: str) -> str | None:
    """Explain why launches of an arm cannot be timed in a CUDA graph; None if they can."""
    tensors = tensor_cache.tensors(arm.reference, arm.problem, torch_device, is_checked=False)
    try:
        replay = tensors.launcher(arm.config, arm.in_graph)
    except CaptureError as error:
        return str(error)
    except Exception:  # of the config: its row will say so
        return None
    poison = [output.clone() for output in tensors.written]
    replay()
    if all(torch.equal(bits(before), bits(after)) for before, after in zip(poison, tensors.written, strict=True)):
        return "a replay writes nothing, as of launches on a stream of their own"
    return None


@guarded
def build(arm: Arm, torch_device: str) -> None:
    """Build what the arm's group shares."""
    arm.build(torch_device)


@guarded
def launch(arm: Arm, torch_device: str) -> None:
    """Launch an arm once and wait for it, so that what it breaks shows here and not in a later call."""
    arm.launcher(torch_device)()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@guarded
def block(arm: Arm, torch_device: str) -> Outcome:
    """Time an arm."""
    return timed(arm.launcher(torch_device), arm.long_us)


@guarded
def checked_block(arm: KernelArm, torch_device: str, round: int, *, times: bool = True) -> Outcome:
    """Check the bytes of a config (once a process) and time it. Every failure is an Outcome.

    In round 0 a config that is too slow to be the pick gets no whole block. After a block, guard bytes, inputs and the
    outputs of its last launch are checked again. With ``check="exact-inputs"`` random inputs are timed, and one more
    launch on exact ones is compared instead. A config that is not too slow is also launched many times in a row, once a
    process, to find a race: on each size, or on one if the arm says so. Raises Poisoned with a ``crashed`` outcome if
    the process must not be used again.
    """
    tensors = tensor_cache.tensors(arm.reference, arm.problem, torch_device)
    outcome = _checked_block(arm, tensors, torch_device, round, times=times) or Outcome(Status.OK)
    if outcome.status is not Status.OK:
        return outcome
    return replace(outcome, reason="; ".join(filter(None, (tensors.remark, outcome.reason))))


def _checked_block(arm: KernelArm, tensors: Tensors, torch_device: str, round: int, *, times: bool) -> Outcome | None:
    config = arm.config
    if config not in tensors.passed:
        if failed := _check(arm.reference, tensors, config, torch_device):
            return failed
        tensors.passed.add(config)
    if not times or tensors.timed.refusal:
        untimed = Outcome(Status.UNTIMED, reason=tensors.timed.refusal or "") if times else None
        return _wrong(_race(arm, tensors, torch_device)) or untimed
    tensors.timed.poison()
    tensors.timed.prepare(config)  # what no launch writes must not be poison afterwards
    # Only round 0 gives up on a config: a stalled estimate once passed for a slow config in its third round.
    too_slow_us = checking.TOO_SLOW_RATIO * tensors.best_us if round == 0 else None
    launch = tensors.timed.launcher(config, arm.in_graph)
    outcome = timed(launch, too_slow_us)
    if fault := tensors.timed.wrong() or (None if tensors.timed.expected else tensors.check(config, [0])):
        tensors.passed.discard(config)
        return _wrong(f"after timed launches: {fault}")
    time_us = outcome.time_us or math.inf
    tensors.best_us = min(tensors.best_us, time_us)
    if time_us > checking.TOO_SLOW_RATIO * tensors.best_us:
        return outcome
    return _wrong(_race(arm, tensors, torch_device)) or outcome


def timed(launch: Callable[[], object], too_slow_us: float | None = None) -> Outcome:
    """Time one block on the GPU, with the device's state and limits around it."""
    before = device.telemetry()
    outcome = replace(timing.block(launch, too_slow_us), process=process_name())
    return replace(outcome, telemetry=device.telemetry_over(before), limits=device.clock_limits())


def failure(error: Exception) -> Outcome:
    """Return an exception as an outcome. A device error poisons the GPU context: ``crashed``.

    Raises MachineError for a failure of the machine (:mod:`fp8tune.measure.machine`), and UsageError, such as for a
    reference that raises, unchanged.
    """
    if isinstance(error, UsageError):
        raise error
    reason = one_line(error)
    if isinstance(error, CaptureError):
        return Outcome(Status.UNTIMED, reason=f"no CUDA graph can hold its launch: {reason}")
    if isinstance(error, triton.runtime.errors.OutOfResources):
        return Outcome(Status.OUT_OF_RESOURCES, reason=reason)
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        tensor_cache.clear()
        return Outcome(Status.OUT_OF_MEMORY, reason=reason)
    machine.raise_if_machine(error)
    if any(sign in reason for sign in ("CUDA error", "HIP error", "AcceleratorError", "illegal memory access")):
        return Outcome(Status.CRASHED, reason=reason)
    return Outcome(Status.COMPILE_ERROR, reason=reason)


def _wrong(reason: str | None) -> Outcome | None:
    return Outcome(Status.WRONG, reason=reason) if reason else None


_edge_outcomes: dict[tuple[str, Edge, NamedInts], Outcome | None] = {}  # None if the config is right on the edge


def _check(reference: str, tensors: Tensors, config: NamedInts, torch_device: str) -> Outcome | None:
    """Check a config on its problem, then on each edge. Return the first failure, or None."""
    if failed := _wrong(tensors.check(config)):
        return failed
    for index, edge in enumerate(edges_of(tensors.spec, tensors.problem)):
        key = (reference, edge, config)
        if key not in _edge_outcomes:
            # On the interpreter a launch takes a good part of a second and runs in order: one launch an edge, and the
            # poison alternates from edge to edge.
            launches = [index] if torch_device == "cpu" else range(checking.LAUNCHES)
            try:
                on_edge = tensor_cache.edge_tensors(reference, edge, torch_device)
                _edge_outcomes[key] = _wrong(on_edge.check(config, launches))
            except Exception as error:
                failed = failure(error)
                failed = replace(failed, reason=f"{failed.reason}, on {place(edge)}")
                if failed.status is Status.CRASHED:
                    raise Poisoned(failed) from None
                _edge_outcomes[key] = failed
        if failed := _edge_outcomes[key]:
            return failed
    return None


_without_race: set[tuple[str, Problem, NamedInts]] = set()  # configs of a spec that did not race, by problem but size


def _race(arm: KernelArm, tensors: Tensors, torch_device: str) -> str | None:
    """Compare many launches, on the problem or on its largest edge that is small enough; once a process on each."""
    on_any_size = arm.reference, replace(arm.problem, shape=NamedInts(), routing="", seed=0), arm.config
    is_known = arm.races_once and on_any_size in _without_race
    if is_known or torch_device == "cpu":  # the interpreter runs programs in order
        return None
    candidates = [tensors]
    if tensors.in_a_row_bytes > checking.IN_A_ROW_BYTES:
        edges = edges_of(tensors.spec, tensors.problem)
        on_edges = [tensor_cache.edge_tensors(arm.reference, edge, torch_device) for edge in edges]
        candidates = [small for small in on_edges if small.in_a_row_bytes <= checking.IN_A_ROW_BYTES]
    largest = max(candidates, key=lambda small: small.in_a_row_bytes, default=None)
    if largest is None or arm.config in largest.without_race:
        return None
    fault = largest.check_in_a_row(arm.config)
    if not fault:
        largest.without_race.add(arm.config)
        _without_race.add(on_any_size)
    return fault
