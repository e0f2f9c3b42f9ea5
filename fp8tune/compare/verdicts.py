"""The statistics of ``compare``: one log ratio a round and row goes in, one word a row comes out.

The worker process is the unit: a round is three fresh ones, and gives each row one log ratio, after over before. Stage
1 looks at every row; the rows it finds contested are decided on stage 2's fresh rounds alone, so that no row is tested
on the data that chose it. All thresholds are on ratios of times: above 1 the kernel became slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

SLOWDOWN = math.log(1.005)
"""A change smaller than this is none: a REGRESSION must be proven to be worse, an IMPROVEMENT to be better by it."""
HARMLESS = math.log(1.02)
"""A row is CLEAR where a slowdown of this size can be ruled out."""
ERROR = 0.05
"""Share of runs in which all verdicts on contested rows together may err; one-sided, as is CLEAR's own."""
POWER = 0.95
"""Share of runs that would have found the smallest detectable effect."""

TRIMMED_SHARE = 0.15
"""Of rounds, at either end: of eighteen the two slowest and the two fastest.

Now and then a block takes several times as long, perhaps because its host was kept from launching: 8 of 1,449 blocks of
a sweep on one H100, 9 of 9,411 in earlier ones. Untrimmed, five of twelve changed rows there had intervals of +-3 to
+-7 %."""

STAGE_ONE_ROUNDS = 6
STAGE_TWO_ROUNDS = 18
"""Both are multiples of six, the orders in which three arms can take turns: each row has all of them equally often."""


class ChangeVerdict(StrEnum):
    """How a row of a comparison ends."""

    SAME_CODE = "SAME-CODE"
    """Identical binary, launch and grid (from recorded rows: identical source)."""
    CLEAR = "CLEAR"
    """No slowdown of 2 % or more."""
    REGRESSION = "REGRESSION"
    IMPROVEMENT = "IMPROVEMENT"
    INCONCLUSIVE = "INCONCLUSIVE"
    NEWLY_WRONG = "NEWLY-WRONG"
    """Right bytes before, wrong ones after."""
    NEW = "NEW"
    REMOVED = "REMOVED"
    NO_ROWS = "no rows"
    """Nothing recorded to compare with."""


@dataclass(frozen=True)
class Effect:
    """A mean log ratio and its standard error, with ``df`` degrees of freedom of Student's t."""

    mean: float
    error: float
    df: float

    @property
    def ratio(self) -> float:
        """After / before."""
        return math.exp(self.mean)

    @property
    def interval(self) -> tuple[float, float]:
        """The two-sided 95 % interval of the ratio."""
        return math.exp(self.lower(0.025)), math.exp(self.upper(0.025))

    def lower(self, level: float) -> float:
        """The one-sided lower bound of the log ratio that errs in a share ``level`` of cases."""
        return self.mean - _quantile(level, self.df) * self.error

    def upper(self, level: float) -> float:
        """The one-sided upper bound."""
        return self.mean + _quantile(level, self.df) * self.error


def paired(logs: Sequence[float]) -> Effect:
    """The effect from one log ratio a round: the trimmed mean, its error from the winsorized variance.

    With fewer than seven rounds none are trimmed, and it is Student's t. Tukey and McLaughlin 1963 have the statistic,
    Yuen 1974 that of two samples. Raises ValueError for fewer than two rounds.
    """
    if len(logs) < 2:
        raise ValueError(f"an error needs two rounds, got {len(logs)}")
    cut = int(TRIMMED_SHARE * len(logs))
    ordered = sorted(logs)
    kept = ordered[cut : len(ordered) - cut]
    winsorized = [kept[0]] * cut + kept + [kept[-1]] * cut
    center = math.fsum(winsorized) / len(winsorized)
    squares = math.fsum((value - center) ** 2 for value in winsorized)
    freedom = len(kept) - 1
    return Effect(math.fsum(kept) / len(kept), math.sqrt(squares / (len(kept) * freedom)), freedom)


