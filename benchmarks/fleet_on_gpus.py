"""Workers on the GPUs of one host against one GPU: seconds, rows, picks, and the loss of a worker.

    python -m benchmarks.fleet_on_gpus                 # all GPUs that torch sees; about five minutes
    python -m benchmarks.fleet_on_gpus --sizes 12 --gpus 4

Each run has its own database and Triton cache. A worker has a GPU and an equal share of the host's cores, also where it
is alone. In the last run one worker is killed when a third of the units is done; on a host with one GPU another worker
takes its place.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fp8tune.fleet import units
from fp8tune.fleet.worker import QueueEvent, Worker
from fp8tune.records import NamedInts, Pick, Problem
from fp8tune.store.results import Store
from fp8tune.store.schema import UnitState
from fp8tune.sweeping import picks, planning, session
from fp8tune.sweeping.options import Options
from fp8tune.sweeping.planning import Plan

GRID = ("num_warps=4,8", "BLOCK_SIZE=64,128", "BLOCK_SIZE_ITER=512", "LEAD=0,192", "num_stages=1,2", "maxnreg=0")
LEASE_S = 10.0
TIE_BAND = 0.01


@dataclass
class Run:
    """One run on some GPUs."""

    name: str
    gpus: int
    seconds: float
    rows: int
    units: int
    attempts: int
    """Times that units were taken."""
    device: str


def timer_of(gpu: int) -> str | None:
    """Return the simulated clock of a GPU if the variable ``FLEET_SEED`` is set, to try this program without one."""
    seed = os.environ.get("FLEET_SEED")
    return f"simulated:{seed},gpu={gpu}" if seed else None


def plan_of(sizes: int) -> Plan:
    """Return a sweep of ``colwise`` with confirmation on so many problem sizes."""
    shapes = itertools.product((16640, 8192), (2048, 5120, 4096), (4, 16))
    rows = tuple(NamedInts(M=m, K=k, N=2048, E=e) for m, k, e in itertools.islice(shapes, sizes))
    short = planning.planned(Options(("colwise",), shapes=(), grid=GRID, timer=timer_of(0)))
    plan = planning.expanded(replace(short, rows=rows))
    return replace(plan, problems=tuple({problem.problem: problem for problem in plan.problems}.values())[:sizes])


def environment(gpu: int, cache: str) -> dict[str, str]:
    """Return the environment of a process on one GPU."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu), "TRITON_CACHE_DIR": cache}


