"""kill -9 at any moment, two sweeps at once, a full disk, a damaged file: no row lost, none doubled, one line said."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import resource
import shutil
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from command_line import fp8tune
from database_rows import begin, config, finished_sweep, problem, row
from forked import Forked, say, workers_forked_from_here
from places import PLANTED, PUBLISHED

from fp8tune.check import doctor
from fp8tune.store import database
from fp8tune.store.results import Store
from fp8tune.sweeping import planning
from fp8tune.sweeping.events import TrialDone
from fp8tune.sweeping.loop import sweep
from fp8tune.sweeping.options import Options

MOMENTS = int(os.environ.get("FP8TUNE_KILLS", "10"))
FAULTS = f"{PLANTED / 'faults.py'}:SPEC"
OPTIONS = Options(
    kernels=(FAULTS,),
    shapes=("tiny",),
    grid=("num_warps=1,2,4,8,16,32",),
    timer="simulated:5",
    quick=True,
    command="fp8tune sweep",
)
SHORT = replace(OPTIONS, grid=("num_warps=1,2,4",))
WITH_FINALS = replace(OPTIONS, grid=("num_warps=1,2",), quick=False)


@functools.cache
def planned(options: Options = OPTIONS) -> planning.Plan:
    with workers_forked_from_here():
        return planning.expanded(planning.planned(options))


def run_sweep(path: Path, options: Options = OPTIONS, stands_after: int | None = None) -> Callable[[], None]:
    """A sweep that announces each trial on a line, as ``--json`` does.

    ``stands_after``: the line after which it waits to be killed.
    """
    plan = planned(options)

    def go() -> None:
        lines = itertools.count(1)
        with Store.open(str(path), create=True) as store:
            for event in sweep(store, plan):
                if isinstance(event, TrialDone):
                    row = event.row
                    process = row.process if row.stage != "screen" else ""
                    say(json.dumps([str(row.problem.shape), str(row.config), row.round, row.stage, process]))
                    if next(lines) == stands_after:
                        signal.pause()

    return go


def announced(output: str) -> set[tuple[object, ...]]:
    whole = output[: output.rfind("\n") + 1]
    return {tuple(json.loads(line)) for line in whole.splitlines()}


STORED = """
    SELECT problems.shape, configs.text, trials.round,
        CASE trials.stage WHEN 0 THEN 'screen' WHEN 1 THEN 'final' ELSE 'duplicate' END,
        CASE trials.stage WHEN 0 THEN '' ELSE processes.name END, trials.status, trials.time_us
    FROM trials JOIN processes ON processes.id = process_id JOIN results ON results.id = result_id
    JOIN studies ON studies.id = study_id JOIN problems ON problems.id = problem_id
    JOIN configs ON configs.id = config_id ORDER BY 1, 2, 3, 4, 5, 6
"""


def stored(path: Path) -> list[tuple[object, ...]]:
    """Every trial, read past fp8tune, after SQLite has found the file sound."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        return connection.execute(STORED).fetchall()


def shown(path: Path) -> str:
    """The final table."""
    ended = fp8tune("show", "--db", path)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


