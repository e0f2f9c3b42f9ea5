"""Share of the roofline that a time reaches, everywhere that it is printed: ``show``, tables and documents.

    ceiling = fastest rate of memory on the device, GB/s, bytes read plus written: a device-to-device copy of 512 MiB
              measured in the same run, or the fastest kernel if that is faster
    peak    = rate of a dense GEMM of 8192 x 8192 x 8192 in the kernel's input dtype in the same run, flop/s
    share   = max(least bytes that an implementation moves / ceiling, floating-point operations / peak) / time

The larger of both bounds the kernel: *memory* or *compute*.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from fp8tune.records import is_recorded
from fp8tune.stats.study import CACHED_RATE, Study

FLOP_PER_S = "flop_per_s_"
"""Beginning of the name of a calibration that holds the peak of a dtype."""


class Bound(StrEnum):
    """Resource that bounds the least time of a problem size."""

    MEMORY = "memory"
    COMPUTE = "compute"


@dataclass(frozen=True)
class CeilingShare:
    """Share of the higher bound that a time reaches."""

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
    """Return the share of the higher bound; None if neither is known. ``at_most``: fewer bytes may be moved.

    A recorded launch may address a part of its tensors (a gather, a slice), so that its bytes are the most that it
    moves. Its rate says nothing if it is beyond what memory gives.
    """
    shares = []
    if time_us and bytes_moved and ceiling_gb_per_s:
        rate = gb_per_s(bytes_moved, time_us)
        share = rate / ceiling_gb_per_s
        if not at_most:
            shares.append(CeilingShare(share, Bound.MEMORY))
        elif not is_cached(rate, ceiling_gb_per_s):
            shares.append(CeilingShare(min(share, 1.0), Bound.MEMORY))
    if time_us and flops and flop_per_s:
        shares.append(CeilingShare(1e6 * flops / time_us / flop_per_s, Bound.COMPUTE))
    return max(shares, key=lambda share: share.share, default=None)


def ceiling_of(study: Study) -> CeilingShare | None:
    """Return the share that the pick of a study reaches; None if it is not known."""
    pick, at_most = study.pick, is_recorded(study.problem)
    memory = study.bytes_moved, pick.ceiling_gb_per_s
    return ceiling_share(study.choice.time_us, *memory, study.flops, pick.peak_flop_per_s, at_most=at_most)


def gb_per_s(bytes_moved: int, time_us: float) -> float:
    """Return a rate: bytes a microsecond are megabytes a second."""
    return bytes_moved / time_us / 1e3


def is_cached(rate_gb_per_s: float, copy_gb_per_s: float) -> bool:
    """Return True if a rate is beyond what memory gives, because a cache was not flushed."""
    return rate_gb_per_s > CACHED_RATE * copy_gb_per_s


def ceiling_gb_per_s(copy_gb_per_s: float, kernels_gb_per_s: Iterable[float]) -> float:
    """Return the rate of the copy, or the highest of the kernels' that memory can have given.

    A copy reads a byte for each that it writes, and memory reads faster than it writes: a kernel that mostly reads can
    be faster than the copy. Then it is the ceiling, so that no share passes 1 by more than noise.
    """
    return max([copy_gb_per_s, *(rate for rate in kernels_gb_per_s if not is_cached(rate, copy_gb_per_s))])
