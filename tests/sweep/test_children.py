"""A sweep on several simulated GPUs: the results of one, whoever is killed, and nothing is left running."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import environment, fp8tune
from forked import workers_forked_from_here
from places import PLANTED

from fp8tune.errors import MachineError, UsageError
from fp8tune.exporting import select_rows
from fp8tune.measure.gpus import Gpu, choose, simulated_gpus
from fp8tune.options import SweepOptions
from fp8tune.plan.shapes import Selection
from fp8tune.records import Device, NamedInts, Problem
from fp8tune.store.results import Store
from fp8tune.sweeping import children, picks, planning, session
from fp8tune.sweeping.events import ChildDied, Event, Finished, SizeDone, TrialDone
from fp8tune.sweeping.planning import Plan
from fp8tune.tables.current import NO_TABLES

TIMER = "simulated:1"
FEW = ("num_warps=4,8", "BLOCK_SIZE=2", "BLOCK_SIZE_ITER=8192", "num_stages=1")
UNTOUCHED = f"{PLANTED / 'untouched.py'}:SPEC"


@pytest.fixture(autouse=True)
def forked() -> Iterator[None]:
    with workers_forked_from_here():
        yield


def plan_of(gpus: int, sizes: int = 6, **options: Any) -> Plan:
    options = {"kernel": ("rowwise-2d",), "grid": FEW, **options}
    short = planning.planned(SweepOptions(timer=TIMER, shapes=(), gpus=gpus, **options))
    rows = tuple(NamedInts(M=1024, K=128 * (1 + number), E=1, N=128) for number in range(sizes))
    return planning.expanded(replace(short, selections=(Selection(rows),)))


def swept(db: Path, plan: Plan) -> list[Event]:
    with Store.open(str(db), create=True) as store:
        return list(children.run(store, plan))


def table(db: Path) -> str:
    with Store.open(str(db), writable=False) as store:
        selection = select_rows(store, "simulated", tables=NO_TABLES)
    return "\n".join((selection.table.render(), *selection.notices))


def chosen(db: Path) -> dict[Problem, object]:
    with Store.open(str(db), writable=False) as store:
        return {pick.problem: (pick.config, pick.verdict, pick.time_us) for pick in picks.read(store)}


def trials(db: Path) -> Counter[tuple[object, ...]]:
    """Number of trials by size, config, stage, round and process of the confirmation."""
    with Store.open(str(db), writable=False) as store:
        return Counter(
            (row.problem, row.config, row.stage, row.round, row.process * (row.stage != "screen"))
            for row in store.rows()
        )


def gpus_of(db: Path) -> dict[Problem, set[str]]:
    gpus = dict[Problem, set[str]]()
    with Store.open(str(db), writable=False) as store:
        for row in store.rows():
            gpus.setdefault(row.problem, set()).add(row.device.uuid_hash)
    return gpus


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep on one GPU."""
    db = tmp_path_factory.mktemp("alone") / "one.db"
    swept(db, plan_of(1))
    return db


def assert_same(db: Path, alone: Path) -> None:
    """No trial is missing, none is there twice, each size is of one GPU, and picks and table are those of one GPU."""
    assert trials(db) == trials(alone)
    assert set(trials(db).values()) == {1}
    assert {len(gpus) for gpus in gpus_of(db).values()} == {1}
    assert chosen(db) == chosen(alone)
    assert table(db) == table(alone)


def test_four_gpus_pick_what_one_picks(alone: Path, tmp_path: Path) -> None:
    db, plan = tmp_path / "four.db", plan_of(4)
    first, *events, last = swept(db, plan)
    assert (first.problems, first.configs) == (6, sum(size.count for size in plan.problems))  # type: ignore[union-attr]
    assert {event.problem for event in events if isinstance(event, SizeDone)} == {s.problem for s in plan.problems}
    assert isinstance(last, Finished)
    assert (last.left_out, last.is_whole) == (0, True)
    assert_same(db, alone)
    assert len(set.union(*gpus_of(db).values())) > 1
    again = swept(db, plan)
    assert [event for event in again if isinstance(event, TrialDone) and not event.from_database] == []
    assert_same(db, alone)


@pytest.mark.parametrize("stage", ["screen", "final"])
def test_a_killed_child_loses_nothing_and_doubles_nothing(alone: Path, tmp_path: Path, stage: str) -> None:
    deaths = list[ChildDied]()
    with Store.open(str(tmp_path / "killed.db"), create=True) as store:
        for event in children.run(store, plan_of(2)):
            is_new = isinstance(event, TrialDone) and event.row.stage == stage
            if is_new and not deaths and (running := multiprocessing.active_children()):
                os.kill(running[0].pid or 0, signal.SIGKILL)
                deaths.append(ChildDied("", "", 0, is_replaced=True))
            elif isinstance(event, ChildDied):
                deaths.append(event)
    assert [(death.reason, death.is_replaced) for death in deaths[1:]] == [("was killed by SIGKILL", True)]
    assert deaths[1].sizes > 0
    assert_same(tmp_path / "killed.db", alone)


