"""A compacted database says what it said before, takes further sweeps, and gives all back from its archive."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from database_rows import begin, config, end_finals, finished_sweep, problem, row, subject
from places import ROOT

from fp8tune.adapter import read_studies
from fp8tune.errors import DatabaseError
from fp8tune.records import Code, Facts, Kind, Row, Status, Subject, Telemetry
from fp8tune.store import compacting
from fp8tune.store.compacting import compact
from fp8tune.store.importing import import_file
from fp8tune.store.outcomes import History
from fp8tune.store.results import Store
from fp8tune.sweep import picks

SAMPLES = (99.968, 100.0, 100.032, 100.032, 100.064)
CLOCKS = Telemetry(1980, 2619, 41, 312.5, 0)
LIMIT_BYTES = 12_000_000


def timed(block: int, stage: str = "screen", process: str = "w1", round: int = 0, K: int = 1024) -> Row:
    made = row(100.0 + block / 64, of=problem(K=K), config=config(block), stage=stage, process=process, round=round)
    facts = Facts(40 + block, 0, 1024, 0.0016723440000134815)
    outcome = replace(made.outcome, samples_us=SAMPLES, tick_us=0.0320002, telemetry=CLOCKS, facts=facts)
    return replace(made, outcome=outcome, position=block)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A problem with finals, one with a screen, one that was compiled, and one that was not finished."""
    path = tmp_path_factory.mktemp("filled") / "results.db"
    with Store.open(str(path), create=True) as store:
        sweep = begin(store)
        for block in (32, 64, 128):
            store.add(sweep, timed(block))
        store.add(sweep, row(None, of=problem(K=1024), config=config(32, 8), status=Status.PRUNED))
        for process, round in (("final 00", 0), ("final 00", 1), ("final 01", 0)):
            store.add_many(sweep, [timed(block, "final", process, round) for block in (32, 64)])
            store.add(sweep, timed(64, "duplicate", process, round))
        store.mark_complete(sweep, subject(problem(K=1024)), 4)
        end_finals(store, sweep, problem(K=1024))
        store.finish_sweep(sweep)
        finished_sweep(store, {problem(K=2048): {config(32): 50.0, config(64): 45.0}}, request="screen")
        compiled = begin(store, request="static")
        code = Facts(40, 0, 1024, 0.5, Code(resident_warps=16))
        store.add(compiled, row(None, of=problem(K=4096), kind=Kind.STATIC, facts=code))
        store.mark_complete(compiled, subject(problem(K=4096)), 1)
        store.add(begin(store, request="unfinished"), row(70.0, of=problem(K=512)))
    return path


@pytest.fixture
def path(filled: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copy(filled, tmp_path))


def said(path: Path) -> tuple[object, ...]:
    with Store.open(str(path), writable=False) as store:
        tallies = [store.tally(one) for one in store.tried_subjects()]
        return (
            store.evidence(),
            read_studies(store),
            sorted(store.pools(), key=str),
            [(tally.subject, tally.outcomes) for tally in tallies],
            [store.commit(tally.subject) for tally in tallies],
            [store.finals(tally.subject, 1) for tally in tallies],
            [store.tick_us(tally.subject, 1) for tally in tallies],
            [store.samples(tally.subject) for tally in tallies],
            (store.counts(), store.arches(), store.kernels(), store.timed_sources(), store.unreadable()),
        )


def one_by_one(store: Store) -> dict[Subject, History]:
    return {one: History(store.tried(one), store.commit(one)) for one in store.tried_subjects()}


def without_samples(one: Row) -> Row:
    """Of a screen, as it is read from a database that was compacted."""
    return replace(one, outcome=replace(one.outcome, samples_us=())) if one.stage == "screen" else one


def rows(path: Path) -> list[str]:
    with Store.open(str(path), writable=False) as store:
        return sorted(repr(without_samples(one)) for one in store.rows())


def count(path: Path, table: str) -> int:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def test_all_that_is_read_stays_the_same(path: Path) -> None:
    before, rows_before = said(path), rows(path)
    with Store.open(str(path), writable=False) as store:
        histories = one_by_one(store)
    done = compact(path, None, None)
    assert (done.problems, done.trials, done.packed, done.left_out) == (3, 17, 16, 3)
    assert count(path, "trials") == 1  # of the sweep that was not finished
    assert said(path) == before
    assert rows(path) == rows_before
    with Store.open(str(path), writable=False) as store:  # one problem has plain rows, the others packed ones
        assert store.histories(dict.fromkeys(histories, ())) == one_by_one(store) == histories
    assert {history.commit for history in histories.values()} == {"c0ffee", ""}
    assert {outcome.status for history in histories.values() for outcome in history.outcomes.values()} == {
        Status.OK,
        Status.PRUNED,
    }


def test_samples_of_finals_are_kept(path: Path) -> None:
    compact(path, None, None)
    with Store.open(str(path), writable=False) as store:
        found = store.samples(subject(problem(K=1024)))
        assert found == {config(b): {("final 00", 0): SAMPLES, ("final 00", 1): SAMPLES, ("final 01", 0): SAMPLES}
                         for b in (32, 64)}  # fmt: skip
        assert store.samples(subject(problem(K=1024)), "screen") == {}


def test_the_same_rows_make_the_same_bytes(path: Path, tmp_path: Path) -> None:
    compact(path, tmp_path / "one.db", None)
    compact(tmp_path / "one.db", tmp_path / "two.db", None)
    assert (tmp_path / "one.db").read_bytes() == (tmp_path / "two.db").read_bytes()


def sweep_again(path: Path, K: int = 1024) -> None:
    with Store.open(str(path)) as store:
        again = begin(store, request="again", again=True)
        store.add(again, replace(timed(32, "final", "final 02", K=K), commit="abcdef"))
        store.add(again, timed(96, K=K))


