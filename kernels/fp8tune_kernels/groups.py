"""Spread of token rows over groups: the six layouts that grouped kernels are checked and timed on.

A layout is a list of end rows, one a group: non-decreasing, the last one M; in ``empty`` the rows of the last eighth
belong to no group. Python's seeded generator makes them the same on every platform.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from random import Random

from .spec import ROUTINGS

ALIGNMENT = 16
"""Of the ``jagged`` layout's groups: what a grouped GEMM asks of its operands."""


def group_ends(routing: str, M: int, G: int, seed: int = 0) -> list[int]:
    """The end row of each of G groups over M rows, spread as ``routing`` says (one of :data:`ROUTINGS`).

    Works for any M >= 0 and G >= 1, also M < G. Raises ValueError for an unknown routing, a negative M or no group.
    """
    if routing not in LAYOUTS:
        raise ValueError(f"routing is {routing!r}, wanted one of {', '.join(ROUTINGS)}")
    if M < 0 or G < 1:
        raise ValueError(f"M={M} rows over G={G} groups: wanted M >= 0 and G >= 1")
    return LAYOUTS[routing](M, G, Random(f"{routing} {M} {G} {seed}"))


def taken_rows(size: int, alignment: int) -> int:
    """Rows that a group of ``size`` takes where groups begin at multiples of ``alignment``, and none is empty."""
    return size if alignment == 1 else max(1, -(-size // alignment)) * alignment


def padded_rows(M: int, G: int, alignment: int) -> int:
    """Rows that M rows in G groups need at most once each group is padded, and the rows of no group after them."""
    return (M + alignment * G + alignment - 1) // alignment * alignment


def _balanced(M: int, G: int, random: Random) -> list[int]:
    """Equal sizes, the remainder spread."""
    return [(group + 1) * M // G for group in range(G)]


def _jagged(M: int, G: int, random: Random) -> list[int]:
    """Uniformly random cut points, each a multiple of 16."""
    return _from_cuts([ALIGNMENT * random.randint(0, M // ALIGNMENT) for _ in range(G - 1)], M)


def _ragged(M: int, G: int, random: Random) -> list[int]:
    """Uniformly random odd cut points: no inner boundary falls on a tile's, or is aligned for any vector access."""
    return _from_cuts([2 * random.randrange((M + 1) // 2) + 1 if M else 0 for _ in range(G - 1)], M)


def _from_cuts(cuts: list[int], M: int) -> list[int]:
    return [*sorted(cuts), M]


def _zipf(M: int, G: int, random: Random) -> list[int]:
    """Group sizes proportional to 1/rank, ranks shuffled."""
    weights = [1.0 / rank for rank in range(1, G + 1)]
    random.shuffle(weights)
    cumulated = list(accumulate(weights))
    return [*(int(M * weight / cumulated[-1]) for weight in cumulated[:-1]), M]


def _one_giant(M: int, G: int, random: Random) -> list[int]:
    """One group has nearly all rows: the others together at most a sixteenth."""
    small = M // (16 * G)
    sizes = [small] * G
    sizes[random.randrange(G)] = M - small * (G - 1)
    return list(accumulate(sizes))


def _empty(M: int, G: int, random: Random) -> list[int]:
    """Half of the groups, and at least one of several, have no row; the others are even, and leave an eighth of M."""
    filled = sorted(random.sample(range(G), (G + 1) // 2))
    ends = dict(zip(filled, _balanced(M - M // 8, len(filled), random), strict=True))
    return list(accumulate((ends.get(group, 0) for group in range(G)), max))


LAYOUTS: dict[str, Callable[[int, int, Random], list[int]]] = {
    "balanced": _balanced,
    "jagged": _jagged,
    "zipf": _zipf,
    "one-giant": _one_giant,
    "empty": _empty,
    "ragged": _ragged,
}
"""Routing -> what gives the group ends; its docstring says how rows spread."""
