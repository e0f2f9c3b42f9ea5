"""Which config a wrapper launches: the exported table of the running arch, else the kernel's declared default.

Order: rows of this very device for the key; rows of its arch for the key; then the row for any shape, device before
arch; then the default. Nothing here waits for the device, and every answer is computed once.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterable, Mapping

import torch

from fp8tune_kernels.spec import KernelSpec
from fp8tune_kernels.tables import Row

__all__ = ["config_for", "device_name", "pick", "running_arch", "table"]

INTERPRETER = "interpreter"
"""The arch of a device that is no GPU."""

_configs: dict[tuple[str, torch.device, tuple[int, ...]], dict[str, int]] = {}


def config_for(spec: KernelSpec, key: tuple[int, ...], device: torch.device) -> Mapping[str, int]:
    """The config to launch; ``key`` is the values of ``spec.key`` in its order. Found once, then remembered."""
    found = _configs.get((spec.name, device, key))
    if found is None:
        rows = table(running_arch(device))
        found = pick(spec, dict(zip(spec.key, key, strict=True)), rows, device_name(device))
        _configs[spec.name, device, key] = found
    return found


def pick(spec: KernelSpec, key: Mapping[str, int], rows: Iterable[Row], device: str) -> dict[str, int]:
    """The config of ``key`` among a table's rows; an axis that the row leaves out has the default's value."""
    wanted = tuple(sorted(key.items()))
    ranks = {(device, wanted): 0, ("", wanted): 1, (device, None): 2, ("", None): 3}
    matches = [
        (ranks[name, row_key], config)
        for kernel, name, row_key, config in rows
        if kernel == spec.name and (name, row_key) in ranks
    ]
    config = min(matches, key=lambda match: match[0])[1] if matches else ()
    return {**spec.default, **dict(config)}


@functools.cache
def table(arch: str) -> tuple[Row, ...]:
    """The rows exported for an arch; none where there is no table. A table that cannot be imported raises."""
    module = f"fp8tune_kernels.tables.{arch}"
    if not re.fullmatch(r"\w+", arch):
        return ()
    try:
        rows: tuple[Row, ...] = importlib.import_module(module).ROWS
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return ()
    return rows


@functools.cache
def running_arch(device: torch.device) -> str:
    """``sm_90``, ``gfx942``, or ``interpreter`` for a device that is no GPU. Reads cached properties: no sync."""
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def device_name(device: torch.device) -> str:
    """The name rows of one device carry; empty for a device that is no GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""
