from __future__ import annotations

import random
from dataclasses import replace

import pytest
from database_rows import AXES, KERNEL, config, evidence, installed, only_study, problem, studies_of

from fp8tune import lookups
from fp8tune.ceiling import ceiling_of
from fp8tune.records import FinalsRun, NamedInts, ProcessTimes
from fp8tune.stats.decide import TICK_SHARE, control_difference, decide_finals
from fp8tune.stats.shared import choose_shared
from fp8tune.stats.study import Decision, Origin, Precedence, Stage, Today, Verdict
from fp8tune.tables.current import Recorded
from fp8tune_kernels.tables import Table

FIRST = FinalsRun("first", tie_band=0.01, keep_band=0.015)
DEFAULT = KERNEL.default
FAST, SLOW = config(32), config(128)


def timed(time_us: float, session: FinalsRun = FIRST, processes: int = 6, rounds: int = 6) -> list[ProcessTimes]:
    """Quiet ones: a process differs by up to 0.1 %, a block by up to 0.02 %."""
    random_ = random.Random(f"{time_us} {session.sweep}")
    blocks = [
        [time_us * random_.uniform(0.999, 1.001) * random_.uniform(0.9998, 1.0002) for _ in range(rounds)]
        for _ in range(processes)
    ]
    return [ProcessTimes(session, f"final {n:02d}", tuple(enumerate(values))) for n, values in enumerate(blocks)]


def decided(times_us: dict[NamedInts, list[ProcessTimes]], current: NamedInts | None = None):
    return decide_finals(times_us, current=current, default=DEFAULT, axes=AXES)


def test_finals_decide_and_say_how_sure_they_are():
    decision = decided({DEFAULT: timed(110.0), FAST: timed(100.0), SLOW: timed(120.0)})
    assert (decision.pick, decision.verdict, decision.runner_up) == (FAST, Verdict.PROVEN, DEFAULT)
    assert decision.processes == 6
    assert decision.times_us[SLOW] == pytest.approx(120.0, rel=0.002)


def test_the_current_config_stays_until_it_is_proven_slower_than_the_keep_band():
    for slower, stays in ((1.012, True), (1.03, False)):
        times = {DEFAULT: timed(150.0), FAST: timed(100.0), SLOW: timed(100.0 * slower)}
        decision = decided(times, current=SLOW)
        assert (decision.pick == SLOW) is stays
        assert decision.verdict is Verdict.PROVEN


def test_the_bands_are_those_the_sweep_went_by():
    wide = replace(FIRST, keep_band=0.05)
    times = {DEFAULT: timed(150.0, wide), FAST: timed(100.0, wide), SLOW: timed(103.0, wide)}
    assert decided(times, current=SLOW).pick == SLOW


def below_the_floor(tick_us: float, current: NamedInts | None = None, **times_us: float) -> Decision:
    """Decide between configs whose times are below the floor of this tick."""
    coarse = replace(FIRST, floor_us=tick_us / TICK_SHARE)
    configs = {"default": DEFAULT, "fast": FAST, "slow": SLOW}
    return decided({configs[name]: timed(time_us, coarse) for name, time_us in times_us.items()}, current)


def test_a_difference_of_a_tick_is_no_proof_below_the_floor():
    decision = below_the_floor(0.5, default=10.4, fast=10.0)
    assert (decision.pick, decision.verdict, decision.needs_more) == (DEFAULT, Verdict.OPEN, False)
    assert decision.ratio == pytest.approx(100 / 104, rel=0.002)


def test_proof_beats_the_floor():
    """Two problems of rowwise-2d on an H200 kept configs that were proven to be 21 % and 15 % slower."""
    decision = below_the_floor(0.032, default=9.25, fast=7.65)
    assert (decision.pick, decision.verdict) == (FAST, Verdict.PROVEN)
    decision = below_the_floor(0.032, default=7.65, fast=9.25)
    assert (decision.pick, decision.verdict) == (DEFAULT, Verdict.PROVEN)


