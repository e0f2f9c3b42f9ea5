"""What "of ceiling" is a share of, everywhere that it is printed: in ``show``, ``bench``, tables and documents.

    ceiling = the fastest that memory was seen to move on the device, GB/s, bytes read plus written:
              a device-to-device copy of 512 MiB measured in the same run, or the fastest kernel if that is faster
    peak    = what a dense GEMM of 8192 x 8192 x 8192 in the kernel's input dtype reaches in the same run, flop/s
    share   = max(the least bytes an implementation moves / ceiling, floating-point operations / peak) / time

The larger of both bounds the kernel: *memory* or *compute*. Without declared operations it is memory.

A copy reads one byte for each that it writes, our kernels two, and memory reads faster than it writes: a kernel that
reads its input once can be faster than the copy. Then it is the ceiling, so that no share passes 1 by more than noise.
A rate far above the copy's comes from a cache that was not flushed, and is no ceiling.

A recorded launch may address a part of its tensors (a gather, a slice): their bytes are the most that it moves, and its
share is at most what is printed. Its rate is never a ceiling, and says nothing where it is beyond what memory gives.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from fp8tune.records import is_recorded
from fp8tune.stats.study import CACHED_RATE, Study

FLOP_PER_S = "flop_per_s_"
"""With a dtype after it the name of a calibration: the peak of that dtype."""


class Bound(StrEnum):
    """What the least time of a problem comes from."""

    MEMORY = "memory"
    COMPUTE = "compute"


@dataclass(frozen=True)
class CeilingShare:
    """How near a time is to the least that a problem can take."""

    share: float
    bound: Bound


def ceiling_share(
    time_us: float | None,
    bytes_moved: int | None,
    ceiling_gb_per_s: float | None,
    flops: int | None = None,
    flop_per_s: float | None = None,
    *,
    at_most: bool = False,
) -> CeilingShare | None:
    """The share of the higher of both bounds; None where neither is known. ``at_most``: fewer bytes may be moved."""
    found = []
    if time_us and bytes_moved and ceiling_gb_per_s:
        rate = gb_per_s(bytes_moved, time_us)
        share = rate / ceiling_gb_per_s
        if not at_most:
            found.append(CeilingShare(share, Bound.MEMORY))
        elif not is_cached(rate, ceiling_gb_per_s):
            found.append(CeilingShare(min(share, 1.0), Bound.MEMORY))
    if time_us and flops and flop_per_s:
        found.append(CeilingShare(1e6 * flops / time_us / flop_per_s, Bound.COMPUTE))
    return max(found, key=lambda one: one.share, default=None)


def ceiling_of(study: Study) -> CeilingShare | None:
    """Return how near the pick's time is to the least that its problem can take; None where that is not known."""
    pick, at_most = study.pick, is_recorded(study.problem)
    memory = study.bytes_moved, pick.ceiling_gb_per_s
    return ceiling_share(study.choice.time_us, *memory, study.flops, pick.peak_flop_per_s, at_most=at_most)


def gb_per_s(bytes_moved: int, time_us: float) -> float:
    """A rate: bytes a microsecond are megabytes a second."""
    return bytes_moved / time_us / 1e3


def is_cached(rate_gb_per_s: float, copy_gb_per_s: float) -> bool:
    """Whether a rate is beyond what memory gives."""
    return rate_gb_per_s > CACHED_RATE * copy_gb_per_s


def ceiling_gb_per_s(copy_gb_per_s: float, kernels_gb_per_s: Iterable[float]) -> float:
    """The copy's rate, or the highest of the kernels' that memory can have given."""
    return max([copy_gb_per_s, *(rate for rate in kernels_gb_per_s if not is_cached(rate, copy_gb_per_s))])
