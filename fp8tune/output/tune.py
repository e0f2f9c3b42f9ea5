"""Screen of ``fp8tune tune``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fp8tune.output.show import ListedPick
from fp8tune.output.tables import Column, Screen, number
from fp8tune.output.text import counted, microseconds, ratio
from fp8tune.stats.study import Verdict

LEAST_S = 0.05
"""Change of the start-up time that is worth a word."""


@dataclass(frozen=True)
class TunedKernel:
    """Picks of one kernel, and what they changed in the program."""

    kernel: str
    picks: Sequence[ListedPick]
    counts: Sequence[int]
    """Recorded launches of each pick."""
    gpu_change: float | None
    """Change of its GPU time as a share of the program's; None if it was not measured."""
    tuning_change_s: float | None
    """Change of the time of run-time tuning; None if there was no second run."""

    @property
    def today_us(self) -> float | None:
        """Mean time of a launch today; None if some config that launches use was not timed."""
        return self._mean([pick.today_us for pick in self.picks])

    @property
    def best_us(self) -> float | None:
        """Mean time of a launch with the picks."""
        return self._mean([pick.time_us for pick in self.picks])

    @property
    def in_use(self) -> bool:
        """True if every pick is in use."""
        return all(pick.in_use for pick in self.picks)

    def _mean(self, times_us: Sequence[float | None]) -> float | None:
        known = [time_us for time_us in times_us if time_us is not None]
        if not known or len(known) < len(times_us):
            return None
        return sum(map(float.__mul__, known, map(float, self.counts))) / sum(self.counts)


def result(
    kernels: Sequence[TunedKernel], skipped: Mapping[str, str], headline: str, others: str, *, by_tuning: bool = True
) -> Screen:
    """Return the screen of tuned kernels, under what two runs measured. ``by_tuning``: today's configs are."""
    columns = [
        Column("kernel", [row.kernel for row in kernels], cut="start"),
        number("speedup", [_speedup(row) for row in kernels]),
        number("today -> best us", [_times(row) for row in kernels]),
        number("GPU time", ["-" if row.gpu_change is None else _percent(row.gpu_change) for row in kernels]),
        number("startup", ["-" if row.tuning_change_s is None else _seconds(row.tuning_change_s) for row in kernels]),
        Column("verdict", [_verdicts(row.picks) for row in kernels]),
    ]
    below = ["Today: what run-time tuning chose in this run, and the time that took." if by_tuning else "", others]
    below += [f"{kernel} was not tuned: {reason}" for kernel, reason in skipped.items()]
    return Screen([headline], columns, below, [])


def headline(gpu_change: float | None, startup_change_s: float, reason: str) -> str:
    """Return what the second run measured: ``4.4 % less GPU time, and every start is 26.5 s faster``."""
    parts = []
    if gpu_change is not None and (percent := _percent(gpu_change)) != "0":
        parts.append(f"{percent.lstrip('+-')} {'less' if gpu_change < 0 else 'more'} GPU time")
    elif gpu_change is not None:
        parts.append("The same GPU time")
    if abs(startup_change_s) >= LEAST_S:
        faster = "faster" if startup_change_s < 0 else "slower"
        parts.append(f"{'and ' if parts else ''}every start is {abs(startup_change_s):.1f} s {faster}")
    if gpu_change is None:
        parts.insert(0, f"The program's GPU time was not measured: {reason}")
    return "; ".join(parts) if gpu_change is None else ", ".join(parts)


def others_line(change: float | None) -> str:
    """Return the line about GPU time outside the pinned kernels, if it differs between the runs."""
    if change is None or abs(change) < 0.005:
        return ""
    much = f"{_percent(abs(change)).lstrip('+')} {'less' if change < 0 else 'more'}"
    return f"The rest of the program took {much} GPU time in the second run: chance, or the GPU's clock."


def recorded_line(command: str, kernels: int, share: float | None, file: str) -> str:
    """Return the line after the first run."""
    of_time = "" if share is None else f", {100 * share:.1f} % of its GPU time"
    return f"Recorded {command}: {counted(kernels, 'kernel')} with a choice of configs{of_time} ({file})"


def _speedup(row: TunedKernel) -> str:
    today_us, best_us = row.today_us, row.best_us
    return "-" if today_us is None or best_us is None else ratio(today_us / best_us, row.in_use)


def _times(row: TunedKernel) -> str:
    if row.in_use or row.today_us is None:
        return microseconds(row.best_us)
    return f"{microseconds(row.today_us)} -> {microseconds(row.best_us)}"


def _percent(share: float) -> str:
    return "0" if abs(share) < 0.0005 else f"{100 * share:+.1f} %"


def _seconds(change_s: float) -> str:
    return "0" if abs(change_s) < LEAST_S else f"{change_s:+.1f} s"


def _verdicts(picks: Sequence[ListedPick]) -> str:
    counts = Counter(pick.verdict for pick in picks)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])
