"""Finals on the simulated clock: who plays, how often, what is stored, and what a fault or a stop costs."""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from places import PLANTED

from fp8tune.choose.calibration import measuring_plan_of
from fp8tune.choose.decision import PickVerdict
from fp8tune.choose.incumbents import Incumbents
from fp8tune.choose.ranking import Winner
from fp8tune.measure.clock import Slot
from fp8tune.measure.laboratory import Batch, OpenLaboratory
from fp8tune.records import NamedInts, Outcome, Row, Status
from fp8tune.store.results import Store
from fp8tune.sweep import finals, session
from fp8tune.sweep import loop as sweep

FAULTS = f"{PLANTED / 'faults.py'}:SPEC"
PROTOCOL = measuring_plan_of({})


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(str(tmp_path / "results.db"), create=True) as opened:
        yield opened


@pytest.fixture
def wish(tmp_path: Path) -> session.Wish:
    """Two problems whose times are far above the clock's tick; no kernel runs, so size costs nothing."""
    path = tmp_path / "large.toml"
    path.write_text("[[rows]]\nM = 16384\nK = [2048, 4096]\nN = 8\nE = 2\n")
    return session.Wish((FAULTS,), (str(path),), grid=("num_warps=4,8",), timer="simulated:7", trial_timeout_s=20.0)


def events(store: Store, wish: session.Wish) -> list[sweep.Event]:
    job = session.take(wish)
    return list(session.run(store, job, session.prepare(job)))


def rows(found: list[sweep.Event]) -> list[Row]:
    return [event.row for event in found if isinstance(event, sweep.TrialDone)]


def winners(store: Store, wish: session.Wish) -> list[Winner]:
    job = session.take(wish)
    return session.winners(store, job.laboratory, session.finished_problems(store, job))


def announced(found: list[sweep.Event]) -> int:
    """Trials that progress counts up to."""
    count = 0
    for event in found:
        match event:
            case sweep.Started(planned=trials) | sweep.Added(trials) | sweep.FinalsStarted(trials=trials):
                count += trials
    return count


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


def test_finals_are_the_default(store: Store, wish: session.Wish) -> None:
    seen = events(store, wish)
    found = rows(seen)
    assert announced(seen) == len(found)
    screened = [row for row in found if row.stage == "screen"]
    played = [row for row in found if row.stage == "final"]
    assert len(screened) > 0
    for of in {row.problem for row in found}:
        mine = [row for row in played if row.problem == of]
        configs, processes = {row.config for row in mine}, {row.process for row in mine}
        assert 2 <= len(configs) <= PROTOCOL.finalists
        assert len(processes) in (PROTOCOL.processes, *PROTOCOL.more_processes)
        assert processes == {finals.process_name(index) for index in range(len(processes))}
        assert len(mine) == len(configs) * len(processes) * PROTOCOL.rounds
        assert {row.round for row in mine} == set(range(PROTOCOL.rounds))
        default = mine[0].version.default if mine[0].version else None
        duplicates = [row for row in found if row.stage == "duplicate" and row.problem == of]
        assert {row.config for row in duplicates} == {default}
        assert len(duplicates) == len(processes) * PROTOCOL.rounds
        assert {row.outcome.time_us for row in duplicates}.isdisjoint({row.outcome.time_us for row in mine})
    for winner in winners(store, wish):
        assert winner.verdict in (
            PickVerdict.CERTIFIED,
            PickVerdict.NEAR_TIE,
            PickVerdict.KEPT_INCUMBENT,
            PickVerdict.AMBIGUOUS,
        )
        assert winner.n in (PROTOCOL.processes, *PROTOCOL.more_processes)
        assert winner.noise_floor is not None
        assert winner.noise_floor < 0.02


def test_only_ambiguous_rows_get_more_processes(store: Store, wish: session.Wish) -> None:
    events(store, wish)
    for winner in winners(store, wish):
        assert winner.verdict is not PickVerdict.AMBIGUOUS or winner.n == PROTOCOL.more_processes[-1]


def test_quick_is_the_screen_alone_and_finals_can_follow(store: Store, wish: session.Wish) -> None:
    quick = replace(wish, quick=True)
    screened = rows(events(store, quick))
    assert {row.stage for row in screened} == {"screen"}
    assert {winner.verdict for winner in winners(store, quick)} == {PickVerdict.QUICK}
    found = events(store, wish)
    kept = [event for event in found if isinstance(event, sweep.TrialDone) and event.from_database]
    assert len(kept) == len(screened)
    assert {winner.n for winner in winners(store, wish)} <= {6, 12, 24}


def test_the_same_sweep_gives_the_same_rows_whatever_the_processes(
    store: Store, wish: session.Wish, tmp_path: Path
) -> None:
    events(store, wish)
    with Store.open(str(tmp_path / "again.db"), create=True) as other:
        events(other, wish)
        assert timed(other) == timed(store)
        assert winners(other, wish) == winners(store, wish)


