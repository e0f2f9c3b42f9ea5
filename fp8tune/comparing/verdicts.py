"""Verdicts on changes and the records that hold them, decided from log ratios of after over before.

Above 0 is slower. Stage 1 times every row. Rows that it leaves open are decided on the rounds of stage 2 alone, so that
no row is tested on the data that chose it. Thresholds are on ratios of times.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from statistics import geometric_mean

from fp8tune.records import Device, Kind, NamedInts, Problem
from fp8tune.stats.estimate import Estimate, estimate, t_quantile

PROVEN = math.log(1.005)  # a REGRESSION is proven to be slower by more than this, a FASTER row to be faster
HARMLESS = math.log(1.02)  # a row is CLEAR if a slowdown of this size can be ruled out
ERROR = 0.05  # share of runs in which the verdicts on open rows, all together, may err; one-sided, as is CLEAR's own
POWER = 0.95  # share of runs that would find the smallest detectable slowdown

# Share of rounds trimmed at either end: of eighteen the two slowest and the two fastest. Now and then a block takes
# several times as long: 8 of 1,449 on one H100. Untrimmed, five of twelve changed rows had intervals of 3 to 7 %.
TRIMMED_SHARE = 0.15

# Reasons that many rows share.
AGREED = "outputs agree, times not compared"
SIMULATED = "simulated: no output was checked"

# Both are multiples of six, the number of orders of three arms, so that each row has all orders equally often.
STAGE_ONE_ROUNDS, STAGE_TWO_ROUNDS = 6, 18


class ChangeVerdict(StrEnum):
    """Verdict on a row of a comparison, the most urgent first."""

    REGRESSION = "REGRESSION"  # proven to be over 0.5 % slower
    WRONG = "WRONG"  # right output before; now a wrong one, another one or none
    OPEN = "OPEN"  # too much noise, a failure while it was timed, or something that cannot be compared
    FASTER = "FASTER"  # proven to be over 0.5 % faster
    CLEAR = "CLEAR"  # a slowdown of 2 % or more is ruled out
    AGREE = "AGREE"  # outputs agree, where nothing else was asked
    SAME_CODE = "SAME-CODE"  # same machine code and launch; of recorded results, same source


@dataclass(frozen=True)
class Revision:
    """One side: the user's name and its commit, with ``+`` appended if there are uncommitted changes."""

    name: str
    commit: str

    def __str__(self) -> str:
        return f"{self.name} {self.commit[:12]}{'+' if self.commit.endswith('+') else ''}"


@dataclass(frozen=True)
class ComparedRow:
    """One kernel on one size and device at both revisions. Without a problem, the kernel has no results at all."""

    kernel: str
    verdict: ChangeVerdict
    problem: Problem | None = None
    device: Device | None = None
    before_us: float | None = None
    after_us: float | None = None
    reason: str = ""
    before_config: NamedInts | None = None
    after_config: NamedInts | None = None
    effect: Estimate | None = None  # change (a log ratio) in the data that gave the verdict; None without any noise
    control: Estimate | None = None  # change of the A/A control, which runs the first side's code once more
    is_stable: bool | None = None  # True if the control moved by no more than chance; None without one
    tested: int = 1  # number of rows that were decided together
    n: int = 0  # rounds behind the verdict; of recorded results, processes on the side with fewer
    disturbances: tuple[str, ...] = ()  # why some of its blocks were slower than they should be
    kind: Kind = Kind.MEASURED  # how both sides were run

    def of_kind(self, kind: Kind) -> ComparedRow:
        """Return the row as it was run. A simulated one is never CLEAR, because no output was checked."""
        if kind is Kind.SIMULATED and self.verdict is ChangeVerdict.CLEAR:
            return replace(self, kind=kind, verdict=ChangeVerdict.OPEN, reason=SIMULATED)
        return replace(self, kind=kind)

    @property
    def shape(self) -> NamedInts:
        """Sizes; empty without results."""
        return self.problem.shape if self.problem else NamedInts()

    @property
    def ratio(self) -> float | None:
        """Time after divided by time before."""
        if self.effect:
            return self.effect.ratio
        return self.after_us / self.before_us if self.before_us and self.after_us else None

    @property
    def smallest_detectable(self) -> float | None:
        """Least ratio that such data call a REGRESSION in 95 % of runs."""
        return smallest_detectable(self.effect, self.tested) if self.effect else None


