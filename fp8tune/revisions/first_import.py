"""Try the import of foreign modules in a child process, where an exit, a crash or a hang harms nobody."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from fp8tune import fork_server
from fp8tune.errors import UsageError

IMPORT_TIMEOUT_S = 60.0  # after which an import counts as hanging; torch and Triton are imported before

_IMPORTED = 113  # exit code of a child that got past the import; a module may exit with 0 itself


def try_import(name: str, load: Callable[[str], object]) -> None:
    """Call ``load(name)`` in a child process and ignore exceptions, which the caller's own import raises again.

    Raises UsageError if the child ends, crashes or hangs. Does nothing in a worker process, whose death harms nobody.
    """
    if multiprocessing.current_process().daemon:
        return
    context: Any = multiprocessing.get_context(_start_method())
    child = context.Process(target=_import, args=(load, name), daemon=True)
    child.start()
    try:
        child.join(IMPORT_TIMEOUT_S)
        code = child.exitcode
    finally:
        try:
            os.killpg(child.pid, signal.SIGKILL)  # with whatever the module started
        except (ProcessLookupError, PermissionError):  # it has ended, or has not made its group yet
            child.kill()
        child.join()
    if code is None:
        failure = f"was still importing after {IMPORT_TIMEOUT_S:g} s"
    else:
        failure = f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
    if code != _IMPORTED:
        raise UsageError(
            f"cannot import {name!r}: the process that imported it {failure}: leave definitions at the top of the "
            'file, and move what runs under if __name__ == "__main__"'
        )


def _start_method() -> str:
    """Return the cheapest safe start method: forking copies locks of threads and GPU contexts, which breaks both."""
    torch: Any = importlib.import_module("torch")  # beside the server, or so that a copy of this process has both
    importlib.import_module("triton")
    if not fork_server.is_running():
        if threading.active_count() == 1 and not torch.cuda.is_initialized():
            return "fork"
        fork_server.start_server()
    return "forkserver"


def _import(load: Callable[[str], object], name: str) -> None:
    """Import in silence, because the import that follows prints the same again."""
    faulthandler.disable()  # it would print where the module crashed
    os.setpgid(0, 0)  # so that what the module starts is ended with it
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(null, descriptor)
    sys.stdout = sys.stderr = open(null, "w", closefd=False)  # noqa: SIM115 - until the process ends
    with contextlib.suppress(BaseException):
        load(name)
    os._exit(_IMPORTED)
