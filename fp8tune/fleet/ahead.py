"""Compile what a queued sweep will launch where there is no GPU.

Hosts with GPUs compile beside their clocks, so nothing waits for this. It helps where they have few cores for each GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass

from fp8tune.errors import MachineError
from fp8tune.fleet import units
from fp8tune.measure import device
from fp8tune.measure.arms import KernelArm
from fp8tune.measure.backends.processes import ProcessBackend
from fp8tune.records import Device
from fp8tune.store.results import Store
from fp8tune.store.schema import UnitState
from fp8tune.store.units import QueuedSweep, Unit
from fp8tune.sweep.planning import Plan
from fp8tune_kernels.arches import ARCHES


@dataclass(frozen=True)
class CompileTask:
    """What one node is to compile."""

    sweep: QueuedSweep
    arch: str
    kernels: tuple[tuple[str, str], ...]
    """Name and source hash of each kernel, in the order in which they are compiled."""
    triton: str
    """The version that whoever queued the sweep has. Another one's programs would not be found."""
    place: int = 0
    places: int = 1
    """This node's number among so many that share the work."""


def task_of(store: Store, plan: Plan, sweep: QueuedSweep, gpus: int) -> CompileTask:
    """What is to be compiled for the units of a sweep that wait. ``plan``: the sweep's, on a GPU of the same kind."""
    waiting = [of.unit for of in store.queue([sweep.key]).of(UnitState.WAITING)]
    ordered = sorted(waiting, key=lambda unit: (-unit.worth, unit.position))
    return CompileTask(sweep, plan.backend.device.arch, kernels_of(ordered, gpus), plan.backend.device.triton)


def kernels_of(waiting: Sequence[Unit], gpus: int) -> tuple[tuple[str, str], ...]:
    """Kernels of units in their order, those last that so many GPUs begin with: their hosts compile these at once."""
    named = [(unit.kernel, unit.source_hash) for unit in waiting]
    first = set(named[:gpus])
    return tuple(sorted(dict.fromkeys(named), key=first.__contains__))


def arms_of(task: CompileTask) -> list[KernelArm]:
    """A node's share of the configs, in the order in which they are compiled.

    Raises MachineError and UsageError where this host's programs would not be found.
    """
    here = device.software().triton
    if here != task.triton:
        raise MachineError(f"Triton here is {here}, and {task.triton} where the sweep was queued")
    wanted = {kernel: place for place, kernel in enumerate(task.kernels)}
    plan = units.static_plan_of(task.sweep, task.arch)
    of_kernels = [of for of in plan.problems if (of.version.kernel, of.version.source_hash) in wanted]
    if not of_kernels:
        raise MachineError("the kernels have other code here than where the sweep was queued")
    ordered = sorted(of_kernels, key=lambda of: wanted[of.version.kernel, of.version.source_hash])
    return [of.arm(config) for of in ordered for config in of.configs][task.place :: task.places]


def compiled(arms: Sequence[KernelArm], arch: str, every_s: float) -> Iterator[int]:
    """Compile configs, and what their checks launch, on all cores. Gives how much is left, again and again, then 0."""
    shared_limit = ARCHES[arch].shared_bytes_per_block
    backend = ProcessBackend(Device(arch=arch), "meta", shared_limit=shared_limit)  # its runners are never started
    with contextlib.closing(backend):
        backend.compile(arms)
        while left := len(wait(backend._compiling.values(), every_s).not_done):
            yield left
    yield 0