def unpaired(before_us: Sequence[float], after_us: Sequence[float]) -> Effect:
    """The effect between times of different processes, one time each, for unequal spreads: Welch's, trimmed Yuen's."""
    before, after = (paired([math.log(time) for time in times]) for times in (before_us, after_us))
    return weighted([(-1.0, before), (1.0, after)])


def weighted(parts: Sequence[tuple[float, Effect]]) -> Effect:
    """A weighted sum of independent effects, its degrees of freedom by Welch and Satterthwaite."""
    variances = [(weight * part.error) ** 2 for weight, part in parts]
    total = math.fsum(variances)
    shares = math.fsum(variance**2 / part.df for variance, (_, part) in zip(variances, parts, strict=True))
    df = total**2 / shares if shares else min(part.df for _, part in parts)
    return Effect(math.fsum(weight * part.mean for weight, part in parts), math.sqrt(total), df)


def geomean(stages: Sequence[Sequence[Sequence[float]]]) -> Effect:
    """The geometric mean over all rows, from the log ratios of each stage: a list of rows, each a list of rounds.

    Rows timed by the same processes share what those have in common, so rounds are averaged over rows first.
    """
    rows = sum(map(len, stages))
    rounds = [[math.fsum(logs) / len(stage) for logs in zip(*stage, strict=True)] for stage in stages]
    return weighted([(len(stage) / rows, paired(means)) for stage, means in zip(stages, rounds, strict=True)])


def all_rows(changes: Sequence[Sequence[Sequence[float]]], controls: Sequence[Sequence[Sequence[float]]]) -> Effect:
    """The geometric mean of the change over all rows, with an error that counts what the control arm moved by.

    Rounds tell how far processes of one arm are apart. They do not tell what an arm has in common in all rounds, for
    instance because its memory lies in the same place each time. The control arm does: it runs the first side's code
    and should not move at all. What it moved by is one more variance, with one degree of freedom.
    """
    return weighted([(1.0, geomean(changes)), (1.0, Effect(0.0, abs(geomean(controls).mean), 1.0))])


def contested(effect: Effect) -> bool:
    """Whether stage 1 leaves a row open: it moved by over 0.5 %, or a slowdown of 2 % cannot be ruled out yet."""
    return abs(effect.mean) > SLOWDOWN or effect.upper(ERROR) >= HARMLESS


def judge(effect: Effect, tested: int = 1) -> ChangeVerdict:
    """The verdict on one of ``tested`` rows that are decided together (Bonferroni)."""
    if effect.lower(ERROR / tested) > SLOWDOWN:
        return ChangeVerdict.REGRESSION
    if effect.upper(ERROR / tested) < -SLOWDOWN:
        return ChangeVerdict.IMPROVEMENT
    return ChangeVerdict.CLEAR if effect.upper(ERROR) < HARMLESS else ChangeVerdict.INCONCLUSIVE


def smallest_detectable(effect: Effect, tested: int = 1) -> float:
    """The least ratio that data of this noise and length call a REGRESSION in 95 % of runs."""
    return math.exp(SLOWDOWN + _noncentrality(ERROR / tested, effect.df) * effect.error)


def quiet(control: Effect, tested: int = 1) -> bool:
    """Whether a control arm stayed where it belongs: within +-0.5 %, or outside by no more than chance.

    ``tested``: how many control arms are looked at together.
    """
    by_chance = control.lower(ERROR / 2 / tested) <= 0 <= control.upper(ERROR / 2 / tested)
    return abs(control.mean) <= SLOWDOWN or by_chance


@cache
def _quantile(level: float, df: float) -> float:
    from scipy.stats import t  # a second to import, and reading recorded rows may need none

    return float(t.isf(level, df))


@cache
def _noncentrality(level: float, df: float) -> float:
    """How many standard errors above the threshold an effect must lie for the test at ``level`` to have its power."""
    from scipy.optimize import brentq
    from scipy.stats import nct

    bound = _quantile(level, df)
    return float(brentq(lambda nc: nct.sf(bound, df, nc) - POWER, 0, 10 * bound + 20))
