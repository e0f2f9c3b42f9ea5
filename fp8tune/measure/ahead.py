"""Compile the launches of a program ahead, each with its config, into a folder that Triton then finds as its cache.

No GPU is needed: Triton names a program by code, constants, options, target and compiler. Its group files have
absolute paths, so the folder must be where the program will find it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from fp8tune.errors import one_line
from fp8tune.measure import compiling
from fp8tune.measure.worker import RemoteError, WorkerDied, WorkerPool, usable_cores
from fp8tune.replay.launching import Launcher
from fp8tune.replay.lazy import triton
from fp8tune.replay.loading import imported_module
from fp8tune.replay.recording import Config, Kernel, Launch
from fp8tune.replay.values import triton_config
from fp8tune_kernels.tuners import resolved

TIMEOUT_S = 300.0

Work = tuple[Kernel, Launch, Config]


@dataclass(frozen=True)
class Compiled:
    """Programs that were compiled ahead."""

    launches: int
    seconds: float
    failures: tuple[str, ...] = ()  # kernel and reason


def compile_ahead(work: Sequence[Work], arch: str, folder: Path) -> Compiled:
    """Compile launches for an arch into a folder, on all cores. Those that fail are compiled when they are launched."""
    started_s = time.perf_counter()
    light = [(replace(kernel, launches=()), launch.without_values(), config) for kernel, launch, config in work]
    pool = WorkerPool(max(1, min(len(light), usable_cores())))
    try:
        futures = [pool.submit(TIMEOUT_S, compile_launch, item, arch, str(folder.absolute())) for item in light]
        names = {future: item[0].name for future, item in zip(futures, light, strict=True)}
        failures = list[str]()
        for future in as_completed(futures):
            try:
                reason = future.result()
            except (WorkerDied, RemoteError) as error:
                reason = str(error).strip().splitlines()[-1][:200]
            failures += [f"{names[future]}: {reason}"] if reason else []
    finally:
        pool.close()
    return Compiled(len(light) - len(failures), time.perf_counter() - started_s, tuple(sorted(set(failures))))


def compile_launch(work: Work, arch: str, folder: str) -> str:
    """Compile one launch in this process; return the reason where that is not possible."""
    if triton.knobs.runtime.interpret:
        return "TRITON_INTERPRET=1 is set: unset it"
    kernel, launch, config = work
    where, _, attribute = kernel.name.rpartition(":")
    try:
        launcher = Launcher(kernel, resolved(imported_module(where), attribute))
        case = launcher.case([launch], "meta")
        inputs = case.inputs(0)
        arguments = next(iter(case.arguments(inputs, case.outputs())))
        triton.knobs.cache.dir = folder
        chosen = triton_config(config, getattr(launcher.autotuner, "configs", ()))
        with compiling.recording(arch):
            launcher.run(launch, chosen, arguments, grid=(1, 1, 1), warmup=False)
    except Exception as error:
        return one_line(error)
    return ""
