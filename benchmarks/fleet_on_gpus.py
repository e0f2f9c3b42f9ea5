"""``python -m benchmarks.fleet_on_gpus``: the same units on one GPU and on several of one host: how long, which picks.

Each run begins with an empty database and an empty Triton cache of its own. Its seconds go from the start of its
workers to the end of the last, calibration included; queueing the work is told apart. The time budget is shared out:
each of several workers has a part of what one has for all the work. Several go first: that run is the shorter one.
With ``--run`` the two can be hours apart, in one folder: the second to end compares them.

    python -m benchmarks.fleet_on_gpus --gpus 0,1 --cores 16 --time-budget 600 --folder out --sweep '--kernel colwise'
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from fp8tune.records import Pick
from fp8tune.stats.decide import MeasuringPlan
from fp8tune.store.results import Store
from fp8tune.sweep import picks

FP8TUNE = (sys.executable, "-m", "fp8tune")

RUNS = ("several", "one")


@dataclass
class Run:
    """One run's workers, what they told, and when."""

    db: Path
    queued_s: float
    seconds: float = 0.0
    told: list[list[tuple[float, Mapping[str, Any]]]] = field(default_factory=list)
    """Of each worker: seconds since the workers were started, and an event."""


def run(folder: Path, name: str, gpus: Sequence[str], cores: int, budget_s: float, sweeps: Sequence[str]) -> Run:
    """Queue the work, and have a worker on each GPU do it, each on cores of its own."""
    db = folder / f"{name}.db"
    cache = tempfile.mkdtemp(prefix="fp8tune-triton-")
    environment = {**os.environ, "TRITON_CACHE_DIR": cache, "FP8TUNE_DB": str(db)}
    begun = time.monotonic()
    for sweep in sweeps:
        queue = [*FP8TUNE, "sweep", "--on", "queue", *shlex.split(sweep)]
        subprocess.run(queue, env={**environment, "CUDA_VISIBLE_DEVICES": gpus[0]}, check=True)
    done = Run(db, time.monotonic() - begun)
    begun, threads = time.monotonic(), []
    for place, gpu in enumerate(gpus):
        own = f"{place * cores}-{(place + 1) * cores - 1}"
        command = ["taskset", "-c", own, *FP8TUNE, "worker", "--format", "json"]
        command += ["--time-budget", f"{budget_s / len(gpus):.0f}"]
        child = subprocess.Popen(
            command, env={**environment, "CUDA_VISIBLE_DEVICES": gpu}, stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        done.told.append([])
        threads.append(threading.Thread(target=_listen, args=(child.stdout, begun, done.told[-1])))
        threads[-1].start()
    for thread in threads:
        thread.join()
    done.seconds = time.monotonic() - begun
    shutil.rmtree(cache)
    return done


def _listen(lines: IO[str], begun: float, told: list[tuple[float, Mapping[str, Any]]]) -> None:
    for line in lines:
        told.append((time.monotonic() - begun, json.loads(line)))


def told_lines(found: Run) -> list[str]:
    """When each worker took and ended its units, and what these were expected to take."""
    lines = []
    for worker, told in enumerate(found.told):
        for at_s, event in told:
            unit = f"{event.get('kernel') or ''} {len(event.get('shapes') or ())} problems"
            lines.append(f"  {at_s:7.1f} s  worker {worker}  {event['event']:10}  {unit}  {event.get('reason') or ''}")
    return lines


def compared(one: Path, several: Path) -> str:
    """How many picks of two databases are the same, or within the tie band of each other."""
    mine, theirs = (_picks(path) for path in (one, several))
    both = mine.keys() & theirs.keys()
    band = MeasuringPlan().tie_band
    same = sum(mine[key].config == theirs[key].config for key in both)
    ratios = [theirs[key].time_us / mine[key].time_us for key in both]
    near = sum(abs(ratio - 1) <= band for ratio in ratios)
    off = max((abs(ratio - 1) for ratio in ratios), default=0.0)
    return (
        f"{len(both)} problems in both ({len(mine)} and {len(theirs)} in all): {same} picks the same config, "
        f"{near} times within {band:.0%} of each other, at most {off:.1%} apart"
    )


def _picks(path: Path) -> dict[object, Pick]:
    with Store.open(str(path), writable=False) as store:
        return {(of.problem, of.device.name): of for of in picks.read(store).picks}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both runs' seconds, their ratio, and how the picks agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", required=True, help="of one host, as CUDA_VISIBLE_DEVICES has them: 0,1")
    parser.add_argument("--cores", type=int, required=True, help="of each worker")
    parser.add_argument("--time-budget", type=float, required=True, help="seconds of the run on one GPU")
    parser.add_argument("--folder", type=Path, required=True, help="an empty one")
    parser.add_argument("--sweep", action="append", required=True, help="options of fp8tune sweep; repeatable")
    parser.add_argument("--run", action="append", choices=RUNS, help="one of the two alone [default: both]")
    given = parser.parse_args(arguments)
    gpus = given.gpus.split(",")
    for name in given.run or RUNS:
        mine = gpus if name == "several" else gpus[:1]
        found = run(given.folder, name, mine, given.cores, given.time_budget, given.sweep)
        print(f"{len(mine)} GPUs: {found.seconds:.1f} s, after {found.queued_s:.1f} s to queue")
        print(*told_lines(found), sep="\n", flush=True)
        _told_of(given.folder, name).write_text(json.dumps(asdict(found), default=str))
    if all(_told_of(given.folder, name).exists() for name in RUNS):
        seconds = {name: json.loads(_told_of(given.folder, name).read_text())["seconds"] for name in RUNS}
        print(f"{seconds['one'] / seconds['several']:.2f} times as fast on {len(gpus)} GPUs")
        print(compared(given.folder / "one.db", given.folder / "several.db"))
    return 0


def _told_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


if __name__ == "__main__":
    raise SystemExit(main())