def test_a_tick_widens_the_bounds_of_a_tie():
    """A difference of 0.3 % is a tie by a fine timer, and unknown by a coarse one; today's config is replaced."""
    for tick_us, verdict in ((0.05, Verdict.PROVEN), (0.2, Verdict.OPEN)):
        decision = below_the_floor(tick_us, default=9.25, fast=7.65, slow=7.67)
        assert (decision.pick, decision.verdict) == (FAST, verdict)
        assert not decision.needs_more


def test_what_was_picked_below_the_floor_stays_with_its_verdict():
    """A table made of a pick does not make the same evidence say less."""
    for current in (None, FAST):
        decision = below_the_floor(0.05, current, default=9.25, fast=7.65, slow=7.67)
        assert (decision.pick, decision.verdict) == (FAST, Verdict.PROVEN)


def test_the_noise_floor_is_what_the_duplicate_is_off_by():
    assert control_difference(timed(100.0), timed(100.4)) == pytest.approx(0.004, abs=0.001)
    assert control_difference(timed(100.4), timed(100.0)) == pytest.approx(0.004, abs=0.001)
    assert control_difference(timed(100.0), []) is None


def entry(time_us: float, size: NamedInts, session: FinalsRun = FIRST, screen_us: float | None = None, **others):
    return evidence(screen_us or time_us, config=size, finals=tuple(timed(time_us, session)), **others)


def test_a_study_with_finals_has_its_verdict_and_noise():
    default = entry(110.0, DEFAULT, control=tuple(timed(110.2)))
    study = only_study(default, entry(100.0, FAST), evidence(190.0, config=SLOW))
    assert (study.pick.config, study.choice.verdict, study.choice.processes) == (FAST, Verdict.PROVEN, 6)
    assert study.choice.runner_up == DEFAULT
    assert study.choice.ratio == pytest.approx(1.1, rel=0.002)
    assert study.noise == pytest.approx(0.002, abs=0.001)
    assert study.choice.upper < 0


def test_the_table_s_config_is_current_and_completed_with_the_default_s_axes():
    entries = [entry(110.0, DEFAULT), entry(100.0, FAST), entry(101.2, SLOW)]
    key = (("G", 64), ("K", 5120))
    (study,) = studies_of(entries, installed(("colwise", "", key, tuple(SLOW.items()))))
    assert (study.pick.config, study.choice.verdict) == (SLOW, Verdict.PROVEN)
    entries = [entry(110.0, DEFAULT), entry(100.0, config(32, DEFAULT["num_warps"], DEFAULT["num_stages"]))]
    (study,) = studies_of(entries, installed(("colwise", "", key, (("BLOCK_SIZE", 32),))))
    assert study.pick.config == config(32, DEFAULT["num_warps"], DEFAULT["num_stages"])
    shared = choose_shared([study], current=NamedInts(BLOCK_SIZE=32))
    assert shared is not None
    assert shared.config == study.pick.config


def test_slowdowns_compare_finals_with_finals_and_the_coarse_pass_with_the_coarse_pass():
    entries = [entry(100.0, FAST, screen_us=90.0), entry(110.0, DEFAULT, screen_us=99.0), evidence(108.0, config=SLOW)]
    study = only_study(*entries)
    assert study.slowdowns[DEFAULT] == pytest.approx(1.1, rel=0.002)
    assert study.slowdowns[SLOW] == pytest.approx(1.2)


# The next best config, and the gain over today's