class Unbroken:
    """Sweeps that nothing disturbed, in this process: all that they import and compile those forked from it have."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._swept: dict[Options, tuple[Path, float]] = {}

    def of(self, options: Options) -> tuple[Path, float]:
        """The database of a sweep, and how long it took."""
        if options not in self._swept:
            path = self._folder / f"{len(self._swept)}.db"
            plan, begun = planned(options), time.monotonic()
            with workers_forked_from_here(), Store.open(str(path), create=True) as store:
                for _ in sweep(store, plan):
                    pass
            self._swept[options] = path, time.monotonic() - begun
        return self._swept[options]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    return Unbroken(tmp_path_factory.mktemp("unbroken"))


def stored_when_killed(path: Path, scratch: Path) -> Counter[tuple[object, ...]]:
    """The trials of a killed sweep, read from a copy: the next run must find the files as they were left."""
    for file in path.parent.glob(f"{path.name}*"):
        if not file.name.endswith("-shm"):  # memory of the dead process
            shutil.copy(file, scratch / file.name)
    try:
        return Counter(row[:5] for row in stored(scratch / path.name))
    except sqlite3.OperationalError as error:  # killed before there was a database
        assert "no such table" in str(error)
        return Counter()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "count"), [(SHORT, MOMENTS * 7 // 10), (WITH_FINALS, MOMENTS * 3 // 10)], ids=["screen", "finals"]
)
def test_killed_at_any_moment_and_run_again(options: Options, count: int, unbroken: Unbroken, tmp_path: Path) -> None:
    """Each moment: kill -9, look at what is there, run again to the end, compare with the unbroken sweep.

    A moment is a line, from before the first to after the last, and a part of a trial more. On a busy machine that part
    may be long: the sweep then stands a few lines further on, so that a kill in the middle is in the middle.
    """
    whole, seconds = unbroken.of(options)
    table, trials, moments = shown(whole), len(stored(whole)), random.Random(0)
    for number in range(count):
        folder, scratch = tmp_path / f"{number}", tmp_path / f"copy of {number}"
        folder.mkdir()
        scratch.mkdir()
        path, line = folder / "results.db", trials * number // (count - 1)
        running = Forked(run_sweep(path, options, stands_after=line + 8))
        running.read(line)
        time.sleep(moments.uniform(0, 2 * seconds / trials if line else seconds / 4))
        told = announced(running.kill())
        found = stored_when_killed(path, scratch)
        assert line <= len(told)
        assert told <= set(found)
        assert max(found.values(), default=1) == 1
        if line <= trials / 2:  # all rows of a process's turn are stored before they are announced
            assert len(found) < trials
        code, _ = Forked(run_sweep(path, options)).wait()
        assert code == 0
        assert stored(path) == stored(whole)
        assert shown(path) == table
        assert list(folder.iterdir()) == [path]


# Two at once


@pytest.mark.parametrize("options", [SHORT, WITH_FINALS], ids=["screen", "finals"])
def test_two_that_run_the_same_sweep_double_nothing(options: Options, unbroken: Unbroken, tmp_path: Path) -> None:
    (whole, _), path = unbroken.of(options), tmp_path / "results.db"
    both = [Forked(run_sweep(path, options)) for _ in range(2)]
    ended = [running.wait() for running in both]
    assert [code for code, _ in ended] == [0, 0], ended
    assert stored(path) == stored(whole)
    assert shown(path) == shown(whole)
    assert list(tmp_path.iterdir()) == [path]


def test_two_different_sweeps_store_all_rows_of_both(unbroken: Unbroken, tmp_path: Path) -> None:
    path, other = tmp_path / "results.db", replace(SHORT, timer="simulated:6")
    alone = [unbroken.of(options)[0] for options in (SHORT, other)]
    both = [Forked(run_sweep(path, options)) for options in (SHORT, other)]
    ended = [running.wait() for running in both]
    assert [code for code, _ in ended] == [0, 0], ended
    assert Counter(stored(path)) == Counter(stored(alone[0])) + Counter(stored(alone[1]))


def test_many_that_open_and_close_at_once(tmp_path: Path) -> None:
    path = tmp_path / "results.db"

    def open_and_close() -> None:
        for _ in range(5):
            with Store.open(str(path), create=True) as store:
                begin(store)

    ended = [running.wait() for running in [Forked(open_and_close) for _ in range(4)]]
    assert [code for code, _ in ended] == [0] * 4, ended
    assert list(tmp_path.iterdir()) == [path]


def test_rows_of_many_writers_are_all_there_once(tmp_path: Path) -> None:
    """240 rows from 4 processes, each commit a row or three."""
    path = tmp_path / "results.db"
    sizes = [1, 3] * 15  # 60 rows

    def write(process: int) -> None:
        with Store.open(str(path), create=True) as store:
            sweep_id = begin(store, request=f"request {process}")
            number = 0
            for size in sizes:
                rows = [row(of=problem(K=16 * (100 * process + number + i + 1))) for i in range(size)]
                assert store.add_many(sweep_id, rows) == size
                number += size

    ended = [running.wait() for running in [Forked(functools.partial(write, process)) for process in range(4)]]
    assert [code for code, _ in ended] == [0] * 4, ended
    found = stored(path)
    assert len(found) == len(set(found)) == 240
    assert list(tmp_path.iterdir()) == [path]


def test_a_first_write_waits_for_whoever_writes(tmp_path: Path) -> None:
    """SQLite refuses the change to WAL at once where another connection is writing."""
    path = tmp_path / "results.db"
    with Store.open(str(path), create=True) as store:
        begin(store)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        ending = threading.Event()
        timer = threading.Timer(0.3, lambda: (ending.set(), writer.rollback()))
        timer.start()
        with Store.open(str(path)) as store:
            begin(store, request="second")
            assert ending.is_set()
        timer.join()


# A full disk


def no_file_above(size: int) -> None:
    """What ``ulimit -f`` does."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.parametrize("size", [100, 20_000, 120_000, 200_000])
