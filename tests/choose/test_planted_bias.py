"""Times that say nothing of a kernel are flagged: a coarse tick, a cache that was not flushed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from database_rows import config, evidence, problem

from fp8tune.choose import calibration
from fp8tune.choose.decision import PickVerdict
from fp8tune.choose.ranking import winners
from fp8tune.measure.arms import Place, Work
from fp8tune.measure.simulated import Noise, SimulatedClock
from fp8tune.measure.timing import tick


def test_a_coarse_tick_raises_the_floor():
    """1.024 us, as seen on some devices, is 0.25 % of 410 us."""
    coarse, fine = (
        SimulatedClock(1, Noise(tick_us=tick_us)).block(Work("x", 300_000_000), Place()).samples_us
        for tick_us in (1.024, 0.032)
    )
    assert calibration.floor_us({}, tick(coarse)) == pytest.approx(410, rel=0.01)
    assert calibration.floor_us({}, tick(fine)) == pytest.approx(12.8, rel=0.01)


def test_a_weak_flush_shows_as_a_rate_that_no_memory_has():
    rates = {"bytes_moved": 200_000_000, "ceiling_gb_per_s": 2000.0, "copy_gb_per_s": 2000.0}
    honest = evidence(100.0, **rates)
    cached = evidence(80.0, of=problem(K=2048), **rates)
    other = evidence(200.0, of=problem(K=2048), config=config(64), **rates)
    found = {winner.problem: winner for winner in winners([honest, cached, other])}
    assert found[problem()].verdict is PickVerdict.QUICK
    assert found[problem(K=2048)].verdict is PickVerdict.UNRESOLVABLE


@pytest.mark.parametrize(("time_us", "share"), [(200.0, 0.5), (95.0, 1.0), (20.0, None)])
def test_a_recorded_launch_that_may_address_a_part_of_its_tensors_is_not_from_a_cache(
    time_us: float, share: float | None
) -> None:
    recorded = replace(problem(), input_layout="recorded-0123456789ab")
    rates = {"bytes_moved": 200_000_000, "ceiling_gb_per_s": 2000.0, "copy_gb_per_s": 2000.0}
    (winner,) = winners([evidence(time_us, of=recorded, **rates)])
    assert winner.verdict is PickVerdict.QUICK
    assert winner.ceiling_share == share
