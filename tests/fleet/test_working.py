"""A worker at its units: taking over, failing, refusing, a time budget, and being told to end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import typer
from command_line import fp8tune
from forked import Forked
from places import PLANTED

from benchmarks.fleet import DEVICE, plan_of, queue, table, timed_once, worked
from fp8tune import alive, cli, recording
from fp8tune.commands import sharing
from fp8tune.errors import UsageError
from fp8tune.fleet import on_ray, units, worker
from fp8tune.fleet.events import UnitDone, UnitFailed, UnitReturned, WorkerEnded, WorkerEvent
from fp8tune.fleet.imports import Imports
from fp8tune.fleet.lease import STALLS_AFTER_S, Heartbeat
from fp8tune.fleet.worth import NEW, SETTLED, STALE, UNDECIDED, worths
from fp8tune.measure import worker as processes
from fp8tune.measure.backends.simulated import SimulatedBackend
from fp8tune.measure.worker import Worker
from fp8tune.recording import Kernel
from fp8tune.records import Status
from fp8tune.stats.calibration import is_calibrated
from fp8tune.store.results import Store
from fp8tune.store.schema import UnitState
from fp8tune.store.units import LEASE_S, LeaseLostError
from fp8tune.sweep import planning, session
from fp8tune.sweep.events import Event, Finished, TrialDone
from fp8tune.sweep.options import Options
from fp8tune.sweep.planning import Plan

WORKER_S = 199
"""A time budget that leaves no time for a calibration."""


@pytest.fixture
def db(tmp_path: Path) -> str:
    return str(tmp_path / "results.db")


def queued(db: str, count: int, *, quick: bool = True) -> Plan:
    with Store.open(db, create=True) as store:
        queue(store, plan := plan_of(count, quick=quick))
    return plan


def of_type(kind: type[WorkerEvent], events: Iterator[WorkerEvent]) -> list[WorkerEvent]:
    return [event for event in events if isinstance(event, kind)]


@pytest.mark.parametrize("stage", ["screen", "final"])
def test_another_gpu_takes_over_and_the_table_is_the_same(db: str, tmp_path: Path, stage: str) -> None:
    """The first worker is lost in the middle of a screen, or of finals, and its host comes back too late."""
    queued(db, 2, quick=False)
    with Store.open(db) as first:
        lease = first.take_unit(DEVICE, "lost", lease_s=0.2)
        assert lease is not None
        plan = units.of_unit(units.plan_of(lease.sweep, timer=f"{DEVICE},gpu=7"), lease.unit)
        with first.fenced(lease):
            lost = worker.swept(first, plan)
            assert any(isinstance(event, TrialDone) and event.row.stage == stage for event in lost)
            time.sleep(0.3)
            assert len(of_type(UnitDone, worked(db, gpu=8, time_budget_s=WORKER_S))) == 2
            with pytest.raises(LeaseLostError):
                for _ in lost:
                    pass
    queued(alone := str(tmp_path / "alone.db"), 2, quick=False)
    assert len(of_type(UnitDone, worked(alone, time_budget_s=WORKER_S))) == 2
    assert table(db) == table(alone)
    with Store.open(db, writable=False) as store:
        assert len({row.device.uuid_hash for row in store.rows()}) == 2


def test_a_unit_that_was_broken_off_goes_on_where_it_was(db: str) -> None:
    queued(db, 1, quick=False)
    events = worked(db, time_budget_s=WORKER_S)
    for event in events:
        if isinstance(event, TrialDone) and event.row.stage == "final":
            break
    events.close()  # type: ignore[attr-defined]
    with Store.open(db, writable=False) as store:
        (unit,) = store.queue().units
        assert (unit.state, unit.attempts, unit.reason) == (
            UnitState.WAITING,
            0,
            "its worker was told to end",
        )
    again = worked(db, time_budget_s=WORKER_S)
    again = [event.from_database for event in again if isinstance(event, TrialDone)]
    assert again.count(True) > 2  # the screen
    with Store.open(db, writable=False) as store:
        assert len({(row.config, row.stage, row.round, row.process) for row in store.rows()}) == len(list(store.rows()))


def test_a_unit_that_fails_is_tried_elsewhere_and_a_worker_that_fails_twice_ends(db: str) -> None:
    def broken(store: Store, plan: Plan) -> Iterator[Event]:
        raise UsageError("the fan is off")
        yield

    queued(db, 3)
    events = list(worked(db, 0, broken, time_budget_s=WORKER_S))
    assert [event.reason for event in events if isinstance(event, UnitFailed)] == ["the fan is off"] * 2
    assert isinstance(events[-1], WorkerEnded)
    assert (events[-1].is_in_vain, events[-1].waiting) == (True, 3)
    assert len(of_type(UnitDone, worked(db, 1, time_budget_s=WORKER_S))) == 3


@pytest.mark.parametrize(("wrong", "without"), [("1", 2), ("0.4", 1)])
def test_a_problem_that_no_config_is_right_on_is_told(db: str, wrong: str, without: int) -> None:
    """Its unit is done, and no other worker would do better. What failed in the first round is not tried again."""
    plan = queued(db, 2)
    done = fp8tune("worker", "--db", db, "--timer", f"{DEVICE},wrong={wrong}", "--time-budget", WORKER_S)
    lines = [line for line in done.stderr.splitlines() if "no config is right" in line]
    assert done.returncode == 1
    shapes = [of.problem.shape for of in plan.problems[:without]]
    assert sorted(lines[:-1]) == [f"rowwise-2d: no config is right on {shape}: wrong" for shape in shapes]
    assert lines[-1].startswith(f"no config is right on some problems of {without} unit")
    with Store.open(db, writable=False) as store:
        found = [of for of in store.queue().units if of.is_finding]
        failed = Counter((row.problem, row.config) for row in store.rows() if row.outcome.status is Status.WRONG)
    assert [of.state for of in found] == [UnitState.DONE] * without
    assert set(failed.values()) == {1}
    assert "done, but no config is right on some problems" in fp8tune("queue", "--db", db).stdout


def test_on_ray_ends_with_1_where_a_problem_has_no_right_config(
    db: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the queue has of units that are done; no GPU of the fleet has anything to do."""

    class Idle(contextlib.AbstractContextManager["Idle"]):
        slots = working = ()
        states: ClassVar[dict[str, object]] = {}

        def __init__(self, *_: object, **__: object) -> None:
            pass

        def is_over(self) -> bool:
            return False

        def __exit__(self, *_: object) -> None:
            pass

    plan = queued(db, 2)
    wrong = worker.WorkerOptions(db, f"{DEVICE},wrong=1", time_budget_s=WORKER_S)
    assert [bool(event.reason) for event in worker.work(wrong) if isinstance(event, UnitDone)] == [True, True]
    monkeypatch.setattr(on_ray, "RayFleet", Idle)
    with pytest.raises(typer.Exit) as ended:
        sharing.on_ray(plan, db, time.monotonic())
    assert ended.value.exit_code == 1
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("no config is right on some problems of 2 units")
    assert "rowwise-2d: no config is right on M=1024 K=128: wrong" in said


