"""What may be wrong with this machine: its GPU, the versions that are installed, clocks, where kernels are compiled."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from fp8tune.check.finding import Finding, Level
from fp8tune.errors import MachineError
from fp8tune.measure import device
from fp8tune.measure import machine as compiling
from fp8tune.measure.device import Software
from fp8tune.records import Device, Telemetry
from fp8tune_kernels.arches import ARCHES

TORCH_SINCE = (2, 11)
TRITON_SINCE, TRITON_BEFORE = (3, 6), (3, 10)
"""What pyproject.toml asks for; an environment may have been changed by hand since."""

C_COMPILERS = ("gcc", "clang")
"""What Triton looks for where ``CC`` names none."""


@dataclass(frozen=True)
class Machine:
    """What was read of the machine. Versions are empty where a package is missing."""

    device: Device | None
    software: Software
    numpy: str
    triton_wanted: str = ""
    """The Triton that the installed torch pins; empty where it pins none."""
    telemetry: Telemetry = Telemetry()
    other_processes: int | None = None


def probe() -> Machine:
    """Read this machine, without a GPU context."""
    return Machine(
        device=device.probe(),
        software=device.software(),
        numpy=_version("numpy"),
        triton_wanted=_triton_wanted(importlib.metadata.requires("torch") or () if _version("torch") else ()),
        telemetry=device.telemetry(),
        other_processes=device.other_processes(),
    )


def check(machine: Machine) -> list[Finding]:
    """GPU, versions, clocks, and what compiling needs where there is a GPU to compile for."""
    findings = [*check_gpu(machine.device), *check_software(machine)]
    if machine.device is not None:
        findings += [*check_clocks(machine.device, machine.telemetry, machine.other_processes), *check_compiling()]
    return findings


def check_gpu(gpu: Device | None) -> Iterator[Finding]:
    """Is there one, is its arch known, can torch use it."""
    if gpu is None:
        fix = "show, export and compare work here; sweep checks on Triton's interpreter"
        yield Finding(Level.WARNING, "no GPU is visible", f"{fix}; to time, use a machine with one")
        return
    what = f"{gpu.name or 'GPU'} ({gpu.arch}), {gpu.multiprocessors} multiprocessors, driver {gpu.driver}"
    yield Finding(Level.OK, f"{what}, {gpu.runtime or 'no GPU runtime'}")
    if gpu.arch not in ARCHES:
        fix = f"add {gpu.arch} to fp8tune_kernels/arches.py; known: {', '.join(ARCHES)}"
        yield Finding(Level.ERROR, f"the limits of {gpu.arch} are not known", fix)
    if gpu.torch and not gpu.runtime:
        fix = "install a torch that is built for this GPU (CUDA or ROCm)"
        yield Finding(Level.ERROR, f"torch {gpu.torch} is built without GPU support", fix)


def check_software(machine: Machine) -> Iterator[Finding]:
    """Versions that are missing, too old, too new, or do not go together."""
    torch, triton, numpy = machine.software.torch, machine.software.triton, machine.numpy
    for name, version in (("torch", torch), ("triton", triton), ("numpy", numpy)):
        if not version:
            yield Finding(Level.ERROR, f"{name} is not installed", f"pip install {name}")
    if torch and release(torch) < TORCH_SINCE:
        yield Finding(Level.ERROR, f"torch {torch} is older than 2.11", "pip install 'torch>=2.11'")
    if triton and not TRITON_SINCE <= release(triton) < TRITON_BEFORE:
        fix = "pip install 'triton>=3.6,<3.10', the one that your torch pins if it pins one"
        yield Finding(Level.ERROR, f"triton {triton} is not supported (3.6 to 3.9 are)", fix)
    if triton and machine.triton_wanted and release(triton) != release(machine.triton_wanted):
        fix = f"pip install triton=={machine.triton_wanted}"
        yield Finding(Level.WARNING, f"torch {torch} was built for triton {machine.triton_wanted}, not {triton}", fix)
    if numpy and release(triton)[:2] == (3, 6) and release(numpy) >= (2, 4):
        what = f"the interpreter of triton {triton} does not work with numpy {numpy}"
        yield Finding(Level.ERROR, what, "pip install 'numpy<2.4'")
    if torch and triton and numpy:
        yield Finding(Level.OK, f"torch {torch}, triton {triton}, numpy {numpy}")


def check_clocks(gpu: Device, state: Telemetry, other_processes: int | None) -> Iterator[Finding]:
    """Can clocks be read, is the GPU slowed down, does somebody else use it."""
    if state.sm_clock_mhz is None or state.power_w is None or state.temperature_c is None:
        fix = "rows will lack them; install nvidia-ml-py and let this user read the device"
        yield Finding(Level.WARNING, "clocks, power or temperature cannot be read", fix)
    else:
        yield Finding(Level.OK, f"{state.sm_clock_mhz} MHz, {state.power_w:.0f} W, {state.temperature_c} degrees C")
    if slowed := device.slowdowns(gpu.arch, state):
        fix = "let it cool down or mend its power supply before timing anything"
        yield Finding(Level.WARNING, f"the GPU is being slowed down: {', '.join(slowed)}", fix)
    if other_processes:
        fix = "see nvidia-smi; end them, or choose another GPU with CUDA_VISIBLE_DEVICES: they disturb every timing"
        yield Finding(Level.WARNING, f"processes beside this one that use the GPU: {other_processes}", fix)


def check_compiling(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Can Triton compile, and keep what it compiled."""
    try:
        compiling.check_folders()
        yield Finding(Level.OK, f"compiled kernels are kept in {compiling.cache_folder()}")
    except MachineError as error:
        yield Finding.of(error)
    named = environment.get("CC")
    if not any(map(shutil.which, (named,) if named else C_COMPILERS)):
        fix = "install gcc or clang, or set CC to a C compiler"
        yield Finding(
            Level.ERROR, f"no C compiler, which Triton needs to launch kernels: {named or 'no gcc, no clang'}", fix
        )


def release(version: str) -> tuple[int, ...]:
    """``2.11.0+cu130`` -> (2, 11, 0)."""
    return tuple(int(digits) for digits in re.findall(r"\d+", version.partition("+")[0])[:3])


def _triton_wanted(requirements: Iterable[str]) -> str:
    pins = (re.match(r"(?:pytorch-)?triton(?:-rocm)?\s*==\s*([0-9.]+)", requirement) for requirement in requirements)
    return next((pin[1] for pin in pins if pin), "")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
