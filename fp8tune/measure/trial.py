"""One trial, in the worker that owns the tensors: check the bytes, then time. Knows no database and no terminal.

The check comes before the clock (:mod:`fp8tune.measure.checking`): on the problem itself and on its edges every byte
must be the reference's. On an edge a config is checked once a process, whichever problem it belongs to. After a timed
block the outputs are looked at once more.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from fp8tune.errors import UsageError
from fp8tune.measure import checking, device, kept, machine, timing
from fp8tune.measure.arms import Arm, KernelArm
from fp8tune.measure.checking import Tensors
from fp8tune.measure.compiling import one_line
from fp8tune.measure.edges import edges_of, place
from fp8tune.measure.worker import Poisoned
from fp8tune.records import NamedInts, Outcome, Problem, Status
from fp8tune.replay.loading import load_spec
from fp8tune.stats.means import trimmed_mean
from fp8tune_kernels.spec import Edge

Clock = Callable[[Callable[[], object], float | None], timing.Samples]
"""(launch, microseconds above which it is too slow to be worth a whole block) -> a block, as of
:func:`fp8tune.measure.timing.block`."""


GEMM_SIZE = 8192
"""M, N and K of the GEMM that stands for what the device computes."""


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

    return 2 * source.numel() / trimmed_mean(timing.block(copy).samples_us) / 1e3


def gemm_flop_per_s(in_dtype: str) -> float:
    """What a dense GEMM of 8192 x 8192 x 8192 reaches, in flop/s. Raises where there is none of the dtype."""
    return 2e6 * GEMM_SIZE**3 / trimmed_mean(timing.block(gemm(in_dtype, "cuda")).samples_us)


def gemm(in_dtype: str, torch_device: str) -> Callable[[], object]:
    """Multiplies two random matrices of a dtype; float32 without TF32."""
    import torch

    dtype = getattr(torch, in_dtype)
    first, second = (torch.randn(2, GEMM_SIZE, GEMM_SIZE, device=torch_device) * 10).to(dtype)
    if dtype == torch.int8:
        return partial(torch._int_mm, first, second.T)
    if dtype.itemsize == 1:
        if dtype == torch.float8_e5m2:  # two of them have no GEMM
            second = second.to(torch.float8_e4m3fn)
        one = torch.ones((), device=torch_device)
        return partial(torch._scaled_mm, first, second.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    torch.set_float32_matmul_precision("highest")
    return partial(torch.mm, first, second)


def prepare(reference: str, problem: Problem, torch_device: str) -> None:
    """Build the tensors of a problem before its first trial. What fails here fails again there, as a row.

    Raises Poisoned where the process must not be used again: the row's failure is to be its own.
    """
    try:
        kept.tensors(reference, problem, torch_device)
        for edge in edges_of(load_spec(reference), problem):
            kept.edge_tensors(reference, edge, torch_device)
    except Exception as error:
        if failure(error).status is Status.CRASHED:
            raise Poisoned(None) from None


# What a worker is asked of an arm


def build(arm: Arm, torch_device: str) -> Outcome:
    """Build what the arm's group shares. Fails as :func:`checked_block` does."""
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
    return _guarded(lambda: timed(arm.launcher(torch_device), arm.long_us))


def checked_block(
    arm: KernelArm,
    torch_device: str,
    round: int,
    *,
    times: bool = True,
    with_edges: bool = True,
    clock: Clock | None = None,
) -> Outcome:
    """Check the bytes of a config (once a process) and time it. Every failure is an Outcome.

    In round 0 a config that is too slow to be the pick gets no whole block. After a block guard bytes, inputs and the
    outputs of its last launch are looked at once more. Where ``check`` is ``exact-inputs`` random inputs are timed, and
    the outputs of one more launch on exact ones are compared instead. A config that is not too slow is launched many
    times in a row besides, once a process, to find a race. ``clock``: the GPU's, if None. Raises Poisoned with a
    ``crashed`` outcome where the process must not be used again.
    """

    def checked_and_timed() -> Outcome | None:
        tensors = kept.tensors(arm.reference, arm.problem, torch_device)
        if arm.config not in tensors.passed:
            if failed := _check(arm.reference, tensors, arm.config, torch_device, with_edges):
                return failed
            if with_edges:
                tensors.passed.add(arm.config)
        if not times:
            return _wrong(_race(arm, tensors, torch_device))
        if tensors.refusal:
            return _wrong(_race(arm, tensors, torch_device)) or Outcome(Status.UNTIMED, reason=tensors.refusal)
        tensors.timed.poison()
        tensors.timed.prepare(arm.config)  # what no launch writes must not be poison afterwards
        # in later rounds nobody is given up: a stalled estimate once passed for a slow config in its third round
        outcome = timed(tensors.timed.launcher(arm.config), tensors.too_slow_us if round == 0 else None, clock)
        wrong = tensors.timed.wrong() or (None if tensors.timed.expected else tensors.check(arm.config, [0]))
        if wrong:
            tensors.passed.discard(arm.config)
            return _wrong(f"after timed launches: {wrong}")
        time_us = outcome.time_us or math.inf
        tensors.best_us = min(tensors.best_us, time_us)
        return (_wrong(_race(arm, tensors, torch_device)) if time_us <= tensors.too_slow_us else None) or outcome

    return _guarded(checked_and_timed)