def test_a_worker_with_other_code_leaves_the_units_alone(db: str) -> None:
    plan = plan_of(1)
    with Store.open(db, create=True) as store:
        sweep = units.queued(plan)
        (unit,) = units.units_of(plan, sweep.key)
        store.add_units(sweep, [replace(unit, source_hash="0123456789abcdef", problems=("fedcba9876543210",))])
    done = fp8tune("worker", "--db", db, "--timer", DEVICE, "--time-budget", WORKER_S)
    assert done.returncode == 2
    assert "rowwise-2d of the unit is 0123456789abcdef" in done.stderr.splitlines()[-1]
    with Store.open(db, writable=False) as store:
        (found,) = store.queue().units
        assert (found.state, found.attempts) == (UnitState.WAITING, 0)


def rewritten(db: str, **changed: object) -> None:
    """Change the document of the queued sweep, as whoever may write to the database can; options by their names."""
    with contextlib.closing(sqlite3.connect(db)) as connection, connection:
        document = json.loads(connection.execute("select document from queued_sweeps").fetchone()[0])
        whole = {name: changed.pop(name) for name in ("version", "options", "rows") if name in changed}
        document["options"].update(changed)
        connection.execute("update queued_sweeps set document = ?", (json.dumps({**document, **whole}),))


def waiting_attempts(db: str) -> list[int]:
    with Store.open(db, writable=False) as store:
        return [of.attempts for of in store.queue().units if of.state is UnitState.WAITING]