def test_the_next_best_is_the_next_best_config_that_was_timed_with_its_stage():
    """It was the next finalist, 170 % slower, where the coarse pass had timed a config that is 6 % slower."""
    study = only_study(entry(100.0, FAST), entry(270.0, DEFAULT), evidence(106.0, config=SLOW))
    assert (study.next_best.config, study.next_best.stage) == (SLOW, Stage.COARSE)
    assert study.next_best.ratio == pytest.approx(1.06)
    assert (study.choice.runner_up, study.precedence) == (DEFAULT, Precedence.UNCONFIRMED)
    study = only_study(entry(100.0, FAST), entry(103.0, DEFAULT), evidence(106.0, config=SLOW))
    assert (study.next_best.config, study.next_best.stage, study.precedence) == (DEFAULT, Stage.FINAL, Precedence.NONE)


@pytest.mark.parametrize("stage", Stage)
def test_the_gain_is_over_the_config_that_a_lookup_gives(stage, monkeypatch):
    """A sweep ended on the gain over the kernel's default, where a lookup would have found the row of a near key."""
    near = ("colwise", "", (("G", 64), ("K", 4096)), tuple(SLOW.items()))
    monkeypatch.setattr(lookups, "table", lambda arch, triton: Table((near,), ("colwise",)))
    slow = entry(104.0, SLOW) if stage is Stage.FINAL else evidence(104.0, config=SLOW)
    study = only_study(entry(100.0, FAST), entry(400.0, DEFAULT), slow)
    assert study.today == Today(SLOW, Origin.SHIPPED_TABLE)
    assert study.rival(SLOW).stage is stage
    assert study.speedup == pytest.approx(1.04, rel=0.002)


def test_the_gain_is_1_for_the_config_in_use_and_unknown_for_one_without_a_time(monkeypatch):
    row = ("colwise", "", (("G", 64), ("K", 5120)), tuple(FAST.items()))
    monkeypatch.setattr(lookups, "table", lambda arch, triton: Table((row,), ()))
    assert only_study(entry(100.0, FAST), entry(400.0, DEFAULT)).speedup == 1.0
    assert only_study(entry(400.0, DEFAULT)).speedup is None


def test_without_a_table_today_s_config_is_the_recorded_one_else_the_default(monkeypatch):
    monkeypatch.setattr(lookups, "table", lambda arch, triton: Table())
    (study,) = studies_of([evidence(100.0), evidence(120.0, config=SLOW), evidence(150.0, config=DEFAULT)])
    assert study.today == Today(DEFAULT, Origin.DEFAULT)
    assert study.speedup == 1.5
    timed, recorded = [evidence(100.0), evidence(120.0, config=SLOW)], Today(SLOW, Origin.RECORDING)
    (study,) = studies_of([*timed, evidence(150.0, config=DEFAULT)], recorded={problem(): Recorded(recorded)})
    assert (study.today, study.speedup) == (recorded, 1.2)


# Times that say nothing of a kernel


def test_a_weak_flush_shows_as_a_rate_that_no_memory_has():
    rates = {"bytes_moved": 200_000_000, "ceiling_gb_per_s": 2000.0, "copy_gb_per_s": 2000.0}
    slow = evidence(200.0, config=config(64), **rates)
    assert only_study(evidence(100.0, **rates), slow).choice.verdict is Verdict.QUICK
    cached = [evidence(80.0, **rates), slow]
    assert only_study(*cached).choice.verdict is Verdict.OPEN


@pytest.mark.parametrize(("time_us", "share"), [(200.0, 0.5), (95.0, 1.0), (20.0, None)])
def test_a_recorded_launch_that_may_address_a_part_of_its_tensors_is_not_from_a_cache(time_us, share):
    recorded = replace(problem(), input_layout="recorded-0123456789ab")
    rates = {"bytes_moved": 200_000_000, "ceiling_gb_per_s": 2000.0, "copy_gb_per_s": 2000.0}
    study = only_study(
        evidence(time_us, size=recorded, **rates), evidence(300.0, config=config(64), size=recorded, **rates)
    )
    ceiling = ceiling_of(study)
    assert study.choice.verdict is Verdict.QUICK
    assert (ceiling and ceiling.share) == share
