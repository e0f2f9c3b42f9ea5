"""PostgreSQL for the tests: an unprivileged server on loopback, made for one test session and thrown away with it.

A test takes the fixture ``postgresql`` (the server, which it may kill and start again), ``postgresql_url`` (an empty
database) or ``database`` (with :data:`on_both`: one that has tables and no rows). Without ``initdb`` or psycopg it is
skipped.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

INITDB = shutil.which("initdb") or max(map(str, Path("/usr/lib/postgresql").glob("*/bin/initdb")), default="")

on_both = pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
"""Of a test that takes ``database``: it runs with a file and with a server."""

USER = "me"
PASSWORD = "se cret/ü"
"""Needs quoting in a URL, in a file of passwords, and in a connection string."""

_NOBODY = 65534
_SETTINGS = {"fsync": "off", "full_page_writes": "off", "max_connections": 200, "shared_buffers": "128MB"}
"""Enough for a killed server: only a machine that loses its power needs ``fsync``."""


def lacking() -> str:
    """Return the reason why no server can run here, as one line; empty if one can."""
    if not INITDB:
        return "needs a PostgreSQL server: apt-get install postgresql"
    return "" if importlib.util.find_spec("psycopg") else "needs psycopg: pip install 'fp8tune[postgresql]'"


class Server:
    """A PostgreSQL server of the tests' own, on loopback, that asks for a password and trusts nobody."""

    def __init__(self, folder: Path, **settings: object) -> None:
        """Make the data in an empty folder, and a free port its own. ``settings``: as in postgresql.conf."""
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self._settings = {**_SETTINGS, "listen_addresses": "127.0.0.1", "port": self.port, **settings}
        self._settings["unix_socket_directories"] = str(folder)
        self._to_empty: dict[str, str] = {}
        """Database -> what removes its rows."""
        if os.geteuid() == 0:  # the server refuses to run as root
            os.chown(folder, _NOBODY, _NOBODY)
        secret = folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        login = ("-U", USER, "-A", "scram-sha-256", f"--pwfile={secret}")
        self._run(INITDB, "-D", str(self.data), *login, "-E", "UTF8", "--locale=C", "--no-sync")

    @property
    def data(self) -> Path:
        """The folder of all that it keeps."""
        return self.folder / "data"

    @property
    def root_url(self) -> str:
        """Its URL, without a database."""
        return f"postgresql://{USER}:{quote(PASSWORD, safe='')}@127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it on its data; after :meth:`kill` that takes a moment longer."""
        options = " ".join(f"-c {name}={value}" for name, value in self._settings.items())
        deadline = time.monotonic() + 30
        while True:
            try:
                return self._control("-o", options, "-l", str(self.folder / "log"), "-w", "start")
            except subprocess.CalledProcessError:  # a killed one's processes still hold its memory
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.1)

    def stop(self, mode: str = "fast") -> None:
        """Stop it in order: ``fast`` ends every connection, ``immediate`` does not write its data first."""
        self._control("-D", str(self.data), "-m", mode, "-w", "stop")

    def kill(self) -> None:
        """Kill it and all its processes (SIGKILL), as a machine that is lost."""
        parent = int((self.data / "postmaster.pid").read_text().splitlines()[0])
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        for pid in (parent, *map(int, children)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ConnectionRefusedError):
            while True:  # its socket outlives it for a moment
                with contextlib.suppress(ConnectionResetError):
                    socket.create_connection(("127.0.0.1", self.port), timeout=10).close()
                time.sleep(0.01)

    def database(self) -> str:
        """The URL of a new, empty database."""
        name = f"t{uuid.uuid4().hex[:12]}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE template0")
        return f"{self.root_url}/{name}"

    def empty(self, url: str) -> None:
        """Remove all rows of a database that fp8tune made, and count from 1 again: a tenth of a new one's work."""
        name = url.rpartition("/")[2]
        if name not in self._to_empty:
            tables = "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
            counters = "SELECT sequencename FROM pg_sequences WHERE schemaname = 'public'"
            spared = {"meta"}
            removed = [f"DELETE FROM {table}" for (table,) in self.execute(tables, name) if table not in spared]
            reset = [f"ALTER SEQUENCE {counter} RESTART" for (counter,) in self.execute(counters, name)]
            unlinked = "SET session_replication_role = replica"  # rows go in any order
            self._to_empty[name] = "; ".join((unlinked, *removed, *reset))
        self.execute(self._to_empty[name], name)

    def execute(self, statement: str, database: str = "postgres") -> list[Any]:
        """Execute one statement in a connection of its own, and return its rows."""
        import psycopg

        with contextlib.closing(psycopg.connect(f"{self.root_url}/{database}", autocommit=True)) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def end_connections(self) -> int:
        """End every connection of fp8tune, as an administrator does. Returns how many there were."""
        mine = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'fp8tune%'"
        return len(self.execute(mine))

    def _control(self, *arguments: str) -> None:
        self._run(str(Path(INITDB).resolve().with_name("pg_ctl")), "-D", str(self.data), *arguments)

    def _run(self, *command: str) -> None:
        owner: Any = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=self.folder, **owner)


class Proxy:
    """Passes bytes between clients and a server on loopback, until it is told to break off."""

    def __init__(self, port: int) -> None:
        self._server = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._cut_after = self._cut_before = b""
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_the_answer_to(self, words: bytes) -> None:
        """Once: pass on what has these words, and break off when the server has answered."""
        self._cut_after = words

    def lose(self, words: bytes) -> None:
        """Once: break off instead of passing on what has these words."""
        self._cut_before = words

    def break_off(self) -> None:
        """End every connection at once."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            self._end(pair)

    def close(self) -> None:
        """End it."""
        self._listening.shutdown(socket.SHUT_RDWR)  # ends the thread that accepts
        self._listening.close()
        self.break_off()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listening.accept()
                try:
                    pair = client, socket.create_connection(("127.0.0.1", self._server))
                except OSError:  # the server is down
                    client.close()
                    continue
                self._pairs.append(pair)
                threading.Thread(target=self._pass, args=(pair, pair[0], pair[1]), daemon=True).start()
                threading.Thread(target=self._pass, args=(pair, pair[1], pair[0]), daemon=True).start()

    def _pass(self, pair: tuple[socket.socket, socket.socket], source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self._cut_before and source is pair[0] and self._cut_before in data:
                    self._cut_before = b""
                    break
                if self._cut_after and source is pair[0] and self._cut_after in data:
                    self._cut_after = b""
                    target.sendall(data)
                    select.select([target], [], [], 1)
                    break
                target.sendall(data)
        self._end(pair)

    @staticmethod
    def _end(pair: tuple[socket.socket, socket.socket]) -> None:
        for connection in pair:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


@contextlib.contextmanager
def running(**settings: object) -> Iterator[Server]:
    """A server that runs, and is gone at the end."""
    folder = Path(tempfile.mkdtemp(prefix="fp8tune-postgresql-", dir="/tmp"))  # a socket's path is short
    server: Server | None = None
    try:
        server = Server(folder, **settings)
        server.start()
        yield server
    finally:
        if server is not None and (server.data / "postmaster.pid").exists():
            with contextlib.suppress(subprocess.CalledProcessError):
                server.stop("immediate")
        shutil.rmtree(folder)