@pytest.mark.parametrize(
    ("kernel", "option"),
    [
        ("{folder}/payload.py:SPEC", "--kernel"),
        ("payload:SPEC", "--kernel"),
        ("payload.py:SPEC@{folder}/run.json", "--kernel"),
        ("rowwise-2d?reference=payload:SPEC", "--reference"),
        ("rowwise-2d?reference=payload.py:SPEC", "--reference"),
        ("fp8tune_kernels.quantize.colwise:SPEC@{folder}/run.json", "--recording"),
    ],
)
def test_code_that_only_the_database_names_is_not_imported(db: str, tmp_path: Path, kernel: str, option: str) -> None:
    """Whoever may write to the database must not choose what a worker runs. Its units are left to other workers."""
    (tmp_path / "payload.py").write_text("open('canary', 'w').write('ran')\nSPEC = print\n")
    recorded = Kernel(f"{tmp_path / 'payload.py'}:SPEC", file=str(tmp_path / "payload.py"))
    (tmp_path / "run.json").write_text(recording.text_of(recording.Recording(kernels=(recorded,))))
    queued(db, 1)
    rewritten(db, kernels=[kernel.format(folder=tmp_path)])
    done = fp8tune("worker", "--db", db, "--timer", DEVICE, "--time-budget", WORKER_S, cwd=tmp_path)
    assert not (tmp_path / "canary").exists()
    assert done.returncode == 2
    assert f" {option} " in done.stderr.splitlines()[-1]
    assert waiting_attempts(db) == [0]


def test_a_worker_imports_what_its_command_line_names(db: str) -> None:
    """A worker without the option leaves the units alone; one with it does them, however it names the file."""
    path = PLANTED / "untouched.py"
    options = ("--timer", DEVICE, "--quick", "--shapes", "llama4", "--db", db)
    sweep = fp8tune("sweep", "--on", "queue", "--kernel", f"{path}:SPEC", *options)
    assert f"fp8tune worker --kernel {path}:SPEC" in sweep.stderr
    command = "worker", "--db", db, "--timer", DEVICE, "--time-budget", WORKER_S
    assert fp8tune(*command).returncode == 2
    assert set(waiting_attempts(db)) == {0}
    done = fp8tune(*command, "--kernel", "untouched.py:SPEC", cwd=PLANTED)
    assert done.returncode == 0
    assert waiting_attempts(db) == []


def test_kernels_of_a_recording_that_the_command_line_names_may_be_imported(tmp_path: Path) -> None:
    """All kernels in the file may, under its absolute path, and no other text that the database adds to it."""
    inside, outside = "inside.py:kernel", "outside.py:kernel"
    run = tmp_path / "run.json"
    recorded = Kernel(f"{tmp_path}/{inside}", file=str(tmp_path / "inside.py"))
    run.write_text(recording.text_of(recording.Recording(kernels=(recorded,))))
    named = Imports.named(recordings=[str(run)])
    assert named.options_for([f"{tmp_path}/{inside}@{run}?check=exact"]) == ""
    assert named.options_for([f"{tmp_path}/{outside}@{run}"]) == f" --kernel {tmp_path}/{outside}"
    assert named.options_for([f"{tmp_path}/{inside}@{run}?reference=os:system"]) == " --reference os:system"
    assert named.options_for([f"{tmp_path}/{inside}"]) == f" --kernel {tmp_path}/{inside}"
    whole = f"{tmp_path}/{inside}@{run}?reference=mine:right"
    assert Imports.named([whole]).options_for([whole]) == ""
    assert Imports().options_for(["rowwise-2d", "rowwise-2d?check=exact"]) == ""


@pytest.mark.parametrize(
    "changed",
    [
        {"kernels": 3},
        {"kernels": [3]},
        {"kernels": ["rowwise-2d?check=nonsense"]},
        {"kernels": None},
        {"seed": "zero"},
        {"seed": 2**70},
        {"grid": {"num_warps": 4}},
        {"quick": "yes"},
        {"quick": []},
        {"trial_timeout_s": -1},
        {"in_dtype": ["bfloat16"]},
        {"routing": 7},
        {"rows": 3},
        {"rows": [3]},
        {"rows": [{"M": "many"}]},
        {"rows": [{"M": -1, "K": 128}]},
        {"options": 3},
        {"options": None},
        {"version": {}},
    ],
)
def test_a_document_of_another_form_is_one_line_and_its_units_stay(db: str, changed: dict[str, object]) -> None:
    queued(db, 1)
    rewritten(db, **changed)
    done = fp8tune("worker", "--db", db, "--timer", DEVICE, "--time-budget", WORKER_S)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("fp8tune: ")
    assert waiting_attempts(db) == [0]
    assert fp8tune("queue", "--db", db).returncode == 0