@pytest.mark.parametrize("K", [1024, 2048, 512, 8192])
def test_a_later_sweep_goes_on_as_if_nothing_was_packed(path: Path, tmp_path: Path, K: int) -> None:
    small = tmp_path / "small.db"
    compact(path, small, None)
    for one in (path, small):
        sweep_again(one, K)
    assert rows(small) == rows(path)
    assert moments_left_out(said(small)) == moments_left_out(said(path))
    before = said(small)
    compact(small, None, None)
    assert said(small) == before


def moments_left_out(found: tuple[object, ...]) -> object:
    """The same without when the new rows were stored, which no two sweeps share."""
    evidence, studies, _, *rest = found
    return evidence, [(one.problem, one.pick.config, one.choice.verdict) for one in studies], rest


def test_rows_keep_their_ids_and_packed_ones_are_not_given_away(path: Path, tmp_path: Path) -> None:
    def ids(of: Path) -> Iterator[tuple[int, ...]]:
        with contextlib.closing(sqlite3.connect(of)) as connection:
            yield from connection.execute("SELECT id, candidate_id, worker_id, time_us FROM trials ORDER BY id")

    before = list(ids(path))
    compact(path, None, None)
    sweep_again(path, K=8192)  # another problem
    for K in (1024, 2048, 4096):
        with Store.open(str(path)) as store:
            kind = Kind.STATIC if K == 4096 else Kind.MEASURED
            store.add(begin(store, request="unpack"), replace(timed(48, K=K), kind=kind))
    assert count(path, "packed_trials") == 0
    assert set(before) < set(ids(path))


def test_an_archive_holds_all_and_is_imported(path: Path, tmp_path: Path) -> None:
    with Store.open(str(path), writable=False) as store:
        before = sorted(map(repr, store.rows()))
    archive = tmp_path / "full.db.xz"
    done = compact(path, None, archive)
    assert done.archive_bytes == archive.stat().st_size
    with Store.open(str(tmp_path / "ours.db"), create=True) as store:
        report = import_file(store, archive)
        assert (report.added, report.already_there) == (17, 0)
        assert sorted(map(repr, store.rows())) == before
        assert import_file(store, path).added == 0  # the packed rows are the same


def test_packed_rows_are_imported(path: Path, tmp_path: Path) -> None:
    before = rows(path)
    compact(path, None, None)
    with Store.open(str(tmp_path / "ours.db"), create=True) as store:
        assert import_file(store, path).added == 17
    assert rows(tmp_path / "ours.db") == before


@pytest.mark.parametrize(
    ("name", "left"), [("candidates:1", 16 - 4), ("trials:1", 16), ("sweeps:1", 4), ("configs:1", 17 - 4 - 1 - 1 - 1)]
)
def test_a_packed_row_can_be_forgotten(path: Path, tmp_path: Path, name: str, left: int) -> None:
    small = tmp_path / "small.db"
    compact(path, small, None)
    for one in (path, small):
        with Store.open(str(one)) as store:
            table, _, id = name.partition(":")
            removed = store.forget([(table, int(id))])
            assert removed["trials"]
    assert rows(small) == rows(path)
    assert said(small) == said(path)


def test_a_damaged_packed_row_is_named_left_out_and_forgotten(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    compact(path, None, None)
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE packed_trials SET columns = x'00' WHERE id = 1")
    with Store.open(str(path)) as store:
        assert len(store.evidence()) == 4
        assert "left out packed_trials:1, which cannot be read: packed values are damaged" in caplog.text
        (name,) = store.unreadable()
        assert name == ("packed_trials", 1)
        store.forget([name])
        assert store.unreadable() == {}


def test_rows_that_cannot_be_read_stay_as_they_are(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE trials SET time_us = -1 WHERE id = 1")
    done = compact(path, None, None)
    assert done.problems == 2
    with Store.open(str(path), writable=False) as store:
        assert list(store.unreadable()) == [("trials", 1)]


HOLDS = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("PRAGMA journal_mode=WAL")
connection.execute("SELECT count(*) FROM trials").fetchone()
print("open", flush=True)
sys.stdin.read()
"""


def test_a_database_that_another_process_writes_is_left_alone(path: Path) -> None:
    command = [sys.executable, "-c", HOLDS, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:  # a sweep between trials
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(DatabaseError, match="is open in another process: let that end"):
            compact(path, None, None)
        assert count(path, "trials") == 17
        other.stdin.close()
    assert compact(path, None, None).problems == 3


def test_what_breaks_off_leaves_the_file_and_nothing_beside_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def full(raw: object) -> dict[str, int]:
        raise DatabaseError("the disk is full")

    monkeypatch.setattr(compacting, "_counts", full)
    with pytest.raises(DatabaseError, match="disk is full"):
        compact(path, None, None)
    assert path.read_bytes() == before
    assert [one.name for one in path.parent.iterdir()] == ["results.db"]


def test_the_committed_database_is_light() -> None:
    assert (ROOT / "results.db").stat().st_size <= LIMIT_BYTES


def test_the_committed_database_is_compacted() -> None:
    with contextlib.closing(sqlite3.connect(f"file:{ROOT / 'results.db'}?mode=ro", uri=True)) as connection:
        assert connection.execute("SELECT count(*) FROM packed_trials").fetchone() > (800,)


def test_the_committed_database_has_the_picks_of_its_rows_and_tables() -> None:
    """``fp8tune show`` takes three times as long to decide them. After an export: ``fp8tune doctor --repair``."""
    with Store.open(str(ROOT / "results.db"), writable=False) as store:
        assert picks.are_current(store)