def _race(arm: KernelArm, tensors: Tensors, torch_device: str) -> str | None:
    """What a look at many launches finds, on the problem or on its largest edge that is small enough; once a process.

    None on the interpreter, where a launch takes a good part of a second and runs in order.
    """
    if torch_device == "cpu" or arm.config in tensors.without_race:
        return None
    small = [tensors]
    if tensors.in_a_row_bytes > checking.IN_A_ROW_BYTES:
        edges = edges_of(tensors.spec, tensors.problem)
        on_edges = [kept.edge_tensors(arm.reference, edge, torch_device) for edge in edges]
        small = [each for each in on_edges if each.in_a_row_bytes <= checking.IN_A_ROW_BYTES]
    wrong = max(small, key=lambda each: each.in_a_row_bytes).check_in_a_row(arm.config) if small else None
    if not wrong:
        tensors.without_race.add(arm.config)
    return wrong


def _wrong(reason: str | None) -> Outcome | None:
    return Outcome(Status.WRONG, reason=reason) if reason else None


def timed(launch: Callable[[], object], too_slow_us: float | None = None, clock: Clock | None = None) -> Outcome:
    """One block on the GPU with the device's state around it."""
    before = device.telemetry()
    samples = (clock or timing.block)(launch, too_slow_us)
    return replace(samples.outcome(process_name()), telemetry=device.telemetry_over(before))


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


def failure(error: Exception) -> Outcome:
    """The status an exception stands for. A device error poisons the GPU context, so it counts as ``crashed``.

    Raises MachineError for what is none of the config's: see :mod:`fp8tune.measure.machine`. The
    user's own mistake, such as a reference that raises, is raised as it is.
    """
    if isinstance(error, UsageError):
        raise error
    import torch
    from triton.runtime.errors import OutOfResources

    if isinstance(error, OutOfResources):
        return Outcome(Status.OUT_OF_RESOURCES, reason=one_line(error))
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        kept.forget()
        return Outcome(Status.OUT_OF_MEMORY, reason=one_line(error))
    machine.raise_if_machine(error)
    text = one_line(error)
    if any(sign in text for sign in ("CUDA error", "HIP error", "AcceleratorError", "illegal memory access")):
        return Outcome(Status.CRASHED, reason=text)
    return Outcome(Status.COMPILE_ERROR, reason=text)


_outcomes_on_edges: dict[tuple[str, Edge, NamedInts], Outcome | None] = {}
"""What a config came to on an edge; None where it is right."""


def _check(reference: str, tensors: Tensors, config: NamedInts, torch_device: str, with_edges: bool) -> Outcome | None:
    """What is wrong with a config, on its problem or on an edge; None where it is right everywhere."""
    if failed := _wrong(tensors.check(config)):
        return failed
    for index, edge in enumerate(edges_of(tensors.spec, tensors.problem) if with_edges else ()):
        if (reference, edge, config) not in _outcomes_on_edges:
            _outcomes_on_edges[reference, edge, config] = _check_edge(reference, edge, config, torch_device, index)
        if failed := _outcomes_on_edges[reference, edge, config]:
            return failed
    return None


def _check_edge(reference: str, edge: Edge, config: NamedInts, torch_device: str, index: int) -> Outcome | None:
    """On the interpreter, where a launch takes a good part of a second and runs in order, one launch an edge: poison
    alternates from edge to edge."""
    launches = [index] if torch_device == "cpu" else range(checking.LAUNCHES)
    try:
        wrong = kept.edge_tensors(reference, edge, torch_device).check(config, launches)
    except Exception as error:
        failed = failure(error)
        failed = replace(failed, reason=f"{failed.reason}, on {place(edge)}")
        if failed.status is Status.CRASHED:
            raise Poisoned(failed) from None
        return failed
    return _wrong(wrong)
