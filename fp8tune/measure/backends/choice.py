"""Choice of the back end: a GPU if there is one, else the interpreter, or what the user names."""

from __future__ import annotations

import os

from fp8tune.errors import MachineError, UsageError, unknown
from fp8tune.measure import device
from fp8tune.measure.backends.gpu import GpuBackend
from fp8tune.measure.backends.processes import ProcessBackend
from fp8tune.measure.backends.simulated import SimulatedBackend
from fp8tune.measure.engine import Backend
from fp8tune.measure.worker import usable_cores
from fp8tune.records import Device, Kind
from fp8tune_kernels.arches import ARCHES

TIMER = "FP8TUNE_TIMER"  # environment variable: the timer of commands that have no --timer, or none given


def compiler(arch: str) -> ProcessBackend:
    """Return the compiler alone, for an arch that need not be here. Raises MachineError if it cannot compile."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise MachineError("TRITON_INTERPRET=1 is set, and Triton then cannot compile: unset it")
    here = Device(arch=arch, triton=device.software().triton)
    return ProcessBackend(here, "meta", Kind.STATIC, runners=0, shared_limit=ARCHES[arch].shared_bytes_per_block)


def interpreter() -> ProcessBackend:
    """Return Triton's interpreter, which checks outputs in as many processes as there are cores and times nothing."""
    installed = device.software()
    here = Device("interpreter", "Triton interpreter", torch=installed.torch, triton=installed.triton)
    return ProcessBackend(here, "cpu", Kind.INTERPRETER, runners=usable_cores())


def backend_for(arch: str | None, timer: str | None, static: bool = False) -> tuple[Backend, tuple[str, ...]]:
    """Return the back end for an arch and a timer (None: this machine's), with notices about the choice.

    Raises UsageError for an unknown name, MachineError for what this machine cannot do.
    """
    timer = timer or os.environ.get(TIMER)
    if timer is not None and timer.startswith("simulated"):
        if arch not in (None, "simulated"):
            raise UsageError(f"--timer {timer} has an arch of its own: leave out --arch {arch}")
        return SimulatedBackend(timer), ("simulated clock: no kernel runs, times are drawn from a seeded model",)
    if timer not in (None, "do_bench"):
        raise UsageError(f"unknown timer {timer!r}: use do_bench or simulated:SEED (a whole number)")
    here = None if os.environ.get("TRITON_INTERPRET") == "1" else device.probe()
    if arch is not None:
        if arch not in ARCHES:
            raise unknown("arch", arch, ARCHES)
        if static or here is None or here.arch != arch:
            return compiler(arch), (f"configs are compiled for {arch}; nothing is run or timed",)
    if static:
        raise UsageError("--static compiles for an arch: say which with --arch, such as sm_90 or gfx942")
    if here is None:
        if timer is not None:
            raise MachineError("there is no GPU here to time on: leave out --timer, or use simulated:SEED")
        return interpreter(), ()
    limits = device.limits(here)
    if limits is None:
        raise MachineError(f"the limits of {here.arch} are not known: add them to fp8tune_kernels/arches.py")
    return GpuBackend(here, limits.shared_bytes_per_block), ()
