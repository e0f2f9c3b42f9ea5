"""Sweep on every GPU of a machine at once, and merge the rows into one database.

    python docs/examples/sweep_every_gpu.py --gpus 0,1,2,3 --shapes llama4 --shapes deepseek-v3
    python docs/examples/sweep_every_gpu.py --gpus 0,1 --kernel rowwise --time-budget 600 -- --quick

Each pair of a kernel and a shape set is one sweep. The GPUs take them from one queue, in the order given; each has a
share of the cores and a database of its own, into which it is calibrated first. What follows ``--`` is for ``fp8tune
sweep``. Rows know their device, and where two of one arch differ by over 2 % its table has a row for each. From a
queue like this one four H200s (torch 2.11, Triton 3.6) swept 129 problems with finals in eight minutes.
"""

from __future__ import annotations

import argparse
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from fp8tune_kernels.catalog import KERNELS

LEAST_S = 30.0
"""A sweep is not begun with less time left."""

Job = tuple[str, str]
"""Kernel and shape set."""


class Gpu:
    """One GPU with its cores and its database."""

    def __init__(self, name: str, cores: Sequence[int], folder: Path) -> None:
        self.name = name
        self.database = folder / f"gpu-{name}.db"
        self._log = folder / f"gpu-{name}.log"
        self.worst = 0
        """The largest exit code so far."""
        self._cores = ",".join(map(str, cores))
        self._environment = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": name}

    def fp8tune(self, *arguments: str) -> int:
        """Run a command of fp8tune on this GPU, into its database; its exit code."""
        pinned = ["taskset", "-c", self._cores, sys.executable, "-m", "fp8tune.cli", *arguments]
        with self._log.open("a") as log:
            done = subprocess.run([*pinned, "--db", str(self.database)], env=self._environment, stderr=log)
        self.worst = max(self.worst, abs(done.returncode))  # negative: a signal ended it
        return done.returncode


def work(gpu: Gpu, jobs: queue.SimpleQueue[Job], options: Sequence[str], end_s: float) -> None:
    """Take jobs until there are none; ``end_s`` on the monotonic clock."""
    if not {"--quick", "--timer"} & set(options):  # a screen needs no calibration, a simulated clock is no GPU
        gpu.fp8tune("calibrate")
    while True:
        try:
            kernel, shapes = jobs.get_nowait()
        except queue.Empty:
            return
        left_s = end_s - time.monotonic()
        if left_s < LEAST_S:
            print(f"left out: {kernel} over {shapes}", flush=True)
            continue
        budget = [] if left_s == float("inf") else ["--time-budget", f"{left_s:.0f}"]
        begun = time.monotonic()
        code = gpu.fp8tune("sweep", "--kernel", kernel, "--shapes", shapes, *budget, *options)
        ended = "" if code == 0 else f", exit code {code}"
        print(f"GPU {gpu.name}: {kernel} over {shapes}, {time.monotonic() - begun:.0f} s{ended}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep, then merge what was swept. The largest exit code of all that ran."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", required=True, help="as CUDA_VISIBLE_DEVICES has them: 0,1,2,3")
    parser.add_argument("--kernel", action="append", help="repeatable (default: all)")
    parser.add_argument("--shapes", action="append", required=True, help="a shape set or a path.toml; repeatable")
    parser.add_argument("--db", help="the database that gets all rows (default: that of fp8tune import)")
    parser.add_argument("--folder", type=Path, help="keep each GPU's database and log here")
    parser.add_argument("--time-budget", type=float, default=float("inf"), metavar="S", help="end after S seconds")
    parser.add_argument("options", nargs="*", help="for fp8tune sweep, after --")
    given = parser.parse_args(arguments)
    end_s = time.monotonic() + given.time_budget
    folder = given.folder or Path(tempfile.mkdtemp(prefix="fp8tune-gpus-"))
    folder.mkdir(parents=True, exist_ok=True)
    names = given.gpus.split(",")
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // len(names))
    gpus = [Gpu(name, cores[place * share :][:share] or cores, folder) for place, name in enumerate(names)]
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for kernel in given.kernel or KERNELS:
        for shapes in given.shapes:
            jobs.put((kernel, shapes))
    threads = [threading.Thread(target=work, args=(gpu, jobs, given.options, end_s)) for gpu in gpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"logs and databases of the GPUs: {folder}", flush=True)
    merge = [sys.executable, "-m", "fp8tune.cli", "import", *(["--db", given.db] if given.db else [])]
    made = [str(gpu.database) for gpu in gpus if gpu.database.exists()]
    imported = [abs(subprocess.run([*merge, database]).returncode) for database in made]
    return max([*imported, *(gpu.worst for gpu in gpus)])


if __name__ == "__main__":
    raise SystemExit(main())
