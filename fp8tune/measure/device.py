"""The GPU of this machine, its driver and its state, read without a GPU context and without importing torch."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pynvml

from fp8tune.errors import MachineError
from fp8tune.measure import codegen
from fp8tune.records import ClockLimits, Device, Telemetry
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.spec import DeviceLimits

# No kernel declares it: of 20 configs compiled for gfx942, asking for 2 to 4 waves changed what is resident in none,
# and asking for 8 made nearly all spill.
AMD_LAUNCH_OPTIONS = ("waves_per_eu",)
"""Grid axes that only AMD's compiler takes: the waves on a SIMD that it should leave registers for."""

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable that names the GPUs which a process sees."""

AMD_VISIBLE = ("HIP_VISIBLE_DEVICES", VISIBLE)  # HIP obeys both; if both are set, the first one

SLOWDOWNS = {0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}
"""NVML's throttle reasons that make timings worthless. A software power cap (0x4) is normal under heavy kernels."""


@dataclass(frozen=True)
class Software:
    """Versions as the packages state them; empty if one is missing."""

    torch: str = ""
    triton: str = ""
    runtime: str = ""
    """Runtime that torch was built for, ``cuda 13.0`` or ``rocm 6.3``: it launches, however new the driver is."""


@functools.cache
def software() -> Software:
    """Read the versions, torch's from its ``version.py`` as text: wheels of one version differ in their runtime."""
    package = importlib.util.find_spec("torch")
    file = Path(package.origin).with_name("version.py") if package and package.origin else None
    text = file.read_text() if file and file.is_file() else ""
    constants = dict(re.findall(r"^(\w+)(?:: [^=]+)? = ['\"](.*)['\"]$", text, re.MULTILINE))
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = ""
    runtimes = [(name, constants.get(key)) for key, name in (("cuda", "cuda"), ("hip", "rocm"))]
    runtime = next((f"{name} {'.'.join(version.split('.')[:2])}" for name, version in runtimes if version), "")
    return Software(constants.get("__version__", ""), triton, runtime)


def seeing(gpu: str) -> Mapping[str, str]:
    """Return the environment of a process that sees one GPU; without a name, this one's."""
    return {**os.environ, VISIBLE: gpu} if gpu else os.environ


def probe(environment: Mapping[str, str] = os.environ, sysfs: Path = Path("/sys")) -> Device | None:
    """Return the first GPU that ``CUDA_VISIBLE_DEVICES`` (AMD: ``HIP_VISIBLE_DEVICES``) shows, or None."""
    handle = nvidia_handle(environment)
    device = _probe_amd(environment, sysfs) if handle is None else _probe_nvidia(handle)
    if device is None:
        return None
    versions = {name: getattr(software(), name) for name in ("runtime", "torch", "triton")}
    return replace(device, **versions, timing="gated", codegen=codegen.settings(environment))


def _probe_nvidia(handle: Any) -> Device:
    try:
        capability = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        return Device(
            arch="sm_{}{}".format(*capability),
            name=pynvml.nvmlDeviceGetName(handle),
            uuid_hash=hash_uuid(pynvml.nvmlDeviceGetUUID(handle)),
            # NVML counts FP32 cores: 64 an SM up to sm_80, 128 since sm_86 (CUDA C++ Programming Guide, arithmetic)
            multiprocessors=int(_read(handle, "NumGpuCores") or 0) // (64 if capability < (8, 6) else 128),
            driver=pynvml.nvmlSystemGetDriverVersion(),
        )
    except pynvml.NVMLError as error:
        raise MachineError(f"the GPU's driver does not answer ({error}): see what nvidia-smi says") from None


def _probe_amd(environment: Mapping[str, str], sysfs: Path) -> Device | None:
    """Return the first visible AMD GPU, or None. The topology holds no name; versions are left empty.

    Devices are found in the kernel driver's topology, which needs no library and creates no GPU context. Written from
    the driver's documentation and tested against a simulated device: it has not run on AMD hardware.
    """
    gpus: list[dict[str, str]] = []
    nodes = (sysfs / "class/kfd/kfd/topology/nodes").glob("[0-9]*")
    for node in sorted(nodes, key=lambda node: int(node.name)):  # HIP counts in the driver's numbering
        with contextlib.suppress(OSError):  # a node of another user's device cannot be read
            lines = (node / "properties").read_text().splitlines()
            properties = dict(line.split(maxsplit=1) for line in lines if " " in line.strip())
            if int(properties.get("gfx_target_version", "0")):
                gpus.append(properties)
    visible = next((environment[name] for name in AMD_VISIBLE if name in environment), "0").split(",")[0].strip()
    if not visible.isdigit() or int(visible) >= len(gpus):
        return None
    gpu, driver = gpus[int(visible)], sysfs / "module/amdgpu/version"
    return Device(
        arch=arch_of_version(int(gpu["gfx_target_version"])),
        uuid_hash=hashlib.sha256(gpu["unique_id"].encode()).hexdigest()[:16] if "unique_id" in gpu else "",
        multiprocessors=int(gpu.get("simd_count", "0")) // max(1, int(gpu.get("simd_per_cu", "4"))),
        driver=driver.read_text().strip() if driver.is_file() else "",
    )


