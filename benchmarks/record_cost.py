"""What ``fp8tune record`` costs a training-like step of 200 autotuned launches, on a GPU.

    python -m benchmarks.record_cost [--pairs 300] [--stub]

One process under ``fp8tune record`` runs steps with the recorder's ``Autotuner.run`` and with Triton's own in turns,
once run-time tuning and the recorder's samples of each launch are over: noise between processes is no part of the
result. Beside it the recorder writes its file again from time to time, for at most one percent of the time; both kinds
of step have that. ``--stub`` needs no GPU: launches do nothing, so that only the host's cost is left.
"""

from __future__ import annotations

import argparse
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
FIRST_STEPS = 100
"""After so many all samples are taken, and kernels repeat themselves: :data:`fp8tune.replay.watch.patches.CALM`."""


def main() -> None:
    """Print the cost in percent, and the microseconds that each launch pays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=300, help="timed steps of each kind")
    parser.add_argument("--stub", action="store_true", help="without a GPU: launches do nothing")
    parser.add_argument("--recorded", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.recorded:
        report(*times_us(stub_step() if options.stub else gpu_step(), options.pairs))
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.record_cost", "--recorded", *sys.argv[1:]]
        record = [sys.executable, "-m", "fp8tune", "record", "--json", "-o", str(Path(folder) / "run.json"), "--"]
        # with --json the program prints to stderr
        subprocess.run([*record, *command], stdout=subprocess.DEVNULL, stderr=sys.stdout, check=True)


def report(without: list[float], with_: list[float]) -> None:
    """Print what the median step takes, and the mean difference within pairs with its 95 % interval."""
    from fp8tune.stats.estimate import estimate

    cost = estimate([one - other for one, other in zip(with_, without, strict=True)], trimmed_share=0.25)
    half, step = cost.upper(0.025) - cost.mean, statistics.median(without)
    print(f"a step of {LAUNCHES} launches takes {step:.1f} us without recording, {len(without)} pairs")
    print(f"recording costs {cost.mean / LAUNCHES:.2f} +- {half / LAUNCHES:.2f} us a launch")
    print(f"cost: {100 * cost.mean / step:.2f} +- {100 * half / step:.2f} %", flush=True)


def times_us(step: Callable[[], None], pairs: int) -> tuple[list[float], list[float]]:
    """Microseconds of each step without and with recording, pair by pair."""
    import torch
    from triton.runtime import Autotuner

    def synchronize() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    recorded = Autotuner.run
    plain = recorded.__wrapped__

    def timed(run: Callable[..., Any]) -> float:
        Autotuner.run = run
        synchronize()
        started = time.perf_counter()
        step()
        synchronize()
        return 1e6 * (time.perf_counter() - started)

    for _ in range(FIRST_STEPS):
        timed(recorded)
    without: list[float] = []
    with_: list[float] = []
    for number in range(pairs):
        for run in (plain, recorded) if number % 2 else (recorded, plain):
            (without if run is plain else with_).append(timed(run))
    Autotuner.run = recorded
    return without, with_


def gpu_step() -> Callable[[], None]:
    """Forward and backward through 100 layers, of one autotuned kernel each way."""
    import torch

    from benchmarks.record_kernels import scaled_silu

    inputs = [torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for size in SIZES]
    gradients = [torch.randn_like(x) for x in inputs]

    def step() -> None:
        for index in range(LAUNCHES // 2):
            x = inputs[index % len(inputs)]
            x.grad = None
            scaled_silu(x, 1.5).backward(gradients[index % len(inputs)])

    return step


def stub_step() -> Callable[[], None]:
    """The same number of launches of an autotuner that launches nothing, which leaves what Python does."""
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

    return step


if __name__ == "__main__":
    main()
