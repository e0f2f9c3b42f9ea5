"""Stability and loss of picks on the simulated GPU: true times are known, so each target is exact.

A table is 20 independent problems. Each is swept twice from scratch, and once more with the first pick as the committed
table's entry. A finer answer takes more tables: 1,000 are ten minutes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from scipy.stats import binomtest
from simulated_sweeps import SimulatedProblem, sweep

from fp8tune.measure.simulated import MEASURED, Noise
from fp8tune.stats.decide import MeasuringPlan

ROWS, TABLES = 20, 4
IMPROBABLE = 1e-4
"""A count that would come this rarely at the target itself fails the test."""


@dataclass(frozen=True)
class Row:
    """One problem. Slowdowns are shares, from true times."""

    is_kept: bool
    """The sweep with the committed table gives the same pick."""
    is_agreed: bool
    """Two sweeps from scratch give the same pick."""
    disagreement: float
    """How far apart their picks are."""
    regret: float
    against_default: float


def table(seed: Sequence[int], noise: Noise, plan: MeasuringPlan = MeasuringPlan()) -> list[Row]:
    random = np.random.default_rng(seed)
    return [row(SimulatedProblem.draw(random, noise), random, plan) for _ in range(ROWS)]


def row(problem: SimulatedProblem, random: np.random.Generator, plan: MeasuringPlan) -> Row:
    """Sweep a problem three times and compare with its true times."""
    first, second = (sweep(problem, None, random, plan) for _ in range(2))
    again = sweep(problem, first.pick, random, plan)
    return Row(
        is_kept=again.pick == first.pick,
        is_agreed=second.pick == first.pick,
        disagreement=abs(math.log1p(problem.slowdown(second.pick, first.pick))),
        regret=problem.slowdown(first.pick),
        against_default=problem.slowdown(first.pick, problem.default),
    )


def is_met(count: int, total: int, target: float, alternative: str) -> bool:
    return binomtest(count, total, target, alternative=alternative).pvalue > IMPROBABLE


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [row for number in range(TABLES) for row in table((17, number), Noise())]


@pytest.mark.slow
def test_a_second_sweep_with_the_committed_table_changes_nothing(rows: list[Row]) -> None:
    """A table stays as it is in 98 % of cases."""
    assert is_met(sum(not row.is_kept for row in rows), len(rows), 1 - 0.98 ** (1 / ROWS), "greater")


@pytest.mark.slow
def test_two_sweeps_from_scratch_agree_or_are_close(rows: list[Row]) -> None:
    assert is_met(sum(row.is_agreed for row in rows), len(rows), 0.90, "less")
    assert math.expm1(max(row.disagreement for row in rows)) <= 0.0125


@pytest.mark.slow
def test_picks_are_close_to_the_best_and_lose_nothing_against_the_default(rows: list[Row]) -> None:
    regrets = np.array([row.regret for row in rows])
    assert regrets.mean() <= 0.005
    assert np.quantile(regrets, 0.95) <= 0.0125
    assert regrets.max() <= 0.02
    assert not any(row.against_default > 0.01 for row in rows)


@pytest.mark.parametrize("device", MEASURED)
def test_the_noise_of_a_measured_device_leaves_its_picks(device: str) -> None:
    rows = table((18,), MEASURED[device])
    assert is_met(sum(not row.is_kept for row in rows), len(rows), 1 - 0.98 ** (1 / ROWS), "greater")
    assert max(row.regret for row in rows) <= 0.02


def test_few_processes_would_not_do() -> None:
    """Problems are decided from two processes: fewer rows agree, so the targets tell good from bad."""
    single = MeasuringPlan(processes=2, more_processes=())
    few = [row for number in range(2) for row in table((17, number), replace(Noise(), process_sd=0.01), single)]
    agreed = sum(row.is_agreed for row in few)
    assert binomtest(agreed, len(few), 0.90, alternative="less").pvalue < 0.01
