"""Connections that break, and servers that are killed: a store waits and goes on, and stores each row once."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Iterator

import pytest
from database_rows import begin, config, end_finals, problem, row, subject
from processes import begun, ended
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
        return sorted(found.process for found in store.rows())


def test_a_store_goes_on_after_its_connection_was_ended(postgresql: Server, url: str) -> None:
    with Store.open(url, create=True) as store:
        sweep = begin(store)
        assert store.add(sweep, row(process="a"))
        for name in ("b", "c"):
            assert postgresql.end_connections() == 1
            assert store.add(sweep, row(process=name))
        assert postgresql.end_connections() == 1
        assert len(list(store.studies())) == 1
        assert postgresql.end_connections() == 1
        assert store.add_many(sweep, (row(process=name) for name in "cde")) == 2
        assert begin(store) == sweep
    assert processes(url) == ["a", "b", "c", "d", "e"]


def test_what_an_iterator_gave_before_the_loss_is_stored_too(postgresql: Server, url: str) -> None:
    with Store.open(url, create=True) as store:
        sweep = begin(store)

        def rows() -> Iterator[object]:
            for number in range(300):
                if number == 250:  # two chunks were sent
                    postgresql.end_connections()
                yield row(process=f"{number}")

        assert store.add_many(sweep, rows()) == 300
        assert store.add_many(sweep, (row(process=f"{number}") for number in range(300))) == 0


@pytest.mark.parametrize("words", [b"COMMIT", b"pg_advisory_xact_lock", b"INSERT INTO trials"])
def test_a_lost_answer_stores_nothing_twice(proxy: Proxy, through: str, words: bytes) -> None:
    with Store.open(through, create=True) as store:
        sweep = begin(store)
        proxy.lose_the_answer_to(words)
        store.add(sweep, row(process="a"))
        assert not store.add(sweep, row(process="a"))
        proxy.lose_the_answer_to(words)
        assert store.add(sweep, row(process="b"), once=True) is False
        proxy.lose_the_answer_to(words)
        store.add_many(sweep, [row(process=name) for name in "abc"])
    assert processes(through) == ["a", "b", "c"]


@pytest.mark.parametrize("words", [b"COMMIT", b"pg_advisory_xact_lock"])
def test_what_never_reached_the_server_is_done_again(proxy: Proxy, through: str, words: bytes) -> None:
    with Store.open(through, create=True) as store:
        sweep = begin(store)
        proxy.lose(words)
        assert store.add(sweep, row(process="a"))
        proxy.lose(words)
        assert store.add_many(sweep, [row(process=name) for name in "abc"]) == 2
    assert processes(through) == ["a", "b", "c"]


def test_patience_ends_with_the_one_line(postgresql: Server, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "PATIENCE_S", 1.0)
    proxy = Proxy(postgresql.port)
    with Store.open(url.replace(str(postgresql.port), str(proxy.port)), create=True) as store:
        sweep = begin(store)
        proxy.close()
        with pytest.raises(DatabaseError, match=r"cannot be reached|was lost") as raised:
            store.add(sweep, row())
        assert "\n" not in str(raised.value)
        with pytest.raises(DatabaseError, match=r"cannot be reached|was lost"):
            store.studies()


def test_a_worker_that_starts_while_the_server_restarts_waits(postgresql: Server) -> None:
    mine = postgresql.database()
    Store.open(mine, create=True).close()
    database._reached.clear()  # as in a process of its own
    postgresql.kill()
    with pytest.raises(DatabaseError, match="cannot be reached"):
        Store.open(mine, writable=False)
    starting = threading.Timer(0.5, postgresql.start)
    starting.start()
    with Store.open(mine, wait=True) as store:
        assert store.studies() == []
    starting.join()


def _start_when_told(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """A server that starts once somebody has said that they wait for it, however busy the machine is."""
    until = time.monotonic() + 60
    while not caplog.records and time.monotonic() < until:
        time.sleep(0.1)
    server.start()


def test_who_waits_says_so_once_and_when_it_goes_on(
    postgresql: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = postgresql.database()
    with caplog.at_level(logging.WARNING), Store.open(mine, create=True) as store:
        sweep = begin(store)
        postgresql.kill()
        threading.Thread(target=_start_when_told, args=(postgresql, caplog)).start()
        assert store.add(sweep, row())
    with Store.open(mine, writable=False) as store:
        assert len(list(store.rows())) == 1
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


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1))
def test_rows_are_neither_lost_nor_doubled_whatever_breaks(postgresql: Server, seed: int) -> None:
    """Writers, a proxy that breaks off, ended connections, and a server that is killed and started again."""
    server, writers, rounds = postgresql, 4, 8
    proxy = Proxy(server.port)
    direct = server.database()
    through = direct.replace(str(server.port), str(proxy.port))
    Store.open(through, create=True).close()  # who has reached a server waits for it, also when it opens it anew

    def work(index: int) -> None:
        generator = random.Random(f"{seed} {index}")
        with Store.open(through, create=True) as store:
            shared, own = begin(store, request="shared"), begin(store, request=f"own {index}")
            for number in range(rounds):
                mine = problem(K=512 * (index + 1), G=number + 1)
                store.add(own, row(of=mine, process=f"{index}"))
                many = [row(of=mine, config=config(32 + n), process=f"{index}") for n in range(1, 20)]
                store.add_many(own, iter(many))
                store.add(shared, row(round=number, process=f"{index}"), once=True)
                end_finals(store, own, mine)
                store.mark_complete(own, subject(mine), 20)
                if generator.random() < 0.05:
                    assert len(store.studies()) >= number
            store.finish_sweep(own)

    children = begun(writers, work)
    stop = threading.Event()

    def break_things() -> None:
        generator = random.Random(seed)
        for number in range(8):  # then it goes in peace
            if stop.wait(generator.uniform(0.05, 0.3)):
                return
            with contextlib.suppress(Exception):  # the server may be down
                match number % 4:
                    case 0 | 2:
                        proxy.break_off()
                    case 1:
                        server.end_connections()
                    case 3:
                        proxy.lose_the_answer_to(b"COMMIT")
            if number % 4 == 3:
                server.kill()
                time.sleep(generator.uniform(0, 0.3))
                server.start()

    breaking = threading.Thread(target=break_things)
    breaking.start()
    codes = ended(children)
    stop.set()
    breaking.join()
    proxy.close()
    assert codes == [0] * writers
    with Store.open(direct, writable=False) as store:
        found = [(found.process, found.problem.shape["K"], found.round, str(found.config)) for found in store.rows()]
        assert len(found) == writers * rounds * 20 + rounds
        assert len(store.unfinished_sweeps()) == 1
    count = (
        "SELECT count(*), (SELECT count(*) FROM study_runs WHERE planned IS NOT NULL), (SELECT count(*) FROM sweeps)"
    )
    name = direct.rpartition("/")[2]
    assert server.execute(f"{count} FROM trials", name) == [(len(found), writers * rounds, writers + 1)]
