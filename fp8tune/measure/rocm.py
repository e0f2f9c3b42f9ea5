"""Everything that is particular to AMD GPUs: finding one, naming its arch, reading its clocks.

Devices are found in the kernel driver's topology (``/sys/class/kfd``), which needs no library and creates no GPU
context; clocks come from ``amdsmi`` where it is installed. Written from the driver's documentation and tested against a
faked device: it has not run on AMD hardware.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fp8tune.records import Device, Telemetry

LAUNCH_OPTIONS = ("waves_per_eu",)
"""Grid axes that only AMD's compiler takes: the waves on a SIMD that it should leave registers for; absent, it decides.
No kernel declares one: of 20 configs compiled for gfx942, asking for 2 to 4 waves changed what is resident in none, and
asking for 8 made nearly all spill."""

VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""HIP obeys both; where both are set, the first one."""


def probe(environment: Mapping[str, str], sysfs: Path = Path("/sys")) -> Device | None:
    """The first visible AMD GPU, or None. Its name, which the topology does not hold, and versions are left empty."""
    gpus = [gpu for gpu in map(_properties, _nodes(sysfs)) if int(gpu.get("gfx_target_version", "0"))]
    visible = next((environment[name] for name in VISIBLE if name in environment), "0").split(",")[0].strip()
    if not visible.isdigit() or int(visible) >= len(gpus):
        return None
    gpu = gpus[int(visible)]
    driver = sysfs / "module/amdgpu/version"
    return Device(
        arch=arch_of_version(int(gpu["gfx_target_version"])),
        uuid_hash=hashlib.sha256(gpu["unique_id"].encode()).hexdigest()[:16] if "unique_id" in gpu else "",
        multiprocessors=int(gpu.get("simd_count", "0")) // max(1, int(gpu.get("simd_per_cu", "4"))),
        driver=driver.read_text().strip() if driver.is_file() else "",
    )


def arch_of_version(gfx_target_version: int) -> str:
    """The driver's decimal version -> the arch's name: 90402 -> ``gfx942``, 90010 -> ``gfx90a``."""
    major, minor, stepping = gfx_target_version // 10000, gfx_target_version // 100 % 100, gfx_target_version % 100
    return f"gfx{major}{minor:x}{stepping:x}"


def telemetry(amdsmi: Any, handle: Any) -> Telemetry:
    """The device's state now through ``amdsmi``; a field it cannot read is None."""
    clock, temperature = amdsmi.AmdSmiClkType, amdsmi.AmdSmiTemperatureType
    metric = amdsmi.AmdSmiTemperatureMetric
    power = _readable(lambda: amdsmi.amdsmi_get_power_info(handle)) or {}
    watts: Any = power.get("current_socket_power", power.get("average_socket_power"))
    return Telemetry(
        sm_clock_mhz=_readable(lambda: int(amdsmi.amdsmi_get_clock_info(handle, clock.GFX)["clk"])),
        memory_clock_mhz=_readable(lambda: int(amdsmi.amdsmi_get_clock_info(handle, clock.MEM)["clk"])),
        temperature_c=_readable(
            lambda: int(amdsmi.amdsmi_get_temp_metric(handle, temperature.HOTSPOT, metric.CURRENT))
        ),
        power_w=_readable(lambda: float(watts)),
        throttle_reasons=_readable(lambda: int(amdsmi.amdsmi_get_gpu_metrics_info(handle)["throttle_status"])),
    )


def open_handle() -> tuple[Any, Any] | None:
    """The ``amdsmi`` module and its first device, or None where the library or a device is missing."""
    try:
        import amdsmi

        amdsmi.amdsmi_init()
        return amdsmi, amdsmi.amdsmi_get_processor_handles()[0]
    except Exception:  # it is a foreign library around a driver that may be absent, older or busy
        return None


def _nodes(sysfs: Path) -> list[Path]:
    """The topology's nodes in the driver's numbering, which is the order HIP counts in."""
    nodes = (sysfs / "class/kfd/kfd/topology/nodes").glob("[0-9]*")
    return sorted(nodes, key=lambda node: int(node.name))


def _properties(node: Path) -> dict[str, str]:
    with contextlib.suppress(OSError):  # a node of another user's device cannot be read
        lines = (node / "properties").read_text().splitlines()
        return dict(line.split(maxsplit=1) for line in lines if " " in line.strip())
    return {}


def _readable(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception:  # amdsmi raises its own types, and returns "N/A" where a sensor is missing
        return None
