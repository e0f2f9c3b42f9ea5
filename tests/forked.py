"""Processes forked from this one, which has torch loaded, as are the workers they start.

The program is the real one, only the three seconds that importing takes in every process are saved.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ParamSpec
from unittest import mock

from command_line import Ended
from sqlalchemy import Engine, event

from fp8tune import cli
from fp8tune.errors import Fp8tuneError
from fp8tune.measure import trial

P = ParamSpec("P")

assert trial  # imported here once, instead of in every worker

# and what commands import when they run, instead of in every process
for module in ("fp8tune.cli.sweep", "scipy.special"):
    importlib.import_module(module)


class Forked:
    """A function in a process of its own, its output in a pipe."""

    def __init__(self, function: Callable[[], None]) -> None:
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                os.dup2(writer, 1)
                os.dup2(writer, 2)
                code = _exit_code(function)
            finally:
                os._exit(code)
        os.close(writer)
        self._output, self._read = os.fdopen(reader, "rb"), b""

    def read(self, lines: int) -> None:
        """Wait until it has written so many lines, or has ended."""
        for _ in range(lines):
            self.line()

    def line(self) -> str:
        """Its next line, once it is whole; empty where it has ended."""
        line = self._output.readline()
        self._read += line
        return line.decode()

    def wait(self) -> tuple[int, str]:
        """(exit code or minus the signal, what it wrote)"""
        output = (self._read + self._output.read()).decode()
        self._output.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), output

    def kill(self) -> str:
        """kill -9; what it had written."""
        os.kill(self.pid, signal.SIGKILL)
        return self.wait()[1]


def ended(*arguments: object, cwd: Path | None = None, **variables: str) -> Ended:
    """One command to its end: also what those that it starts write, and what goes past Python."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        outputs = (out.fileno(), error.fileno())
        code, _ = Forked(lambda: _command(outputs, cwd or ".", variables, [*map(str, arguments)])).wait()
        texts = [os.pread(file.fileno(), 1 << 30, 0).decode() for file in (out, error)]
        return Ended(code, *texts)


def _command(outputs: Sequence[int], cwd: str | Path, variables: Mapping[str, str], arguments: list[str]) -> None:
    for number, file in enumerate(outputs, 1):
        os.dup2(file, number)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc] # as of a process that begins
    os.chdir(cwd)
    os.environ.update(variables)
    sys.argv = ["fp8tune", *arguments]
    cli.main()


PROGRAM = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({address!r})
    socket.send_fds(server, [json.dumps([os.getcwd(), dict(os.environ), sys.argv[1:]]).encode()], [1, 2])
    sys.exit(server.recv(1)[0])
"""


@contextlib.contextmanager
def program(folder: Path) -> Iterator[None]:
    """``fp8tune`` for shells, first in the path: commands are forked from this process, one after the other."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server, mock.patch.dict(os.environ):
        server.bind(b"")  # to any name, which is no file
        server.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):  # once it is closed
                while True:
                    connection, _ = server.accept()
                    with connection:
                        text, files, *_ = socket.recv_fds(connection, 1 << 20, 2)
                        code, _ = Forked(lambda: _command(files, *json.loads(text))).wait()  # noqa: B023 - waited for
                        connection.send(bytes([code % 256]))
                        for file in files:
                            os.close(file)

        script = folder / "fp8tune"
        script.write_text(PROGRAM.format(python=sys.executable, address=server.getsockname()))
        script.chmod(0o755)
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def alone(test: Callable[P, None]) -> Callable[P, None]:
    """A test in a process of its own: Ray leaves threads in one, and other tests are forked from this one."""

    @functools.wraps(test)
    def run(*arguments: P.args, **named: P.kwargs) -> None:
        with tempfile.TemporaryFile() as output:

            def go() -> None:
                os.dup2(output.fileno(), 1)  # not the pipe, for whose end would be waited that Ray's own processes have
                os.dup2(output.fileno(), 2)
                test(*arguments, **named)

            code, _ = Forked(go).wait()
            assert code == 0, os.pread(output.fileno(), 1 << 20, 0).decode()

    return run


def told_to_end(number: int, *arguments: str) -> Callable[[], None]:
    """A command that gets the signal before its 30th change of the database: amid its work on any machine."""
    changes = itertools.count(1)

    def count(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith(("INSERT", "UPDATE")) and next(changes) == 30:
            os.kill(os.getpid(), number)

    def go() -> None:
        event.listen(Engine, "before_cursor_execute", count)
        with mock.patch("sys.argv", ["fp8tune", *arguments]):
            cli.main()

    return go


def _exit_code(function: Callable[[], None]) -> int:
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115 - closed by the end of the process
    try:
        with workers_forked_from_here():
            function()
    except Fp8tuneError as error:
        say(f"fp8tune: {error}")
        return error.exit_code
    except SystemExit as ended:
        return int(ended.code or 0)
    except BaseException:
        say(traceback.format_exc())
        return 70
    finally:
        sys.stdout.flush()
    return 0


def say(line: str) -> None:
    """In one write, as whoever is killed must not leave half a line that was whole."""
    os.write(1, f"{line}\n".encode())


@contextlib.contextmanager
def workers_forked_from_here() -> Iterator[None]:
    """No fork server: it would import torch once more for each sweep."""
    fork, is_forking, forked = multiprocessing.get_context("fork"), threading.Lock(), os.fork

    def fork_alone() -> int:
        with is_forking:  # filelock refuses to fork in two threads at once
            return forked()

    with (
        mock.patch("os.fork", fork_alone),
        mock.patch("fp8tune.measure.worker.multiprocessing.get_context", return_value=fork),
        mock.patch("multiprocessing.forkserver.ensure_running"),
    ):
        yield