def share_cores(gpu: int, gpus: int) -> None:
    """Use this GPU's share of the cores."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[len(cores) * gpu // gpus : len(cores) * (gpu + 1) // gpus])


def child(action: str, db: str, sizes: int, gpu: int, gpus: int, cache: str) -> subprocess.Popen[bytes]:
    """Start this program on one GPU."""
    command = [sys.executable, "-m", "benchmarks.fleet_on_gpus", "--do", action, "--db", db, "--sizes", str(sizes)]
    command += ["--gpu", str(gpu), "--gpus", str(gpus)]
    return subprocess.Popen(command, env=environment(gpu, cache), start_new_session=True)


def run(name: str, workers: int, gpus: int, sizes: int, folder: Path) -> Run:
    """Queue the units and let workers do them, or sweep in one process."""
    kill, plain = name == "one killed", name == "plain sweep"
    db, cache = str(folder / f"{name.replace(' ', '_')}.db"), tempfile.mkdtemp(prefix="fp8tune-triton-")
    if not plain:
        assert child("queue", db, sizes, 0, gpus, cache).wait() == 0
    begun = time.monotonic()
    children = [child("sweep" if plain else "work", db, sizes, gpu, gpus, cache) for gpu in range(workers)]
    while kill and any(process.poll() is None for process in children):
        time.sleep(0.2)
        with Store.open(db, writable=False) as store:
            counts = store.count_units()
        if 3 * counts[UnitState.DONE] >= counts.total() and counts[UnitState.RUNNING] == workers:
            os.killpg(children[-1].pid, signal.SIGKILL)
            children.pop().wait()
            if not children:
                children.append(child("work", db, sizes, 0, gpus, cache))
            break
    codes = [process.wait() for process in children]
    seconds = time.monotonic() - begun
    shutil.rmtree(cache, ignore_errors=True)
    with Store.open(db, writable=False) as store:
        queue, rows = store.queue(), list(store.rows())
    assert not any(codes), codes
    attempts, device = sum(status.attempts for status in queue.units), rows[0].device.name
    return Run(name, workers, seconds, len(rows), len(queue.units), attempts, device)


def act(action: str, db: str, sizes: int, gpu: int, gpus: int) -> None:
    """Queue the units, work on them, or sweep without units."""
    share_cores(gpu, gpus)
    if action == "work":
        for event in Worker(db, timer_of(gpu), lease_s=LEASE_S).run():
            if isinstance(event, QueueEvent):
                unit = f"{len(event.unit.problems)} sizes, {event.unit.expected_s:.0f} s expected" if event.unit else ""
                print(f"    GPU {gpu}: {event.event} {unit} {event.seconds or ''} {event.reason}", flush=True)
        return
    plan = plan_of(sizes)
    with Store.open(db, create=True) as store:
        if action == "queue":
            units.add(store, plan)
        else:
            for _ in session.run(store, plan):
                pass


def picks_of(folder: Path, name: str) -> Mapping[Problem, Pick]:
    """Return the picks of a run by problem size."""
    with Store.open(str(folder / f"{name.replace(' ', '_')}.db"), writable=False) as store:
        return {pick.problem: pick for pick in picks.read(store)}


def compared(folder: Path, one: str, other: str) -> str:
    """Compare the picks of two runs."""
    first, second = picks_of(folder, one), picks_of(folder, other)
    both = first.keys() & second.keys()
    same = sum(first[problem].config == second[problem].config for problem in both)
    ratios = [abs(second[problem].time_us / first[problem].time_us - 1) for problem in both]
    near = sum(ratio <= TIE_BAND for ratio in ratios)
    worst = max(ratios, default=0.0)
    sizes = f"{len(first)} and {len(second)} sizes"
    return f"{one} / {other}: {sizes}, {same} same configs, {near} times within 1 %, at most {worst:.1%} apart"


def main() -> None:
    """Print a table of runs and comparisons of their picks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, default=6, help="problem sizes, at most 12")
    parser.add_argument("--gpus", type=int, default=0, help="default: all")
    parser.add_argument("--seconds", type=float, default=290.0, help="begin no other run after this many seconds")
    parser.add_argument("--do", choices=["queue", "work", "sweep"], help=argparse.SUPPRESS)
    parser.add_argument("--db", help=argparse.SUPPRESS)
    parser.add_argument("--gpu", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.do:
        act(options.do, options.db, options.sizes, options.gpu, options.gpus)
        return
    gpus, begun = options.gpus or importlib.import_module("torch").cuda.device_count(), time.monotonic()
    folder = Path(os.environ.get("OUT") or tempfile.mkdtemp())
    runs: list[Run] = []
    several = f"{gpus} workers"
    for name, workers in ((several, gpus), ("one killed", gpus), ("one worker", 1), ("plain sweep", 1)):
        if name == "1 workers":
            continue
        if time.monotonic() - begun + max((item.seconds for item in runs), default=0.0) > options.seconds:
            print(f"{name}: left out, no time", flush=True)
            continue
        runs.append(run(name, workers, gpus, options.sizes, folder))
        print(f"{name}: {runs[-1].seconds:.1f} s", flush=True)
    print("\nrun          GPUs  seconds  speedup   rows  units  attempts  device")
    for item in runs:
        one = next((other.seconds for other in runs if other.name == "one worker"), item.seconds)
        speedup = one / item.seconds
        numbers = f"{item.gpus:4}  {item.seconds:7.1f}  {speedup:6.2f}x  {item.rows:5}  {item.units:5}"
        print(f"{item.name:11}  {numbers}  {item.attempts:8}  {item.device}")
    for item in runs:
        if item.name != "one worker" and any(other.name == "one worker" for other in runs):
            print(compared(folder, "one worker", item.name))
    (folder / "fleet_on_gpus.json").write_text(json.dumps([asdict(item) for item in runs], indent=1))


if __name__ == "__main__":
    main()
