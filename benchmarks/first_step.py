"""Time to the first step of a program with twelve autotuned kernels: tuned at run time, hard-coded, and pinned.

    python -m benchmarks.first_step --folder first_step     # without a GPU it compiles for sm_90 and launches nothing

Each time is that of a new process, from its start to the end of the step. ``cold``: with an empty cache of Triton,
``warm``: with that of the run before, ``ahead``: with what was compiled ahead, without a GPU, in parallel.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

HERE, BEGAN = "benchmarks.first_step", "FP8TUNE_FIRST_STEP"
ARCH = "sm_90"


def run(arm: str, cache: Path, tables: Path | None = None, **variables: str) -> dict[str, Any]:
    """Run one step in a new process; return what it prints."""
    environment = {**os.environ, **variables, "TRITON_CACHE_DIR": str(cache), BEGAN: repr(time.time())}
    environment |= {"FP8TUNE_PIN": f"{tables}:strict"} if arm == "pinned" else {}
    command = [sys.executable, "-m", HERE, "--arm", arm, "--folder", str(tables or cache)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{arm}: {ended.stderr[-2000:]}")
    return dict(json.loads(ended.stdout.splitlines()[-1]))


def child(arm: str, folder: Path) -> None:
    """Make the step, and print its times and the configs that it took."""
    if arm == "pinned":
        import fp8tune_kernels  # noqa: F401 - as fp8tune_kernels.pth does in an installed package
    import torch

    from benchmarks.real import twelve_kernels as program
    from fp8tune_kernels.tuners import tuning_key

    keys: dict[str, Any] = {}

    def launch(kernel: Any, grid: Any) -> Any:
        name = kernel.base_fn.__name__
        grid = grid if torch.cuda.is_available() else (1, 1)
        if arm != "hard-coded":

            def noting_key(*args: Any) -> Any:
                keys[name] = tuning_key(kernel, args, {})
                return kernel[grid](*args)

            return noting_key
        chosen = configs[name]
        return partial(kernel.fn[grid], **chosen["kwargs"], num_warps=chosen["num_warps"])

    configs = json.loads((folder / "configs.json").read_text()) if arm == "hard-coded" else {}
    torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu")  # the context is no part of the step
    imported_s = time.time()
    with contextlib.nullcontext() if torch.cuda.is_available() else _compiling():
        float(program.step(launch))
    ended_s = time.time()
    began_s = float(os.environ[BEGAN])
    best = {kernel.base_fn.__name__: getattr(kernel, "best_config", None) for kernel in program.KERNELS}
    chosen = {name: {"kwargs": item.kwargs, "num_warps": item.num_warps} for name, item in best.items() if item}
    cpu_s = sum(os.times()[:4])  # with compilers, which are other processes
    times = {"step_s": ended_s - imported_s, "total_s": ended_s - began_s, "cpu_s": cpu_s}
    lookup = lookup_us(program) if arm == "lookup" else {}
    print(json.dumps({**times, "configs": chosen, "keys": keys, "lookup_us": lookup}))


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """Compile instead of launching; run-time tuning compiles all configs, and takes the first."""
    from triton.runtime.autotuner import Autotuner

    from fp8tune.measure import compiling

    def compiled(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        self.fn.run(*args, **meta, **config.all_kwargs())
        return [1.0]

    bench, Autotuner._bench = Autotuner._bench, compiled
    try:
        with compiling.recording(ARCH):
            yield
    finally:
        Autotuner._bench = bench


def lookup_us(program: Any) -> dict[str, float]:
    """Return the host time of a launch whose config Triton has cached, and of one that is pinned."""
    import torch

    from fp8tune_kernels import pin, unpin

    kernel, x = program.relu, torch.zeros(256, device="cuda")
    key, out = (256, "torch.float32", "torch.float32"), torch.zeros(256, device="cuda")

    def launch() -> None:
        kernel[(1,)](x, out, 256)

    times: dict[str, float] = {"cached by Triton": float("inf"), "pinned": float("inf")}
    launch()
    row = {"kwargs": kernel.cache[key].kwargs, "num_warps": kernel.cache[key].num_warps}
    for _ in range(15):  # in turns: clocks of the host change
        for name in times:
            if name == "pinned":
                pin({key: row}, kernel, unknown="strict")
            launch()
            torch.cuda.synchronize()
            times[name] = min(times[name], timeit.timeit(launch, number=500) / 500 * 1e6)
            torch.cuda.synchronize()
            unpin(kernel)
    return times


def write_tables(folder: Path, result: dict[str, Any]) -> None:
    """Write the configs of a run as tables to pin, and as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "configs.json").write_text(json.dumps(result["configs"]))
    for name, config in result["configs"].items():
        rows = {"": {tuple(result["keys"][name]): config}}
        kernel = f"benchmarks.real.twelve_kernels:{name}"
        (folder / f"{name}.py").write_text(f"\nKERNEL = {kernel!r}\nKEY = ()\nTABLE = {rows!r}\n")


