"""The steps by which a lookup falls back, and the row that one ends at. Imports no torch: the tuner asks it, too."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from ..spec import KernelSpec
from ..tables import Row, Table
from .nearest import nearest

__all__ = ["Step", "taken"]


class Step(StrEnum):
    """Where a config comes from, in the order in which it is looked for."""

    KEY = "key"
    """The row of the key itself."""
    NEAREST = "nearest"
    """The row of the nearest key that suits, of a kernel that the table names for it."""
    FALLBACK = "fallback"
    """The row for any other shape, which has no key."""
    DEFAULT = "default"
    """No row: the kernel's declared default."""


def _suits_any(spec: KernelSpec, row: Row, key: Mapping[str, int]) -> bool:
    return spec.span is None or spec.span.suits({**spec.default, **dict(row[3])}, {}, key)


def taken(spec: KernelSpec, key: Mapping[str, int], exported: Table, device: str) -> tuple[Step, Row | None]:
    """The step that a lookup of ``key`` ends at, and its row: None where that is the default.

    At each step a row of this device comes before one of its arch.
    """
    wanted = tuple(sorted(key.items()))
    rows = [row for row in exported.rows if row[0] == spec.name and row[1] in (device, "")]
    near = rows if spec.name in exported.nearest else [row for row in rows if row[2] == wanted]
    row = nearest(wanted, near, spec.span, spec.default)
    if row is not None:
        return Step.KEY if row[2] == wanted else Step.NEAREST, row
    fallbacks = [row for row in rows if row[2] is None and _suits_any(spec, row, key)]
    if fallbacks:
        return Step.FALLBACK, min(fallbacks, key=lambda row: (row[1] == "", row[3]))
    return Step.DEFAULT, None