def test_units_are_built_anew_from_their_document_and_name_no_database(db: str) -> None:
    options = Options(("rowwise-2d",), shapes=("tiny",), timer=DEVICE, db="postgresql://me:secret@host/x", quick=True)
    plan = planning.expanded(planning.planned(options))
    sweep = units.queued(plan)
    assert "secret" not in sweep.document + sweep.command
    again = units.plan_of(sweep, timer=f"{DEVICE},gpu=1")
    assert [units.problem_key(of) for of in again.problems] == [units.problem_key(of) for of in plan.problems]
    assert [of.configs for of in again.problems] == [of.configs for of in plan.problems]
    parts = [units.of_unit(again, unit) for unit in units.units_of(plan, sweep.key)]
    assert [of for part in parts for of in part.problems] == list(again.problems)
    assert len({part.key for part in parts}) == len(parts)
    with pytest.raises(UsageError, match="the units are for simulated:1, and this GPU is simulated:2"):
        units.plan_of(sweep, timer="simulated:2")


class Clock:
    """A clock that units move."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def do(self, seconds: float) -> worker.Do:
        """What takes so long."""

        def working(store: Store, plan: Plan) -> Iterator[Event]:
            budget_s = plan.options.time_budget_s
            self.now_s += seconds if budget_s is None else min(seconds, budget_s)
            if budget_s is not None and budget_s < seconds:
                raise worker.UnfinishedError("the time is over")
            yield from timed_once(store, plan)

        return working


@pytest.mark.parametrize(("budget_s", "done"), [(60, 2), (900, 30)])
def test_a_short_budget_goes_into_units_and_says_what_is_left(db: str, budget_s: int, done: int) -> None:
    """The old example spent 44 of 60 seconds on a calibration, and swept nothing."""
    queued(db, 40)
    clock = Clock()
    options = worker.WorkerOptions(db, DEVICE, time_budget_s=budget_s)
    events = list(worker.work(options, clock.do(30), clock=clock, sleep=lambda _: None))
    ended = events[-1]
    assert isinstance(ended, WorkerEnded)
    assert (ended.done, ended.failed, ended.waiting) == (done, 0, 40 - done)
    assert (ended.reason, ended.is_in_vain) == ("the time budget is over", False)
    assert ended.left_s is not None
    assert len(of_type(UnitReturned, iter(events))) == (1 if budget_s % 30 > worker.LEAST_S else 0)
    with Store.open(db, writable=False) as store:
        assert not is_calibrated(store.calibration(SimulatedBackend(DEVICE).device))


def test_worth_is_what_is_open_and_settled_problems_are_left_out(db: str) -> None:
    plan = plan_of(3, quick=True)
    new, screened, stale = plan.problems
    with Store.open(db, create=True) as store:
        old = replace(stale, version=replace(stale.version, source_hash="0123456789abcdef"))
        for of in (screened, old):
            for _ in session.run(store, replace(plan, key=of.version.source_hash, problems=(of,))):
                pass
        worth = worths(store, plan)
        assert [worth(of) for of in (new, screened, stale)] == [NEW, SETTLED, STALE]
        finals = replace(plan, options=replace(plan.options, quick=False))
        assert worths(store, finals)(screened) == UNDECIDED  # it has no finals yet
        again = replace(plan, options=replace(plan.options, again=True))
        assert worths(store, again)(screened) == NEW
        added = units.add(store, plan)
        assert (added.problems, added.settled) == (2, 1)
        assert units.add(store, plan).new == 0
        first = store.queue().units[0]
        assert first.unit.worth > STALE / 2


def test_what_the_time_budget_left_out_is_no_failure(db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of the finals that would end too late is not begun: then there is time left, and the unit is not done."""
    queued(db, 2)
    monkeypatch.setattr(worker, "sweep", lambda store, plan: iter([Finished(0, 1.0, left_out=54)]))
    events = list(worker.work(worker.WorkerOptions(db, DEVICE, time_budget_s=1000.0)))
    assert len(of_type(UnitReturned, iter(events))) == 1
    assert not of_type(UnitFailed, iter(events))
    assert isinstance(events[-1], WorkerEnded)
    assert (events[-1].reason, events[-1].is_in_vain) == ("the time budget is over", False)
    with Store.open(db, writable=False) as store:
        assert {(of.state, of.attempts) for of in store.queue().units} == {(UnitState.WAITING, 0)}