def arch_of_version(gfx_target_version: int) -> str:
    """Return the arch's name for the driver's decimal version: 90402 -> ``gfx942``, 90010 -> ``gfx90a``."""
    major, minor, stepping = gfx_target_version // 10000, gfx_target_version // 100 % 100, gfx_target_version % 100
    return f"gfx{major}{minor:x}{stepping:x}"


def limits(device: Device) -> DeviceLimits | None:
    """Return the limits of configs on a device; None for a stand-in and for an arch that is not in the list."""
    arch = ARCHES.get(device.arch)
    return None if arch is None else arch.limits(device.multiprocessors or None)


def telemetry(gpu: Any | None = None) -> Telemetry:
    """Read clocks, temperature, power and throttle reasons of NVML's handle, by default the first visible GPU's.

    Cheap: the handle stays open.
    """
    gpu = _open_nvidia() if gpu is None else gpu
    milliwatts = _read(gpu, "PowerUsage")
    return Telemetry(
        sm_clock_mhz=_read(gpu, "ClockInfo", pynvml.NVML_CLOCK_SM),
        memory_clock_mhz=_read(gpu, "ClockInfo", pynvml.NVML_CLOCK_MEM),
        temperature_c=_read(gpu, "Temperature", pynvml.NVML_TEMPERATURE_GPU),
        power_w=None if milliwatts is None else milliwatts / 1000,
        throttle_reasons=_read(gpu, "CurrentClocksEventReasons"),
    )


def telemetry_over(before: Telemetry) -> Telemetry:
    """Return the state after a block, with the throttle reasons seen at either end of it."""
    after = telemetry()
    reasons = [state.throttle_reasons for state in (before, after) if state.throttle_reasons is not None]
    return replace(after, throttle_reasons=functools.reduce(int.__or__, reasons) if reasons else None)


def clock_limits() -> ClockLimits:
    """Read the clocks and the power limit that the GPU is set to, None if unreadable; at most once a second."""
    return _limits_in(int(time.monotonic()))


@functools.lru_cache(maxsize=1)  # reading takes about a millisecond on an H100, longer than many launches
def _limits_in(second: int) -> ClockLimits:
    return clock_limits_of(_open_nvidia())


def clock_limits_of(gpu: Any | None) -> ClockLimits:
    """Read the limits of NVML's handle, as :func:`clock_limits` does."""
    sm_mhz, memory_mhz = (  # newer drivers know no application clocks: then the most that it reaches
        _read(gpu, "ApplicationsClock", kind) or _read(gpu, "MaxClockInfo", kind)
        for kind in (pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM)
    )
    milliwatts = _read(gpu, "EnforcedPowerLimit")
    return ClockLimits(sm_mhz, memory_mhz, None if milliwatts is None else milliwatts / 1000)


def slowdowns(arch: str, state: Telemetry) -> tuple[str, ...]:
    """Name the reasons why the device runs slower than it should. The bits are NVML's: AMD's numbers differ."""
    bits = (state.throttle_reasons or 0) if arch.startswith("sm_") else 0
    return tuple(name for bit, name in SLOWDOWNS.items() if bits & bit)


def processes(gpu: Any | None = None) -> list[int] | None:
    """Return the processes that compute on NVML's handle, by default the first visible GPU's; None if unreadable."""
    running = _read(_open_nvidia() if gpu is None else gpu, "ComputeRunningProcesses")
    return None if running is None else [process.pid for process in running]


def other_processes() -> int | None:
    """Count other processes that compute on the first visible GPU; None if that cannot be read."""
    return None if (running := processes()) is None else sum(pid != os.getpid() for pid in running)


def hash_uuid(uuid: str) -> str:
    """Return a name for a device that does not disclose its UUID. NVML writes ``GPU-1234...``, torch ``1234...``."""
    return hashlib.sha256(uuid.removeprefix("GPU-").lower().encode()).hexdigest()[:16]


def nvidia_handle(environment: Mapping[str, str] = os.environ) -> Any | None:
    """Return NVML's handle of the first GPU that is visible; None if there is none."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    try:
        pynvml.nvmlInit()
        if visible.startswith(("GPU-", "MIG-")):
            return pynvml.nvmlDeviceGetHandleByUUID(visible)
        return pynvml.nvmlDeviceGetHandleByIndex(int(visible)) if visible.isdigit() else None
    except pynvml.NVMLError:  # no driver, or no such device
        return None


def nvidia_handles(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return NVML's handle of each visible GPU by its name in ``CUDA_VISIBLE_DEVICES``; empty if there is none."""
    visible, names = environment.get("CUDA_VISIBLE_DEVICES"), list[str]()
    with contextlib.suppress(pynvml.NVMLError):  # no driver
        pynvml.nvmlInit()
        names = [str(index) for index in range(pynvml.nvmlDeviceGetCount())] if visible is None else visible.split(",")
    handles = ((name.strip(), nvidia_handle({"CUDA_VISIBLE_DEVICES": name})) for name in names)
    return {name: handle for name, handle in handles if handle is not None}


@functools.cache
def _open_nvidia() -> Any | None:
    return nvidia_handle()


def _read(handle: Any | None, name: str, *arguments: int) -> Any:
    """Return the answer of NVML's ``nvmlDeviceGet{name}``; None without a GPU or an answer."""
    try:
        return None if handle is None else getattr(pynvml, f"nvmlDeviceGet{name}")(handle, *arguments)
    except pynvml.NVMLError:  # not supported by this device, or not permitted to this user
        return None
