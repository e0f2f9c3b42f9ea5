"""Seconds of each step of a fresh confirmation process, and the cost of reading the GPU's state around a block.

    python -m benchmarks.process_starts
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fp8tune.fork_server import start_server
from fp8tune.measure import device, trial
from fp8tune.measure.arms import KernelArm
from fp8tune.measure.worker import Worker
from fp8tune.plan import grids
from fp8tune.records import NamedInts, Problem
from fp8tune.replay.loading import load_spec

SHAPES = (NamedInts(M=16640, K=5120, G=16), NamedInts(M=16640, K=8192, G=4), NamedInts(M=131072, K=8192, G=8))


def nothing() -> float:
    return time.time()


def context() -> None:
    import torch

    torch.empty(1, device="cuda")
    torch.cuda.synchronize()


def spec_of(name: str) -> None:
    load_spec(name)


def first_random() -> None:
    import torch

    torch.randn(8, device="cuda")
    torch.randint(0, 8, (8,), device="cuda")
    torch.cuda.synchronize()


def gate() -> None:
    from fp8tune.measure.gate import GpuStream

    GpuStream()


def launch_and_wait(arm: KernelArm) -> None:
    trial.launch(arm, "cuda")


def telemetry_ms() -> tuple[float, float]:
    device.telemetry(), device.clock_limits()
    begun = time.perf_counter()
    for _ in range(200):
        before = device.telemetry()
        device.telemetry_over(before)
        device.clock_limits()
    block = (time.perf_counter() - begun) / 200
    begun = time.perf_counter()
    for _ in range(50):
        device._limits_in.cache_clear()
        device.clock_limits()
    return 1e3 * block, 1e3 * (time.perf_counter() - begun) / 50


def main() -> None:
    start_server()
    here = device.probe()
    assert here is not None
    spec, problem = load_spec("colwise"), Problem("colwise", SHAPES[0], "jagged")
    for number in range(4):
        worker, steps = Worker(), list[tuple[str, float]]()

        def timed(name: str, function: Callable[..., Any], *args: Any) -> Any:
            begun = time.perf_counter()
            value = worker.call(120, function, *args)
            steps.append((name, time.perf_counter() - begun))
            return value

        timed("fork", nothing)
        timed("context", context)
        timed("random", first_random)
        timed("spec", spec_of, "colwise")
        timed("gate", gate)
        for shape in SHAPES:
            problem = Problem("colwise", shape, "jagged")
            grid = grids.configs(spec, problem, spec.axes, device.limits(here))
            configs = [config for config, pruned in grid.items() if not pruned][:9]
            arms = [KernelArm.of("colwise", spec, problem, config) for config in configs]
            timed(f"build {shape}", trial.build, arms[0], "cuda")
            for place, arm in enumerate(arms):
                timed(f"  launch {place}", launch_and_wait, arm)
            for place, arm in enumerate(arms * 2):
                timed(f"  block {place}", trial.block, arm, "cuda")
        if number == 3:
            print("telemetry of a block: {:.3f} ms; limits alone: {:.3f} ms".format(*timed("telemetry", telemetry_ms)))
        begun = time.perf_counter()
        worker.close()
        steps.append(("close", time.perf_counter() - begun))
        print(f"process {number}: " + ", ".join(f"{name} {seconds:.3f}" for name, seconds in steps), flush=True)


if __name__ == "__main__":
    main()