@dataclass(frozen=True)
class Comparison:
    """All rows of two revisions."""

    before: Revision
    after: Revision
    rows: tuple[ComparedRow, ...]
    added: int = 0  # sizes, or kernels, of the second side alone, and those that only it gets right
    removed: int = 0  # sizes, or kernels, of the first side alone
    overall: Estimate | None = None  # geometric mean over rows timed against each other; None of recorded results
    control: Estimate | None = None  # geometric mean of the A/A control

    @property
    def counts(self) -> Counter[ChangeVerdict]:
        """Number of rows by verdict."""
        return Counter(row.verdict for row in self.rows)

    @property
    def ratio(self) -> float | None:
        """Geometric mean of the rows whose code changed; 1 if none did, None if nothing could be compared."""
        if self.overall:
            return self.overall.ratio
        changed = [row for row in self.rows if row.verdict is not ChangeVerdict.SAME_CODE]
        if ratios := [row.ratio for row in changed if row.ratio]:
            return geometric_mean(ratios)
        return 1.0 if len(changed) < len(self.rows) else None

    @property
    def is_stable(self) -> bool | None:
        """True if each control, and all together, moved by no more than chance; None without any."""
        if self.control is None:
            return None
        return is_stable(self.control) and all(row.is_stable is not False for row in self.rows)

    @property
    def exit_code(self) -> int:
        """1 for REGRESSION or WRONG; 3 if a row is OPEN, nothing was compared or a control drifted; else 0.

        A simulated FASTER is no all-clear either.
        """
        if self.counts[ChangeVerdict.REGRESSION] or self.counts[ChangeVerdict.WRONG]:
            return 1
        is_empty = not self.rows and bool(self.added) == bool(self.removed)  # what was renamed was not compared
        is_open = self.counts[ChangeVerdict.OPEN] or any(
            row.kind is Kind.SIMULATED and row.verdict is ChangeVerdict.FASTER for row in self.rows
        )
        return 3 if is_empty or is_open or self.is_stable is False else 0


def paired(logs: Sequence[float]) -> Estimate:
    """Return the change from one log ratio per round, trimmed from seven rounds on. Raises ValueError for one."""
    return estimate(logs, TRIMMED_SHARE)


def unpaired(before_us: Sequence[float], after_us: Sequence[float]) -> Estimate:
    """Return the change between times of different processes, one time each, for unequal spreads (Yuen 1974)."""
    before, after = (paired([math.log(time_us) for time_us in times_us]) for times_us in (before_us, after_us))
    return weighted([(-1.0, before), (1.0, after)])


def geomean(stages: Sequence[Sequence[Sequence[float]]]) -> Estimate:
    """Return the geometric mean over all rows, from the log ratios of each stage: rows of rounds.

    Rounds are averaged over rows first, because rows timed by the same processes share what those have in common.
    """
    rows = sum(map(len, stages))
    rounds = [[math.fsum(logs) / len(stage) for logs in zip(*stage, strict=True)] for stage in stages]
    return weighted([(len(stage) / rows, paired(means)) for stage, means in zip(stages, rounds, strict=True)])


def all_rows(changes: Sequence[Sequence[Sequence[float]]], controls: Sequence[Sequence[Sequence[float]]]) -> Estimate:
    """Return the geometric mean of the change over all rows, with the drift of the control in its error.

    Rounds do not show what an arm has in common in all of them, for instance where its memory lies. The control, which
    should not move, does: its drift is one more variance, with one degree of freedom.
    """
    return weighted([(1.0, geomean(changes)), (1.0, Estimate(0.0, abs(geomean(controls).mean), 1.0))])


def is_open(change: Estimate) -> bool:
    """Return True if stage 1 leaves a row open: it moved by over 0.5 %, or may be 2 % slower."""
    return abs(change.mean) > PROVEN or change.upper(ERROR) >= HARMLESS


def decide(change: Estimate, tested: int = 1) -> ChangeVerdict:
    """Return the verdict on one of ``tested`` rows that are decided together (Bonferroni)."""
    if change.lower(ERROR / tested) > PROVEN:
        return ChangeVerdict.REGRESSION
    if change.upper(ERROR / tested) < -PROVEN:
        return ChangeVerdict.FASTER
    return ChangeVerdict.CLEAR if change.upper(ERROR) < HARMLESS else ChangeVerdict.OPEN


def smallest_detectable(change: Estimate, tested: int = 1) -> float:
    """Return the least ratio that data of this noise and length call a REGRESSION in 95 % of runs."""
    return math.exp(PROVEN + _noncentrality(ERROR / tested, change.df) * change.error)


@cache
def _noncentrality(level: float, df: float) -> float:
    """Return the standard errors above the threshold at which the test at ``level`` has its power."""
    from scipy.special import nctdtrinc  # takes 0.3 s; scipy.stats and a search take another

    return float(nctdtrinc(df, 1 - POWER, t_quantile(1 - level, df)))


def is_stable(control: Estimate, tested: int = 1) -> bool:
    """Return True if one of ``tested`` controls stayed within 0.5 %, or moved by no more than chance."""
    by_chance = control.lower(ERROR / 2 / tested) <= 0 <= control.upper(ERROR / 2 / tested)
    return abs(control.mean) <= PROVEN or by_chance


def weighted(parts: Sequence[tuple[float, Estimate]]) -> Estimate:
    """Return a weighted sum of independent estimates, its degrees of freedom by Welch and Satterthwaite."""
    variances = [(weight * part.error) ** 2 for weight, part in parts]
    total = math.fsum(variances)
    shares = math.fsum(variance**2 / part.df for variance, (_, part) in zip(variances, parts, strict=True))
    df = total**2 / shares if shares else min(part.df for _, part in parts)
    return Estimate(math.fsum(weight * part.mean for weight, part in parts), math.sqrt(total), df)
