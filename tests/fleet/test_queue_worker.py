"""A worker at its units: taking over, failing, refusing, a time budget, and being told to end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import fp8tune
from fleet.crew import DEVICE, Clock, Take, of_type, plan_of, queue, table, timed_once, worked
from forked import Forked
from places import PLANTED

from fp8tune import alive, cli
from fp8tune.errors import MachineError, UsageError
from fp8tune.fleet import units, worker
from fp8tune.fleet.heartbeat import STALLS_AFTER_S, renewing
from fp8tune.measure import worker as processes
from fp8tune.records import Status
from fp8tune.store.results import Store
from fp8tune.store.schema import UnitState
from fp8tune.store.units import LEASE_S, LeaseLostError
from fp8tune.sweeping.events import Event, Finished, SizeDone, TrialDone
from fp8tune.sweeping.planning import Plan
from fp8tune.sweeping.session import sweep


@pytest.fixture
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FP8TUNE_TIMER", DEVICE)
    return str(tmp_path / "results.db")


@pytest.mark.parametrize("stage", ["screen", "final"])
def test_another_gpu_takes_over_and_the_table_is_the_same(db: str, tmp_path: Path, stage: str) -> None:
    """The first worker is lost in the middle of a pass, and its host comes back too late."""
    queue(db, plan_of(2, quick=False))
    with Store.open(db) as first:
        lease = first.take_unit(DEVICE, "lost", lease_s=0.2)
        assert lease is not None
        plan = units.plan_of(lease.sweep, timer=f"{DEVICE},gpu=7")
        with first.fenced([lease]):
            lost = sweep(first, replace(plan, problems=plan.problems[:1]))
            assert any(isinstance(event, TrialDone) and event.row.stage == stage for event in lost)
            time.sleep(0.3)
            assert len(of_type(worked(db, gpu=8), "done")) == 2
            with pytest.raises(LeaseLostError):
                for _ in lost:
                    pass
    queue(alone := str(tmp_path / "alone.db"), plan_of(2, quick=False))
    assert len(of_type(worked(alone), "done")) == 2
    assert table(db) == table(alone)
    with Store.open(db, writable=False) as store:
        assert len({row.device.uuid_hash for row in store.rows()}) == 2


def test_a_unit_that_was_broken_off_continues_where_it_was(db: str) -> None:
    queue(db, plan_of(1, quick=False))
    events = worked(db)
    assert any(isinstance(event, TrialDone) and event.row.stage == "final" for event in events)
    events.close()  # type: ignore[attr-defined]
    with Store.open(db, writable=False) as store:
        (unit,) = store.queue().units
        assert (unit.state, unit.attempts, unit.reason) == (UnitState.WAITING, 0, "its worker was told to end")
    again = [event.from_database for event in worked(db) if isinstance(event, TrialDone)]
    assert again.count(True) > 2  # the coarse pass
    with Store.open(db, writable=False) as store:
        rows = [(row.config, row.stage, row.round, row.process) for row in store.rows()]
    assert len(set(rows)) == len(rows)


def test_a_unit_that_fails_is_tried_elsewhere_and_a_worker_that_fails_twice_ends(db: str) -> None:
    def broken(store: Store, plan: Plan, clock: Clock, /, *, take: Take) -> Generator[Event, None, None]:
        raise UsageError("the fan is off")
        yield

    queue(db, plan_of(3))
    events, failing = [], worked(db, 0, broken)
    with pytest.raises(MachineError, match="2 units in a row failed here, the last: the fan is off"):
        events.extend(failing)
    assert len(of_type(worked(db, 1), "done")) == 3


@pytest.mark.parametrize(("wrong", "without"), [("1", 2), ("0.4", 1)])
def test_a_problem_that_no_config_is_right_on_is_named(
    db: str, wrong: str, without: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its unit is done, and no other worker would do better. A config that failed is not tried again."""
    plan = plan_of(2)
    queue(db, plan)
    monkeypatch.setenv("FP8TUNE_TIMER", f"{DEVICE},wrong={wrong}")
    done = fp8tune("worker", "--db", db)
    assert done.returncode == 1
    named = [
        size.problem.shape for size in plan.problems if f"no config is right on {size.problem.shape}" in done.stderr
    ]
    assert named == [size.problem.shape for size in plan.problems[:without]]
    with Store.open(db, writable=False) as store:
        result = [status for status in store.queue().units if status.is_finding]
        failed = Counter((row.problem, row.config) for row in store.rows() if row.outcome.status is Status.WRONG)
    assert [status.state for status in result] == [UnitState.DONE] * without
    assert set(failed.values()) == {1}
    assert "no config is right on" in fp8tune("worker", "--status", "--db", db).stdout


