"""Programs of many launches, compiled in worker processes with the installed Triton: no GPU is needed.

Either for the hashes of their machine code, or ahead of a program's start, into the folder that Triton will have there
as its cache. Triton names a program by code, constants, options, target and compiler, but its group files have absolute
paths: the folder must be where the program will find it.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from fp8tune.compiled import facts
from fp8tune.errors import one_line
from fp8tune.measure import compiling, machine
from fp8tune.measure.backends import outcome_of
from fp8tune.measure.worker import RemoteError, WorkerDied, WorkerPool, finished, usable_cores
from fp8tune.records import Compiler, NamedInts, Problem
from fp8tune.replay.launching import Launcher
from fp8tune.replay.lazy import triton
from fp8tune.replay.loading import imported_module
from fp8tune.replay.recording import Config, Kernel, Launch
from fp8tune.stats.means import group_by
from fp8tune_kernels.tuners import resolved

W = TypeVar("W")

TIMEOUT_S = 900.0  # of one call, which is all launches of a config: a compiler that takes longer hangs

Work = tuple[Kernel, Launch, Config]


@dataclass(frozen=True)
class Wanted:
    """A launch whose machine code a caller wants."""

    reference: str  # what `fp8tune.replay.loading.load_spec` takes; of a kernel of fp8tune its name
    problem: Problem
    config: NamedInts


@dataclass(frozen=True)
class Compiled:
    """Machine code of launches."""

    compiler: Compiler
    hashes: Mapping[Wanted, str]  # as `fp8tune.compiled.facts.code_hash` makes them
    failures: Mapping[Wanted, str]  # launch that did not compile -> the reason
    programs: int  # different programs that were compiled
    left: int = 0  # launches that were not reached


@dataclass(frozen=True)
class CompiledAhead:
    """Launches whose programs are in a cache."""

    launches: int
    seconds: float
    failures: tuple[str, ...] = ()  # kernel and reason


def compile_programs(
    requests: Iterable[Wanted],
    arch: str,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    is_over: Callable[[], bool] = lambda: False,
) -> Compiled:
    """Compile launches for an arch with the installed Triton and kernels, each program once.

    Args:
        requests: Launches; repeated ones count once.
        arch: Arch to compile for, which need not be here.
        progress: Called with the number of finished launches and of all.
        is_over: Nothing more is compiled once it returns True.

    Raises:
        MachineError: The machine cannot compile: a full disk, no assembler.
    """
    launches = list(dict.fromkeys(requests))
    # Launches of a config share most programs, so one worker gets them; large groups first, so that none is left last.
    groups = group_by(launches, lambda launch: (launch.reference, launch.config)).values()
    hashes: dict[Wanted, str] = {}
    failures: dict[Wanted, str] = {}
    programs: set[str] = set()
    with contextlib.closing(WorkerPool(usable_cores())) as pool:
        compiler = pool.submit(TIMEOUT_S, compiling.compiler_of, arch).result()
        calls = {pool.submit(TIMEOUT_S, _compile, batch, arch): batch for batch in sorted(groups, key=len)[::-1]}
        for batch, answer in _answers(calls, is_over):
            if isinstance(answer, str):
                failures |= dict.fromkeys(batch, answer)
            else:
                hashes |= answer[0]
                failures |= answer[1]
                programs |= answer[2]
            progress(len(hashes) + len(failures), len(launches))
    return Compiled(compiler, hashes, failures, len(programs), len(launches) - len(hashes) - len(failures))


def compile_ahead(work: Sequence[Work], arch: str, folder: Path) -> CompiledAhead:
    """Compile launches for an arch into a folder, on all cores. Those that fail are compiled when they are launched."""
    started_s = time.perf_counter()
    light = [(replace(kernel, launches=()), launch.without_values(), config) for kernel, launch, config in work]
    with contextlib.closing(WorkerPool(max(1, min(len(light), usable_cores())))) as pool:
        place = arch, str(folder.absolute())
        calls = {pool.submit(TIMEOUT_S, _compile_recorded, item, *place): item[0].name for item in light}
        failures = [f"{name}: {reason}" for name, reason in _answers(calls) if reason]
    return CompiledAhead(len(light) - len(failures), time.perf_counter() - started_s, tuple(sorted(set(failures))))


def _answers(
    calls: Mapping[Future[Any], W], is_over: Callable[[], bool] = lambda: False
) -> Iterator[tuple[W, Any | str]]:
    """Yield what workers were asked for with their answers; a worker that ended answers with a text that says so."""
    for work, future in finished(dict(calls), is_over):
        try:
            yield work, future.result()
        except (WorkerDied, RemoteError) as error:
            yield work, outcome_of(error).reason


def _compile(batch: Sequence[Wanted], arch: str) -> tuple[dict[Wanted, str], dict[Wanted, str], set[str]]:
    """Compile launches in this worker; return hashes, failures, and the programs by Triton's names."""
    hashes: dict[Wanted, str] = {}
    failures: dict[Wanted, str] = {}
    programs: set[str] = set()
    hash_of = cache(lambda kernels: facts.code_hash(kernels, list(map(facts.resources, kernels))))
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
    return hashes, failures, programs


def _compile_recorded(work: Work, arch: str, folder: str) -> str:
    """Compile one recorded launch in this worker; return the reason where that is not possible."""
    if triton.knobs.runtime.interpret:
        return "TRITON_INTERPRET=1 is set: unset it"
    kernel, launch, config = work
    where, _, attribute = kernel.name.rpartition(":")
    try:
        launcher = Launcher(kernel, resolved(imported_module(where), attribute))
        triton.knobs.cache.dir = folder
        with compiling.recording(arch):
            launcher.compile(launch, config)
    except Exception as error:
        return one_line(error)
    return ""
