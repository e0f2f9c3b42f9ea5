"""Which config a wrapper launches: the exported table of the running arch, else the kernel's declared default.

A row of the user's own table (``user_tables.py``) stands for the shipped ones of its key. Order: the
row of the key; for the kernels that the table names, the row of the nearest key that suits; the row for any shape; the
default. At each step rows of this very device come before those of its arch (of the nearest keys: among those as near).
Nothing here waits for the device, and every answer is computed once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import torch

from fp8tune_kernels.runtime.nearest import nearest
from fp8tune_kernels.runtime.user_tables import of_kernel, overlay, user_table
from fp8tune_kernels.spec import KernelSpec
from fp8tune_kernels.tables import Row, Table, table

__all__ = ["config_for", "device_name", "pick", "running_arch", "table"]

INTERPRETER = "interpreter"
"""The arch of a device that is no GPU."""

_configs: dict[tuple[str, torch.device, tuple[int, ...]], dict[str, int]] = {}


def config_for(spec: KernelSpec, key: tuple[int, ...], device: torch.device) -> Mapping[str, int]:
    """The config to launch; ``key`` is the values of ``spec.key`` in its order. Found once, then remembered."""
    found = _configs.get((spec.name, device, key))
    if found is None:
        arch = running_arch(device)
        exported = overlay(of_kernel(spec, user_table(arch)), table(arch))
        found = pick(spec, dict(zip(spec.key, key, strict=True)), exported, device_name(device))
        _configs[spec.name, device, key] = found
    return found


def pick(spec: KernelSpec, key: Mapping[str, int], exported: Table, device: str) -> dict[str, int]:
    """The config of ``key`` by a table; an axis that the row leaves out has the default's value."""
    wanted = tuple(sorted(key.items()))
    rows = [row for row in exported.rows if row[0] == spec.name and row[1] in (device, "")]
    near = rows if spec.name in exported.nearest else [row for row in rows if row[2] == wanted]
    row = nearest(wanted, near, spec.span, spec.default) or _for_any_shape(rows)
    return {**spec.default, **dict(row[3] if row else ())}


def _for_any_shape(rows: Iterable[Row]) -> Row | None:
    found = [row for row in rows if row[2] is None]
    return min(found, key=lambda row: (row[1] == "", row[3]), default=None)


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
