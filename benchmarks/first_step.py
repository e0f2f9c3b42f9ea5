"""Time to the first step of a program with twelve autotuned kernels: tuned at run time, hard-coded, and pinned.

    python -m benchmarks.first_step --folder first_step     # without a GPU it compiles for sm_90 and launches nothing

Each time is that of a new process, from its start to the end of the step. ``cold``: with an empty cache of Triton,
``warm``: with that of the run before, ``ahead``: with what was compiled ahead, without a GPU, in parallel.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
import timeit
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch

BEGAN, ARCH = "FP8TUNE_FIRST_STEP", "sm_90"
PROGRAM = "benchmarks.real.twelve_kernels"
HAS_GPU = torch.cuda.is_available()


def run(arm: str, cache: Path, tables: Path) -> dict[str, Any]:
    """Run one step in a new process; return what it prints."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), BEGAN: repr(time.time())}
    environment |= {"FP8TUNE_PIN": f"{tables}:strict"} if arm == "pinned" else {}
    command = [sys.executable, "-m", "benchmarks.first_step", "--arm", arm, "--folder", str(tables)]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return dict(json.loads(output.splitlines()[-1]))


def make_step(arm: str, tables: Path) -> dict[str, Any]:
    """Make the step; return its times and the configs that it took."""
    if arm == "pinned":
        importlib.import_module("fp8tune_kernels")  # as fp8tune_kernels.pth does in an installed package
    program = importlib.import_module(PROGRAM)
    tuning_key = importlib.import_module("fp8tune_kernels.tuners").tuning_key
    configs = json.loads((tables / "configs.json").read_text()) if arm == "hard-coded" else {}
    keys: dict[str, Any] = {}

    def launch(kernel: Any, grid: Any) -> Any:
        name, grid = kernel.base_fn.__name__, grid if HAS_GPU else (1, 1)
        if name in configs:
            return partial(kernel.fn[grid], **configs[name]["kwargs"], num_warps=configs[name]["num_warps"])

        def noting_key(*args: Any) -> Any:
            keys[name] = tuning_key(kernel, args, {})
            return kernel[grid](*args)

        return noting_key

    torch.zeros(1, device="cuda" if HAS_GPU else "cpu")  # the context is no part of the step
    imported_s = time.time()
    with contextlib.nullcontext() if HAS_GPU else compiling():
        float(program.step(launch))
    ended_s = time.time()
    best = {kernel.base_fn.__name__: getattr(kernel, "best_config", None) for kernel in program.KERNELS}
    return {
        "step_s": ended_s - imported_s,
        "total_s": ended_s - float(os.environ[BEGAN]),
        "cpu_s": sum(os.times()[:4]),  # with compilers, which are other processes
        "configs": {name: {"kwargs": c.kwargs, "num_warps": c.num_warps} for name, c in best.items() if c},
        "keys": keys,
        "lookup_us": lookup_us(program) if arm == "lookup" else {},
    }


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Compile instead of launching; run-time tuning compiles all configs, and takes the first."""
    autotuner: Any = importlib.import_module("triton.runtime.autotuner").Autotuner

    def compiled(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        self.fn.run(*args, **meta, **config.all_kwargs())
        return [1.0]

    recording = importlib.import_module("fp8tune.measure.compiling").recording
    with mock.patch.object(autotuner, "_bench", compiled), recording(ARCH):
        yield


def lookup_us(program: Any) -> dict[str, float]:
    """Return the host time of a launch whose config Triton has cached, and of one that is pinned."""
    kernels: Any = importlib.import_module("fp8tune_kernels")
    kernel, x, out = program.relu, torch.zeros(256, device="cuda"), torch.zeros(256, device="cuda")
    key, times = (256, "torch.float32", "torch.float32"), {"cached by Triton": float("inf"), "pinned": float("inf")}

    def launch() -> None:
        kernel[(1,)](x, out, 256)

    launch()
    row = {"kwargs": kernel.cache[key].kwargs, "num_warps": kernel.cache[key].num_warps}
    for _ in range(15):  # in turns: clocks of the host change
        for name in times:
            if name == "pinned":
                kernels.pin({key: row}, kernel, unknown="strict")
            launch()
            torch.cuda.synchronize()
            times[name] = min(times[name], timeit.timeit(launch, number=500) / 500 * 1e6)
            torch.cuda.synchronize()
            kernels.unpin(kernel)
    return times


def write_tables(folder: Path, result: dict[str, Any]) -> None:
    """Write the configs of a run as tables to pin, and as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "configs.json").write_text(json.dumps(result["configs"]))
    for name, config in result["configs"].items():
        rows = {"": {tuple(result["keys"][name]): config}}
        (folder / f"{name}.py").write_text(f"\nKERNEL = {f'{PROGRAM}:{name}'!r}\nKEY = ()\nTABLE = {rows!r}\n")


