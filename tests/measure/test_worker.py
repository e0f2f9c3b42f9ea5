"""Workers answer, die, hang and are replaced; a death costs only the call it happened in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8tune.errors import UsageError
from fp8tune.measure import worker as workers
from fp8tune.measure.worker import Poisoned, RemoteError, Worker, WorkerDied, WorkerHung, WorkerPool


def double(value: int) -> int:
    return 2 * value


def die(how: int) -> None:
    os.kill(os.getpid(), how)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def begin_a_compiler() -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def fail() -> None:
    raise ValueError("planted")


def misuse() -> None:
    raise UsageError("planted: do something else")


def poison(value: int) -> int:
    raise Poisoned(value)


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


def test_one_process_answers_many_calls(worker: Worker) -> None:
    assert [worker.call(60, double, value) for value in range(3)] == [0, 2, 4]
    assert worker.call(60, os.getpid) == worker.call(60, os.getpid) != os.getpid()


def test_no_key_of_a_terminal_reaches_a_compiler_and_it_ends_with_its_worker(worker: Worker) -> None:
    """ptxas heard Ctrl-C, which a worker ignores, and Triton printed the program that was not assembled."""
    assert worker.call(60, os.getpgrp) == worker.call(60, os.getpid) != os.getpgrp()
    compiler = worker.call(60, begin_a_compiler)
    worker.kill()
    for _ in range(100):
        if not Path(f"/proc/{compiler}").exists() or " Z " in Path(f"/proc/{compiler}/stat").read_text():
            return
        time.sleep(0.05)
    pytest.fail("the compiler still runs")


def test_death_is_told_and_the_next_call_gets_a_new_process(worker: Worker) -> None:
    before = worker.call(60, os.getpid)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        worker.call(60, die, signal.SIGKILL)
    assert worker.call(60, os.getpid) != before


def test_hang_is_ended_in_time(worker: Worker) -> None:
    worker.call(60, double, 1)
    begun = time.monotonic()
    with pytest.raises(WorkerHung, match=r"no answer in 0\.2 s"):
        worker.call(0.2, sleep, 60)
    assert time.monotonic() - begun < 10
    assert worker.call(60, double, 4) == 8


def test_exceptions_keep_the_process(worker: Worker) -> None:
    before = worker.call(60, os.getpid)
    with pytest.raises(RemoteError, match="ValueError: planted"):
        worker.call(60, fail)
    with pytest.raises(UsageError, match="do something else"):
        worker.call(60, misuse)
    assert worker.call(60, os.getpid) == before


def test_poisoned_process_answers_and_is_replaced(worker: Worker) -> None:
    before = worker.call(60, os.getpid)
    assert worker.call(60, poison, 7) == 7
    assert worker.call(60, os.getpid) != before


def test_pool_loses_only_the_call_that_died() -> None:
    pool = WorkerPool(2)
    try:
        futures = [pool.submit(60, double, value) for value in range(4)]
        dead = pool.submit(60, die, signal.SIGSEGV)
        futures += [pool.submit(60, double, value) for value in range(4, 8)]
        assert [future.result() for future in futures] == [2 * value for value in range(8)]
        with pytest.raises(WorkerDied, match="SIGSEGV"):
            dead.result()
    finally:
        pool.close()


@pytest.mark.skipif(sys.platform != "linux", reason="no other system lets a process choose its cores like that")
def test_only_the_cores_this_process_may_use_count():
    """Of sweeps beside each other, each given a share of the cores, none may start compilers for all of them."""
    mine = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mine)})
        assert workers.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, mine)
    assert workers.usable_cores() == len(mine)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a worker ends when its pipe does")
def test_a_worker_whose_parent_was_killed_while_it_began_ends():
    """It once stayed for good, and whoever waited for its output with it: Linux tells of deaths to come only."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        parent = os.getpid()
        if os.fork() == 0:
            while os.getppid() == parent:
                time.sleep(0.001)
            workers._die_with_parent()
            os.write(writer, b"still there")
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as output:
        assert output.read() == b""
    os.wait()
