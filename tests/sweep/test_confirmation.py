"""Confirmation on the simulated clock: finalists, processes, rows, and the cost of a fault or a stop."""

from __future__ import annotations

import math
from collections.abc import Iterator
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

FAULTS = f"{PLANTED / 'faults.py'}:SPEC"
TIMER = "simulated:7"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def store(database: str) -> Iterator[Store]:
    with Store.open(database, create=True) as opened:
        yield opened


@pytest.fixture
def options(tmp_path: Path) -> SweepOptions:
    """Two problems whose times are far above the clock's tick; no kernel runs, so size costs nothing."""
    path = tmp_path / "large.toml"
    path.write_text("[[rows]]\nM = 16384\nK = [2048, 4096]\nN = 8\nE = 2\n")
    return SweepOptions(kernel=(FAULTS,), shapes=(str(path),), grid=("num_warps=4,8",), timer=TIMER)


def planned(options: SweepOptions, gpu: FakeGpu | None = None) -> Plan:
    """Every problem and config; on a fake GPU, if one is given."""
    plan = planning.expanded(planning.planned(options))
    return plan if gpu is None else replace(plan, backend=gpu)


def events(store: Store, options: SweepOptions, gpu: FakeGpu | None = None) -> list[Event]:
    with store.adding_together(1.0):
        return list(session.run(store, planned(options, gpu)))


def budgeted(store: Store, options: SweepOptions, turns: int, answer: Answer = lambda *_: None) -> Finished:
    """The end of a sweep whose time is up once its finals' processes have begun with so many problems."""
    gpu = FakeGpu(TIMER, answer)
    plan = planned(replace(options, budget_s=1e9), gpu)
    *_, last = session.run(store, plan, clock=lambda: math.inf if gpu.turns >= turns else 0.0)
    assert isinstance(last, Finished)
    return last


def rows(done: list[Event]) -> list[Row]:
    return [event.row for event in done if isinstance(event, TrialDone)]


def studies(store: Store, options: SweepOptions) -> list[Study]:
    return session.studies(store, planned(options))


def decisions(store: Store, options: SweepOptions) -> list[object]:
    return [(study.problem, study.choice, study.noise) for study in studies(store, options)]


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
        mine = [row for row in done if row.problem == problem and row.stage == "final"]
        configs, processes = {row.config for row in mine}, {row.process for row in mine}
        assert 2 <= len(configs) <= PLAN.finalists
        assert processes == {process_name(number) for number in range(1, len(processes) + 1)}
        assert len(mine) == len(configs) * len(processes) * PLAN.rounds
        assert {row.round for row in mine} == set(range(PLAN.rounds))
        duplicates = [row for row in done if row.stage == "duplicate" and row.problem == problem]
        assert {row.config for row in duplicates} == {mine[0].version and mine[0].version.default}
        assert len(duplicates) == len(processes) * PLAN.rounds
        assert {row.outcome.time_us for row in duplicates}.isdisjoint({row.outcome.time_us for row in mine})
    for study in studies(store, options):
        assert study.choice.verdict in (Verdict.PROVEN, Verdict.OPEN)
        assert study.choice.processes in (PLAN.processes, *PLAN.more_processes)
        assert not study.choice.needs_more or study.choice.processes == PLAN.more_processes[-1]
        assert study.noise is not None
        assert study.noise < 0.02
    gpu = FakeGpu(TIMER)
    again = events(store, options, gpu)
    assert all(event.from_database for event in again if isinstance(event, TrialDone))
    assert (gpu.turns, again[-1].is_whole) == (0, True)  # type: ignore[union-attr]
    with Store.open(str(tmp_path / "again.db"), create=True) as second:
        events(second, options)
        assert timed(second) == timed(store)
        assert decisions(second, options) == decisions(store, options)


def test_a_grid_of_the_default_alone_has_nothing_to_compare_it_with(store: Store, options: SweepOptions) -> None:
    """Its pick was certified: proven faster than all of no rivals."""
    default = planned(options).problems[0].version.default
    alone = replace(options, grid=tuple(f"{name}={value}" for name, value in default.items()))
    done = rows(events(store, alone))
    assert {row.config for row in done} == {default}
    for study in studies(store, alone):
        assert (study.pick.config, study.choice.verdict, study.next_best) == (default, Verdict.PROVEN, None)
        assert (study.choice.processes, study.noise is None) == (PLAN.processes, False)
    stored = picks.read(store)
    bounds = {(pick.verdict, pick.slowdown_lower_share, pick.slowdown_upper_share) for pick in stored}
    assert bounds == {("proven", None, None)}
    assert len(stored) == 2


