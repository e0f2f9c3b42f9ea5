"""Comparisons on the simulated GPU: how often A..A raises an alarm, and how many slowdowns of 2 % are found.

The noise, the order of blocks and the statistics are fp8tune's own; workers, checkouts and samples are left out (a
block's value is drawn with the scatter that its trimmed mean would have).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fp8tune.comparing import verdicts
from fp8tune.comparing.timing import AFTER, BEFORE, CONTROL, ORDERS
from fp8tune.comparing.verdicts import ChangeVerdict
from fp8tune.measure.simulated import MEASURED, Noise
from fp8tune.stats.estimate import Estimate

ROWS = 20
SLOWDOWN = 0.02
H200 = replace(MEASURED["NVIDIA H200"], drift_sd=0.002, throttle_share=0)
"""A device that holds still: what rows have in common shows best beside little noise."""
TRIMMED_SPREAD = 1.1
"""Standard error of the 25 % trimmed mean of normal samples, over that of their mean."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    """How one simulated comparison ended."""

    verdicts: tuple[ChangeVerdict, ...]
    is_stable: bool
    overall: Estimate


@dataclass(frozen=True)
class Common:
    """What blocks have in common beside their worker's level."""

    arm_sd: float = 0.0
    """Of a draw an arm, the same in all rounds and rows of a run: rounds do not show it."""
    places: tuple[float, ...] = (0.0,) * 6
    """Log time that each of the six turns adds to its block."""


def run(random: Generator, noise: Noise, changes: Floats, common: Common = Common()) -> Run:
    """One comparison whose rows really change by ``changes``, (row,) log ratios: stage 1, stage 2, verdicts."""
    bimodal = random.random(len(changes)) < noise.bimodal_share
    arms = common.arm_sd * random.standard_normal(3)
    first = Rounds(random, noise, bimodal, changes, arms, common.places).draw(range(verdicts.STAGE_ONE_ROUNDS))
    effects = [verdicts.paired(logs) for logs in first[0]]
    left_open = [row for row, effect in enumerate(effects) if verdicts.is_open(effect)]
    numbers = range(verdicts.STAGE_ONE_ROUNDS, verdicts.STAGE_ONE_ROUNDS + verdicts.STAGE_TWO_ROUNDS)
    second = Rounds(random, noise, bimodal[left_open], changes[left_open], arms, common.places).draw(numbers)
    final = dict(zip(left_open, [verdicts.paired(logs) for logs in second[0]], strict=True))
    ended = [
        verdicts.decide(final[row], len(left_open)) if row in final else verdicts.decide(effect)
        for row, effect in enumerate(effects)
    ]
    cleared = [[logs for row, logs in enumerate(rows) if row not in final] for rows in first]
    change, control = ([stage for stage in stages if stage] for stages in zip(cleared, second, strict=True))
    looked_at = len(first[1]) + len(second[1])
    each = all(verdicts.is_stable(verdicts.paired(logs), looked_at) for stage in control for logs in stage)
    is_stable = each and verdicts.is_stable(verdicts.geomean(control))
    return Run(tuple(ended), is_stable, verdicts.all_rows(change, control))


@dataclass(frozen=True, eq=False)
class Rounds:
    """Rounds of some rows, drawn."""

    random: Generator
    noise: Noise
    bimodal: NDArray[np.bool_]
    changes: Floats
    arms: Floats
    """What each arm adds in all rounds."""
    places: tuple[float, ...]

    def draw(self, numbers: range) -> tuple[list[list[float]], list[list[float]]]:
        """Log ratios of change and control: for each row a list, a round an entry."""
        logs = np.array([self._round(number) for number in numbers]).reshape(len(numbers), 3, len(self.changes))
        change, control = logs[:, AFTER] - logs[:, BEFORE], logs[:, CONTROL] - logs[:, BEFORE]
        return change.T.tolist(), control.T.tolist()

    def _round(self, number: int) -> Floats:
        """The mean log time of each arm on each row, (arm, row)."""
        noise, random, rows = self.noise, self.random, len(self.changes)
        logs = np.zeros((3, rows)) + (self.arms + noise.worker_sd * random.standard_normal(3))[:, None]
        logs[AFTER] += self.changes
        for process in logs:
            process += noise.process_effect(random, rows) + noise.mode_effect(random, self.bimodal)
        orders = np.array([ORDERS[(number + row) % len(ORDERS)] for row in range(rows)]).reshape(rows, 3)
        turns = np.concatenate([orders, orders[:, ::-1]], axis=1)
        drift = noise.wall(random)(noise.block_s * np.arange(turns.size)).reshape(turns.shape)
        sampling = TRIMMED_SPREAD * noise.sample_sd / math.sqrt(noise.samples)
        sd = math.hypot(noise.block_sd, noise.carry_over_sd, sampling)
        blocks = drift + sd * random.standard_normal(turns.shape)
        blocks += self.places
        for arm in (BEFORE, AFTER, CONTROL):
            logs[arm] += (blocks * (turns == arm)).sum(axis=1) / 2  # two blocks per arm and round
        return logs


def false_alarms(noise: Noise, runs: int, random: Generator, rows: int = ROWS) -> list[Run]:
    """Comparisons of a revision with itself."""
    return [run(random, noise, np.zeros(rows)) for _ in range(runs)]


def injections(noise: Noise, runs: int, random: Generator, rows: int = ROWS) -> list[Run]:
    """Comparisons whose first row is 2 % slower, the others unchanged."""
    changes = np.zeros(rows)
    changes[0] = math.log1p(SLOWDOWN)
    return [run(random, noise, changes) for _ in range(runs)]


def excludes(ended: Run, change: float = 0.0) -> bool:
    """Whether the interval of the mean over rows leaves out a change (a log ratio)."""
    low, high = ended.overall.interval
    return not low <= math.exp(change) <= high


def is_alarm(ended: Run) -> bool:
    """Whether a run of unchanged rows called one a regression, or an improvement."""
    return bool({ChangeVerdict.REGRESSION, ChangeVerdict.FASTER} & set(ended.verdicts))


def is_found(ended: Run) -> bool:
    """Whether the slowed row was called a regression."""
    return ended.verdicts[0] is ChangeVerdict.REGRESSION
