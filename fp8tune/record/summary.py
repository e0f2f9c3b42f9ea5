"""A recording in a few numbers a kernel: what to sweep first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fp8tune.recording import Kernel, Recording


@dataclass(frozen=True)
class Row:
    """One kernel of a recording."""

    kernel: str
    launches: int
    """All of them, those that cannot be swept too."""
    distinct: int
    """Launches that differ in more than values."""
    keys: int
    """Distinct lookup keys: each is tuned at run time on its own."""
    configs: int
    gpu_share: float | None
    """Of the GPU time of all recorded kernels; None where nothing was timed."""
    tuning_s: float
    """Spent tuning at run time, over all processes."""
    refusal: str
    """Why it cannot be swept; empty if it can be."""
    skipped: int
    """Launches that are counted only."""

    @property
    def is_sweepable(self) -> bool:
        """Whether a sweep has launches of it to make."""
        return bool(self.distinct) and not self.refusal


def rows(recording: Recording) -> list[Row]:
    """Kernels, those that take most of the GPU's time first."""
    times = [_gpu_us(kernel) for kernel in recording.kernels]
    total = sum(time for time in times if time is not None)
    found = [
        Row(
            kernel.name,
            launches=sum(launch.count for launch in kernel.launches) + sum(kernel.skipped.values()),
            distinct=len(kernel.launches),
            keys=len({repr(launch.key) for launch in kernel.launches}),
            configs=len(kernel.configs),
            gpu_share=time / total if time is not None and total else None,
            tuning_s=kernel.tuning_s,
            refusal=kernel.refusal,
            skipped=sum(kernel.skipped.values()),
        )
        for kernel, time in zip(recording.kernels, times, strict=True)
    ]
    return sorted(found, key=lambda row: (-(row.gpu_share or 0.0), not row.configs, -row.launches, row.kernel))


def most_to_gain(found: Sequence[Row]) -> Row | None:
    """The kernel to sweep first: with several configs, the largest share of tuning seconds plus that of GPU time.

    Only where no kernel has several configs, one without; None where none can be swept.
    """
    sweepable = [row for row in found if row.is_sweepable]
    tunable = [row for row in sweepable if row.configs > 1]
    total_s = sum(row.tuning_s for row in tunable) or 1.0
    return max(tunable or sweepable, key=lambda row: row.tuning_s / total_s + (row.gpu_share or 0.0), default=None)


def _gpu_us(kernel: Kernel) -> float | None:
    times = [launch.count * launch.gpu_us for launch in kernel.launches if launch.gpu_us is not None]
    return sum(times) if times else None
