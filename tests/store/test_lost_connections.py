"""Connections that break, and servers that are killed: a store waits and goes on, and stores each row once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest
from database_rows import begin, row
from servers import Proxy, Server

from fp8tune.errors import DatabaseError
from fp8tune.store import database
from fp8tune.store.results import Store


@pytest.fixture
def url(postgresql: Server, made_database: str) -> Iterator[str]:
    """A database without rows."""
    yield made_database
    postgresql.empty(made_database)


@pytest.fixture
def proxy(postgresql: Server) -> Iterator[Proxy]:
    made = Proxy(postgresql.port)
    yield made
    made.close()


@pytest.fixture
def through(proxy: Proxy, postgresql: Server, url: str) -> str:
    """The database's URL through the proxy."""
    return url.replace(str(postgresql.port), str(proxy.port))


def processes(url: str) -> list[str]:
    with Store.open(url, writable=False) as store:
        return sorted(result.process for result in store.rows())


def test_a_store_goes_on_after_its_connection_was_ended(postgresql: Server, url: str) -> None:
    with Store.open(url, create=True) as store:
        sweep = begin(store)
        for name in ("a", "b"):
            assert store.add(sweep, row(process=name))
            assert postgresql.end_connections() == 1
        assert len(store.studies()) == 1
        assert postgresql.end_connections() == 1
        assert store.add_many(sweep, (row(process=name) for name in "bcd")) == 2
        assert begin(store) == sweep
    assert processes(url) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("words", [b"COMMIT", b"pg_advisory_xact_lock", b"INSERT INTO trials"])
def test_a_lost_message_stores_nothing_twice_and_loses_nothing(proxy: Proxy, through: str, words: bytes) -> None:
    with Store.open(through, create=True) as store:
        sweep = begin(store)
        proxy.lose_the_answer_to(words)
        store.add(sweep, row(process="a"))
        assert not store.add(sweep, row(process="a"))
        proxy.lose_the_answer_to(words)
        assert store.add(sweep, row(process="b"), once=True) is False
        proxy.lose_the_answer_to(words)
        store.add_many(sweep, [row(process=name) for name in "abc"])
        proxy.lose(words)  # it never reaches the server
        assert store.add(sweep, row(process="d"))
        proxy.lose(words)
        assert store.add_many(sweep, [row(process=name) for name in "def"]) == 2
    assert processes(through) == ["a", "b", "c", "d", "e", "f"]


def test_patience_ends_with_the_one_line(postgresql: Server, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "PATIENCE_S", 1.0)
    proxy = Proxy(postgresql.port)
    with Store.open(url.replace(str(postgresql.port), str(proxy.port)), create=True) as store:
        sweep = begin(store)
        proxy.close()
        for work in (lambda: store.add(sweep, row()), store.studies):
            with pytest.raises(DatabaseError, match=r"cannot be reached|was lost") as raised:
                work()
            assert "\n" not in str(raised.value)


def test_who_waits_says_so_once_and_when_it_goes_on(postgresql: Server, caplog: pytest.LogCaptureFixture) -> None:
    mine = postgresql.database()

    def start_once_announced() -> None:
        until = time.monotonic() + 60
        while not caplog.records and time.monotonic() < until:
            time.sleep(0.1)
        postgresql.start()

    with caplog.at_level(logging.WARNING), Store.open(mine, create=True) as store:
        sweep = begin(store)
        postgresql.kill()
        threading.Thread(target=start_once_announced).start()
        assert store.add(sweep, row())
    assert len(processes(mine)) == 1
    waits, goes_on = (record.message for record in caplog.records)
    assert "waiting up to 5 min" in waits
    assert "is back after" in goes_on
    assert "cret" not in waits + goes_on


def test_a_stream_that_breaks_is_one_line(postgresql: Server, url: str) -> None:
    with Store.open(url, create=True) as store:
        sweep = begin(store)
        store.add_many(sweep, (row(process=f"{number:0400}") for number in range(300)))
        rows = store.rows()
        next(rows)
        postgresql.end_connections()
        with pytest.raises(DatabaseError, match="was lost, the server ended the connection"):
            list(rows)
        assert len(list(store.rows())) == 300