def test_a_worker_with_other_code_leaves_the_units_alone(db: str) -> None:
    plan = plan_of(1)
    with Store.open(db, create=True) as store:
        sweep = units.queued(plan)
        (unit,) = units.units_of(plan, sweep.key)
        store.add_units(sweep, [replace(unit, source_hash="0123456789abcdef", problems=("fedcba9876543210",))])
    done = fp8tune("worker", "--db", db)
    assert done.returncode == 2
    assert "rowwise-2d of the unit is 0123456789abcdef" in done.stderr.splitlines()[-1]
    with Store.open(db, writable=False) as store:
        (result,) = store.queue().units
        assert (result.state, result.attempts) == (UnitState.WAITING, 0)


@pytest.mark.parametrize(("budget_s", "done"), [(60, 2), (300, 10)])
def test_a_time_budget_goes_into_units_and_says_what_is_left(db: str, budget_s: int, done: int) -> None:
    queue(db, plan_of(12))
    now_s = 0.0

    def half_a_minute(store: Store, plan: Plan, clock: Clock, /, *, take: Take) -> Generator[Event, None, None]:
        nonlocal now_s
        deadline = now_s + (plan.options.budget_s or 0.0)
        for event in timed_once(store, plan, clock, take=take):
            if isinstance(event, SizeDone):
                if now_s + 30.0 > deadline:
                    now_s = deadline
                    yield Finished(0.0, left_out=1, is_whole=False)
                    return
                now_s += 30.0
            yield event

    events = list(worked(db, 0, half_a_minute, time_budget_s=budget_s, clock=lambda: now_s))
    (ended,) = of_type(iter(events), "ended")
    assert len(of_type(iter(events), "done")) == done
    assert (ended.done, ended.waiting, ended.reason) == (done, 12 - done, "the time budget is over")


def test_a_hang_of_the_work_itself_gives_its_unit_back_and_a_wait_with_a_limit_does_not(
    db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the one case nothing gives a sign, in the other a process works."""
    assert LEASE_S + STALLS_AFTER_S + worker.WAIT_S <= 60
    monkeypatch.setattr(alive, "EVERY_S", 0.05)
    monkeypatch.setattr(processes, "PRELOAD", [])  # it only sleeps
    queue(db, plan_of(1))
    with Store.open(db) as store, contextlib.closing(processes.Worker()) as process:
        process.call(60, time.sleep, 0)
        for wait, returned in ((lambda: process.call(60, time.sleep, 1.2), 0), (lambda: time.sleep(1.2), 1)):
            lease = store.take_unit(DEVICE, "me", lease_s=0.4)
            assert lease is not None
            with renewing(db, [lease], 0.1, stalls_after_s=0.3):
                wait()
                assert store.return_expired_units() == returned
            store.return_units_of("me", "the next case")


def test_a_worker_that_is_told_to_end_gives_its_unit_back_at_once(db: str) -> None:
    kernel = f"{PLANTED / 'untouched.py'}:SPEC"
    options = ("--kernel", kernel, "--shapes", "llama4", "--db", db)
    assert fp8tune("sweep", *options, "--on", "queue").returncode == 0

    def work() -> None:
        os.environ["FP8TUNE_DB"] = db
        sys.argv = ["fp8tune", "worker", "--format", "json", "--kernel", kernel]
        cli.main()

    process = Forked(work)
    while '"event": "taken"' not in (line := process.line()):
        assert line, process.wait()
    os.kill(process.pid, signal.SIGSTOP)  # it would be done before a busy machine has read the status
    assert f"{os.uname().nodename}:{process.pid}" in fp8tune("worker", "--status", "--db", db).stdout
    os.kill(process.pid, signal.SIGTERM)
    os.kill(process.pid, signal.SIGCONT)
    code, text = process.wait()
    assert code == 143
    assert "its unit is given back" in text.splitlines()[-1]
    with Store.open(db, writable=False) as store:
        left = store.queue()
        assert left.counts[UnitState.WAITING]
        assert not left.counts[UnitState.RUNNING]
        assert all(unit.attempts == 0 for unit in left.units if unit.state is UnitState.WAITING)
