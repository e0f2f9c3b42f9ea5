"""GPUs of this machine that a command uses at once: those of one name that no other process uses."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8tune.errors import MachineError, UsageError
from fp8tune.measure import device
from fp8tune.measure.simulated import SimulatedBackend
from fp8tune.records import Device

TIMER = "FP8TUNE_TIMER"
"""Environment variable with the timer of commands that have no ``--timer``, or whose user gives none."""

RANKS = ("LOCAL_RANK", "SLURM_LOCALID")
"""Variables that number the processes of a host: each of them uses one GPU."""


@dataclass(frozen=True)
class Gpu:
    """A visible GPU."""

    name: str
    """Name in ``CUDA_VISIBLE_DEVICES``; timer of a simulated one."""
    device: Device
    is_used: bool = False
    """True if another process computes on it."""

    def left_out(self, first: Gpu) -> str:
        """Return the reason why it is not used beside the first GPU."""
        return "in use" if self.device.name == first.device.name else self.device.name or self.device.arch


def visible_gpus() -> list[Gpu]:
    """Return the NVIDIA GPUs that ``CUDA_VISIBLE_DEVICES`` shows; without NVML's, the first visible one or none."""
    gpus = list[Gpu]()
    for number, (name, handle) in enumerate(device.nvidia_handles().items()):
        if (here := device.probe(device.seeing(name))) is not None:
            gpus.append(Gpu(name, here, _is_used(number, device.processes(handle) or [])))
    if not gpus and (first := device.probe()) is not None:
        return [Gpu("", first)]
    return gpus


def _is_used(number: int, running: Sequence[int]) -> bool:
    """Return True if another process than this one computes on the GPU of a number."""
    torch: Any = sys.modules.get("torch")
    is_here = torch is not None and torch.cuda.is_initialized() and torch.cuda.memory_reserved(number) > 0
    # In a container NVML may know this process, such as a notebook that has used the GPU, by another number.
    return len(running) > 1 or (bool(running) and os.getpid() not in running and not is_here)


def simulated_gpus(timer: str, count: int) -> list[Gpu]:
    """Return simulated GPUs of one name: the timer's own, and others that are numbered from 1."""
    seed, comma, rest = timer.partition(",")
    timers = [timer, *(f"{seed},gpu={number}{comma}{rest}" for number in range(1, count))]
    return [Gpu(text, SimulatedBackend(text).device) for text in timers]


def choose_gpus(requested: int | None, timer: str | None) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Return the GPUs that a command uses, or the simulated ones of a timer, and lines about the others.

    None without a GPU, where nothing is timed. Raises what :func:`choose` does.
    """
    timer = timer or os.environ.get(TIMER) or ""
    if timer.startswith("simulated"):
        return tuple(simulated_gpus(timer, requested or 1)), ()
    gpus = [] if os.environ.get("TRITON_INTERPRET") == "1" else visible_gpus()
    if not gpus and requested is not None:
        raise UsageError(f"--gpus {requested}: there is no GPU here; leave it out")
    return choose(gpus, requested) if gpus else ((), ())


def choose(
    gpus: Sequence[Gpu], requested: int | None, environment: Mapping[str, str] = os.environ
) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Return the free GPUs of the first one's name, at most so many, and lines about the others.

    Raises:
        UsageError: More are requested than there are.
        MachineError: Too few are free.
    """
    named = [gpu for gpu in gpus if gpu.device.name == gpus[0].device.name]
    if requested is not None and requested > len(named):
        model = f" named {gpus[0].device.name}" if gpus[0].device.name else ""
        raise UsageError(f"--gpus {requested}: {len(named)} visible GPUs{model} are here; leave it out to use all")
    rank = next((name for name in RANKS if environment.get(name, "").isdecimal()), None) if requested is None else None
    if rank is not None:
        named = [named[int(environment[rank]) % len(named)]]
    free = [gpu for gpu in named if not gpu.is_used]
    if len(free) < (requested or 1):
        used = ", ".join(gpu.name for gpu in named if gpu.is_used)
        fix = f"end them (nvidia-smi lists them), or name other GPUs in {device.VISIBLE}"
        raise MachineError(f"other processes use GPU {used}: {fix}")
    if rank is not None:
        line = f"GPU {free[0].name} of {len(gpus)}, because {rank} is set: --gpus {len(gpus)} uses all"
        return tuple(free), (line,) * (len(gpus) > 1)
    left_out = [f"{gpu.name} ({gpu.left_out(gpus[0])})" for gpu in gpus if gpu not in free]
    return tuple(free[:requested]), (f"left out: GPU {', '.join(left_out)}",) * bool(left_out)