def test_a_stopped_sweep_continues_with_the_next_visit(store: Store, wish: session.Wish, tmp_path: Path) -> None:
    job = session.take(wish)
    running = session.run(store, job, session.prepare(job))
    seen = 0
    for event in running:
        seen += isinstance(event, sweep.TrialDone) and event.row.stage == "final"
        if seen == 100:
            break
    running.close()  # type: ignore[attr-defined]
    assert {winner.verdict for winner in session.winners(store, job.laboratory, [event.row.problem])} == {
        PickVerdict.QUICK
    }
    events(store, wish)
    with Store.open(str(tmp_path / "whole.db"), create=True) as whole:
        events(whole, wish)
        assert timed(whole) == timed(store)


def test_a_finished_sweep_is_answered_from_its_rows(wish: session.Wish, tmp_path: Path) -> None:
    database, job = str(tmp_path / "finished.db"), session.take(wish)
    with Store.open(database, create=True) as store:
        found = rows(events(store, wish))
    assert session.is_stored(database, job)
    assert not session.is_stored(database, session.take(replace(wish, quick=True)))
    with Store.open(database) as opened:
        again = list(session.run(opened, job))
        assert sorted(str(row.as_json()["config"]) for row in rows(again)) == sorted(
            str(row.as_json()["config"]) for row in found
        )
        planned_again = events(opened, wish)
        assert all(event.from_database for event in planned_again if isinstance(event, sweep.TrialDone))
        assert len(rows(planned_again)) == len(found)
        assert announced(planned_again) == len(found)


def failing(
    monkeypatch: pytest.MonkeyPatch, status: Status, config: NamedInts, process: int
) -> list[tuple[NamedInts, Slot]]:
    """The laboratory, but that a config fails in one process; returns what it is asked."""
    asked: list[tuple[NamedInts, Slot]] = []
    real = OpenLaboratory.run_final

    def run_final(self: OpenLaboratory, batch: Batch, of: NamedInts, slot: Slot) -> Outcome:
        asked.append((of, slot))
        if of == config and slot.process == process:
            return Outcome(status, reason="planted")
        return real(self, batch, of, slot)

    monkeypatch.setattr(OpenLaboratory, "run_final", run_final)
    return asked


@pytest.mark.parametrize("status", [Status.CRASHED, Status.TIMEOUT])
def test_a_config_that_fails_in_the_finals_is_out(
    store: Store, wish: session.Wish, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    events(store, replace(wish, quick=True))
    best = {winner.problem: winner.config for winner in winners(store, replace(wish, quick=True))}
    (victim, *_) = best.values()
    assert victim is not None
    asked = failing(monkeypatch, status, victim, process=3)
    found = rows(events(store, wish))
    failed = [row for row in found if row.outcome.status is status]
    assert {(row.config, row.stage, row.outcome.reason) for row in failed} == {(victim, "final", "planted")}
    assert len(failed) == len({row.problem for row in failed})
    assert not [slot for of, slot in asked if of == victim and slot.process > 3]
    for winner in winners(store, wish):
        assert winner.config != victim
        assert winner.n >= PROTOCOL.processes


def test_a_problem_that_cannot_be_built_is_skipped_and_tried_again(
    store: Store, wish: session.Wish, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenLaboratory, "prepare_final", lambda self, batch: "out of memory")
    found = events(store, wish)
    assert [event.reason for event in found if isinstance(event, sweep.NoFinals)] == ["out of memory"] * 2
    assert session.finished_problems(store, session.take(wish)) == []
    monkeypatch.undo()
    events(store, wish)
    assert len(session.finished_problems(store, session.take(wish))) == 2


def test_a_time_budget_that_ends_in_the_finals_says_so(
    store: Store, wish: session.Wish, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0] * 3)
    monkeypatch.setattr(finals, "time", SimpleNamespace(monotonic=lambda: next(clock, math.inf)))
    *_, last = events(store, replace(wish, time_budget_s=1e9))
    assert isinstance(last, sweep.Finished)
    assert last.left_out > 0
    monkeypatch.undo()
    *_, last = events(store, wish)
    assert isinstance(last, sweep.Finished)
    assert last.left_out == 0
    assert PickVerdict.QUICK not in {winner.verdict for winner in winners(store, wish)}


def test_a_time_budget_leaves_what_was_visited_often_enough(
    store: Store, wish: session.Wish, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0] * (2 * PROTOCOL.processes - 1))  # asked before each visit; two problems
    monkeypatch.setattr(finals, "time", SimpleNamespace(monotonic=lambda: next(clock, math.inf)))
    *_, last = events(store, replace(wish, time_budget_s=1e9))
    assert isinstance(last, sweep.Finished)
    assert last.left_out > 0
    job = session.take(wish)
    problems = [batch.problem for batch in session.prepare(job).request.batches]
    verdicts = [session.winners(store, job.laboratory, [problem])[0].verdict for problem in problems]
    assert verdicts[0] is not PickVerdict.QUICK
    assert verdicts[1] is PickVerdict.QUICK


