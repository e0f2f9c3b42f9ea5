"""Machine code of many launches with the installed Triton: compiled in worker processes, no GPU needed.

Launches of one config go to one worker, because most of them share a program, which a process compiles once.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import cache
from typing import Any

from fp8tune import alive
from fp8tune.compiled import facts
from fp8tune.errors import one_line
from fp8tune.measure import compiling, machine
from fp8tune.measure.worker import RemoteError, WorkerDied, WorkerPool, usable_cores
from fp8tune.records import Compiler, NamedInts, Problem
from fp8tune.stats.means import group_by

TIMEOUT_S = 900.0  # of all launches of one config: a compiler that takes longer hangs
POLL_S = 0.2


@dataclass(frozen=True)
class Wanted:
    """A launch whose machine code is asked for."""

    reference: str
    """Text that :func:`fp8tune.replay.loading.load_spec` takes; of a kernel of fp8tune its name."""
    problem: Problem
    config: NamedInts


@dataclass(frozen=True)
class Compiled:
    """Machine code of launches."""

    compiler: Compiler
    hashes: Mapping[Wanted, str]
    """Hashes as :func:`fp8tune.compiled.facts.code_hash` makes them."""
    failures: Mapping[Wanted, str]
    """Reason of each launch that did not compile."""
    programs: int
    """Number of different programs that were compiled."""
    left: int = 0
    """Number of launches that were not reached."""


@dataclass(frozen=True)
class _Batch:
    hashes: Mapping[Wanted, str]
    failures: Mapping[Wanted, str]
    programs: frozenset[str]


def compile_programs(
    requests: Iterable[Wanted],
    arch: str,
    *,
    processes: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    is_over: Callable[[], bool] = lambda: False,
) -> Compiled:
    """Compile launches for an arch with the installed Triton and kernels, each program once.

    Args:
        requests: Launches; repeated ones count once.
        arch: Arch to compile for, which need not be here.
        processes: Worker processes; None for one on each usable core.
        progress: Called with the number of finished launches and of all.
        is_over: Nothing more is compiled once it returns True.

    Raises:
        MachineError: The machine cannot compile: a full disk, no assembler.
    """
    launches = list(dict.fromkeys(requests))
    groups = group_by(launches, lambda launch: (launch.reference, launch.config)).values()
    # Large groups first, so that no worker is left with one at the end.
    batches = sorted(groups, key=len, reverse=True)
    pool = WorkerPool(processes or usable_cores())
    hashes: dict[Wanted, str] = {}
    failures: dict[Wanted, str] = {}
    programs: set[str] = set()
    try:
        compiler = pool.submit(TIMEOUT_S, compiling.compiler_of, arch).result()
        pending = {pool.submit(TIMEOUT_S, _compile, batch, arch): batch for batch in batches}
        while pending and not is_over():
            alive.sign()
            done, _ = wait(pending, POLL_S, FIRST_COMPLETED)
            for future in done:
                batch = pending.pop(future)
                result = _answer(future, batch)
                hashes |= result.hashes
                failures |= result.failures
                programs |= result.programs
                progress(len(hashes) + len(failures), len(launches))
    finally:
        pool.close()
    return Compiled(compiler, hashes, failures, len(programs), len(launches) - len(hashes) - len(failures))


def _answer(future: Future[_Batch], batch: Sequence[Wanted]) -> _Batch:
    try:
        return future.result()
    except (WorkerDied, RemoteError) as error:
        return _Batch({}, dict.fromkeys(batch, one_line(error)), frozenset())


def _compile(batch: Sequence[Wanted], arch: str) -> _Batch:
    """Compile launches in this worker."""
    hashes: dict[Wanted, str] = {}
    failures: dict[Wanted, str] = {}
    programs: set[str] = set()
    hash_of = cache(_hash_of)  # launches of a config share kernels
    for launch in batch:
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # Triton prints a program that ptxas refuses
                recorded = compiling.record_launches(launch.reference, launch.problem, launch.config, arch)
            kernels = tuple(item.kernel for item in recorded)
            hashes[launch] = hash_of(kernels)
            programs |= {kernel.hash for kernel in kernels}
        except Exception as error:  # any compiler failure is this launch's result
            machine.raise_if_machine(error)
            failures[launch] = one_line(error)
    return _Batch(hashes, failures, frozenset(programs))


def _hash_of(kernels: tuple[Any, ...]) -> str:
    return facts.code_hash(kernels, list(map(facts.resources, kernels)))
