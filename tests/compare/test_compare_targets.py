"""The targets of ``compare`` at a size that fits a test; docs/results/compare.md has them whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binomtest
from simulated_comparisons import H200, Common, excludes, false_alarms, injections, is_alarm, is_found, run

from fp8tune.measure.simulated import Noise

RUNS = 60
NOISES = [replace(Noise(), process_sd=process) for process in (0.002, 0.006)]


def test_a_revision_against_itself_raises_no_alarm() -> None:
    """At the target's 1 % of runs, more alarms than this come once in ten thousand."""
    random = np.random.default_rng(11)
    alarms = sum(is_alarm(ended) for noise in NOISES for ended in false_alarms(noise, RUNS, random))
    assert binomtest(alarms, RUNS * len(NOISES), 0.01, alternative="greater").pvalue > 1e-4


def test_a_slowdown_of_two_percent_is_found() -> None:
    random = np.random.default_rng(12)
    found = sum(is_found(ended) for noise in NOISES for ended in injections(noise, RUNS, random))
    assert binomtest(found, RUNS * len(NOISES), 0.95, alternative="less").pvalue > 1e-4


def test_a_slowdown_too_small_to_matter_is_mostly_left_alone() -> None:
    """The simulation can fail to find: a quarter of a percent is below what a verdict needs."""
    noise, random = NOISES[0], np.random.default_rng(13)
    changes = np.zeros(5)
    changes[0] = 0.0025
    found = sum(is_found(run(random, noise, changes)) for _ in range(RUNS))
    assert binomtest(found, RUNS, 0.05, alternative="greater").pvalue > 1e-4


@pytest.mark.parametrize("common", [Common(), Common(arm_sd=0.003), Common(places=(0.01, 0.0, 0.0, -0.003, 0.0, 0.0))])
def test_the_mean_over_rows_is_held_to_its_error_rate(common: Common) -> None:
    """Rows share a process' level, an arm's in all rounds, or what a place does: 5 % of intervals may leave out 0.

    From rounds alone, 56 % of the intervals of the second case did.
    """
    random = np.random.default_rng(14)
    noise = replace(H200, worker_sd=0.001)
    ended = [run(random, noise, np.zeros(4), common) for _ in range(RUNS)]
    assert binomtest(sum(map(excludes, ended)), RUNS, 0.05, alternative="greater").pvalue > 1e-4
