"""Compare a sweep on all GPUs of a machine with one on a single GPU: speed, picks and table, also if a child is killed.

    python -m benchmarks.several_gpus --out results
    FP8TUNE_TIMER=simulated:1 python -m benchmarks.several_gpus --gpus 2 --shapes tiny   # without a GPU

Prints a row for each run; ``--out`` has its database and log. One GPU has the share of the cores that it has beside the
others, and each sweep compiles anew. Simulated GPUs take no time: there the factor is that of the blocks, all on one
GPU over the most on one of several.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8tune.exporting import select_rows
from fp8tune.records import NamedInts, Problem
from fp8tune.store.results import Store
from fp8tune.sweeping import picks
from fp8tune.tables.current import SHIPPED

PARTS = {"sweeps": ("one", "all"), "killed": ("killed",)}
HEADINGS = "run | GPUs | s | factor | blocks by GPU | device s by GPU | picks equal | loss | tables | lost | doubled"


@dataclass(frozen=True)
class Results:
    """Contents of a sweep's database."""

    blocks: Counter[str]
    device_s: dict[str, float]
    """Sum of the samples of each GPU."""
    trials: Counter[tuple[Any, ...]]
    chosen: dict[Problem, NamedInts | None]
    times_us: dict[Any, float]
    tables: list[str]

    @classmethod
    def read(cls, db: Path) -> Results:
        """Read a database."""
        blocks, device_s, trials = Counter[str](), dict[str, float](), Counter[tuple[Any, ...]]()
        with Store.open(str(db), writable=False) as store:
            for row in store.rows():
                gpu, process = row.device.uuid_hash, "" if row.stage == "screen" else row.process
                blocks[gpu] += 1
                device_s[gpu] = device_s.get(gpu, 0.0) + sum(row.outcome.samples_us) / 1e6
                trials[row.problem, row.config, row.stage, row.round, process] += 1
            chosen = {pick.problem: pick.config for pick in picks.read(store)}
            times_us = {(item.problem, item.config): item.time_us for item in picks.finalists(store)}
            tables = [select_rows(store, arch, tables=SHIPPED).table.render() for arch in store.arches()]
        return cls(blocks, device_s, trials, chosen, times_us, tables)

    def losses(self, peer: Results) -> list[float]:
        """Return what each differing or missing pick of another sweep loses by the times of this one."""
        times = self.times_us
        return [
            times.get((size, peer.chosen.get(size)), math.inf) / times[size, config] - 1
            for size, config in self.chosen.items()
            if peer.chosen.get(size) != config
        ]

    def lost(self, peer: Results) -> int:
        """Return the number of configs that another sweep has not tried."""
        return len({trial[:2] for trial in self.trials} - {trial[:2] for trial in peer.trials})


def sweep(options: argparse.Namespace, run: str, cache: str, kill_at: float = math.inf) -> tuple[float, bool]:
    """Sweep, and kill a child once a number of blocks is stored. Return seconds and success."""
    db, gpus = options.out / f"{run}.db", 1 if run == "one" else options.gpus
    named = {"kernel": options.kernel, "grid": options.grid, "shapes": options.shapes, "gpus": [gpus], "db": [db]}
    texts = [f"--{option}={text}" for option, values in named.items() for text in values]
    cores = sorted(os.sched_getaffinity(0))
    share = ",".join(map(str, cores[: max(1, len(cores) * gpus // options.gpus)]))
    environment = {**os.environ, "TRITON_CACHE_DIR": str(Path(cache, run))}
    environment.pop("TRITON_INTERPRET", None)
    begun = time.monotonic()
    with (options.out / f"{run}.log").open("wb") as log:
        command = ["taskset", "-c", share, sys.executable, "-m", "fp8tune", "sweep", *texts]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        while process.poll() is None:
            if stored(db) >= kill_at and (children := gpu_children(process.pid)):
                os.kill(children[0], signal.SIGKILL)
                kill_at = math.inf
            time.sleep(0.05)
    return time.monotonic() - begun, process.returncode == 0 and math.isinf(kill_at)


def stored(db: Path) -> int:
    """Return the number of blocks in a database that may not exist yet."""
    url = f"{db.resolve().as_uri()}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(url, uri=True)) as connection:
            return int(connection.execute("SELECT count(*) FROM trials").fetchone()[0])
    except sqlite3.OperationalError:
        return 0


def gpu_children(process: int) -> list[int]:
    """Return the processes of a sweep that have a GPU each: they come from its fork server."""

    def children(parent: int) -> list[int]:
        with contextlib.suppress(OSError):
            return [*map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())]
        return []

    return [child for server in children(process) for child in children(server)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweeps and print a row for each. Exit code 1: a sweep failed, or trials are missing or doubled."""
    parser = argparse.ArgumentParser(prog="benchmarks.several_gpus", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("several-gpus"), help="folder of databases and logs")
    parser.add_argument("--gpus", type=int, help="default: all")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    parser.add_argument("--kernel", nargs="+", default=["colwise"])
    grid = ["BLOCK_SIZE=64,128", "num_warps=4,8", "num_stages=1", "maxnreg=0"]
    parser.add_argument("--grid", nargs="+", default=grid)
    parser.add_argument("--shapes", nargs="+", default=["models"])
    parser.add_argument("--kill-at", type=float, default=0.5, help="share of one GPU's blocks")
    options = parser.parse_args(arguments)
    options.gpus = options.gpus or importlib.import_module("torch").cuda.device_count()
    if options.gpus < 2:
        parser.error("two GPUs are needed: --gpus 2 and FP8TUNE_TIMER=simulated:1 simulate them")
    options.out.mkdir(parents=True, exist_ok=True)
    runs = [run for part, names in PARTS.items() if part in options.parts for run in names]
    if done := [run for run in runs if (options.out / f"{run}.db").exists()]:
        parser.error(f"{options.out} has {done[0]}.db: name another folder with --out")
    if "one" not in runs and not (options.out / "one.db").exists():
        parser.error(f"{options.out} has no one.db to compare: add the part sweeps")
    print(f"| {HEADINGS} |\n|{'---|' * len(HEADINGS.split(' | '))}", flush=True)
    seconds, faults = dict[str, float](), 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        for run in runs:
            kill_at = max(1, options.kill_at * stored(options.out / "one.db")) if run == "killed" else math.inf
            seconds[run], is_right = sweep(options, run, cache, kill_at)
            if not is_right:
                print(f"{run}: failed, or no child was killed: see {options.out}/{run}.log", file=sys.stderr)
                return 1
            alone, own = (Results.read(options.out / f"{name}.db") for name in ("one", run))
            if os.environ.get("FP8TUNE_TIMER"):
                factor = max(alone.blocks.values()) / max(own.blocks.values())
            else:
                factor = seconds.get("one", math.nan) / seconds[run]
            losses, lost, doubled = alone.losses(own), alone.lost(own), own.trials.total() - len(own.trials)
            faults += lost + doubled
            cells = [run, f"{len(own.blocks)}", f"{seconds[run]:.1f}", "-" if math.isnan(factor) else f"{factor:.2f}x"]
            cells += [" + ".join(f"{count:,}" for count in own.blocks.values())]
            cells += [" + ".join(f"{time_s:.2f}" for time_s in own.device_s.values())]
            cells += [f"{len(alone.chosen) - len(losses)} of {len(alone.chosen)}", f"{max(losses, default=0.0):.1%}"]
            cells += ["equal" if own.tables == alone.tables else "different", str(lost), str(doubled)]
            print(f"| {' | '.join(cells)} |", flush=True)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
