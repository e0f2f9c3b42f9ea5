"""The statistics of ``compare``: one log ratio a round and row goes in, one verdict a row comes out.

A round is three fresh worker processes and gives each row one log ratio, after over before (above 0: slower). Stage 1
times every row. The rows it leaves open are decided on stage 2's rounds alone: no row is tested on the data that chose
it. Thresholds are on ratios of times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from functools import cache

from fp8tune.stats.estimate import Estimate, estimate, t_quantile

SLOWDOWN = math.log(1.005)
"""A REGRESSION must be proven to be worse by more than this, an IMPROVEMENT to be better."""
HARMLESS = math.log(1.02)
"""A row is CLEAR if a slowdown of this size can be ruled out."""
ERROR = 0.05
"""Share of runs in which the verdicts on open rows, all together, may err; one-sided, as is CLEAR's own."""
POWER = 0.95
"""Share of runs that would have found the smallest detectable slowdown."""

TRIMMED_SHARE = 0.15
"""Of rounds, at either end: of eighteen the two slowest and the two fastest. Now and then a block takes several times
as long: 8 of 1,449 on one H100. Untrimmed, five of twelve changed rows there had intervals of +-3 to +-7 %."""

STAGE_ONE_ROUNDS = 6
STAGE_TWO_ROUNDS = 18
"""Both are multiples of six, the number of orders of three arms: each row has all of them equally often."""


class ChangeVerdict(StrEnum):
    """Verdict on a row of a comparison."""

    SAME_CODE = "SAME-CODE"
    """Identical binary, launch and grid (from recorded rows: identical source)."""
    CLEAR = "CLEAR"
    """No slowdown of 2 % or more."""
    REGRESSION = "REGRESSION"
    """Proven to be over 0.5 % slower."""
    IMPROVEMENT = "IMPROVEMENT"
    """Proven to be over 0.5 % faster."""
    INCONCLUSIVE = "INCONCLUSIVE"
    """None of these, or a side failed while it was timed."""
    NEWLY_WRONG = "NEWLY-WRONG"
    """Right bytes before, wrong ones after."""
    NEW = "NEW"
    """On the second side only, or not right before."""
    REMOVED = "REMOVED"
    """On the first side only."""
    NO_ROWS = "no rows"
    """Of recorded rows: nothing that may be paired; the reason says why."""


def paired(logs: Sequence[float]) -> Estimate:
    """Return the change from one log ratio a round, trimmed from seven rounds on. Raises ValueError for one."""
    return estimate(logs, TRIMMED_SHARE)


def unpaired(before_us: Sequence[float], after_us: Sequence[float]) -> Estimate:
    """Return the change between times of different processes, one time each, for unequal spreads (Yuen 1974)."""
    before, after = (paired([math.log(time) for time in times]) for times in (before_us, after_us))
    return weighted([(-1.0, before), (1.0, after)])


def geomean(stages: Sequence[Sequence[Sequence[float]]]) -> Estimate:
    """Return the geometric mean over all rows, from the log ratios of each stage: rows of rounds.

    Rounds are averaged over rows first, because rows timed by the same processes share what those have in common.
    """
    rows = sum(map(len, stages))
    rounds = [[math.fsum(logs) / len(stage) for logs in zip(*stage, strict=True)] for stage in stages]
    return weighted([(len(stage) / rows, paired(means)) for stage, means in zip(stages, rounds, strict=True)])


def all_rows(changes: Sequence[Sequence[Sequence[float]]], controls: Sequence[Sequence[Sequence[float]]]) -> Estimate:
    """Return the geometric mean of the change over all rows, with the drift of the control arm in its error.

    Rounds do not show what an arm has in common in all of them, for instance where its memory lies; the control arm,
    which should not move, does. What it moved by is one more variance, with one degree of freedom.
    """
    return weighted([(1.0, geomean(changes)), (1.0, Estimate(0.0, abs(geomean(controls).mean), 1.0))])


def is_open(change: Estimate) -> bool:
    """Return True if stage 1 leaves a row open: it moved by over 0.5 %, or may be 2 % slower."""
    return abs(change.mean) > SLOWDOWN or change.upper(ERROR) >= HARMLESS


def decide(change: Estimate, tested: int = 1) -> ChangeVerdict:
    """Return the verdict on one of ``tested`` rows that are decided together (Bonferroni)."""
    if change.lower(ERROR / tested) > SLOWDOWN:
        return ChangeVerdict.REGRESSION
    if change.upper(ERROR / tested) < -SLOWDOWN:
        return ChangeVerdict.IMPROVEMENT
    return ChangeVerdict.CLEAR if change.upper(ERROR) < HARMLESS else ChangeVerdict.INCONCLUSIVE


def smallest_detectable(change: Estimate, tested: int = 1) -> float:
    """Return the least ratio that data of this noise and length call a REGRESSION in 95 % of runs."""
    return math.exp(SLOWDOWN + _noncentrality(ERROR / tested, change.df) * change.error)


def is_stable(control: Estimate, tested: int = 1) -> bool:
    """Return True if one of ``tested`` control arms stayed within +-0.5 %, or moved by no more than chance."""
    by_chance = control.lower(ERROR / 2 / tested) <= 0 <= control.upper(ERROR / 2 / tested)
    return abs(control.mean) <= SLOWDOWN or by_chance


@cache
def _noncentrality(level: float, df: float) -> float:
    """Return the standard errors above the threshold at which the test at ``level`` has its power."""
    from scipy.optimize import brentq  # a second to import, and comparing recorded rows may need none
    from scipy.stats import nct

    bound = t_quantile(1 - level, df)
    return float(brentq(lambda nc: nct.sf(bound, df, nc) - POWER, 0, 10 * bound + 20))


def weighted(parts: Sequence[tuple[float, Estimate]]) -> Estimate:
    """Return a weighted sum of independent estimates, its degrees of freedom by Welch and Satterthwaite."""
    variances = [(weight * part.error) ** 2 for weight, part in parts]
    total = math.fsum(variances)
    shares = math.fsum(variance**2 / part.df for variance, (_, part) in zip(variances, parts, strict=True))
    df = total**2 / shares if shares else min(part.df for _, part in parts)
    return Estimate(math.fsum(weight * part.mean for weight, part in parts), math.sqrt(total), df)
