"""The store on a PostgreSQL server: what SQLite promises holds there too. Needs initdb and psycopg."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
from database_rows import H100, begin, config, end_finals, finished_sweep, problem, row, subject
from processes import together
from servers import Server

from fp8tune.errors import DatabaseError
from fp8tune.store.results import Store


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
        assert remote.studies() == local.studies()
        assert list(remote.rows()) == list(local.rows())
        assert remote.calibration(H100) == local.calibration(H100)
        assert remote.unfinished_sweeps() == local.unfinished_sweeps()
        assert not remote.add(begin(remote, request="finals"), row(1.0, stage="final", process="w0"))


def test_text_may_be_as_long_as_in_a_file(url: str) -> None:
    names = row(1.0)
    long = dict.fromkeys(("driver", "torch", "triton"), "x" * 64) | {"name": "é" * 400, "runtime": "r" * 300}
    device = type(H100)("sm_90", uuid_hash="0" * 64, multiprocessors=132, **long)
    values = {name: getattr(names, name) for name in names.__dataclass_fields__}
    values |= {"device": device, "source": "s" * 500, "note": "n" * 500, "process": "p" * 400}
    with Store.open(url, create=True) as store:
        assert store.add(begin(store, device), type(names)(**values))
        (result,) = store.rows()
    assert (result.device, result.source, result.note, result.process) == (device, "s" * 500, "n" * 500, "p" * 400)


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
        assert sorted(result.round for result in store.rows()) == list(range(10))


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
                assert len(store.studies()) <= len(list(store.rows()))

    assert together(4, work) == [0] * 4


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
