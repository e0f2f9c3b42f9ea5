"""The steps by which a lookup falls back, and its final row. Imports no torch: the tuner asks it, too."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from enum import StrEnum

from ..spec import FLAGS, KernelSpec, NamedInts, Span
from ..tables import Key, Row, Table

ROWS, GROUPS = "M_bucket", "G"  # in a lookup key: the rows of all groups, and how many groups there are

NO_AXES: Mapping[str, int] = NamedInts()


class Step(StrEnum):
    """Origin of a config, in the order of the search."""

    KEY = "key"
    """The row of the key itself."""
    NEAREST = "nearest"
    """The row of the nearest key that suits, of a kernel that the table names for it."""
    FALLBACK = "fallback"
    """The row for any other shape, which has no key."""
    DEFAULT = "default"
    """No row: the kernel's declared default."""


def taken(spec: KernelSpec, key: Mapping[str, int], exported: Table, device: str) -> tuple[Step, Row | None]:
    """Return the step that a lookup of ``key`` ends at, and its row: None where that is the default.

    At each step a row of this device comes before one of its arch.
    """
    expected = tuple(sorted(key.items()))
    rows = [row for row in exported.rows if row[0] == spec.name and row[1] in (device, "")]
    near = rows if spec.name in exported.nearest else [row for row in rows if row[2] == expected]
    row = nearest(expected, near, spec.span, spec.default)
    if row is not None:
        return Step.KEY if row[2] == expected else Step.NEAREST, row
    fallbacks = [row for row in rows if row[2] is None and _suits(row, spec.span, spec.default, key)]
    if fallbacks:
        return Step.FALLBACK, min(fallbacks, key=lambda row: (row[1] == "", row[3]))
    return Step.DEFAULT, None


def _suits(row: Row, span: Span | None, default: Mapping[str, int], key: Mapping[str, int]) -> bool:
    return span is None or span.suits({**default, **dict(row[3])}, dict(row[2] or ()), key)


def nearest(
    key: Key, rows: Iterable[Row], span: Span | None = None, default: Mapping[str, int] = NO_AXES
) -> Row | None:
    """Return the row of the key nearest to ``key``; None where none can be compared.

    ``rows`` are of one kernel and one device or its arch. Fallback rows are left out, and configs that do not suit the
    key by the kernel's ``span``. ``default`` has the axes that a row leaves out. Of rows as near, one of a device comes
    before one of its arch, then the key that sorts first.
    """
    ranked = [
        (row[2] != key, far, row[1] == "", row[2], row[3], row)  # sizes beyond 2**53 can round to a distance of 0
        for row in rows
        if row[2] is not None and math.isfinite(far := distance(key, row[2])) and _suits(row, span, default, dict(key))
    ]
    return min(ranked)[-1] if ranked else None


def distance(first: Key, second: Key) -> float:
    """Return the sum over all sizes of (log2 of their ratio) squared; infinite between other names or flags.

    Equal ratios tie to the last bit. The rows of a group count as one more size, because a tile has to fit them:
    lookups of ``rowwise`` then lose 9 % on an H100, each shape left out, not 15.
    """
    if [name for name, _ in first] != [name for name, _ in second]:
        return math.inf
    squares = [
        _squared_log(name, single, peer)
        for (name, single), (_, peer) in zip(first, second, strict=True)
        if single != peer  # an export asks for each pair of its rows
    ]
    ours, theirs = dict(first), dict(second)
    if ROWS in ours and GROUPS in ours:
        squares.append(_squared_log("rows of a group", ours[ROWS] * theirs[GROUPS], theirs[ROWS] * ours[GROUPS]))
    return math.fsum(squares)


@functools.lru_cache(4096)  # a table repeats few sizes
def _squared_log(name: str, single: int, peer: int) -> float:
    if single == peer:
        return 0.0
    if name in FLAGS:
        return math.inf
    smaller, larger = sorted((single, peer))
    return math.log2(larger / (smaller or 0.5)) ** 2  # 0 is as far from 1 as 1 from 2