@pytest.mark.parametrize("settles", [True, False])
def test_a_time_budget_leaves_the_verdict_of_the_processes_before_and_the_same_command_goes_on(
    store: Store, wish: session.Wish, monkeypatch: pytest.MonkeyPatch, settles: bool
) -> None:
    """Once, a row that 16 processes had not settled was as if none had visited it."""
    clock = iter([0.0] * (2 * PROTOCOL.processes + 1))  # one visit more than the first judgement takes
    monkeypatch.setattr(finals, "time", SimpleNamespace(monotonic=lambda: next(clock, math.inf)))
    monkeypatch.setattr(finals, "needs_more", lambda decision: True)
    *_, last = events(store, replace(wish, time_budget_s=1e9))
    assert isinstance(last, sweep.Finished)
    assert last.left_out > 0
    job = session.take(wish)
    problems = [batch.problem for batch in session.prepare(job).request.batches]
    cut = [session.winners(store, job.laboratory, [problem])[0] for problem in problems]
    assert [winner.n for winner in cut] == [PROTOCOL.processes + 1, PROTOCOL.processes]
    assert PickVerdict.QUICK not in {winner.verdict for winner in cut}
    monkeypatch.undo()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(finals, "needs_more", lambda decision: not settles)
    *_, last = events(store, wish)
    assert isinstance(last, sweep.Finished)
    assert last.left_out == 0
    most = PROTOCOL.more_processes[-1]
    expected = [winner.n for winner in cut] if settles else [most, most]
    assert [winner.n for winner in winners(store, wish)] == expected


def test_a_time_budget_ends_no_finals_that_nobody_played(
    store: Store, wish: session.Wish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = session.take(wish)
    first, second = (batch.problem for batch in session.prepare(job).request.batches)
    real = OpenLaboratory.run_final

    def run_final(self: OpenLaboratory, batch: Batch, of: NamedInts, slot: Slot) -> Outcome:
        return Outcome(Status.TIMEOUT, reason="planted") if batch.problem == first else real(self, batch, of, slot)

    clock = iter([0.0] * (2 * PROTOCOL.processes + 1))
    monkeypatch.setattr(finals, "time", SimpleNamespace(monotonic=lambda: next(clock, math.inf)))
    monkeypatch.setattr(finals, "needs_more", lambda decision: True)
    monkeypatch.setattr(OpenLaboratory, "run_final", run_final)
    *_, last = events(store, replace(wish, time_budget_s=1e9))
    assert isinstance(last, sweep.Finished)
    assert last.left_out > 0
    verdicts = [session.winners(store, job.laboratory, [problem])[0].verdict for problem in (first, second)]
    assert verdicts[0] is PickVerdict.QUICK
    assert verdicts[1] is not PickVerdict.QUICK
    with contextlib.closing(sqlite3.connect(tmp_path / "results.db")) as raw:
        assert raw.execute("SELECT count(*) FROM finals").fetchone() == (1,)


def test_the_incumbent_plays_however_slow(store: Store, wish: session.Wish, monkeypatch: pytest.MonkeyPatch) -> None:
    screened = [row for row in rows(events(store, replace(wish, quick=True))) if row.round == 0]
    slowest = max(screened, key=lambda row: row.outcome.time_us or 0.0).config
    assert slowest is not None
    monkeypatch.setattr(Incumbents, "config", lambda *place: slowest)
    found = rows(events(store, wish))
    for of in {row.problem for row in found}:
        assert slowest in {row.config for row in found if row.problem == of and row.stage == "final"}
    assert slowest not in {winner.config for winner in winners(store, wish)}


@pytest.mark.parametrize("is_fallback", [False, True])
def test_what_the_committed_table_holds_is_timed_in_every_round(
    store: Store, wish: session.Wish, monkeypatch: pytest.MonkeyPatch, is_fallback: bool
) -> None:
    """Else a block far off in the first round puts it out of the screen, and so out of the row for any other shape."""
    wish = replace(wish, quick=True)
    screened = rows(events(store, wish))
    slowest = max(screened, key=lambda row: row.outcome.time_us or 0.0).config
    assert max(row.round for row in screened if row.config == slowest) == 0
    monkeypatch.setattr(
        Incumbents, "config", lambda self, kernel, device, key: slowest if (key is None) == is_fallback else None
    )
    again = rows(events(store, replace(wish, again=True)))
    for of in {row.problem for row in again}:
        assert {row.round for row in again if (row.problem, row.config) == (of, slowest)} == {0, 1, 2}


def test_the_numbers_of_a_calibration_are_used(store: Store, wish: session.Wish) -> None:
    job = session.take(wish)
    calibrated = store.begin_sweep("calibrate", job.laboratory.device, command="", commit="", timer="", seed=0)
    for name, value in {"process_sd": 0.0005, "block_sd": 0.0002}.items():
        store.record_calibration(calibrated, job.laboratory.device, name, value)
    store.finish_sweep(calibrated)
    (started,) = [event for event in events(store, wish) if isinstance(event, sweep.FinalsStarted)][:1]
    assert started.is_calibrated
    assert (started.processes, started.protocol.rounds) == (4, 4)