@on_both
def test_a_stopped_sweep_continues_with_the_next_process(store: Store, options: SweepOptions, tmp_path: Path) -> None:
    plan = planned(options)
    running = session.run(store, plan)
    seen = 0
    for event in running:
        seen += isinstance(event, TrialDone) and event.row.stage == "final"
        if seen == 100:
            break
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
    assert victim is not None

    def failing(arm: KernelArm, place: Place) -> Outcome | None:
        is_victim = arm.config == victim and place.process == 3
        return Outcome(status, reason="planted") if is_victim else None

    gpu = FakeGpu(TIMER, failing)
    done = rows(events(store, options, gpu))
    failed = [row for row in done if row.outcome.status is status]
    assert {(row.config, row.stage, row.outcome.reason) for row in failed} == {(victim, "final", "planted")}
    assert len(failed) == len({row.problem for row in failed})
    assert not [place for arm, place in gpu.calls if arm.config == victim and place.process > 3]
    for study in studies(store, options):
        assert study.pick.config != victim
        assert study.choice.processes >= PLAN.processes


def test_a_problem_that_cannot_be_built_is_skipped_and_tried_again(store: Store, options: SweepOptions) -> None:
    gpu = FakeGpu(TIMER, unbuilt=Outcome(Status.OUT_OF_MEMORY, reason="out of memory"))
    done = events(store, options, gpu)
    assert [event.reason for event in done if isinstance(event, ConfirmationSkipped)] == ["out of memory"] * 2
    assert isinstance(done[-1], Finished)
    assert not done[-1].is_whole
    *_, last = events(store, options)
    assert isinstance(last, Finished)
    assert last.is_whole


def ambiguous(arm: KernelArm, place: Place) -> Outcome:
    """Every config takes another time in every process: nothing is ever settled."""
    return timed_as(100.0 * (1 + 0.1 * ((place.process * 7 + arm.config["FAULT"] * 3 + arm.config["num_warps"]) % 5)))


def clear(arm: KernelArm, place: Place) -> Outcome:
    """The more warps, the slower, in every process."""
    return timed_as(100.0 * (1 + 0.1 * arm.config["FAULT"] + 0.05 * arm.config["num_warps"]))


def timed_as(time_us: float) -> Outcome:
    return Outcome(Status.OK, time_us=time_us, samples_us=(time_us,))


@pytest.mark.parametrize(
    ("database", "settles"), [("sqlite", True), ("sqlite", False), ("postgresql", True)], indirect=["database"]
)
def test_a_time_budget_leaves_the_verdict_of_the_processes_before_and_the_same_command_goes_on(
    store: Store, options: SweepOptions, settles: bool
) -> None:
    """Once, a row that 16 processes had not settled was as if none had timed it."""
    turns = 2 * PLAN.processes + 1  # one more than the first judgement takes
    assert budgeted(store, options, turns, ambiguous).left_out > 0
    plan = planned(options)
    cut = [session.studies(store, replace(plan, problems=(problem,)))[0] for problem in plan.problems]
    assert [study.choice.processes for study in cut] == [PLAN.processes + 1, PLAN.processes]
    assert Verdict.QUICK not in {study.choice.verdict for study in cut}
    *_, last = events(store, options, FakeGpu(TIMER, clear if settles else ambiguous))
    assert isinstance(last, Finished)
    assert last.left_out == 0
    counts = [study.choice.processes for study in studies(store, options)]
    if settles:
        assert all(PLAN.processes < n <= PLAN.more_processes[-1] for n in counts)
    else:
        assert counts == [PLAN.more_processes[-1]] * 2


def with_committed(plan: Plan, **committed: NamedInts) -> Plan:
    return replace(plan, problems=tuple(replace(size, **committed) for size in plan.problems))  # type: ignore[arg-type]


@pytest.mark.parametrize("use", ["current", "today"])
def test_the_config_in_use_is_a_finalist_however_slow(store: Store, options: SweepOptions, use: str) -> None:
    screened = [row for row in rows(events(store, replace(options, quick=True))) if row.round == 0]
    slowest = max(screened, key=lambda row: row.outcome.time_us or 0.0).config
    assert slowest is not None
    in_use = Today(slowest, Origin.SHIPPED_TABLE) if use == "today" else slowest
    done = rows(list(session.run(store, with_committed(planned(options), **{use: in_use}))))
    for size in {row.problem for row in done}:
        assert slowest in {row.config for row in done if row.problem == size and row.stage == "final"}
    assert slowest not in {study.pick.config for study in studies(store, options)}


@pytest.mark.parametrize("committed", ["current", "fallback"])
def test_what_the_committed_table_holds_is_timed_in_every_round(
    store: Store, options: SweepOptions, committed: str
) -> None:
    """Else a block far off in the first round puts it out of the screen, and so out of the row for any other shape."""
    options = replace(options, quick=True)
    screened = rows(events(store, options))
    slowest = max(screened, key=lambda row: row.outcome.time_us or 0.0).config
    assert slowest is not None
    assert max(row.round for row in screened if row.config == slowest) == 0
    again = with_committed(planned(replace(options, again=True)), **{committed: slowest})
    done = rows(list(session.run(store, again)))
    for size in {row.problem for row in done}:
        assert {row.round for row in done if (row.problem, row.config) == (size, slowest)} == {0, 1, 2}
