"""Screen of ``fp8tune tune``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fp8tune.output.tables import Column, Screen, number
from fp8tune.output.text import counted, microseconds, ratio
from fp8tune.records import Pick
from fp8tune.stats.study import Verdict
from fp8tune.tuning.runs import Change

LEAST_S = 0.05
"""Change of the start-up time that is worth a word."""


@dataclass(frozen=True)
class TunedKernel:
    """Picks of one kernel, and what they changed in the program."""

    picks: Sequence[Pick]
    counts: Sequence[int]
    """Recorded launches of each pick."""
    gpu_change: float | None
    """Change of its GPU time as a share of the program's; None if it was not measured."""
    tuning_change_s: float | None
    """Change of the time of run-time tuning; None if there was no second run."""

    @cached_property
    def today_us(self) -> float | None:
        """Mean time of a launch today; None if some config that launches use was not timed."""
        known = [pick.today_us for pick in self.picks if pick.today_us is not None]
        return self._mean(known) if len(known) == len(self.picks) else None

    @cached_property
    def best_us(self) -> float:
        """Mean time of a launch with the picks."""
        return self._mean([pick.time_us for pick in self.picks])

    @cached_property
    def in_use(self) -> bool:
        """True if every pick is in use."""
        return all(pick.today is not None and pick.today == pick.config for pick in self.picks)

    def _mean(self, times_us: Sequence[float]) -> float:
        return sum(time_us * count for time_us, count in zip(times_us, self.counts, strict=True)) / sum(self.counts)


def result(
    kernels: Sequence[TunedKernel], skipped: Mapping[str, str], change: Change, *, by_tuning: bool = True
) -> Screen:
    """Return the screen of tuned kernels, under what two runs measured. ``by_tuning``: today's configs are."""

    def times(row: TunedKernel) -> str:
        before = "" if row.in_use or row.today_us is None else f"{microseconds(row.today_us)} -> "
        return before + microseconds(row.best_us)

    def seconds(change_s: float | None) -> str:
        return "-" if change_s is None else "0" if abs(change_s) < LEAST_S else f"{change_s:+.1f} s"

    def verdicts(row: TunedKernel) -> str:
        counts = Counter(pick.verdict for pick in row.picks)
        return ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])

    columns = [
        Column("kernel", lambda row: row.picks[0].problem.kernel, cut="start"),
        number("speedup", lambda row: ratio(row.today_us and row.today_us / row.best_us, row.in_use)),
        number("today -> best us", times),
        number("GPU time", lambda row: "-" if row.gpu_change is None else _percent(row.gpu_change)),
        number("startup", lambda row: seconds(row.tuning_change_s)),
        Column("verdict", verdicts),
    ]
    below = ["Today: what run-time tuning chose in this run, and the time that took." if by_tuning else ""]
    below += [others_line(change.others)]
    below += [f"{kernel} was not tuned: {reason}" for kernel, reason in skipped.items()]
    return Screen([headline(change.gpu, change.startup_s, change.reason)], columns, below, kernels)


def headline(gpu_change: float | None, startup_change_s: float, reason: str) -> str:
    """Return what the second run measured: ``4.4 % less GPU time, and every start is 26.5 s faster``."""
    start = ""
    if abs(startup_change_s) >= LEAST_S:
        start = f"every start is {abs(startup_change_s):.1f} s {'faster' if startup_change_s < 0 else 'slower'}"
    if gpu_change is None:
        return "; ".join(filter(None, [f"The program's GPU time was not measured: {reason}", start]))
    share = _percent(gpu_change)
    text = "The same" if share == "0" else f"{share.lstrip('+-')} {'less' if gpu_change < 0 else 'more'}"
    return f"{text} GPU time" + (f", and {start}" if start else "")


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


def _percent(share: float) -> str:
    return "0" if abs(share) < 0.0005 else f"{100 * share:+.1f} %"
