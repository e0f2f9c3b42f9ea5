"""Comparisons on the simulated GPU: false alarms of ``A..A``, and slowdowns of 2 % that are found.

Noise, orders of blocks and statistics are fp8tune's own; workers, checkouts and samples are left out: a block's value
has the scatter of its trimmed mean. docs/results/compare.md has more runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.stats import binomtest

from fp8tune.comparing import verdicts
from fp8tune.comparing.rounds import AFTER, BEFORE, CONTROL, ORDERS
from fp8tune.comparing.verdicts import ChangeVerdict
from fp8tune.measure.simulated import MEASURED, Noise

Floats = NDArray[np.float64]

RUNS, SIZES = 60, 20
NOISES = [replace(Noise(), process_sd=process_sd) for process_sd in (0.002, 0.006)]
H200 = replace(MEASURED["NVIDIA H200"], drift_sd=0.002, throttle_share=0, worker_sd=0.001)
TRIMMED_SPREAD = 1.1  # standard error of the 25 % trimmed mean of normal samples, over that of their mean


@dataclass(frozen=True, eq=False)
class Session:
    """A comparison of sizes that change by ``changes`` (log ratios), with an offset of each arm in all rounds."""

    random: Generator
    noise: Noise
    changes: Floats
    arm_sd: float = 0.0

    def run(self) -> tuple[list[ChangeVerdict], tuple[float, float]]:
        """Return the verdicts and the interval of the mean over sizes."""
        arms = self.arm_sd * self.random.standard_normal(3)
        sizes = np.arange(len(self.changes))
        first = self.draw(sizes, arms, range(verdicts.STAGE_ONE_ROUNDS))
        effects = [verdicts.paired(logs) for logs in first[0]]
        left_open = [size for size in sizes if verdicts.is_open(effects[size])]
        rounds = range(verdicts.STAGE_ONE_ROUNDS, verdicts.STAGE_ONE_ROUNDS + verdicts.STAGE_TWO_ROUNDS)
        second = self.draw(np.array(left_open, dtype=int), arms, rounds)
        ended = [verdicts.decide(effect) for effect in effects]
        for size, logs in zip(left_open, second[0], strict=True):
            ended[size] = verdicts.decide(verdicts.paired(logs), len(left_open))
        cleared = [[logs for size, logs in enumerate(rows) if size not in left_open] for rows in first]
        change, control = ([stage for stage in stages if stage] for stages in zip(cleared, second, strict=True))
        return ended, verdicts.all_rows(change, control).interval

    def draw(self, sizes: NDArray[np.int_], arms: Floats, rounds: range) -> tuple[list[list[float]], list[list[float]]]:
        """Return the log ratios of change and control: for each size a list, one entry per round."""
        if not sizes.size:
            return [], []
        logs = np.array([self.round(sizes, arms, number) for number in rounds])
        changes, controls = logs[:, AFTER] - logs[:, BEFORE], logs[:, CONTROL] - logs[:, BEFORE]
        return changes.T.tolist(), controls.T.tolist()

    def round(self, sizes: NDArray[np.int_], arms: Floats, number: int) -> Floats:
        """Return the mean log time of each arm on each size."""
        noise, random = self.noise, self.random
        logs = np.zeros((3, len(sizes))) + (arms + noise.worker_sd * random.standard_normal(3))[:, None]
        logs[AFTER] += self.changes[sizes]
        for process in logs:
            process += noise.process_effect(random, len(sizes))
        orders = np.array([ORDERS[(number + size) % len(ORDERS)] for size in range(len(sizes))])
        turns = np.concatenate([orders, orders[:, ::-1]], axis=1)
        drift = noise.wall(random)(noise.block_s * np.arange(turns.size)).reshape(turns.shape)
        sampling = TRIMMED_SPREAD * noise.sample_sd / math.sqrt(noise.samples)
        sd = math.hypot(noise.block_sd, noise.carry_over_sd, sampling)
        blocks = drift + sd * random.standard_normal(turns.shape)
        for arm in (BEFORE, AFTER, CONTROL):
            logs[arm] += (blocks * (turns == arm)).sum(axis=1) / 2  # two blocks per arm and round
        return logs


def share_of(word: ChangeVerdict, change: float, seed: int, sizes: int = SIZES) -> tuple[int, int]:
    """Return in how many of the runs any size ends in a word if the first changes, and the number of runs."""
    random, changes = np.random.default_rng(seed), np.zeros(sizes)
    changes[0] = math.log1p(change)
    hits = [word in Session(random, noise, changes).run()[0] for noise in NOISES for _ in range(RUNS)]
    return sum(hits), len(hits)


@pytest.mark.parametrize("word", [ChangeVerdict.REGRESSION, ChangeVerdict.FASTER])
def test_a_revision_against_itself_raises_no_alarm(word: ChangeVerdict) -> None:
    """At the target of 1 % of runs, more alarms than this come once in ten thousand."""
    assert binomtest(*share_of(word, 0.0, 11), 0.01, alternative="greater").pvalue > 1e-4


def test_a_slowdown_of_two_percent_is_found() -> None:
    assert binomtest(*share_of(ChangeVerdict.REGRESSION, 0.02, 12), 0.95, alternative="less").pvalue > 1e-4


def test_a_slowdown_too_small_to_matter_is_mostly_left_alone() -> None:
    """The simulation can fail to find: a quarter of a percent is below what a verdict needs."""
    assert binomtest(*share_of(ChangeVerdict.REGRESSION, 0.0025, 13, 5), 0.05, alternative="greater").pvalue > 1e-4


@pytest.mark.parametrize("arm_sd", [0.0, 0.003])
def test_the_interval_of_the_mean_covers_offsets_of_arms(arm_sd: float) -> None:
    """Without the control's drift in the error, 56 % of the second case's intervals excluded 1."""
    random = np.random.default_rng(14)
    intervals = [Session(random, H200, np.zeros(4), arm_sd).run()[1] for _ in range(RUNS)]
    excluded = sum(not low <= 1 <= high for low, high in intervals)
    assert binomtest(excluded, RUNS, 0.05, alternative="greater").pvalue > 1e-4


def test_every_arm_has_every_position_equally_often() -> None:
    assert verdicts.STAGE_ONE_ROUNDS % len(ORDERS) == verdicts.STAGE_TWO_ROUNDS % len(ORDERS) == 0
