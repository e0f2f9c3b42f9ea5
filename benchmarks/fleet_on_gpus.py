"""Workers on two GPUs of one host against one: seconds, rows, picks, and the loss of a worker.

    python -m benchmarks.fleet_on_gpus                 # colwise on all of llama4; about nine minutes on two GPUs

Each run has its own database, Triton cache and equal share of the host's cores. The plain sweep and the worker that is
alone run at the same time, each on its GPU. In the last run one of two workers is killed when half of the units are
taken. On a host with one GPU there is the plain sweep alone. ``FLEET_SEED=1`` tries the program without a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fp8tune.fleet import units
from fp8tune.fleet.worker import QueueEvent, Worker
from fp8tune.options import SweepOptions
from fp8tune.records import Pick, Problem
from fp8tune.store.results import Store
from fp8tune.store.schema import UnitState
from fp8tune.sweeping import picks, planning, session
from fp8tune.sweeping.planning import Plan

LEASE_S = 10.0
TIE_BAND = 0.01
PLAIN, ONE, TWO, KILLED = "plain sweep", "one worker", "two workers", "one killed"


@dataclass
class Run:
    """One run."""

    name: str
    seconds: float
    rows: int
    attempts: int
    """Times that units were taken."""
    device: str


def timer_of(gpu: int) -> str | None:
    """Return the simulated clock of a GPU if the variable ``FLEET_SEED`` is set."""
    seed = os.environ.get("FLEET_SEED")
    return f"simulated:{seed},gpu={gpu}" if seed else None


def plan_of(sizes: int, gpu: int) -> Plan:
    """Return a sweep of ``colwise`` with confirmation on so many problem sizes of llama4."""
    plan = planning.expanded(planning.planned(SweepOptions(kernel=("colwise",), timer=timer_of(gpu))))
    return replace(plan, problems=plan.problems[:sizes])


def act(action: str, db: str, sizes: int, gpu: int) -> None:
    """Queue the units, work on them, or sweep without units; on half of the cores."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[len(cores) * gpu // 2 : len(cores) * (gpu + 1) // 2])
    if action == "work":
        for event in Worker(db, timer_of(gpu), lease_s=LEASE_S).run():
            if isinstance(event, QueueEvent) and event.event != "waiting":
                shape = event.unit.shapes[0] if event.unit else ""
                print(f"    GPU {gpu} {time.strftime('%X')} {event.event} {shape} {event.reason}", flush=True)
        return
    with Store.open(db, create=True) as store:
        if action == "queue":
            units.add(store, plan_of(sizes, gpu))
        else:
            for _ in session.run(store, plan_of(sizes, gpu)):
                pass


def child(action: str, db: Path, sizes: int, gpu: int, cache: str) -> subprocess.Popen[bytes]:
    """Start this program on one GPU."""
    command = [sys.executable, "-m", "benchmarks.fleet_on_gpus", "--do", action, "--db", str(db)]
    command += ["--sizes", str(sizes), "--gpu", str(gpu)]
    variables = {"CUDA_VISIBLE_DEVICES": str(gpu), "TRITON_CACHE_DIR": cache}
    return subprocess.Popen(command, env={**os.environ, **variables}, start_new_session=True)