def test_again_queues_anew_once_all_is_done(db: str) -> None:
    plan = plan_of(2)
    again = replace(plan, options=replace(plan.options, again=True))
    with Store.open(db, create=True) as store:
        first = units.add(store, again)
        assert units.add(store, again).sweep == first.sweep
        assert units.add(store, again).new == 0
        while (lease := store.take_unit(DEVICE, "me")) is not None:
            store.finish_unit(lease)
        second = units.add(store, again)
        assert second.new == first.new
        assert second.sweep.key != first.sweep.key


def test_work_that_gives_no_sign_loses_its_lease(db: str) -> None:
    queued(db, 1)
    with Store.open(db) as store:
        lease = store.take_unit(DEVICE, "me", lease_s=0.4)
        assert lease is not None
        with Heartbeat(db, lease, stalls_after_s=60.0) as heart:
            time.sleep(0.8)
            heart.beat()
            assert store.return_expired_units() == 0
            heart.stalls_after_s = 0.0
            time.sleep(1.0)
            assert heart.is_stalled
            assert store.return_expired_units() == 1
            heart.stalls_after_s = 60.0
            time.sleep(0.4)
            with pytest.raises(LeaseLostError):
                heart.beat()


def test_a_hang_of_the_work_itself_gives_its_unit_back_and_a_wait_with_a_limit_does_not(
    db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody tells the heartbeat of what goes on: in the one case nothing does, in the other a process works."""
    assert LEASE_S + STALLS_AFTER_S + worker.WAIT_S <= 60
    monkeypatch.setattr(alive, "EVERY_S", 0.05)
    monkeypatch.setattr(processes, "PRELOAD", [])  # it only sleeps
    queued(db, 1)
    with Store.open(db) as store, contextlib.closing(Worker()) as process:
        process.call(60, time.sleep, 0)
        for wait, returned in ((lambda: process.call(60, time.sleep, 1.2), 0), (lambda: time.sleep(1.2), 1)):
            lease = store.take_unit(DEVICE, "me", lease_s=0.4)
            assert lease is not None
            with Heartbeat(db, lease, stalls_after_s=0.3):
                wait()
                assert store.return_expired_units() == returned
            store.return_units_of("me", "the next case")


def test_a_worker_that_is_told_to_end_gives_its_unit_back_at_once(db: str) -> None:
    kernel = f"{PLANTED / 'untouched.py'}:SPEC"
    options = ("--kernel", kernel, "--shapes", "llama4", "--timer", DEVICE, "--db", db)
    assert fp8tune("sweep", *options, "--on", "queue").returncode == 0

    def work() -> None:
        os.environ["FP8TUNE_DB"] = db
        sys.argv = ["fp8tune", "worker", "--timer", DEVICE, "--format", "json", "--time-budget", str(WORKER_S)]
        sys.argv += ["--kernel", kernel]
        cli.main()

    process = Forked(work)
    while '"event": "taken"' not in (line := process.line()):
        assert line, process.wait()
    shown = fp8tune("queue", "--db", db).stdout
    assert f"{os.uname().nodename}:{process.pid}" in shown
    os.kill(process.pid, signal.SIGTERM)
    code, said = process.wait()
    assert code == 143
    assert "its unit is given back" in said.splitlines()[-1]
    with Store.open(db, writable=False) as store:
        assert store.count_units().keys() == {UnitState.WAITING}
        assert sum(of.attempts for of in store.queue().units) == 0


def test_the_queue_says_what_there_is(db: str) -> None:
    assert "does not exist" in fp8tune("queue", "--db", db).stderr
    with Store.open(db, create=True) as store:
        plan = plan_of(3)
        sweep = queue(store, plan)
        first, lease = (store.take_unit(DEVICE, name) for name in ("host-a:16", "host-a:17"))
        assert first is not None
        assert lease is not None
        store.finish_unit(first)
        found = json.loads(fp8tune("queue", "--db", db, "--format", "json").stdout)
        assert sorted(one["state"] for one in found["units"]) == ["done", "running", "waiting"]
        assert found["excluded"] == []
        store.fail_unit(replace(lease, attempt=9), "it broke")
    shown = fp8tune("queue", "--db", db).stdout
    assert "it broke" in shown
    assert max(map(len, shown.splitlines())) <= 120
    assert "1 units that had failed wait again" in fp8tune("queue", "--db", db, "--retry-failed").stderr
    assert fp8tune("queue", "--db", db, "--forget", "nothing").returncode == 2
    assert "3 units removed" in fp8tune("queue", "--db", db, "--forget", sweep.key).stderr
    assert "no work is queued" in fp8tune("queue", "--db", db).stdout
