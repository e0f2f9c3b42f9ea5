"""Confirmation on the simulated clock: finalists, processes, rows, and the cost of a fault or a stop."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_gpu import Answer, FakeGpu
from places import PLANTED
from servers import on_both

from fp8tune.measure.arms import KernelArm, Place
from fp8tune.options import SweepOptions
from fp8tune.records import NamedInts, Outcome, Row, Status
from fp8tune.stats.decide import PLAN
from fp8tune.stats.study import Origin, Study, Today, Verdict
from fp8tune.store.results import Store
from fp8tune.sweeping import picks, planning, session
from fp8tune.sweeping.confirmation import process_name
from fp8tune.sweeping.events import ConfirmationSkipped, Event, Finished, TrialDone
from fp8tune.sweeping.planning import Plan

TIMER = "simulated:7"


@pytest.fixture
def store(database: str) -> Iterator[Store]:
    with Store.open(database, create=True) as opened:
        yield opened


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepOptions:
    """Two problems whose times are far above the clock's tick; no kernel runs, so size costs nothing."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    path = tmp_path / "large.toml"
    path.write_text("[[rows]]\nM = 16384\nK = [2048, 4096]\nN = 8\nE = 2\n")
    kernel = f"{PLANTED / 'faults.py'}:SPEC"
    return SweepOptions(kernel=(kernel,), shapes=(str(path),), grid=("num_warps=4,8",), timer=TIMER)


class LateFault(FakeGpu):
    """Its fastest config is wrong in the last round of the coarse pass."""

    racing: NamedInts | None = None

    def screen(self, arms, places, is_over=lambda: False):  # type: ignore[no-untyped-def]
        for number, outcome in super().screen(arms, places, is_over):
            is_wrong = arms[number].config == self.racing and places[number].round == PLAN.screen_rounds - 1
            yield number, Outcome(Status.WRONG, reason="a race") if is_wrong else outcome


def planned(options: SweepOptions, gpu: FakeGpu | None = None) -> Plan:
    """Every problem and config; on a fake GPU, if one is given."""
    plan = planning.expanded(planning.planned(options))
    return plan if gpu is None else replace(plan, backend=gpu)


def events(store: Store, options: SweepOptions, gpu: FakeGpu | None = None) -> list[Event]:
    with store.adding_together(1.0):
        return list(session.run(store, planned(options, gpu)))


def rows(done: Iterable[Event]) -> list[Row]:
    return [event.row for event in done if isinstance(event, TrialDone)]


def finished(done: list[Event]) -> Finished:
    assert isinstance(done[-1], Finished)
    return done[-1]


def studies(store: Store, options: SweepOptions) -> list[Study]:
    return session.studies(store, planned(options))


def timed(store: Store) -> list[tuple[object, ...]]:
    """All rows but when and by which operating-system process."""
    return sorted(
        (
            str(row.problem.shape),
            str(row.config),
            row.stage,
            row.process if row.stage != "screen" else "",
            row.round,
            row.position,
            row.outcome.samples_us,
        )
        for row in store.rows()
    )


def test_finals_are_the_default(store: Store, options: SweepOptions, tmp_path: Path) -> None:
    """An equal sweep gives the same rows whatever the processes, and times nothing when it is run again."""
    done = rows(events(store, options))
    assert any(row.stage == "screen" for row in done)
    for problem in {row.problem for row in done}:
        mine, duplicates = (
            [row for row in done if row.problem == problem and row.stage == stage] for stage in ("final", "duplicate")
        )
        configs, processes = {row.config for row in mine}, {row.process for row in mine}
        assert 2 <= len(configs) <= PLAN.finalists
        assert processes == {process_name(number) for number in range(1, len(processes) + 1)}
        assert len(mine) == len(configs) * len(processes) * PLAN.rounds
        assert {row.round for row in mine} == set(range(PLAN.rounds))
        assert {row.config for row in duplicates} == {mine[0].version and mine[0].version.default}
        assert len(duplicates) == len(processes) * PLAN.rounds
        assert {row.outcome.time_us for row in duplicates}.isdisjoint({row.outcome.time_us for row in mine})
    decided = studies(store, options)
    for study in decided:
        assert study.choice.verdict in (Verdict.PROVEN, Verdict.OPEN)
        assert study.choice.processes in (PLAN.processes, *PLAN.more_processes)
        assert not study.choice.needs_more or study.choice.processes == PLAN.more_processes[-1]
        assert study.noise is not None
        assert study.noise < 0.02
    gpu = FakeGpu(TIMER)
    again = events(store, options, gpu)
    assert all(event.from_database for event in again if isinstance(event, TrialDone))
    assert (gpu.turns, finished(again).is_whole) == (0, True)
    with Store.open(str(tmp_path / "again.db"), create=True) as second:
        events(second, options)
        assert timed(second) == timed(store)
        assert [(study.problem, study.choice, study.noise) for study in studies(second, options)] == [
            (study.problem, study.choice, study.noise) for study in decided
        ]


def test_a_grid_of_the_default_alone_has_nothing_to_compare_it_with(store: Store, options: SweepOptions) -> None:
    """Its pick was proven faster than all of no rivals."""
    default = planned(options).problems[0].version.default
    alone = replace(options, grid=tuple(f"{name}={value}" for name, value in default.items()))
    assert {row.config for row in rows(events(store, alone))} == {default}
    for study in studies(store, alone):
        assert (study.pick.config, study.choice.verdict, study.next_best) == (default, Verdict.ALONE, None)
        assert (study.choice.processes, study.noise is None) == (PLAN.processes, False)
    bounds = [(pick.verdict, pick.slowdown_lower_share, pick.slowdown_upper_share) for pick in picks.read(store)]
    assert bounds == [("alone", None, None)] * 2