def test_a_file_that_may_not_grow_keeps_what_it_has(size: int, unbroken: Unbroken, tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    sweeping = run_sweep(path)
    code, output = Forked(lambda: (no_file_above(size), sweeping())).wait()  # type: ignore[func-returns-value]
    *lines, last = output.splitlines()
    assert (code, last[:8]) == (2, "fp8tune:")
    assert "disk" in last
    (tmp_path / "copy").mkdir()
    assert announced("".join(f"{line}\n" for line in lines)) <= set(stored_when_killed(path, tmp_path / "copy"))
    assert Forked(sweeping).wait()[0] == 0  # there is room again
    assert stored(path) == stored(unbroken.of(OPTIONS)[0])


def test_a_full_disk_keeps_what_it_has(unbroken: Unbroken, tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    sweeping, connect = run_sweep(path), database.Database._connect
    pages = unbroken.of(OPTIONS)[0].stat().st_size // 4096 - 5

    def connect_to_small_disk(self: database.Database) -> sqlite3.Connection:
        connection = connect(self)
        connection.execute(f"PRAGMA max_page_count={pages}")
        return connection

    with mock.patch.object(database.Database, "_connect", connect_to_small_disk):
        code, output = Forked(sweeping).wait()
    assert code == 2
    assert "the disk is full: free some space" in output.splitlines()[-1]
    assert 0 < len(stored(path)) < len(stored(unbroken.of(OPTIONS)[0]))
    assert Forked(sweeping).wait()[0] == 0
    assert stored(path) == stored(unbroken.of(OPTIONS)[0])


# A damaged file


def cut_off(content: bytearray, at: int) -> bytearray:
    return content[:at]


def noise(content: bytearray, at: int) -> bytearray:
    content[at : at + 4096] = random.Random(at).randbytes(4096)
    return content


def zeros(content: bytearray, at: int) -> bytearray:
    content[at : at + 4096] = bytes(4096)
    return content


COMMANDS = (
    ("show",),
    ("export", "--arch", "sm_90", "--check"),
    ("import", PUBLISHED),
    ("sweep", "--kernel", FAULTS, "--shapes", "tiny", "--timer", "simulated:5"),
    ("compare", "HEAD..HEAD", "--kernel", "rowwise"),
)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("filled") / "results.db"
    configs = [config(32 * block, warps) for block in range(1, 9) for warps in (4, 8)]
    with Store.open(str(path), create=True) as store:
        finished_sweep(store, {problem(K=512 * k): dict.fromkeys(configs, 100.0 + k) for k in range(1, 20)})
    return path.read_bytes()


DAMAGES = (cut_off, noise, zeros)
SHARES = (0.0, 0.02, 0.3, 0.6, 0.9)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("share", SHARES)
def test_a_damaged_file_is_one_line_and_has_a_way_back(
    damage: Callable[[bytearray, int], bytearray], share: float, filled: bytes, tmp_path: Path
) -> None:
    """Two commands that read every time, and of those that write one: each meets each damage, somewhere."""
    path = tmp_path / "results.db"
    damaged = damage(bytearray(filled), 4096 * int(share * len(filled) / 4096))
    path.write_bytes(damaged)
    writing = COMMANDS[2 + (DAMAGES.index(damage) + SHARES.index(share)) % 3]
    for number, command in enumerate((*COMMANDS[:2], writing) if damaged else COMMANDS[:2]):  # empty: a new database
        with workers_forked_from_here():
            code, out, error = fp8tune(*command, "--db", path)
        output = out + error
        assert code in (0, 1, 2), output
        assert "Traceback" not in output
        if code == 2:
            (said,) = (line for line in output.splitlines() if line.startswith("fp8tune: "))
            met_no_damage = command[0] == "import" and "cannot compile" in said  # nothing does under the interpreter
            assert str(path) in said or met_no_damage
        if number < 2 and code == 2:
            assert len(output.splitlines()) == 1
            assert path.read_bytes() == damaged
    path.write_bytes(damaged)
    if damaged:
        (finding,) = (finding for finding in doctor.check_database(str(path)) if finding.level == "error")
        assert f"mv {path}" in finding.fix
        assert "fp8tune import" in finding.fix


def test_the_way_back_leads_back(unbroken: Unbroken, tmp_path: Path) -> None:
    """Move the damaged file away, import what another copy has, run the same sweep again."""
    path, copy = tmp_path / "results.db", tmp_path / "copy.db"
    running = Forked(run_sweep(copy, SHORT, stands_after=20))
    running.read(20)
    running.kill()
    path.write_bytes(noise(bytearray(unbroken.of(SHORT)[0].read_bytes()), 0))
    path.rename(f"{path}.damaged")
    assert fp8tune("import", copy, "--db", path).returncode == 0
    assert Forked(run_sweep(path, SHORT)).wait()[0] == 0
    assert stored(path) == stored(unbroken.of(SHORT)[0])
    assert shown(path) == shown(unbroken.of(SHORT)[0])
