"""Which measured key is nearest to one that nobody measured. Imports no torch: the tuner runs it, too."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping

from ..spec import FLAGS, NamedInts, Span
from ..tables import Key, Row

__all__ = ["distance", "nearest"]

ROWS, GROUPS = "M_bucket", "G"  # in a lookup key: the rows of all groups, and how many groups there are

NO_AXES: Mapping[str, int] = NamedInts()


def nearest(
    key: Key, rows: Iterable[Row], span: Span | None = None, default: Mapping[str, int] = NO_AXES
) -> Row | None:
    """The row of the key nearest to ``key``; None where none can be compared.

    ``rows`` are of one kernel and one device or its arch. Fallback rows are left out, and configs that do not suit the
    key by the kernel's ``span``. ``default`` has the axes that a row leaves out. Of rows as near, one of a device comes
    before one of its arch, then the key that sorts first.
    """
    ranked = [
        (row[2] != key, far, row[1] == "", row[2], row[3], row)  # sizes beyond 2**53 can round to a distance of 0
        for row in rows
        if row[2] is not None
        and math.isfinite(far := distance(key, row[2]))
        and (span is None or span.suits({**default, **dict(row[3])}, dict(row[2]), dict(key)))
    ]
    return min(ranked)[-1] if ranked else None


def distance(first: Key, second: Key) -> float:
    """The sum over all sizes of (log2 of their ratio) squared; infinite between other names or flags.

    Equal ratios tie to the last bit. The rows of a group count as one more size, because a tile has to fit them:
    lookups of ``rowwise`` then lose 9 % on an H100, each shape left out, not 15 (``benchmarks/README.md``).
    """
    if len(first) != len(second):
        return math.inf
    squares = []
    for (name, one), (its_name, other) in zip(first, second, strict=True):
        if name != its_name:
            return math.inf
        if one != other:  # an export asks for each pair of its rows
            squares.append(_squared_log(name, one, other))
    ours, theirs = dict(first), dict(second)
    if ROWS in ours and GROUPS in ours:
        squares.append(_squared_log("rows of a group", ours[ROWS] * theirs[GROUPS], theirs[ROWS] * ours[GROUPS]))
    return math.fsum(squares)


@functools.lru_cache(4096)  # a table repeats few sizes
def _squared_log(name: str, one: int, other: int) -> float:
    if one == other:
        return 0.0
    if name in FLAGS:
        return math.inf
    smaller, larger = sorted((one, other))
    return math.log2(larger / (smaller or 0.5)) ** 2  # 0 is as far from 1 as 1 from 2
