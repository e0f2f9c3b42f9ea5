"""The store on a PostgreSQL server: what SQLite promises holds there too. Needs initdb and psycopg."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path

import pytest
from database_rows import H100, begin, config, end_finals, finished_sweep, problem, row, subject
from processes import together
from servers import Server

from fp8tune.errors import DatabaseError
from fp8tune.store.results import Store


def test_what_goes_in_comes_out_as_from_sqlite(postgresql_url: str, tmp_path: Path) -> None:
    long = replace(H100, name="é" * 400, runtime="r" * 300, uuid_hash="0" * 64, triton="x" * 64)
    with Store.open(str(tmp_path / "a.db"), create=True) as local, Store.open(postgresql_url, create=True) as remote:
        finished_sweep(remote, {problem(): {config(32): 100.0, config(64): 110.0}, problem(K=2048): {config(): 5.0}})
        sweep = begin(remote, request="finals")
        remote.add_many(sweep, (row(99.5, stage="final", process=f"w{n}") for n in range(3)))
        end_finals(remote, sweep)
        remote.record_ceiling(sweep, H100, 3000.0)
        named = replace(row(1.0, device=long, process="p" * 400), source="s" * 500, note="n" * 500)
        assert remote.add(begin(remote, long), named)
        assert local.merge(remote) == (7, 0)
        assert remote.studies() == local.studies()
        assert list(remote.rows()) == list(local.rows())
        assert named in remote.rows()
        assert remote.calibration(H100) == local.calibration(H100)
        assert remote.unfinished_sweeps() == local.unfinished_sweeps()
        assert not remote.add(begin(remote, request="finals"), row(1.0, stage="final", process="w0"))


def test_eight_sweeps_begun_at_once_in_an_empty_database_are_one(postgresql_url: str) -> None:
    def sweep(index: int) -> None:
        with Store.open(postgresql_url, create=True) as store:
            id = begin(store)
            for round in range(10):
                store.add(id, row(100.0, round=round, process=f"w{index}"), once=True)
            store.mark_complete(id, subject(), 10)
            end_finals(store, id)

    assert together(8, sweep) == [0] * 8
    with Store.open(postgresql_url, writable=False) as store:
        assert len(store.unfinished_sweeps()) == 1
        assert sorted(result.round for result in store.rows()) == list(range(10))


def test_readers_beside_writers_see_one_moment(postgresql_url: str) -> None:
    Store.open(postgresql_url, create=True).close()

    def work(index: int) -> None:
        until = time.monotonic() + 0.8
        if index < 2:
            with Store.open(postgresql_url, create=True) as store:
                sweep, number = begin(store), 0
                while time.monotonic() < until:
                    number += 1
                    store.add(
                        sweep, row(size=problem(K=number), config=config(32 + number), process=f"{index} {number}")
                    )
                    end_finals(store, sweep, problem(K=number))
        while index >= 2 and time.monotonic() < until:
            with Store.open(postgresql_url, writable=False) as store:
                assert len(store.studies()) <= len(list(store.rows()))

    assert together(4, work) == [0] * 4


def test_what_cannot_be_opened_is_one_line_without_the_password(postgresql: Server, postgresql_url: str) -> None:
    import psycopg

    foreign = postgresql.database()
    with contextlib.closing(psycopg.connect(foreign, autocommit=True)) as connection:
        connection.execute("CREATE TABLE birds (name TEXT)")
    cases = {
        f"{postgresql.root_url}/missing": "is not there: make the database with createdb",
        postgresql_url: "is empty: run fp8tune sweep",
        postgresql_url.replace("cret", "kret"): "refused the login",
        postgresql_url.replace("127.0.0.1", "127.0.0.1:1/x?y="): "is no database URL|cannot be",
        "postgresql://me:secret@127.0.0.1:1/db": "cannot be reached",
        "postgresql://me:secret@127.0.0.1:408/db": "cannot be reached",  # 08 and 40 are codes of lost connections
        foreign: "is not a results database",
    }
    for url, expected in cases.items():
        with pytest.raises(DatabaseError, match=expected) as raised:
            Store.open(url, writable=False)
        assert "\n" not in str(raised.value)
        for secret in ("secret", "se cret", "se%20", "kret", "ü"):
            assert secret not in str(raised.value)
