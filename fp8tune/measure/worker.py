"""Long-lived worker processes, forked from a server that has torch and Triton imported and no GPU context.

A worker runs one function at a time and may die or hang, which is an answer like any other. Forking costs milliseconds,
importing torch costs seconds. The server is Python's own ``forkserver``; it takes the environment
(``TRITON_INTERPRET`` above all) of the moment when the first worker starts.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar, cast

from fp8tune.errors import Fp8tuneError, MachineError
from fp8tune.fork_server import PRELOAD
from fp8tune.measure import codegen
from fp8tune.measure.device import VISIBLE
from fp8tune.stopping import END_SIGNALS, blocked_signals

P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W")

POLL_S = 0.2  # how often somebody who waits for workers checks whether the time is up


def usable_cores() -> int:
    """Count the cores this process may use; ``taskset``, containers and batch systems may leave fewer than exist."""
    return len(os.sched_getaffinity(0))


class WorkerDied(Exception):  # noqa: N818 - an event the caller handles, not an error of the program
    """The process ended before it answered; ``str()`` says by which signal or exit code."""


class WorkerHung(WorkerDied):
    """The process did not answer in time and was killed."""


class RemoteError(Exception):
    """The function raised in the worker; ``str()`` holds the remote traceback."""


class Poisoned(Exception):  # noqa: N818 - an answer, raised because nothing may run after it
    """Raised in a worker: ``value`` is the answer, and the process must not be used again (a broken GPU context)."""

    def __init__(self, value: object) -> None:
        super().__init__(value)
        self.value = value


_WORKERS: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register  # before multiprocessing joins them: they ignore SIGTERM
def _end_workers() -> None:
    for worker in list(_WORKERS):
        worker.close()


class Worker:
    """One process that answers calls in turn. The next call after its death starts another process."""

    def __init__(self, gpu: str = "") -> None:
        """Take the name of the GPU that it sees; empty for those that this process sees."""
        self._gpu = gpu
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._closed = False
        _WORKERS.add(self)

    def call(self, timeout_s: float, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a module-level function in the worker and return its result.

        Raises WorkerDied or WorkerHung (the next call forks a new process), RemoteError for an exception in the
        function, and the function's own :class:`~fp8tune.errors.Fp8tuneError` unchanged.
        """
        process, connection = self._running()
        try:
            connection.send((function, args, kwargs))
            if not wait([connection, process.sentinel], timeout_s):
                self.kill()
                raise WorkerHung(f"no answer in {timeout_s:g} s")
            error, value, poisoned = connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise WorkerDied(self._bury()) from None
        if poisoned:
            self.kill()
        if error is None:
            return value  # type: ignore[no-any-return]
        if isinstance(value, Fp8tuneError):
            raise value
        raise RemoteError(error)

    def kill(self) -> None:
        """End the process at once, whatever it is doing, with the compilers that it runs."""
        if self._process is not None and self._process.is_alive():
            try:
                os.killpg(cast(int, self._process.pid), signal.SIGKILL)
            except (ProcessLookupError, PermissionError):  # it has not made its process group yet
                self._process.kill()
        self._bury()

    def close(self) -> None:
        """End the process for good, even if another thread is starting it at this moment."""
        self._closed = True
        self.kill()

    def _running(self) -> tuple[BaseProcess, Connection]:
        if self._process is not None and self._connection is not None:
            return self._process, self._connection
        connection, remote = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(remote, codegen.fp_fusion(), self._gpu), daemon=True)
        try:
            with blocked_signals():  # it may start the server
                process.start()
        except OSError as error:
            raise MachineError(f"no worker can be started ({error.strerror or error}): see ulimit -a") from None
        remote.close()
        self._process, self._connection = process, connection
        if self._closed:  # a pool may be closed while its threads start workers
            self.kill()
            raise WorkerDied("worker ended")
        return process, connection

    def _bury(self) -> str:
        """Forget the dead process and say how it ended. A closing pool and a waiting thread may both come here."""
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if process is None:
            return "worker ended"
        process.join(5)
        if process.exitcode is not None and process.exitcode < 0:
            return f"worker killed by {signal.Signals(-process.exitcode).name}"
        return f"worker exited with code {process.exitcode}"


class WorkerPool:
    """A fixed number of workers behind one ``submit``; a death costs only the call it happened in."""

    def __init__(self, size: int, gpu: str = "") -> None:
        self.size, self._gpu = size, gpu
        self._workers = [Worker(gpu) for _ in range(size)]
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="fp8tune-pool")

    def submit(self, timeout_s: float, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call. The future raises what :meth:`Worker.call` raises."""

        def run() -> T:
            worker = self._idle.get()
            try:
                return worker.call(timeout_s, function, *args, **kwargs)
            finally:
                self._idle.put(worker)

        return self._threads.submit(run)

    def close(self) -> None:
        """Drop what is queued, end every worker."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def replaced(self) -> WorkerPool:
        """Close this pool, and return another one that starts its processes when they are needed."""
        self.close()
        return WorkerPool(self.size, self._gpu)


def finished(pending: dict[Future[Any], W], is_over: Callable[[], bool]) -> Iterator[tuple[W, Future[Any]]]:
    """Remove and yield what is pending as its future is done, until ``is_over``. More may be added meanwhile."""
    while pending and not is_over():
        done, _ = futures.wait(pending, POLL_S, futures.FIRST_COMPLETED)
        for future in [future for future in pending if future in done]:
            yield pending.pop(future), future


def _serve(connection: Connection, fp_fusion: bool, gpu: str) -> None:
    """Answer calls until the connection is closed: the worker's main loop."""
    for number in (signal.SIGINT, *END_SIGNALS):  # the parent handles them, also if its whole process group gets them
        signal.signal(number, signal.SIG_IGN)
    os.setpgid(0, 0)  # so that Ctrl-C does not reach ptxas, after which Triton prints all of its input
    _die_with_parent()
    if gpu:
        os.environ[VISIBLE] = gpu  # there is no GPU context yet
    codegen.fix_fp_fusion(fp_fusion)
    sys.stdout = sys.stderr
    os.dup2(2, 1)  # whatever a kernel prints, in C too: results have stdout to themselves
    while True:
        try:
            function, args, kwargs = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        answer: tuple[str | None, Any, bool]
        try:
            answer = (None, function(*args, **kwargs), False)
        except Poisoned as poisoned:
            answer = (None, poisoned.value, True)
        except Fp8tuneError as error:
            answer = ("user error", error, False)
        except Exception:  # the parent decides what an unknown failure means
            answer = (traceback.format_exc(), None, False)
        connection.send(answer)


_forked_from = 0


def _remember_parent() -> None:
    global _forked_from
    _forked_from = os.getpid()


os.register_at_fork(before=_remember_parent)


def _die_with_parent() -> None:
    """Ask Linux to kill this process when the fork server ends, so that ``kill -9`` leaves nothing behind.

    Linux reports later deaths only. A parent that was killed while this process started is gone already.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if _forked_from not in (0, os.getppid()):  # 0: not imported before the fork, so nothing is known
        os._exit(1)
