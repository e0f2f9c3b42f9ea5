"""Which GPU this is, what drives it and how it is doing, read without a GPU context and without importing torch."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pynvml

from fp8tune.errors import MachineError
from fp8tune.measure import codegen, rocm
from fp8tune.records import Device, Telemetry
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.spec import DeviceLimits

T = TypeVar("T")


@dataclass(frozen=True)
class Software:
    """Versions as the packages state them; empty where one is missing."""

    torch: str = ""
    triton: str = ""
    runtime: str = ""
    """What torch was built for, ``cuda 13.0`` or ``rocm 6.3``: what launches, however much newer the driver is."""


@functools.cache
def software() -> Software:
    """Read from torch's ``version.py`` as text, since wheels of one version differ in what they were built for."""
    said = _torch_version_file()
    runtime = next((f"{name} {_major_minor(said[key])}" for key, name in _RUNTIMES if said.get(key)), "")
    return Software(said.get("__version__", ""), _version("triton"), runtime)


_RUNTIMES = (("cuda", "cuda"), ("hip", "rocm"))


def probe(environment: Mapping[str, str] = os.environ, nvml: Any = pynvml, sysfs: Path = Path("/sys")) -> Device | None:
    """The first GPU that ``CUDA_VISIBLE_DEVICES`` (AMD: ``HIP_VISIBLE_DEVICES``) shows, or None.

    XX"""
    handle = _nvidia_handle(environment, nvml)
    found = rocm.probe(environment, sysfs) if handle is None else _nvidia_device(handle, nvml)
    if found is None:
        return None
    installed = software()
    return replace(
        found,
        runtime=installed.runtime,
        torch=installed.torch,
        triton=installed.triton,
        timing="gated",
        codegen=codegen.settings(environment),
    )


def limits(device: Device) -> DeviceLimits | None:
    """What a config can break on this device; None for a stand-in and for an arch whose limits nobody wrote down."""
    arch = ARCHES.get(device.arch)
    return None if arch is None else arch.limits(device.multiprocessors or None)


def interpreter_device() -> Device:
    """What stands for the GPU where there is none: Triton's interpreter, which checks results but times nothing."""
    installed = software()
    return Device("interpreter", "Triton interpreter", torch=installed.torch, triton=installed.triton)


def simulated_device() -> Device:
    """The device of the simulated clock. It runs no kernel, so no version belongs to it."""
    return Device("simulated", "simulated clock")


def telemetry() -> Telemetry:
    """Clocks, temperature, power and throttle reasons now, None where unreadable. Cheap: the handle stays open."""
    handle = _open_nvidia()
    if handle is not None:
        return _nvidia_telemetry(handle, pynvml)
    amd = _open_amd()
    return rocm.telemetry(*amd) if amd else Telemetry()


SLOWDOWNS = {0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}
"""NVML's throttle reasons that make timings worthless. A software power cap (0x4) is normal under heavy kernels."""


def slowdowns(arch: str, state: Telemetry) -> tuple[str, ...]:
    """Why the device runs slower than it should, in words. The bits are NVML's: AMD numbers its reasons otherwise."""
    bits = (state.throttle_reasons or 0) if arch.startswith("sm_") else 0
    return tuple(name for bit, name in SLOWDOWNS.items() if bits & bit)


def telemetry_over(before: Telemetry) -> Telemetry:
    """The state after a block that began at ``before``, with the throttle reasons seen at either end."""
    after = telemetry()
    reasons = [state.throttle_reasons for state in (before, after) if state.throttle_reasons is not None]
    return replace(after, throttle_reasons=functools.reduce(int.__or__, reasons) if reasons else None)


def other_processes() -> int | None:
    """How many other processes compute on the device (an NVIDIA one); None where that cannot be read."""
    handle = _open_nvidia()
    if handle is None:
        return None
    running = _readable(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return None if running is None else sum(process.pid != os.getpid() for process in running)


def nvidia_handle(environment: Mapping[str, str] = os.environ, nvml: Any = pynvml) -> Any | None:
    """NVML's handle of the first GPU that is visible; None where there is none."""
    return _nvidia_handle(environment, nvml)


def hash_uuid(uuid: str) -> str:
    """Tells devices apart without naming them. NVML says ``GPU-1234...``, torch ``1234...``: the same device."""
    return hashlib.sha256(uuid.removeprefix("GPU-").lower().encode()).hexdigest()[:16]


def _nvidia_handle(environment: Mapping[str, str], nvml: Any) -> Any | None:
    visible = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    try:
        nvml.nvmlInit()
        if visible.startswith(("GPU-", "MIG-")):
            return nvml.nvmlDeviceGetHandleByUUID(visible)
        return nvml.nvmlDeviceGetHandleByIndex(int(visible)) if visible.isdigit() else None
    except nvml.NVMLError:  # no driver, or no such device
        return None


def _nvidia_device(handle: Any, nvml: Any) -> Device:
    try:
        capability = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        return Device(
            arch="sm_{}{}".format(*capability),
            name=nvml.nvmlDeviceGetName(handle),
            uuid_hash=hash_uuid(nvml.nvmlDeviceGetUUID(handle)),
            multiprocessors=_multiprocessors(handle, capability, nvml),
            driver=nvml.nvmlSystemGetDriverVersion(),
        )
    except nvml.NVMLError as error:
        raise MachineError(f"the GPU's driver does not answer ({error}): see what nvidia-smi says") from None


def _multiprocessors(handle: Any, capability: tuple[int, int], nvml: Any) -> int:
    """NVML counts FP32 cores: 64 an SM up to sm_80, 128 since sm_86 (CUDA C++ Programming Guide, arithmetic)."""
    cores = _readable(lambda: nvml.nvmlDeviceGetNumGpuCores(handle), nvml) or 0
    return int(cores) // (64 if capability < (8, 6) else 128)


def _nvidia_telemetry(handle: Any, nvml: Any) -> Telemetry:
    def read(function: Callable[..., T], *arguments: Any) -> T | None:
        return _readable(lambda: function(handle, *arguments), nvml)

    milliwatts = read(nvml.nvmlDeviceGetPowerUsage)
    return Telemetry(
        sm_clock_mhz=read(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
        memory_clock_mhz=read(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
        temperature_c=read(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        power_w=None if milliwatts is None else milliwatts / 1000,
        throttle_reasons=read(nvml.nvmlDeviceGetCurrentClocksEventReasons),
    )


@functools.cache
def _open_nvidia() -> Any | None:
    return _nvidia_handle(os.environ, pynvml)


@functools.cache
def _open_amd() -> tuple[Any, Any] | None:
    return rocm.open_handle()


def _readable(read: Callable[[], T], nvml: Any = pynvml) -> T | None:
    try:
        return read()
    except nvml.NVMLError:  # not supported by this device, or not permitted to this user
        return None


def _torch_version_file() -> dict[str, str]:
    """The plain texts assigned in ``torch/version.py``; empty where torch is missing."""
    found = importlib.util.find_spec("torch")
    file = Path(found.origin).with_name("version.py") if found and found.origin else None
    if file is None or not file.is_file():
        return {}
    said: dict[str, str] = {}
    for statement in ast.parse(file.read_text()).body:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        value = getattr(statement, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
            said[target.id] = value.value
    return said


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _major_minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