def ahead(folder: Path, tables: Path, cache: Path) -> float:
    """Compile the pinned launches of a recording ahead; return the seconds."""
    from fp8tune.measure.programs import compile_ahead
    from fp8tune.replay.recording import Config, read

    configs, work = json.loads((tables / "configs.json").read_text()), []
    for kernel in read(folder / "run.json").kernels:
        chosen = configs[kernel.name.rpartition(":")[2]]
        declared = next(c for c in kernel.configs if (c.kwargs, c.num_warps) == (chosen["kwargs"], chosen["num_warps"]))
        config = Config(declared.kwargs, declared.num_warps, declared.num_stages)
        work += [(kernel, launch, config) for launch in kernel.launches]
    result = compile_ahead(work, ARCH, cache)
    if result.failures:
        raise SystemExit(str(result.failures))
    return result.seconds


def torch_has_gpu() -> bool:
    """Return True if this machine has a GPU."""
    import torch

    return bool(torch.cuda.is_available())


def record(folder: Path, tables: Path) -> None:
    """Record the launches of the pinned program; without a GPU by Triton's interpreter, at the same sizes."""
    variables = {"FP8TUNE_PIN": str(tables)} | ({} if torch_has_gpu() else {"TRITON_INTERPRET": "1"})
    command = [sys.executable, "-m", "fp8tune", "record", "-o", str(folder / "run.json"), "--"]
    program = [sys.executable, "-m", "benchmarks.real.twelve_kernels"]
    subprocess.run([*command, *program], env={**os.environ, **variables}, check=True, capture_output=True)


def main() -> None:
    """Run all arms and print one line of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("first_step"))
    parser.add_argument("--arm", default="")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.arm:
        child(options.arm, options.folder)
        return
    folder: Path = options.folder.absolute()
    tables, caches = folder / "tables", folder / "caches"
    cold = run("autotune", caches / "tuned")
    rows = [("Triton's autotuning, cold", [cold])]
    write_tables(tables, cold)
    rows.append(("Triton's autotuning, warm", [run("autotune", caches / "tuned") for _ in range(options.rounds)]))
    record(folder, tables)
    compile_s = ahead(folder, tables, caches / "ahead")
    for arm in ("hard-coded", "pinned"):
        runs: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": [], "ahead": []}
        for number in range(options.rounds):
            runs["cold"].append(run(arm, caches / f"{arm}{number}", tables))
            runs["warm"].append(run(arm, caches / f"{arm}{number}", tables))
            runs["ahead"].append(run(arm, caches / "ahead", tables))
        rows += [(f"{arm}, {state}", every) for state, every in runs.items()]
    print(f"{'arm':28}{'first step s':>14}{'with imports s':>16}{'CPU s':>8}{'processes':>11}")
    for name, every in rows:
        fields = ("step_s", "total_s", "cpu_s")
        step_s, total_s, cpu_s = (statistics.median(item[field] for item in every) for field in fields)
        print(f"{name:28}{step_s:14.2f}{total_s:16.2f}{cpu_s:8.2f}{len(every):11}")
    if torch_has_gpu():
        times = run("lookup", caches / "tuned")["lookup_us"]
        print(", ".join(f"{name}: {time_us:.2f} us a launch" for name, time_us in times.items()))
    print(f"12 launches compiled ahead in {compile_s:.1f} s on {len(os.sched_getaffinity(0))} cores")


if __name__ == "__main__":
    main()
