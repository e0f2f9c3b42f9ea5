"""What the committed tables hold: the configs that must be beaten before a table changes.

A key that a table leaves out has the kernel's declared default for an incumbent, whatever a lookup gives there: that
was chosen without it. Imports no torch, as the tables do not.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterable, Mapping

from fp8tune.choose.ranking import Incumbents
from fp8tune.records import Device, NamedInts
from fp8tune_kernels.tables import Row

Place = tuple[str, str, tuple[tuple[str, int], ...] | None]
"""Kernel, device name or ``""``, sorted items of the lookup key or None."""


def committed(kernel: str, device: Device, key: NamedInts | None) -> NamedInts | None:
    """What the installed table of the device's arch holds."""
    return _found(_installed(device.arch), kernel, device, key)


def of_rows(rows: Iterable[Row]) -> Incumbents:
    """What a table holds that is not installed."""
    return functools.partial(_found, _by_place(rows))


def _found(configs: Mapping[Place, NamedInts], kernel: str, device: Device, key: NamedInts | None) -> NamedInts | None:
    """A device's own row before the arch's."""
    wanted = None if key is None else tuple(sorted(key.items()))
    return configs.get((kernel, device.name, wanted)) or configs.get((kernel, "", wanted))


@functools.cache
def _installed(arch: str) -> Mapping[Place, NamedInts]:
    module = f"fp8tune_kernels.tables.{arch}"
    if not re.fullmatch(r"\w+", arch):
        return {}
    try:
        return _by_place(importlib.import_module(module).ROWS)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return {}


def _by_place(rows: Iterable[Row]) -> dict[Place, NamedInts]:
    return {(kernel, device, key): NamedInts(config) for kernel, device, key, config in rows}
