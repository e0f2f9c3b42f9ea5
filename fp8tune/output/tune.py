"""Screen of ``fp8tune tune``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul

from fp8tune.output.show import UNCHECKED
from fp8tune.output.tables import Column, Screen, number
from fp8tune.output.text import counted, counts, microseconds, ratio
from fp8tune.records import Kind, Pick
from fp8tune.stats.study import Verdict
from fp8tune.tuning.runs import Change

LEAST_S = 0.05
"""Change of the start-up time that is worth a word."""


@dataclass(frozen=True)
class TunedKernel:
    """Picks of one kernel, and what they changed in the program."""

    picks: Sequence[Pick]
    launches: Sequence[int]
    """Recorded launches of each pick."""
    gpu_change: float | None
    """Change of its GPU time as a share of the program's; None if it was not measured."""
    tuning_change_s: float | None
    """Change of the time of run-time tuning; None if there was no second run."""

    @property
    def in_use(self) -> bool:
        """True if every pick is in use."""
        return all(pick.is_in_use for pick in self.picks)

    def mean_us(self, field: str) -> float | None:
        """Return the mean over all launches of ``time_us`` or ``today_us`` of their picks; None if one is unknown."""
        times_us = [getattr(pick, field) for pick in self.picks]
        return None if None in times_us else sum(map(mul, times_us, self.launches)) / sum(self.launches)


def result(
    kernels: Sequence[TunedKernel], skipped: Mapping[str, str], change: Change, *, by_tuning: bool = True
) -> Screen:
    """Return the screen of tuned kernels, under what two runs measured. ``by_tuning``: today's configs are."""

    def speedup(row: TunedKernel) -> str:
        today_us, best_us = row.mean_us("today_us"), row.mean_us("time_us")
        return ratio(today_us / best_us if today_us and best_us else None, row.in_use)

    def times(row: TunedKernel) -> str:
        today_us = None if row.in_use else row.mean_us("today_us")
        return f"{microseconds(today_us)} -> " * (today_us is not None) + microseconds(row.mean_us("time_us"))

    def startup(row: TunedKernel) -> str:
        change_s = row.tuning_change_s
        return "-" if change_s is None else "0" if abs(change_s) < LEAST_S else f"{change_s:+.1f} s"

    def verdicts(row: TunedKernel) -> str:
        number_of = Counter(pick.verdict for pick in row.picks)
        return counts({verdict: number_of[verdict] for verdict in Verdict})

    columns = [
        Column("kernel", lambda row: row.picks[0].problem.kernel, loses="start"),
        number("speedup", speedup),
        number("today -> best us", times),
        number("GPU time", lambda row: "-" if row.gpu_change is None else _percent(row.gpu_change)),
        number("startup", startup),
        Column("verdict", verdicts),
    ]
    below = ["Today: what run-time tuning chose in this run, and the time that took." if by_tuning else ""]
    if change.others is not None and abs(change.others) >= 0.005:
        below.append(
            f"The rest of the program took {_gpu_time(change.others)} in the second run: chance, or its clock."
        )
    below += [UNCHECKED] if any(pick.kind is Kind.SIMULATED for kernel in kernels for pick in kernel.picks) else []
    below += [f"{kernel} was not tuned: {reason}" for kernel, reason in skipped.items()]
    return Screen([headline(change.gpu, change.startup_s, change.reason)], columns, below, kernels)


def headline(gpu_change: float | None, startup_change_s: float, reason: str) -> str:
    """Return what the second run measured: ``4.4 % less GPU time, and every start is 26.5 s faster``."""
    start = ""
    if abs(startup_change_s) >= LEAST_S:
        start = f"every start is {abs(startup_change_s):.1f} s {'faster' if startup_change_s < 0 else 'slower'}"
    if gpu_change is None:
        return "; ".join(filter(None, [f"The program's GPU time was not measured: {reason}", start]))
    return ", and ".join(filter(None, [_gpu_time(gpu_change), start]))


def recorded_line(command: str, kernels: int, share: float | None, file: str) -> str:
    """Return the line after the first run."""
    busy = "" if share is None else f", {100 * share:.1f} % of its GPU time"
    return f"Recorded {command}: {counted(kernels, 'kernel')} with a choice of configs{busy} ({file})"


def _percent(share: float) -> str:
    return "0" if abs(share) < 0.0005 else f"{100 * share:+.1f} %"


def _gpu_time(share: float) -> str:
    """Return a change of GPU time in words: ``4.4 % less GPU time``."""
    much = _percent(share).lstrip("+-")
    return "The same GPU time" if much == "0" else f"{much} {'less' if share < 0 else 'more'} GPU time"