def kill_one(db: Path, workers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill a worker once half of the units are taken."""
    while all(worker.poll() is None for worker in workers):
        time.sleep(0.2)
        with Store.open(str(db), writable=False) as store:
            counts = store.count_units()
        if 2 * counts[UnitState.WAITING] <= counts.total():
            os.killpg(workers[-1].pid, signal.SIGKILL)
            return


def run(name: str, gpus: Sequence[int], sizes: int, folder: Path) -> subprocess.Popen[bytes]:
    """Do one run in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.fleet_on_gpus", "--run", name, "--sizes", str(sizes)]
    return subprocess.Popen([*command, "--gpus", *map(str, gpus), "--folder", str(folder)])


def run_here(name: str, gpus: Sequence[int], sizes: int, folder: Path) -> None:
    """Queue the units and let workers do them, or sweep in one process; write what there is to say."""
    db, cache = folder / f"{name.replace(' ', '_')}.db", tempfile.mkdtemp(prefix="fp8tune-triton-")
    if name != PLAIN:
        assert child("queue", db, sizes, gpus[0], cache).wait() == 0
    begun = time.monotonic()
    children = [child("sweep" if name == PLAIN else "work", db, sizes, gpu, cache) for gpu in gpus]
    if name == KILLED:
        kill_one(db, children)
    codes = [process.wait() for process in children]
    seconds = time.monotonic() - begun
    shutil.rmtree(cache, ignore_errors=True)
    assert not any(code for code in codes if code != -signal.SIGKILL), codes
    with Store.open(str(db), writable=False) as store:
        attempts, rows = sum(status.attempts for status in store.queue().units), list(store.rows())
    result = Run(name, seconds, len(rows), attempts, rows[0].device.name)
    db.with_suffix(".json").write_text(json.dumps(asdict(result)))
    print(f"{name}: {seconds:.1f} s", flush=True)


def picks_of(folder: Path, name: str) -> Mapping[Problem, Pick]:
    """Return the picks of a run by problem size."""
    with Store.open(str(folder / f"{name.replace(' ', '_')}.db"), writable=False) as store:
        return {pick.problem: pick for pick in picks.read(store)}


def compared(folder: Path, base: str, name: str) -> str:
    """Compare the picks of a run with those of the first run."""
    first, second = picks_of(folder, base), picks_of(folder, name)
    both = first.keys() & second.keys()
    same = sum(first[problem].config == second[problem].config for problem in both)
    ratios = [abs(second[problem].time_us / first[problem].time_us - 1) for problem in both]
    near, worst = sum(ratio <= TIE_BAND for ratio in ratios), max(ratios, default=0.0)
    return f"{len(second)} of {len(first)} picks, {same} same configs, {near} times within 1 %, {worst:.1%} at most"


def main() -> None:
    """Print a table of runs with their picks beside those of the plain sweep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, default=12, help="problem sizes, at most 12")
    parser.add_argument("--seconds", type=float, default=540.0, help="begin no run that may end later than this")
    parser.add_argument("--two-only", action="store_true", help="leave out the plain sweep and the single worker")
    parser.add_argument("--do", choices=["queue", "work", "sweep"], help=argparse.SUPPRESS)
    parser.add_argument("--run", choices=[PLAIN, ONE, TWO, KILLED], help=argparse.SUPPRESS)
    parser.add_argument("--gpus", type=int, nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--db", help=argparse.SUPPRESS)
    parser.add_argument("--gpu", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.do:
        act(options.do, options.db, options.sizes, options.gpu)
        return
    if options.run:
        run_here(options.run, options.gpus, options.sizes, options.folder)
        return
    gpus = 2 if "FLEET_SEED" in os.environ else importlib.import_module("torch").cuda.device_count()
    folder, begun = Path(os.environ.get("OUT") or tempfile.mkdtemp()), time.monotonic()
    alone = [(PLAIN, 0), (ONE, 1)][:gpus]
    codes, longest_s = list[int](), 0.0
    if not options.two_only:
        pairs = [run(name, [gpu], options.sizes, folder) for name, gpu in alone]
        codes = [process.wait() for process in pairs]
    for name in (TWO, KILLED) if gpus > 1 else ():
        if time.monotonic() - begun + longest_s > options.seconds:
            print(f"{name}: left out, no time")
        else:
            codes.append(run(name, [0, 1], options.sizes, folder).wait())
            longest_s = 1.4 * json.loads((folder / "two_workers.json").read_text())["seconds"]
    results = {name: folder / f"{name.replace(' ', '_')}.json" for name in (PLAIN, ONE, TWO, KILLED)}
    runs = [Run(**json.loads(path.read_text())) for path in results.values() if path.is_file()]
    seconds = {item.name: item.seconds for item in runs}
    print("\nrun          seconds  of one worker  of plain sweep   rows  attempts  device")
    for item in runs:
        speedups = [f"{seconds.get(name, item.seconds) / item.seconds:.2f}x" for name in (ONE, PLAIN)]
        print(f"{item.name:11}  {item.seconds:7.1f}  {speedups[0]:>13}  {speedups[1]:>14}", end="  ")
        print(f"{item.rows:5}  {item.attempts:8}  {item.device}")
    for item in runs[1:]:
        print(f"{runs[0].name} / {item.name}: {compared(folder, runs[0].name, item.name)}")
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
