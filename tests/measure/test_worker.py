"""Workers answer, die, hang and are replaced; a death costs only the call it happened in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from database_rows import H100

from fp8tune.errors import UsageError
from fp8tune.measure import codegen
from fp8tune.measure import worker as workers
from fp8tune.measure.worker import Poisoned, RemoteError, Worker, WorkerDied, WorkerHung, WorkerPool

linux = pytest.mark.skipif(sys.platform != "linux", reason="no other system has this call")


def double(value: int) -> int:
    return 2 * value


def die(how: int) -> None:
    os.kill(os.getpid(), how)


def begin_a_compiler() -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def fail(error: Exception) -> None:
    raise error


def print_in_c() -> str:
    os.write(1, b"printed in C")
    return os.readlink("/proc/self/fd/1")


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


def test_one_process_answers_many_calls_and_an_exception_keeps_it(worker: Worker) -> None:
    pid = worker.call(60, os.getpid)
    assert [worker.call(60, double, value) for value in range(3)] == [0, 2, 4]
    with pytest.raises(RemoteError, match="ValueError: planted"):
        worker.call(60, fail, ValueError("planted"))
    with pytest.raises(UsageError, match="do something else"):
        worker.call(60, fail, UsageError("planted: do something else"))
    assert worker.call(60, os.getpid) == pid != os.getpid()
    assert worker.call(60, print_in_c) == worker.call(60, os.readlink, "/proc/self/fd/2")


def test_a_fresh_process_does_not_hash_tritons_libraries() -> None:
    """It took half a second of each fresh process in a confirmation."""
    keys = "__import__('triton').runtime.cache.triton_key.cache_info().currsize"
    own = "worker.PRELOAD = [name for name in worker.PRELOAD if name.endswith('forked')]"  # torch takes seconds
    code = f"from fp8tune.measure import worker; {own}; print(worker.Worker().call(60, eval, {keys!r}))"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_a_dead_a_hung_and_a_poisoned_process_are_replaced(worker: Worker) -> None:
    pids = [worker.call(60, os.getpid)]
    with pytest.raises(WorkerDied, match="SIGKILL"):
        worker.call(60, die, signal.SIGKILL)
    pids.append(worker.call(60, os.getpid))
    begun = time.monotonic()
    with pytest.raises(WorkerHung, match=r"no answer in 0\.2 s"):
        worker.call(0.2, time.sleep, 60)
    assert time.monotonic() - begun < 10
    pids.append(worker.call(60, os.getpid))
    assert worker.call(60, fail, Poisoned(7)) == 7
    assert len({*pids, worker.call(60, os.getpid)}) == 4


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


def test_a_pool_loses_only_the_call_that_died() -> None:
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


@linux
def test_only_the_cores_this_process_may_use_count() -> None:
    """Sweeps beside each other share the cores: none may start compilers for all of them."""
    mine = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mine)})
        assert workers.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, mine)
    assert workers.usable_cores() == len(mine)


@linux
def test_a_worker_whose_parent_was_killed_while_it_began_ends() -> None:
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


# Settings that change machine code


@pytest.mark.parametrize(
    ("environment", "settings"),
    [
        ("", "fp_fusion=1"),
        ("TRITON_DEFAULT_FP_FUSION=0", "fp_fusion=0"),
        ("TRITON_DEFAULT_FP_FUSION=True", "fp_fusion=1"),
        ("DISABLE_LLVM_OPT=1 PATH=/bin TRITON_CACHE_DIR=/x", "fp_fusion=1 DISABLE_LLVM_OPT=1"),
        ("TRITON_PRINT_AUTOTUNING=1 MLIR_ENABLE_DUMP=1 LLVM_IR_ENABLE_DUMP=1", "fp_fusion=1"),
        ("TRITON_INVENTED_TOMORROW=2", "fp_fusion=1 TRITON_INVENTED_TOMORROW=2"),
        ("TRITON_DUMP_MIR=1 AMDGCN_ENABLE_DUMP=1 TRITON_REDIS_HOST=h", "fp_fusion=1"),
        ("DISABLE_TELEMETRY=1 ENABLE_USER_SITE=1 LLVM_CONFIG=x", "fp_fusion=1"),  # other programs'
        ("PTXAS_OPTIONS=", "fp_fusion=1"),
        ("TRITON_DISABLE_LINE_INFO=1", "fp_fusion=1 TRITON_DISABLE_LINE_INFO=1"),  # ptxas chooses other registers
    ],
)
def test_settings_are_one_text(environment: str, settings: str) -> None:
    variables = dict(item.split("=") for item in environment.split())
    assert codegen.settings(variables) == settings
    paths = {codegen.settings({**variables, "TRITON_PTXAS_PATH": path}) for path in ("/home/me/ptxas", "/opt/ptxas")}
    assert (len(paths), "/" in "".join(paths)) == (2, False)  # told apart, but not stored


def test_every_setting_is_part_of_what_may_be_compared() -> None:
    changed = [replace(H100, timing="events"), replace(H100, codegen="fp_fusion=0")]
    assert len({H100.fingerprint, *(device.fingerprint for device in changed)}) == 3


def _fp_fusion() -> tuple[bool, str | None]:
    from triton import knobs

    return knobs.language.default_fp_fusion, os.environ.get(codegen.FP_FUSION)


@pytest.mark.parametrize("is_on", [True, False])
def test_workers_set_fp_fusion_whatever_tritons_default_is(is_on, worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leave the environment alone, which is a part of Triton's cache keys."""
    from triton import knobs

    if not hasattr(knobs.language, "default_fp_fusion"):
        pytest.skip("this Triton always fuses")
    monkeypatch.setattr(codegen, "fp_fusion", lambda: is_on)
    assert worker.call(60, _fp_fusion) == (is_on, os.environ.get(codegen.FP_FUSION))