def test_the_same_sweep_goes_on_where_it_was_stopped(alone: Path, tmp_path: Path) -> None:
    db, plan = tmp_path / "stopped.db", plan_of(3, again=True)
    with Store.open(str(db), create=True) as store:
        running = children.run(store, plan)
        done = 0
        for event in running:
            done += isinstance(event, SizeDone)
            if done == 2:
                break
        running.close()  # type: ignore[attr-defined]
        assert multiprocessing.active_children() == []
        stored = sum(1 for _ in store.rows())
    events = swept(db, plan)
    assert sum(isinstance(event, TrialDone) and event.from_database for event in events) > 0
    assert 0 < stored < sum(trials(db).values())
    assert_same(db, alone)


@pytest.mark.parametrize("broken", [(1,), (0, 1)])
def test_the_others_do_the_sizes_of_a_gpu_whose_children_die_again_and_again(
    alone: Path, tmp_path: Path, broken: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, sweep = plan_of(2), session.sweep
    names = [plan.gpus[number].name for number in broken]

    def dying(store: Store, own: Plan, *arguments: Any, **options: Any) -> Generator[Event, None, int]:
        if own.backend.timer in names:
            os._exit(3)
        return (yield from sweep(store, own, *arguments, **options))

    monkeypatch.setattr(session, "sweep", dying)
    if broken == (0, 1):
        with pytest.raises(MachineError, match="ended with code 3, as others before: run the same command to resume"):
            swept(tmp_path / "broken.db", plan)
        return
    events = swept(tmp_path / "broken.db", plan)
    deaths = [event.is_replaced for event in events if isinstance(event, ChildDied)]
    assert deaths == [True] * (children.MOST_DEATHS - 1) + [False]
    assert_same(tmp_path / "broken.db", alone)


def test_an_error_of_a_child_is_that_of_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> Iterator[Event]:
        raise MachineError("the GPU's clocks changed")
        yield

    monkeypatch.setattr(session, "sweep", failing)
    with pytest.raises(MachineError, match="the GPU's clocks changed"):
        swept(tmp_path / "error.db", plan_of(2))
    assert multiprocessing.active_children() == []


def test_several_gpus_share_a_search(tmp_path: Path) -> None:
    """Grids that do not fit the time budget: each GPU has its sizes, and the time is that of the whole sweep."""
    leads = f"LEAD={','.join(map(str, range(1, 1401)))}"
    grid = (leads, "maxnreg=0,64,96,128,168", "num_warps=1,2,4,8,16", "BLOCK_SIZE<=32")
    plan = plan_of(2, 3, kernel=("colwise",), grid=grid, budget_s=3.0, quick=True)
    begun = time.monotonic()
    *_, last = swept(tmp_path / "search.db", plan)
    assert isinstance(last, Finished)
    assert 0 < last.seen < last.grid
    gpus = gpus_of(tmp_path / "search.db")
    assert sorted(Counter(uuid for uuids in gpus.values() for uuid in uuids).values()) == [1, 2]
    assert time.monotonic() - begun < 60


def test_nothing_is_handed_out_after_the_time_budget(tmp_path: Path) -> None:
    plan = plan_of(2, budget_s=0.0)
    *events, last = swept(tmp_path / "late.db", plan)
    assert isinstance(last, Finished)
    assert (last.left_out, last.is_whole) == (sum(size.count for size in plan.problems), False)
    assert not any(isinstance(event, TrialDone) for event in events)


def test_sizes_travel_as_they_are() -> None:
    """A grid is rebuilt by the child, also one that is never built."""
    large = ("BLOCK_SIZE<=32", f"LEAD={','.join(map(str, range(1, 1401)))}", "num_warps=1,2,4,8,16")
    for plan in (plan_of(1, 1), plan_of(1, 1, kernel=("colwise",), grid=large, budget_s=60.0)):
        (size,) = plan.problems
        again = pickle.loads(pickle.dumps(size))
        assert again == replace(size, configs=again.configs)
        assert type(again.configs) is type(size.configs)
        configs = list(itertools.islice(size.configs, 50))
        assert {config: again.configs[config] for config in configs} == {c: size.configs[c] for c in configs}
        assert len(again.configs) == len(size.configs)


# Commands


def test_tune_and_recheck_take_gpus_and_refuse_what_is_not_there(tmp_path: Path) -> None:
    cases = {
        ("sweep", "--gpus", "0"): "--gpus must be at least 1, got 0",
        ("recheck", "--gpus", "0"): "--gpus must be at least 1, got 0",
        ("tune", "--gpus", "0", "--", "true"): "--gpus must be at least 1, got 0",
        ("sweep", "--arch", "sm_90", "--gpus", "2"): "only compiles: leave out --gpus",
        ("sweep", "--same-bits", "M", "--gpus", "2", "--timer", TIMER): "leave out --on and --gpus",
    }
    for command, words in cases.items():
        done = fp8tune(*command, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
        assert words in done.stderr


def test_the_command_prints_what_it_prints_with_one_gpu(tmp_path: Path) -> None:
    options = ("--kernel", UNTOUCHED, "--shapes", "tiny", "--timer", TIMER, "--format", "json")
    several, single = (
        fp8tune("sweep", *options, "--gpus", count, "--db", tmp_path / f"{count}.db") for count in (2, 1)
    )
    assert (several.returncode, single.returncode) == (0, 0), several.stderr
    assert "planted-untouched on 2 x simulated:1: " in several.stderr

    def results(text: str) -> list[str]:
        return sorted(line for line in text.splitlines() if '"decided"' in line)

    assert results(several.stdout) == results(single.stdout) != []
    assert sorted(line for line in several.stdout.splitlines() if '"timed"' in line) == sorted(
        line for line in single.stdout.splitlines() if '"timed"' in line
    )


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_without_a_traceback_and_the_same_command_resumes(tmp_path: Path) -> None:
    """The real command: its children come from a fork server, and a terminal sends the signal to all of them."""
    mark, db = f"mark-{os.getpid()}", tmp_path / "real.db"
    command = ["sweep", "--kernel", UNTOUCHED, "--shapes", "tiny", "--timer", TIMER, "--gpus", "2", "--db", str(db)]
    env = {**environment(), "PGMARK": mark}

    def rows() -> int:
        with contextlib.suppress(Exception), Store.open(str(db), writable=False) as store:
            return sum(1 for _ in store.rows())
        return 0

    def is_marked(folder: Path) -> bool:
        with contextlib.suppress(OSError):
            return mark.encode() in (folder / "environ").read_bytes() and bool((folder / "cmdline").read_bytes())
        return False

    program = [sys.executable, "-m", "fp8tune", *command]
    process = subprocess.Popen(program, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 240
    while not rows() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert "run the same command to resume" in error
    stored, deadline = rows(), time.monotonic() + 20
    while (left := [*filter(is_marked, Path("/proc").glob("[0-9]*"))]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert (stored > 0, left) == (True, [])
    done = fp8tune(*command)
    assert done.returncode == 0, done.stderr
    assert set(trials(db).values()) == {1}


# Choice of GPUs


def gpu(name: str, model: str = "NVIDIA H200", *, is_used: bool = False) -> Gpu:
    return Gpu(name, Device("sm_90", model, uuid_hash=name), is_used)


HOST = (gpu("0"), gpu("1", is_used=True), gpu("2", "NVIDIA L4"), gpu("3"))


@pytest.mark.parametrize(
    ("gpus", "requested", "environment", "names", "line"),
    [
        (HOST, None, {}, "03", "left out: GPU 1 (in use), 2 (NVIDIA L4)"),
        (HOST, 1, {}, "0", "left out: GPU 1 (in use), 2 (NVIDIA L4)"),
        (HOST[3:], None, {}, "3", ""),
        ((HOST[1], HOST[0]), None, {}, "0", "left out: GPU 1 (in use)"),
        (HOST, None, {"LOCAL_RANK": "2"}, "3", "GPU 3 of 4, because LOCAL_RANK is set: --gpus 4 uses all"),
        (HOST, 2, {"SLURM_LOCALID": "0"}, "03", "left out: GPU 1 (in use), 2 (NVIDIA L4)"),
        (HOST[:1], None, {"SLURM_LOCALID": "5"}, "0", ""),
    ],
)
def test_free_gpus_of_the_first_ones_name_are_used(
    gpus: tuple[Gpu, ...], requested: int | None, environment: dict[str, str], names: str, line: str
) -> None:
    chosen, lines = choose(gpus, requested, environment)
    assert ("".join(gpu.name for gpu in chosen), "".join(lines)) == (names, line)


@pytest.mark.parametrize(
    ("gpus", "requested", "error", "words"),
    [
        (HOST, 4, UsageError, "--gpus 4: 3 visible GPUs named NVIDIA H200 are here"),
        (HOST, 3, MachineError, "other processes use GPU 1: end them"),
        (HOST[1:2], None, MachineError, "other processes use GPU 1: end them"),
        (HOST[1:2], 1, MachineError, "other processes use GPU 1: end them"),
    ],
)
def test_more_gpus_than_there_are_or_than_are_free(
    gpus: tuple[Gpu, ...], requested: int | None, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        choose(gpus, requested, {})


def test_simulated_gpus_of_one_timer_have_one_name_and_the_first_is_the_timers_own() -> None:
    gpus = simulated_gpus("simulated:3.1,wrong=0.5", 3)
    assert gpus[0].name == "simulated:3.1,wrong=0.5"
    assert gpus[2].name == "simulated:3.1,gpu=2,wrong=0.5"
    assert len({gpu.device for gpu in gpus}) == 3
    assert {gpu.device.name for gpu in gpus} == {"simulated:3"}
