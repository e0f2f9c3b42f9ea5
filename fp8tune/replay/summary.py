"""Summarize a recording in a few numbers a kernel: what to sweep first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fp8tune.replay.recording import Recording


@dataclass(frozen=True)
class Row:
    """One kernel of a recording."""

    kernel: str
    launches: int
    """All of them, those that cannot be swept included."""
    distinct: int
    """Launches that differ in more than values."""
    keys: int
    """Distinct lookup keys: each is tuned at run time on its own."""
    configs: int
    gpu_share: float | None
    """Share of the GPU time of all recorded kernels; None where nothing was timed."""
    tuning_s: float
    """Seconds of run-time tuning, over all processes."""
    refusal: str
    """The reason why it cannot be swept; empty if it can be."""
    skipped: int
    """Launches that are counted only."""

    @property
    def is_sweepable(self) -> bool:
        """True if a sweep can make launches of it."""
        return bool(self.distinct) and not self.refusal


def rows(recording: Recording) -> list[Row]:
    """Return a row for each kernel, those that take most of the GPU's time first."""
    timed = {
        kernel.name: [launch.count * launch.gpu_us for launch in kernel.launches if launch.gpu_us is not None]
        for kernel in recording.kernels
    }
    total = sum(map(sum, timed.values()))
    result = [
        Row(
            kernel.name,
            launches=sum(launch.count for launch in kernel.launches) + sum(kernel.skipped.values()),
            distinct=len(kernel.launches),
            keys=len({repr(launch.key) for launch in kernel.launches}),
            configs=len(kernel.configs),
            gpu_share=sum(times) / total if (times := timed[kernel.name]) and total else None,
            tuning_s=kernel.tuning_s,
            refusal=kernel.refusal,
            skipped=sum(kernel.skipped.values()),
        )
        for kernel in recording.kernels
    ]
    return sorted(result, key=lambda row: (-(row.gpu_share or 0.0), not row.configs, -row.launches, row.kernel))


def most_to_gain(rows: Sequence[Row]) -> Row | None:
    """Return the kernel to sweep first: the largest share of tuning seconds plus share of GPU time.

    A kernel with one config comes only where there is no other; None where none can be swept.
    """
    sweepable = [row for row in rows if row.is_sweepable]
    tunable = [row for row in sweepable if row.configs > 1]
    total_s = sum(row.tuning_s for row in tunable) or 1.0
    return max(tunable or sweepable, key=lambda row: row.tuning_s / total_s + (row.gpu_share or 0.0), default=None)
