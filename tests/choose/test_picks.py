from __future__ import annotations

import random
from dataclasses import replace

import pytest
from database_rows import AXES, KERNEL, config, evidence, installed
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.choose import ranking
from fp8tune.choose.decision import TICK_SHARE, Decision, PickVerdict, decide_finals, noise_floor
from fp8tune.records import FinalsRun, NamedInts, ProcessTimes

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


def decided(times_us: dict[NamedInts, list[ProcessTimes]], incumbent: NamedInts | None = None):
    return decide_finals(times_us, incumbent=incumbent, default=DEFAULT, axes=AXES)


def test_finals_decide_and_say_how_sure_they_are():
    decision = decided({DEFAULT: timed(110.0), FAST: timed(100.0), SLOW: timed(120.0)})
    assert (decision.config, decision.verdict, decision.runner_up) == (FAST, PickVerdict.CERTIFIED, DEFAULT)
    assert decision.processes == 6
    assert decision.times_us[SLOW] == pytest.approx(120.0, rel=0.002)


def test_the_incumbent_stays_until_it_is_proven_slower_than_the_keep_band():
    for slower, kept in ((1.012, True), (1.03, False)):
        times = {DEFAULT: timed(150.0), FAST: timed(100.0), SLOW: timed(100.0 * slower)}
        decision = decided(times, incumbent=SLOW)
        assert (decision.config == SLOW) is kept
        assert (decision.verdict is PickVerdict.KEPT_INCUMBENT) is kept


def test_the_bands_are_those_the_sweep_went_by():
    wide = replace(FIRST, keep_band=0.05)
    times = {DEFAULT: timed(150.0, wide), FAST: timed(100.0, wide), SLOW: timed(103.0, wide)}
    assert decided(times, incumbent=SLOW).config == SLOW


def below_the_floor(tick_us: float, incumbent: NamedInts | None = None, **times_us: float) -> Decision:
    """Decide between configs whose times are below the floor of this tick."""
    coarse = replace(FIRST, floor_us=tick_us / TICK_SHARE)
    configs = {"default": DEFAULT, "fast": FAST, "slow": SLOW}
    return decided({configs[name]: timed(time_us, coarse) for name, time_us in times_us.items()}, incumbent)


def test_a_difference_of_a_tick_is_no_proof_below_the_floor():
    decision = below_the_floor(0.5, default=10.4, fast=10.0)
    assert (decision.config, decision.verdict) == (DEFAULT, PickVerdict.UNRESOLVABLE)
    assert decision.ratio == pytest.approx(100 / 104, rel=0.002)


def test_proof_beats_the_floor():
    """Two problems of rowwise-2d on an H200 kept configs that were proven to be 21 % and 15 % slower."""
    decision = below_the_floor(0.032, default=9.25, fast=7.65)
    assert (decision.config, decision.verdict) == (FAST, PickVerdict.CERTIFIED)
    decision = below_the_floor(0.032, default=7.65, fast=9.25)
    assert (decision.config, decision.verdict) == (DEFAULT, PickVerdict.CERTIFIED)


def test_a_tick_widens_the_bounds_of_a_tie():
    """The same 0.3 % are a tie by a fine timer, and cannot be told by a coarse one; today's config is replaced."""
    for tick_us, verdict in ((0.05, PickVerdict.NEAR_TIE), (0.2, PickVerdict.UNRESOLVABLE)):
        decision = below_the_floor(tick_us, default=9.25, fast=7.65, slow=7.67)
        assert (decision.config, decision.verdict) == (FAST, verdict)
        assert not decision.contested


def test_what_was_picked_below_the_floor_stays_with_its_verdict():
    """A table made of a pick does not make the same evidence say less."""
    for incumbent in (None, FAST):
        decision = below_the_floor(0.05, incumbent, default=9.25, fast=7.65, slow=7.67)
        assert (decision.config, decision.verdict) == (FAST, PickVerdict.NEAR_TIE)


def test_the_noise_floor_is_what_the_duplicate_is_off_by():
    assert noise_floor(timed(100.0), timed(100.4)) == pytest.approx(0.004, abs=0.001)
    assert noise_floor(timed(100.4), timed(100.0)) == pytest.approx(0.004, abs=0.001)
    assert noise_floor(timed(100.0), []) is None


def test_no_finals_are_an_error():
    with pytest.raises(ValueError, match="no finals"):
        decided({})


def entry(time_us: float, of: NamedInts, session: FinalsRun = FIRST, screen_us: float | None = None):
    made = evidence(time_us, config=of, stage="final", finals=tuple(timed(time_us, session)))
    return replace(made, screen_us=screen_us or time_us)


def test_a_winner_of_finals_has_its_verdict_and_noise_floor():
    default = replace(entry(110.0, DEFAULT), duplicate=tuple(timed(110.2)))
    (winner,) = ranking.winners([default, entry(100.0, FAST), evidence(90.0, config=SLOW)])
    assert (winner.config, winner.verdict, winner.n) == (FAST, PickVerdict.CERTIFIED, 6)
    assert winner.runner_up == DEFAULT
    assert winner.decision.ratio == pytest.approx(1.1, rel=0.002)
    assert winner.noise_floor == pytest.approx(0.002, abs=0.001)
    assert winner.decision.upper < 0


def test_a_screen_alone_is_quick():
    (winner,) = ranking.winners([evidence(100.0), evidence(110.0, config=SLOW)])
    assert (winner.verdict, winner.noise_floor) == (PickVerdict.QUICK, None)


def test_the_committed_table_s_config_is_the_incumbent():
    entries = [entry(110.0, DEFAULT), entry(100.0, FAST), entry(101.2, SLOW)]
    key = (("G", 64), ("K", 5120))
    (winner,) = ranking.winners(entries, installed(("colwise", "", key, tuple(SLOW.items()))))
    assert (winner.config, winner.verdict) == (SLOW, PickVerdict.KEPT_INCUMBENT)


def test_an_axis_that_a_committed_row_leaves_out_has_the_default_s_value():
    entries = [entry(110.0, DEFAULT), entry(100.0, FAST), entry(101.2, config(32, 4, 2))]
    (winner,) = ranking.winners(entries, installed(("colwise", "", (("G", 64), ("K", 5120)), (("BLOCK_SIZE", 32),))))
    assert winner.config == config(32, DEFAULT["num_warps"], DEFAULT["num_stages"])
    shared = ranking.robust(ranking.all_candidates(entries), incumbent=NamedInts(BLOCK_SIZE=32))
    assert shared is not None
    assert shared.config == winner.config


def test_slowdowns_compare_finals_with_finals_and_the_screen_with_the_screen():
    entries = [entry(100.0, FAST, screen_us=90.0), entry(110.0, DEFAULT, screen_us=99.0), evidence(108.0, config=SLOW)]
    (candidates,) = ranking.all_candidates(entries)
    assert candidates.slowdowns[DEFAULT] == pytest.approx(1.1, rel=0.002)
    assert candidates.slowdowns[SLOW] == pytest.approx(1.2)


@given(st.randoms(use_true_random=False))
def test_any_order_of_processes_gives_the_same_decision(generator):
    times = {c: timed(t) for c, t in ((DEFAULT, 101.0), (FAST, 100.0), (SLOW, 100.5))}
    shuffled = list(times.items())
    generator.shuffle(shuffled)
    again = {c: generator.sample(v, len(v)) for c, v in shuffled}
    assert decided(again) == decided(times)
