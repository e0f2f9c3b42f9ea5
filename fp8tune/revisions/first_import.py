"""The first import of somebody else's module, in a child process: what it may do to its process, it does there."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, cast

from fp8tune import alive, fork_server
from fp8tune.errors import UsageError

IMPORT_TIMEOUT_S = 60.0
"""An import that takes longer counts as hanging. torch and Triton are imported before."""


def try_import(name: str, load: Callable[[str], object]) -> None:
    """Call ``load(name)`` in a child process. An exception is no failure here: the import after this one raises it.

    Raises UsageError if the child ends, crashes or hangs. Does nothing in a worker process, whose death harms nobody.
    """
    if multiprocessing.current_process().daemon:
        return
    context: Any = multiprocessing.get_context(_start_method())
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_import_and_answer, args=(theirs, load, name), daemon=True)
    with contextlib.closing(ours):
        child.start()
        theirs.close()
        try:
            if failure := _failure(child, ours):
                raise UsageError(
                    f"cannot import {name!r}: the process that imported it {failure}: leave definitions at the top of "
                    'the file, and move what runs under if __name__ == "__main__"'
                )
        finally:
            _kill(child)


def _start_method() -> str:
    """Return the cheapest start method that is safe: a copy of threads' locks or of a GPU context does not work."""
    torch: Any = importlib.import_module("torch")  # beside the server, or so that a copy of this process has both
    importlib.import_module("triton")
    if fork_server.is_running():
        return "forkserver"
    if threading.active_count() == 1 and not torch.cuda.is_initialized():
        return "fork"
    fork_server.start_server()
    return "forkserver"


def _failure(child: BaseProcess, answer: Connection) -> str:
    """Wait for the child and say what went wrong; empty if it answered."""
    deadline = time.monotonic() + IMPORT_TIMEOUT_S
    while not wait([answer, child.sentinel], alive.EVERY_S):
        alive.sign()
        if time.monotonic() > deadline:
            return f"was still importing after {IMPORT_TIMEOUT_S:g} s"
    with contextlib.suppress(EOFError, ConnectionResetError):
        if answer.poll():  # a child that has answered may have ended since
            answer.recv_bytes()
            return ""
    child.join(5)
    code = child.exitcode
    if code is None or code >= 0:
        return f"exited with code {code}"
    return f"was killed by {signal.Signals(-code).name}"


def _import_and_answer(connection: Connection, load: Callable[[str], object], name: str) -> None:
    """Import in silence, as the same is printed once more by the import that follows."""
    faulthandler.disable()  # it would print where the module crashed
    os.setpgid(0, 0)  # so that what the module starts is ended with it
    nothing = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nothing, descriptor)
    sys.stdout = sys.stderr = open(nothing, "w", closefd=False)  # noqa: SIM115 - until the process ends
    with contextlib.suppress(BaseException):
        load(name)
    connection.send_bytes(b"imported")


def _kill(child: BaseProcess) -> None:
    pid = cast(int, child.pid)
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it has not come to make its group, or has ended
        child.kill()
    child.join()
