"""What ``fp8tune record`` costs a training-like step of 200 autotuned launches, on a GPU.

    python -m benchmarks.record_cost [--rounds 6] [--stub]

Processes with and without recording take turns; each prints the median time of its steps once run-time tuning and the
recorder's first launches are over. ``--stub`` needs no GPU: launches do nothing, so that only the host's cost is left.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAUNCHES = 200
SIZES = ((512, 1024), (2048, 1024), (1024, 4096), (4096, 2048), (256, 8192))


def main() -> None:
    """Print the cost in percent, and the microseconds that each launch pays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="processes of each kind")
    parser.add_argument("--steps", type=int, default=300, help="timed steps of each process")
    parser.add_argument("--stub", action="store_true", help="without a GPU: launches do nothing")
    parser.add_argument("--step", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        print(json.dumps(stub_us(options.steps) if options.stub else step_us(options.steps)))
        return
    times: dict[str, list[float]] = {"without": [], "with": []}
    for number in range(2 * options.rounds):
        kind = ("without", "with")[number % 2]
        times[kind].append(_process(kind == "with", options))
        print(f"{kind:>8} {times[kind][-1]:10.1f} us a step", file=sys.stderr)
    without, with_ = (statistics.median(times[kind]) for kind in ("without", "with"))
    print(f"a step takes {without:.1f} us without and {with_:.1f} us with recording")
    print(f"cost: {100 * (with_ / without - 1):.2f} %, {(with_ - without) / LAUNCHES:.2f} us a launch")


def _process(records: bool, options: argparse.Namespace) -> float:
    command = [sys.executable, "-m", "benchmarks.record_cost", "--step", "--steps", str(options.steps)]
    command += ["--stub"] if options.stub else []
    with tempfile.TemporaryDirectory() as folder:
        if records:
            recording = str(Path(folder) / "run.json")
            command = [sys.executable, "-m", "fp8tune", "record", "-o", recording, "--", *command]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=dict(os.environ))
        return float(done.stdout.splitlines()[0])


def step_us(steps: int) -> float:
    """Median microseconds of a step: forward and backward through 100 layers, of two autotuned kernels each way."""
    import torch

    from benchmarks.record_kernels import scaled_silu

    inputs = [torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for size in SIZES]

    def step() -> None:
        for index in range(LAUNCHES // 2):
            x = inputs[index % len(inputs)]
            x.grad = None
            scaled_silu(x, 1.5).backward(x.detach())

    return _median_us(step, steps, torch.cuda.synchronize)


def stub_us(steps: int) -> float:
    """The same with an autotuner whose launch returns at once, which leaves what Python does."""
    import torch
    import triton

    from benchmarks.record_kernels import silu_forward

    class Nothing:
        """A jitted function that launches nothing."""

        def __init__(self) -> None:
            self.fn, self.arg_names = silu_forward.fn.fn, silu_forward.arg_names

        def run(self, *args: Any, **kwargs: Any) -> None:
            """Return."""

    tuner = triton.runtime.Autotuner(Nothing(), silu_forward.arg_names, [triton.Config({"BLOCK": 1024})], ["n"], [], [])
    inputs = [torch.randn(size, dtype=torch.bfloat16) for size in SIZES]
    y = [torch.empty_like(x) for x in inputs]

    def step() -> None:
        for index in range(LAUNCHES):
            x = inputs[index % len(inputs)]
            tuner[lambda meta: (meta["BLOCK"],)](x, y[index % len(y)], x.numel(), 1.5)

    return _median_us(step, steps, lambda: None)


def _median_us(step: Callable[[], None], steps: int, synchronize: Callable[[], None]) -> float:
    for _ in range(1100):  # the recorder times the launches of a signature until the 1024th
        step()
    times = []
    for _ in range(steps):
        synchronize()
        started = time.perf_counter()
        step()
        synchronize()
        times.append(1e6 * (time.perf_counter() - started))
    return statistics.median(times)


if __name__ == "__main__":
    main()