def compile_recorded(folder: Path, tables: Path, cache: Path) -> float:
    """Record the pinned program, on the interpreter if there is no GPU, and compile its launches ahead."""
    from fp8tune.measure.programs import compile_ahead  # here: timed processes must not import these
    from fp8tune.replay.recording import Config, read

    variables = {"FP8TUNE_PIN": str(tables)} | ({} if HAS_GPU else {"TRITON_INTERPRET": "1"})
    command = [sys.executable, "-m", "fp8tune", "record", "-o", str(folder / "run.json"), "--"]
    command += [sys.executable, "-m", PROGRAM]
    subprocess.run(command, env={**os.environ, **variables}, check=True, capture_output=True)
    configs, work = json.loads((tables / "configs.json").read_text()), []
    for kernel in read(folder / "run.json").kernels:
        chosen = configs[kernel.name.rpartition(":")[2]]
        declared = next(c for c in kernel.configs if (c.kwargs, c.num_warps) == (chosen["kwargs"], chosen["num_warps"]))
        config = Config(declared.kwargs, declared.num_warps, declared.num_stages)
        work += [(kernel, launch, config) for launch in kernel.launches]
    result = compile_ahead(work, ARCH, cache)
    assert not result.failures, result.failures
    return result.seconds


def main() -> None:
    """Run all arms and print one line of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("first_step"))
    parser.add_argument("--arm", default="", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(make_step(options.arm, options.folder)))
        return
    folder, rounds = options.folder.absolute(), range(options.rounds)
    tables, caches = folder / "tables", folder / "caches"
    rows = {"Triton's autotuning, cold": [run("autotune", caches / "tuned", tables)]}
    write_tables(tables, rows["Triton's autotuning, cold"][0])
    rows["Triton's autotuning, warm"] = [run("autotune", caches / "tuned", tables) for _ in rounds]
    compile_s = compile_recorded(folder, tables, caches / "ahead")
    for arm in ("hard-coded", "pinned"):
        for state in ("cold", "warm", "ahead"):
            own = [caches / ("ahead" if state == "ahead" else f"{arm}{number}") for number in rounds]
            rows[f"{arm}, {state}"] = [run(arm, cache, tables) for cache in own]
    print(f"{'arm':28}{'first step s':>14}{'with imports s':>16}{'CPU s':>8}{'processes':>11}")
    for name, runs in rows.items():
        step_s, total_s, cpu_s = (median(item[field] for item in runs) for field in ("step_s", "total_s", "cpu_s"))
        print(f"{name:28}{step_s:14.2f}{total_s:16.2f}{cpu_s:8.2f}{len(runs):11}")
    for name, time_us in run("lookup", caches / "tuned", tables)["lookup_us"].items() if HAS_GPU else ():
        print(f"{name}: {time_us:.2f} us a launch")
    print(f"12 launches compiled ahead in {compile_s:.1f} s on {len(os.sched_getaffinity(0))} cores")


if __name__ == "__main__":
    main()
