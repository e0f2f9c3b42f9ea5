"""The store on a PostgreSQL server: what SQLite promises holds there too. Needs initdb and psycopg."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from database_rows import H100, KERNEL, begin, config, end_finals, finished_sweep, problem, row, subject
from processes import together
from servers import Server

from fp8tune.check import stored
from fp8tune.errors import DatabaseError
from fp8tune.store import database, last_writes, postgresql
from fp8tune.store.results import Store
from fp8tune.store.schema import OPTIONAL
from fp8tune.sweep.picks import are_current, refresh_picks


@pytest.fixture
def url(postgresql_url: str) -> str:
    """An empty database."""
    return postgresql_url


def test_what_goes_in_comes_out_as_from_sqlite(url: str, tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "results.db"), create=True) as local, Store.open(url, create=True) as remote:
        finished_sweep(remote, {problem(): {config(32): 100.0, config(64): 110.0}, problem(K=2048): {config(): 5.0}})
        sweep = begin(remote, request="finals")
        remote.add_many(sweep, (row(99.5, stage="final", process=f"w{n}") for n in range(3)))
        end_finals(remote, sweep)
        remote.record_ceiling(sweep, H100, 3000.0)
        assert local.merge(remote) == (6, 0)
        assert remote.evidence() == local.evidence()
        assert list(remote.rows()) == list(local.rows())
        assert remote.counts() == local.counts()
        assert remote.calibration(H100) == local.calibration(H100)
        assert remote.unfinished_sweeps() == local.unfinished_sweeps()
        assert not remote.add(begin(remote, request="finals"), row(1.0, stage="final", process="w0"))


def test_merging_a_file_doubles_nothing(url: str, tmp_path: Path) -> None:
    path = str(tmp_path / "results.db")
    with Store.open(path, create=True) as local:
        finished_sweep(local, {problem(): {config(32): 100.0, config(64): 110.0}})
        expected = local.evidence()
    with Store.open(url, create=True) as remote, Store.open(path, writable=False) as local:
        assert remote.merge(local) == (2, 0)
        assert remote.merge(local) == (0, 2)
        assert remote.evidence() == expected


def test_text_may_be_as_long_as_in_a_file(url: str) -> None:
    names = row(1.0)
    long = dict.fromkeys(("driver", "torch", "triton"), "x" * 64) | {"name": "é" * 400, "runtime": "r" * 300}
    device = type(H100)("sm_90", uuid_hash="0" * 64, multiprocessors=132, **long)
    values = {name: getattr(names, name) for name in names.__dataclass_fields__}
    values |= {"device": device, "source": "s" * 500, "note": "n" * 500, "process": "p" * 400}
    with Store.open(url, create=True) as store:
        assert store.add(begin(store, device), type(names)(**values))
        (found,) = store.rows()
    assert (found.device, found.source, found.note, found.process) == (device, "s" * 500, "n" * 500, "p" * 400)


def test_eight_sweeps_begun_at_once_in_an_empty_database_are_one(url: str) -> None:
    def sweep(index: int) -> None:
        with Store.open(url, create=True) as store:
            id = begin(store)
            for round in range(10):
                store.add(id, row(100.0, round=round, process=f"w{index}"), once=True)
            store.mark_complete(id, subject(), 10)
            end_finals(store, id)

    assert together(8, sweep) == [0] * 8
    with Store.open(url, writable=False) as store:
        assert len(store.unfinished_sweeps()) == 1
        assert [found.round for found in store.rows()] == list(range(10))


def test_readers_beside_writers_see_one_moment(url: str) -> None:
    Store.open(url, create=True).close()

    def work(index: int) -> None:
        until = time.monotonic() + 0.8
        if index < 2:
            with Store.open(url, create=True) as store:
                sweep, number = begin(store), 0
                while time.monotonic() < until:
                    number += 1
                    store.add(sweep, row(of=problem(K=number), config=config(32 + number), process=f"{index} {number}"))
                    end_finals(store, sweep, problem(K=number))
        while index >= 2 and time.monotonic() < until:
            with Store.open(url, writable=False) as store:
                assert len(store.evidence()) <= len(list(store.rows()))

    assert together(4, work) == [0] * 4


def test_doctor_finds_nothing_wrong(url: str) -> None:
    with Store.open(url, create=True) as store:
        finished_sweep(store, {problem(): {config(): 100.0}})
    with Store.open(url, writable=False) as store:
        (finding,) = stored.check_store(url, store)
    assert finding.level == "ok"
    assert "sm_90 1 measured" in finding.what
    assert "cret" not in finding.what


def test_what_cannot_be_opened_is_one_line_without_the_password(postgresql: Server, url: str) -> None:
    cases = {
        f"{postgresql.root_url}/missing": "is not there: make the database with createdb",
        url: "is empty: run fp8tune sweep",
        url.replace("cret", "kret"): "refused the login",
        url.replace("127.0.0.1", "127.0.0.1:1/x?y="): "is no database URL|cannot be",
        "postgresql://me:secret@127.0.0.1:1/db": "cannot be reached",
        "postgresql://me:secret@127.0.0.1:408/db": "cannot be reached",  # 08 and 40 are codes of lost connections
    }
    for text, expected in cases.items():
        with pytest.raises(DatabaseError, match=expected) as raised:
            Store.open(text, writable=False)
        assert "\n" not in str(raised.value)
        for secret in ("secret", "se cret", "se%20", "kret", "ü"):
            assert secret not in str(raised.value)


def test_a_foreign_database_is_refused(url: str) -> None:
    import psycopg

    with contextlib.closing(psycopg.connect(url, autocommit=True)) as connection:
        connection.execute("CREATE TABLE birds (name TEXT)")
    for writable in (False, True):
        with pytest.raises(DatabaseError, match="is not a results database"):
            Store.open(url, create=writable, writable=writable)


def test_a_writer_waits_for_a_writer_but_not_for_ever(url: str) -> None:
    import psycopg

    Store.open(url, create=True).close()
    impatient = database.connect(url, create=False, writable=True, patience_s=0.05)
    with Store(impatient, writable=True) as store, contextlib.closing(psycopg.connect(url)) as other:
        other.execute(f"SELECT pg_advisory_xact_lock({postgresql.WRITERS_LOCK})")
        with pytest.raises(DatabaseError, match="is locked by another process"):
            begin(store)
        with Store.open(url, writable=False) as reader:
            assert reader.evidence() == []
        other.rollback()
        assert store.add(begin(store), row())


def test_the_optional_tables_travel_and_are_made_once_by_writers_beside_each_other(url: str, tmp_path: Path) -> None:
    recorded = {problem(): '{"launch": {"name": "é"}}', problem(K=2048): "{}"}
    with Store.open(str(tmp_path / "results.db"), create=True) as local:
        finished_sweep(local, {problem(): {config(32): 100.0}})
        local.record_launches(recorded)
        local.record_flops({problem(): 2**53})
        local.record_check(begin(local), KERNEL, "tolerance 1e-03 relative of float64")
        expected = local.evidence()
    with Store.open(url, create=True) as store:
        begin(store)
    with connected(url) as connection:
        for table in OPTIONAL:
            connection.execute(f"DROP TABLE {table.name} CASCADE")
    with Store.open(url, writable=False) as remote:
        assert (remote.recorded_launches(), remote.evidence(), remote.unreadable()) == ({}, [], {})

    def work(index: int) -> None:
        with Store.open(url) as store, Store.open(str(tmp_path / "results.db"), writable=False) as local:
            store.merge(local)
            store.record_flops({problem(K=4096 + index): index})

    assert together(4, work) == [0] * 4
    with Store.open(url, writable=False) as remote:
        assert remote.recorded_launches() == remote.recorded_launches("colwise") == recorded
        assert (remote.evidence(), remote.unreadable()) == (expected, {})


def test_views_and_kept_picks(url: str) -> None:
    with Store.open(url, create=True) as store:
        finished_sweep(store, {problem(K=k): {config(32): 100.0, config(64): 110.0} for k in (1024, 2048)})
        decided = refresh_picks(store)
        assert are_current(store)
        assert sorted(store.kept_picks().picks, key=str) == sorted(decided.picks, key=str)
    query = "SELECT shape, config, verdict, is_current, measured_at FROM v_picks"
    with connected(url) as connection:
        found = connection.execute(query).fetchall()
        assert [row[:4] for row in found] == [
            (f"M=16640 K={k} G=64", str(config(32)), "quick", 1) for k in (1024, 2048)
        ]
        assert found[0][4] in {row[0] for row in connection.execute("SELECT measured_at FROM v_trials")}
        assert connection.execute("SELECT count(*) FROM v_finals").fetchone() == (0,)
        connection.execute("DELETE FROM completions")
        assert {row[3] for row in connection.execute(query)} == {0}
    Store.open(url).close()
    with Store.open(url) as store:
        assert not are_current(store)


def made_older(url: str) -> None:
    """What the last fp8tune without recorded migrations left: its names, and what commands held."""
    with connected(url) as connection:
        for statement in (
            "DROP TABLE migrations",
            "UPDATE meta SET value = '1' WHERE name = 'schema_version'",
            "ALTER TABLE references_checked RENAME TO judges",
            "ALTER TABLE finals ADD COLUMN replaces VARCHAR NOT NULL DEFAULT ''",
            "UPDATE kernel_versions SET source_hash = '8b6c5121011a684a'",
            "UPDATE trials SET stage = 'twin' WHERE stage = 'duplicate'",
            "UPDATE sweeps SET command = 'fp8tune sweep --db postgresql://me:hunter2@host/db'",
            "DROP INDEX summary",
            "CREATE INDEX summary ON trials (candidate_id, stage)",
        ):
            connection.execute(statement)


@contextlib.contextmanager
def connected(url: str) -> Iterator[Any]:
    import psycopg

    with contextlib.closing(psycopg.connect(url, autocommit=True)) as connection:
        yield connection


def test_an_older_database_is_migrated_by_who_writes_and_named_to_who_reads(url: str) -> None:
    with Store.open(url, create=True) as store:
        sweep = begin(store)
        store.add(sweep, row())
        store.add(sweep, row(stage="duplicate"))
        end_finals(store, sweep)
        expected = store.counts()
    made_older(url)
    with pytest.raises(DatabaseError, match="is of an older fp8tune: run fp8tune sweep"):
        Store.open(url, writable=False)
    Store.open(url).close()
    with Store.open(url, writable=False) as store:
        assert (store.counts(), store.unreadable()) == (expected, {})
        assert [made.stage for made in store.rows()] == ["screen", "duplicate"]
        assert store.timed_sources() == {"colwise": {"a6a4153271148844"}}
        assert store.unfinished_sweeps() == ["fp8tune sweep --db postgresql://me:***@host/db"]


def test_a_migration_that_fails_leaves_a_server_s_database_as_it_was(url: str) -> None:
    Store.open(url, create=True).close()
    made_older(url)
    with connected(url) as connection:
        connection.execute("CREATE VIEW migrations AS SELECT 'x' AS name")  # nothing can be recorded in it
    with pytest.raises(DatabaseError):
        Store.open(url)
    with connected(url) as connection:
        assert connection.execute("SELECT count(*) FROM judges").fetchone() == (0,)
        assert connection.execute("SELECT value FROM meta WHERE name = 'schema_version'").fetchall() == [("1",)]


def test_a_write_is_known_by_its_own_name_and_by_no_id_that_a_server_gives_again(url: str) -> None:
    """Of two that write, one lost its connection: what the other committed meanwhile says nothing of it."""
    with Store.open(url, create=True) as mine, Store.open(url) as other:
        sweep = begin(mine)
        assert last_writes.is_committed(mine._connection)
        with contextlib.suppress(KeyError), mine._transaction(write=True):
            raise KeyError  # as if the server had crashed
        begin(other, request="other")
        assert not last_writes.is_committed(mine._connection)
        assert last_writes.is_committed(other._connection)
        assert mine.add(sweep, row())
        assert last_writes.is_committed(mine._connection)
    with connected(url) as connection:
        assert connection.execute("SELECT count(*) FROM last_writes").fetchone() == (2,)
        connection.execute(f"UPDATE last_writes SET written_at = written_at - {2 * last_writes.KEPT_S}")
    with Store.open(url) as store:
        begin(store, request="a day later")
    with connected(url) as connection:
        assert connection.execute("SELECT count(*) FROM last_writes").fetchone() == (1,)
