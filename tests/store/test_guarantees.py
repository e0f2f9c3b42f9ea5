"""Guarantees of a sweep and of the store: each test has the form that ``docs/architecture.md`` promises."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import socket
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from database_rows import begin, config, end_finals, row, subject
from forked import workers_forked_from_here
from processes import together
from servers import Server
from sqlalchemy import Connection

from fp8tune.errors import DatabaseError
from fp8tune.exporting import select_rows
from fp8tune.options import SweepOptions
from fp8tune.store import database
from fp8tune.store.results import Store
from fp8tune.sweeping import planning, session

GRID = ("BLOCK_SIZE=32,64,128", "BLOCK_SIZE_ITER=64", "LEAD=0", "num_warps=2,4,8", "num_stages=1,2", "maxnreg=0")


@functools.cache
def plan() -> planning.Plan:
    options = SweepOptions(kernel=("colwise",), shapes=("tiny",), grid=GRID, timer="simulated:1")
    with workers_forked_from_here():
        return planning.expanded(planning.planned(options, "fp8tune sweep"))


def sweep(path: Path | str) -> None:
    plans = plan()
    with workers_forked_from_here(), Store.open(str(path), create=True) as store:
        for _ in session.run(store, replace(plans, problems=plans.problems[:1])):
            pass


def exported(path: Path | str) -> str:
    with Store.open(str(path), writable=False) as store:
        return select_rows(store, "simulated").table.render()


def trials(path: Path | str) -> Counter[tuple[str, str, int, str]]:
    """Number of trials by config, stage and round; processes of the finals apart."""
    with Store.open(str(path), writable=False) as store:
        return Counter((str(r.config), r.stage, r.round, r.process * (r.stage != "screen")) for r in store.rows())


@contextlib.contextmanager
def counted_commits(on_commit: Callable[[int], None]) -> Iterator[list[int]]:
    """Call a function after each commit of this process."""
    count, transaction = [0], database.Database.transaction

    @contextlib.contextmanager
    def counted(self: database.Database, *, write: bool = False) -> Iterator[Connection]:
        with transaction(self, write=write) as connection:
            yield connection
        if write:
            count[0] += 1
            on_commit(count[0])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(database.Database, "transaction", counted)
        yield count


def test_1_killed_after_any_commit_the_same_sweep_ends_with_the_same_table(tmp_path: Path) -> None:
    with counted_commits(lambda number: None) as count:
        sweep(tmp_path / "whole.db")
    expected, table = trials(tmp_path / "whole.db"), exported(tmp_path / "whole.db")
    assert count[0] > 30
    for last in random.Random(0).sample(range(1, count[0]), 4):

        def work(index: int, last: int = last) -> None:
            with counted_commits(lambda number: os._exit(7) if number == last else None):
                sweep(tmp_path / f"{last}.db")

        assert together(1, work) == [7]
        assert together(1, lambda index, last=last: sweep(tmp_path / f"{last}.db")) == [0]
        assert (trials(tmp_path / f"{last}.db"), exported(tmp_path / f"{last}.db")) == (expected, table)


def test_2_no_trial_counts_twice_whoever_runs_beside(each_database: str, tmp_path: Path) -> None:
    sweep(tmp_path / "alone.db")
    Store.open(each_database, create=True).close()
    assert together(2, lambda index: sweep(each_database)) == [0, 0]
    alone = trials(tmp_path / "alone.db")
    assert trials(each_database) == alone
    assert set(alone.values()) == {1}
    assert exported(each_database) == exported(tmp_path / "alone.db")


def test_3_no_process_stops_the_others_for_a_minute(postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert database.IDLE_S < 60
    options = database._OPTIONS.replace(f"timeout={1000 * database.IDLE_S}", "timeout=1500")
    Store.open(postgresql_url, create=True).close()
    monkeypatch.setattr(database, "_OPTIONS", options)
    with Store.open(postgresql_url) as paused, Store.open(postgresql_url) as worker:

        def pause() -> None:
            with paused.transaction(write=True) as connection:
                assert worker.add(begin(worker), row())  # the paused writer sends nothing meanwhile
                connection.exec_driver_sql("SELECT 1")

        began = time.monotonic()
        with pytest.raises(DatabaseError, match="was lost"):
            pause()
        assert time.monotonic() - began < 60


def _pass_messages(client: socket.socket, port: int, count: int) -> None:
    """Pass a client's bytes to a server, and so many messages of the server back; then close."""
    with client, socket.create_connection(("127.0.0.1", port)) as server, contextlib.suppress(OSError):
        stream = server.makefile("rb")

        def upward() -> None:
            with contextlib.suppress(OSError):
                while data := client.recv(1 << 16):
                    server.sendall(data)
                server.shutdown(socket.SHUT_RDWR)

        threading.Thread(target=upward, daemon=True).start()
        for _ in range(count):
            if len(head := stream.read(5)) < 5:
                break
            client.sendall(head + stream.read(int.from_bytes(head[1:], "big") - 4))
        for end in (client, server):  # closing alone does not wake the other thread
            end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def closing_server(port: int, count: int) -> Iterator[int]:
    """A server on a port of its own that closes each connection after ``count`` messages."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    threading.Thread(target=_pass_messages, args=(client, port, count), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def test_4_a_server_that_goes_away_at_any_message_is_one_line(
    postgresql: Server, postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "PATIENCE_S", 0.2)
    with Store.open(postgresql_url, create=True) as store:
        store.add(begin(store), row())
    outcomes = Counter[str]()
    for count in [*range(1, 21), 10**6]:
        with closing_server(postgresql.port, count) as port:
            url = postgresql_url.replace(str(postgresql.port), str(port))
            try:
                with Store.open(f"{url}?sslmode=disable&gssencmode=disable") as store:
                    store.add(begin(store), row(round=count % 1000))
                outcomes["stored"] += 1
            except DatabaseError as error:
                assert "\n" not in str(error)
                assert "cret" not in str(error)
                outcomes["one line"] += 1
    assert outcomes["one line"] >= 15
    assert outcomes["stored"] >= 1


def test_5_a_flipped_byte_is_reported_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    with Store.open(str(path), create=True) as store:
        sweep_id = begin(store)
        rows = [row(100.0 + block, config=config(block)) for block in (32, 64, 128)]
        rows += [replace(size, stage="final", process=f"final {n}", round=n) for size in rows for n in range(3)]
        store.add_many(sweep_id, rows)
        store.mark_complete(sweep_id, subject(), 3)
        end_finals(store, sweep_id)
        expected = store.studies()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA page_size = 512")
        connection.execute("VACUUM")
    content, generator = path.read_bytes(), random.Random(0)
    outcomes = Counter[str]()
    for _ in range(150):
        place = generator.randrange(len(content))
        changed = bytearray(content)
        changed[place] ^= 1 << generator.randrange(8)
        path.write_bytes(changed)
        try:
            with Store.open(str(path), writable=False) as store:
                assert store.studies() == expected
            outcomes["harmless"] += 1
        except DatabaseError as error:
            assert "\n" not in str(error)
            outcomes["reported"] += 1
    assert min(outcomes.values()) > 10
