"""The config that a wrapper launches: the exported table of the running arch, else the kernel's declared default.

A row of the user's own table replaces the shipped rows of its key (:mod:`.user_tables`). Then, in this order:

1. the row of the key;
2. for the kernels that the table names, the row of the nearest key that suits (:mod:`.nearest`);
3. the fallback row, which has no key, if it suits;
4. the default.

At each step a row of this device comes before one of its arch. Nothing waits for the device; answers are kept.
Meta tensors have the table of the compiler's target.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping

import torch

from ..spec import KernelSpec
from ..tables import Table, overlay, table, versions
from .chain import taken
from .user_tables import of_kernel, user_table

__all__ = [
    "compiling_for",
    "config_for",
    "device_name",
    "forget",
    "pick",
    "running_arch",
    "table",
]

INTERPRETER = "interpreter"
"""The arch of a device that is no GPU."""

_Asked = tuple[str, torch.device, tuple[int, ...]]

_configs: dict[_Asked, dict[str, int]] = {}
_arch_of_meta = [INTERPRETER]

caches: list[Callable[[], None]] = []
"""Functions that clear what was made of tables."""


def config_for(spec: KernelSpec, key: tuple[int, ...], device: torch.device) -> Mapping[str, int]:
    """The config to launch; ``key`` is the values of ``spec.key`` in its order. Found once, then remembered."""
    answer = _configs.get((spec.name, device, key))
    if answer is None:
        arch = running_arch(device)
        exported = overlay(of_kernel(spec, user_table(arch)), table(arch))
        answer = pick(spec, dict(zip(spec.key, key, strict=True)), exported, device_name(device))
        if device.type != "meta":  # which arch is compiled for changes
            _configs[spec.name, device, key] = answer
    return answer


def forget() -> None:
    """Read all tables again: for a process in which an export has written one."""
    for clear in caches:
        clear()


caches += [_configs.clear, user_table.cache_clear, table.cache_clear, versions.cache_clear]


def pick(spec: KernelSpec, key: Mapping[str, int], exported: Table, device: str) -> dict[str, int]:
    """The config of ``key`` by a table; an axis that the row leaves out has the default's value."""
    _, row = taken(spec, key, exported, device)
    return {**spec.default, **dict(row[3] if row else ())}


def running_arch(device: torch.device) -> str:
    """``sm_90``, ``gfx942``, or ``interpreter`` for a device that is no GPU. Reads cached properties: no sync."""
    return _arch_of_meta[0] if device.type == "meta" else _arch_of(device)


@contextlib.contextmanager
def compiling_for(arch: str) -> Iterator[None]:
    """While open, meta tensors are of this arch: what is launched with them is what its table says."""
    before, _arch_of_meta[0] = _arch_of_meta[0], arch
    try:
        yield
    finally:
        _arch_of_meta[0] = before


@functools.cache
def _arch_of(device: torch.device) -> str:
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def device_name(device: torch.device) -> str:
    """The name that rows of one device carry; empty for a device that is no GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""