@on_both
def test_a_stopped_sweep_continues_with_the_next_process(store: Store, options: SweepOptions, tmp_path: Path) -> None:
    plan, seen = planned(options), 0
    running = session.run(store, plan)
    while seen < 100:
        event = next(running)
        seen += isinstance(event, TrialDone) and event.row.stage == "final"
    running.close()  # type: ignore[attr-defined]
    assert {study.choice.verdict for study in session.studies(store, plan)} == {Verdict.QUICK}
    events(store, options)
    with Store.open(str(tmp_path / "whole.db"), create=True) as whole:
        events(whole, options)
        assert timed(whole) == timed(store)


@pytest.mark.parametrize("status", [Status.CRASHED, Status.TIMEOUT])
def test_a_config_that_fails_in_the_finals_is_out(store: Store, options: SweepOptions, status: Status) -> None:
    events(store, replace(options, quick=True))
    victim = studies(store, replace(options, quick=True))[0].pick.config

    def failing(arm: KernelArm, place: Place) -> Outcome | None:
        return Outcome(status, reason="planted") if arm.config == victim and place.process == 3 else None

    gpu = FakeGpu(TIMER, failing)
    failed = [row for row in rows(events(store, options, gpu)) if row.outcome.status is status]
    assert {(row.config, row.stage, row.outcome.reason) for row in failed} == {(victim, "final", "planted")}
    assert len(failed) == len({row.problem for row in failed})
    assert not [place for arm, place in gpu.calls if arm.config == victim and place.process > 3]
    for study in studies(store, options):
        assert study.pick.config != victim
        assert study.choice.processes >= PLAN.processes


def test_a_problem_that_cannot_be_built_is_skipped_and_tried_again(store: Store, options: SweepOptions) -> None:
    done = events(store, options, FakeGpu(TIMER, unbuilt=Outcome(Status.OUT_OF_MEMORY, reason="out of memory")))
    assert [event.reason for event in done if isinstance(event, ConfirmationSkipped)] == ["out of memory"] * 2
    assert not finished(done).is_whole
    assert finished(events(store, options)).is_whole


def times_by(time_us: float) -> Outcome:
    return Outcome(Status.OK, time_us=time_us, samples_us=(time_us,))


def ambiguous(arm: KernelArm, place: Place) -> Outcome:
    """Every config takes another time in every process: nothing is ever settled."""
    return times_by(100.0 + 10.0 * ((place.process * 7 + arm.config["FAULT"] * 3 + arm.config["num_warps"]) % 5))


def clear(arm: KernelArm, place: Place) -> Outcome:
    """The more warps, the slower, in every process."""
    return times_by(100.0 + 10.0 * arm.config["FAULT"] + 5.0 * arm.config["num_warps"])


@pytest.mark.parametrize("later", [clear, ambiguous])
def test_a_time_budget_leaves_the_verdict_of_the_processes_before_and_the_same_command_goes_on(
    store: Store, options: SweepOptions, later: Answer
) -> None:
    """Once, a row that 16 processes had not settled was as if none had timed it."""
    gpu = FakeGpu(TIMER, ambiguous)
    turns = 2 * PLAN.processes + 1  # one more than the first judgement takes
    plan = planned(replace(options, budget_s=1e9), gpu)
    cut = list(session.run(store, plan, clock=lambda: math.inf if gpu.turns >= turns else 0.0))
    assert finished(cut).left_out > 0
    choices = [session.studies(store, replace(plan, problems=(size,)))[0].choice for size in plan.problems]
    assert [choice.processes for choice in choices] == [PLAN.processes + 1, PLAN.processes]
    assert Verdict.QUICK not in {choice.verdict for choice in choices}
    assert finished(events(store, options, FakeGpu(TIMER, later))).left_out == 0
    counts = [study.choice.processes for study in studies(store, options)]
    if later is clear:
        assert all(PLAN.processes < n <= PLAN.more_processes[-1] for n in counts)
    else:
        assert counts == [PLAN.more_processes[-1]] * 2


@pytest.mark.parametrize("use", ["current", "today", "fallback"])
def test_a_config_in_use_is_timed_in_every_round_however_slow(store: Store, options: SweepOptions, use: str) -> None:
    """Else a block far off in the first round puts it out of the screen, and so out of the row for any other shape."""
    screened = rows(events(store, replace(options, quick=True)))
    slowest = max(screened, key=lambda row: row.outcome.time_us or 0.0).config
    assert slowest is not None
    assert max(row.round for row in screened if row.config == slowest) == 0
    in_use = Today(slowest, Origin.SHIPPED_TABLE) if use == "today" else slowest
    plan = planned(replace(options, again=True))
    sizes = tuple(replace(size, **{use: in_use}) for size in plan.problems)  # type: ignore[arg-type]
    done = [row for row in rows(session.run(store, replace(plan, problems=sizes))) if row.config == slowest]
    for size in plan.problems:
        mine = [row for row in done if row.problem == size.problem]
        assert {row.round for row in mine if row.stage == "screen"} == set(range(PLAN.screen_rounds))
        assert any(row.stage == "final" for row in mine) == (use != "fallback")
    assert slowest not in {study.pick.config for study in studies(store, options)}


def test_a_config_that_fails_in_the_last_round_is_no_finalist(
    store: Store, options: SweepOptions, tmp_path: Path
) -> None:
    with Store.open(str(tmp_path / "before.db"), create=True) as before:
        events(before, options)
        (fastest, _) = (study.choice.pick for study in studies(before, options))
    gpu = LateFault(TIMER)
    gpu.racing = fastest
    done = rows(events(store, options, gpu))
    assert any(row.config == fastest and row.outcome.status is Status.WRONG for row in done)
    assert not any(row.config == fastest and row.stage == "final" for row in done)
