"""AMD GPUs: finding one and naming its arch.

Devices are found in the kernel driver's topology (``/sys/class/kfd``), which needs no library and creates no GPU
context. Written from the driver's documentation and tested against a simulated device: it has not run on AMD hardware.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from pathlib import Path

from fp8tune.records import Device

# No kernel declares it: of 20 configs compiled for gfx942, asking for 2 to 4 waves changed what is resident in none,
# and asking for 8 made nearly all spill.
LAUNCH_OPTIONS = ("waves_per_eu",)
"""Grid axes that only AMD's compiler takes: the waves on a SIMD that it should leave registers for."""

VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")  # HIP obeys both; if both are set, the first one


def probe(environment: Mapping[str, str], sysfs: Path = Path("/sys")) -> Device | None:
    """Return the first visible AMD GPU, or None. The topology holds no name; versions are left empty."""
    gpus: list[dict[str, str]] = []
    nodes = (sysfs / "class/kfd/kfd/topology/nodes").glob("[0-9]*")
    for node in sorted(nodes, key=lambda node: int(node.name)):  # HIP counts in the driver's numbering
        with contextlib.suppress(OSError):  # a node of another user's device cannot be read
            lines = (node / "properties").read_text().splitlines()
            properties = dict(line.split(maxsplit=1) for line in lines if " " in line.strip())
            if int(properties.get("gfx_target_version", "0")):
                gpus.append(properties)
    visible = next((environment[name] for name in VISIBLE if name in environment), "0").split(",")[0].strip()
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
