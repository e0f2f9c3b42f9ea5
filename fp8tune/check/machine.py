"""Checks of this machine: its GPU, installed versions, clocks, and what compiling needs."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
from collections.abc import Iterator, Mapping

from fp8tune.check.findings import Finding, Level
from fp8tune.errors import MachineError
from fp8tune.measure import device
from fp8tune.measure import machine as compiling
from fp8tune.records import ClockLimits, Device, Telemetry
from fp8tune_kernels.arches import ARCHES

# As in pyproject.toml; an environment may have been changed by hand since it was installed.
TORCH_SINCE = (2, 11)
TRITON_SINCE, TRITON_BEFORE = (3, 6), (3, 10)
C_COMPILERS = ("gcc", "clang")  # what Triton looks for unless CC names one


def check_machine() -> Iterator[Finding]:
    """Check everything. Creates no GPU context."""
    gpu, software = device.probe(), device.software()
    yield from check_gpu(gpu, software.torch, software.triton)
    yield from check_versions(software.torch, software.triton, installed_version("numpy"), _pinned_triton())
    if gpu is not None:
        yield from check_clocks(gpu, device.telemetry(), device.other_processes())
        handles = device.nvidia_handles().items()
        yield from check_others(
            gpu.arch, {name: (device.telemetry(handle), device.clock_limits_of(handle)) for name, handle in handles}
        )
        yield from check_compiling()


def check_gpu(gpu: Device | None, torch: str, triton: str) -> Iterator[Finding]:
    """Check that there is a GPU of a known arch, and that torch can use it."""
    versions = f"torch {torch or '(none)'}, Triton {triton or '(none)'}"
    if gpu is None:
        fix = "time on a machine with a GPU; show, export and compare work here, and sweep checks outputs"
        yield Finding(Level.WARNING, f"no GPU is visible; {versions}", fix)
        return
    yield Finding(Level.OK, f"{gpu.name or 'GPU'} ({gpu.arch}), driver {gpu.driver}; {versions}")
    if gpu.arch not in ARCHES:
        fix = f"add {gpu.arch} to fp8tune_kernels/arches.py; known are {', '.join(ARCHES)}"
        yield Finding(Level.ERROR, f"the limits of {gpu.arch} are unknown", fix)
    if gpu.torch and not gpu.runtime:
        fix = "install a torch that is built for this GPU (CUDA or ROCm)"
        yield Finding(Level.ERROR, f"torch {gpu.torch} is built without GPU support", fix)


def check_versions(torch: str, triton: str, numpy: str, pinned_triton: str = "") -> Iterator[Finding]:
    """Check versions that are missing, too old, too new, or do not go together."""
    for name, version in (("torch", torch), ("triton", triton), ("numpy", numpy)):
        if not version:
            yield Finding(Level.ERROR, f"{name} is not installed", f"pip install {name}")
    if torch and release(torch) < TORCH_SINCE:
        yield Finding(Level.ERROR, f"torch {torch} is older than 2.11", "pip install 'torch>=2.11'")
    if triton and not TRITON_SINCE <= release(triton) < TRITON_BEFORE:
        fix = "pip install 'triton>=3.6,<3.10', the version that your torch pins if it pins one"
        yield Finding(Level.ERROR, f"Triton {triton} is not supported, 3.6 to 3.9 are", fix)
    if triton and pinned_triton and release(triton) != release(pinned_triton):
        fix = f"pip install triton=={pinned_triton}"
        yield Finding(Level.WARNING, f"torch {torch} was built for Triton {pinned_triton}, not {triton}", fix)
    if numpy and release(triton)[:2] == (3, 6) and release(numpy) >= (2, 4):
        text = f"the interpreter of Triton {triton} does not work with numpy {numpy}"
        yield Finding(Level.ERROR, text, "pip install 'numpy<2.4'")


def check_clocks(gpu: Device, state: Telemetry, other_processes: int | None) -> Iterator[Finding]:
    """Check that clocks can be read, that nothing slows the GPU down, and that nobody else uses it."""
    if state.sm_clock_mhz is None or state.power_w is None or state.temperature_c is None:
        fix = "install nvidia-ml-py and let this user read the device; results lack them otherwise"
        yield Finding(Level.WARNING, "clocks, power or temperature of the GPU cannot be read", fix)
    if reasons := device.slowdowns(gpu.arch, state):
        fix = "let it cool down or repair its power supply before you time anything"
        yield Finding(Level.WARNING, f"the GPU is slowed down: {', '.join(reasons)}", fix)
    if other_processes:
        fix = "stop them (nvidia-smi lists them), or choose another GPU with CUDA_VISIBLE_DEVICES"
        yield Finding(Level.WARNING, f"{other_processes} other processes use this GPU, so times may be off", fix)


def check_others(arch: str, states: Mapping[str, tuple[Telemetry, ClockLimits]]) -> Iterator[Finding]:
    """Check that no visible GPU after the first is slowed down, or has other limits. ``states``: by name, in order."""
    (first, (_, limits)), *others = states.items() if states else [("", (Telemetry(), ClockLimits()))]
    for name, (state, own) in others:
        if reasons := device.slowdowns(arch, state):
            fix = "let it cool down or repair its power supply, or leave it out"
            yield Finding(Level.WARNING, f"GPU {name} is slowed down: {', '.join(reasons)}", fix)
        if text := limits.difference(own, f"{{}} of GPU {first} is {{}}, of GPU {name} {{}}"):
            yield Finding(Level.WARNING, text, "set both alike with nvidia-smi, or leave one out")


def check_compiling() -> Iterator[Finding]:
    """Check that Triton can compile, and store what it compiled."""
    try:
        compiling.check_folders()
    except MachineError as error:
        yield Finding.from_error(error)
    compiler = os.environ.get("CC")
    if not any(map(shutil.which, (compiler,) if compiler else C_COMPILERS)):
        fix = "install gcc or clang, or set CC"
        yield Finding(
            Level.ERROR, f"no C compiler{f' {compiler}' if compiler else ''}: Triton cannot launch kernels", fix
        )


def release(version: str) -> tuple[int, ...]:
    """Return ``(2, 11, 0)`` for ``2.11.0+cu130``."""
    return tuple(int(digits) for digits in re.findall(r"\d+", version.partition("+")[0])[:3])


def _pinned_triton() -> str:
    requirements = (importlib.metadata.requires("torch") or ()) if installed_version("torch") else ()
    pins = (re.match(r"(?:pytorch-)?triton(?:-rocm)?\s*==\s*([0-9.]+)", line) for line in requirements)
    return next((pin[1] for pin in pins if pin), "")


def installed_version(package: str) -> str:
    """Return the version of a package; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
