"""The results database at a million rows: commands as whole processes, inserts with one commit a trial.

    python -m benchmarks.database
    python -m benchmarks.database --rows 100000 --runs 3 --versions 1
    python -m benchmarks.database --db million.db       # filled where it is not there yet, kept afterwards
    python -m benchmarks.database --server postgresql://me@host/empty    # beside a server with the same rows, in turns

``benchmarks/README.md`` says what the rows are.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fp8tune import scratch
from fp8tune.records import (
    Device,
    FinalsRun,
    KernelVersion,
    Kind,
    NamedInts,
    Outcome,
    Problem,
    Row,
    Status,
    Subject,
)
from fp8tune.store.database import EmptyDatabaseError
from fp8tune.store.results import Store
from fp8tune.sweeping.picks import keep_current

SIZES = (32, 64, 128, 256)
AXES = (("BLOCK_SIZE", SIZES), ("BLOCK_SIZE_ITER", SIZES), ("num_warps", (4, 8)), ("num_stages", (1, 2, 3)))
CONFIGS = [NamedInts(dict(zip(dict(AXES), values, strict=True))) for values in itertools.product(*dict(AXES).values())]
DEVICE = Device("sm_90", "NVIDIA H100 80GB HBM3", "0123456789abcdef", 132, "580.1", "cuda 13.0", "2.11.0", "3.6.0")
KERNELS = ("colwise", "rowwise-2d")
SAMPLES = 30
FINALISTS, PROCESSES, ROUNDS = 8, 6, 6
SINGLE_COMMITS = 5_000
DEFAULT = CONFIGS[5]
SWEEP = ("sweep", "--kernel", "colwise", "--shapes", "tiny", "--timer", "simulated:1")
LIMIT_MB = 500


def sweep_of(version: KernelVersion, problem: Problem, generator: random.Random) -> list[Row]:
    """A screen of all configs, two more rounds of those within 1.3x, and finals of the default, its duplicate and the
    fastest."""
    slowdowns = {config: 1 + 0.6 * generator.random() for config in CONFIGS}
    ranked = sorted(CONFIGS, key=slowdowns.__getitem__)
    near = [config for config in CONFIGS if slowdowns[config] < 1.3]
    first = 5 + 6e-6 * problem.shape["M"] * problem.shape["K"]
    made = Row(problem, None, DEVICE, Kind.MEASURED, Outcome(Status.OK), version, bytes_moved=3 * 16640 * 5120)
    made = replace(made, lookup_key=NamedInts(K=problem.shape["K"], G=problem.shape["G"]), commit="c0ffee")
    plan = [("screen", 0, CONFIGS), ("screen", 1, near), ("screen", 2, near)]
    finalists = [DEFAULT, *(config for config in ranked if config != DEFAULT)][:FINALISTS]
    plan += [("final", number, finalists) for number in range(PROCESSES * ROUNDS)]
    plan += [("duplicate", number, [DEFAULT]) for number in range(PROCESSES * ROUNDS)]
    rows = []
    for stage, number, configs in plan:
        final, round = divmod(number, ROUNDS) if stage != "screen" else (0, number)
        process = f"{version.source_hash} screen" if stage == "screen" else f"final {final:02}"
        for position, config in enumerate(configs):
            samples = [first * slowdowns[config] * generator.gauss(1, 0.0035) for _ in range(SAMPLES)]
            outcome = Outcome(Status.OK, statistics.mean(samples), samples_us=tuple(samples), tick_us=0.032)
            place = replace(made, stage=stage, round=round, position=position)
            rows.append(replace(place, config=config, outcome=outcome, process=process))
    return rows


def problems(count: int) -> Iterator[Problem]:
    """Distinct problems, half of each kernel."""
    for number in range(count):
        index, kernel = divmod(number, len(KERNELS))
        yield Problem(KERNELS[kernel], NamedInts(M=16640, K=512 * (index % 32 + 1), G=index // 32 + 1), "jagged")


def fill(store: Store, rows: int, versions: int) -> int:
    """Store at least so many rows, spread over kernel versions that all swept the same problems. Returns how many."""
    generator, stored = random.Random(0), 0
    a_sweep = 2 * len(CONFIGS) + (FINALISTS + 1) * PROCESSES * ROUNDS  # about half of the configs run twice more
    for number in range(versions):
        sweep = begin(store, f"request {number}")
        store.record_ceiling(sweep, DEVICE, 3000.0)
        for problem in problems(-(-rows // (versions * a_sweep))):
            version = KernelVersion(problem.kernel, f"{number:016x}", DEFAULT, AXES, ("K", "G"))
            stored += store.add_many(sweep, sweep_of(version, problem, generator))
            subject = Subject(version, DEVICE, Kind.MEASURED, problem)
            store.mark_complete(sweep, subject, len(CONFIGS))
            store.end_finals(sweep, subject, FinalsRun("", tie_band=0.01, keep_band=0.015))
        store.finish_sweep(sweep)
    return stored


def begin(store: Store, request: str) -> int:
    """A sweep to add rows to."""
    return store.begin_sweep(request, DEVICE, command="benchmark", commit="", timer="do_bench", seed=0)


def insert_alone(store: Store, request: str) -> str:
    """How fast trials are stored one commit each, as a sweep does: a screen's, each the first of its candidate."""
    version = KernelVersion("colwise", request, DEFAULT, AXES, ("K", "G"))
    made = (sweep_of(version, problem, random.Random(1))[: len(CONFIGS)] for problem in problems(1_000))
    rows = list(itertools.islice(itertools.chain.from_iterable(made), SINGLE_COMMITS))
    sweep = begin(store, request)
    begun, begun_cpu = time.perf_counter(), time.process_time()
    for row in rows:
        store.add(sweep, row, once=True)
    cpu_s, seconds = time.process_time() - begun_cpu, time.perf_counter() - begun
    return f"{len(rows) / cpu_s:,.0f} rows/s of CPU time, {len(rows) / seconds:,.0f} rows/s on the wall"


def run(*arguments: object) -> tuple[float, float, float]:
    """A command as a whole process: CPU seconds (user and system), seconds on the wall, peak memory in MB."""
    command = [sys.executable, "-m", "fp8tune", *map(str, arguments)]
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall_s, process.returncode = time.perf_counter() - begun, os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"fp8tune {arguments[0]} exited with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, wall_s, usage.ru_maxrss / 1024


def make(path: Path, options: argparse.Namespace) -> None:
    """Fill a database and print how fast that went."""
    with Store.open(str(path), create=True) as store:
        empty = insert_alone(store, "first")
        begun = time.perf_counter()
        stored = fill(store, options.rows, options.versions)
        seconds = time.perf_counter() - begun
        full = insert_alone(store, "last")
    print(f"{stored:,} rows, {options.versions} kernel versions, {path.stat().st_size / 1e6:.0f} MB")
    print(f"a commit each, empty  {empty}, wanted 2,000")
    print(f"a commit each, full   {full}, wanted 2,000")
    print(f"one commit            {stored / seconds:,.0f} rows/s on the wall (making the rows included)", flush=True)
    run(*SWEEP, "--db", path)


def measure(path: Path, runs: int) -> None:
    """Print the least CPU time of several runs, which other programs disturb least, the median on the wall, and the
    worst of their memory."""
    commands = {
        "show": (2, ("show",)),
        "show --kernel": (2, ("show", "--kernel", KERNELS[0])),
        "show --format json": (2, ("show", "--format", "json")),
        "export": (2, ("export", "--arch", DEVICE.arch, "--output", path.with_name("table.py"))),
        "sweep, finished": (1, SWEEP),
    }
    for name, (limit_s, arguments) in commands.items():
        cpu_s, wall_s, peak_mb = zip(*(run(*arguments, "--db", path) for _ in range(runs)), strict=True)
        times = f"CPU {min(cpu_s):5.2f} s, wall {statistics.median(wall_s):5.2f} s, limit {limit_s} s"
        print(f"{name:22}{times}; peak memory {max(peak_mb):.0f} MB, limit {LIMIT_MB} MB", flush=True)


def compare(path: Path, server: str, runs: int) -> None:
    """Print the least time on the wall of each command on the file and on a server with the same rows, in turns."""
    try:
        with Store.open(server, writable=False) as store:
            is_empty = not store.counts()
    except EmptyDatabaseError:
        is_empty = True
    if is_empty:
        _, wall_s, _ = run("import", path, "--db", server)
        print(f"import into the server {wall_s:.0f} s", flush=True)
    table = path.with_name("table.py")
    commands = {
        "show": ("show",),
        "show --kernel": ("show", "--kernel", KERNELS[0]),
        "show --format json": ("show", "--format", "json"),
        "export": ("export", "--arch", DEVICE.arch, "--output", table),
    }
    for picks in ("kept", "decided anew"):
        for db in (str(path), server):
            with Store.open(db) as store:
                if picks == "kept":
                    keep_current(store)
                else:
                    store.keep_picks([], "")
        for name, arguments in commands.items():
            times = [(run(*arguments, "--db", path)[1], run(*arguments, "--db", server)[1]) for _ in range(runs)]
            file_s, server_s = map(min, zip(*times, strict=True))
            said = f"file {file_s:5.2f} s, server {server_s:5.2f} s, {server_s / file_s:.2f} times as long, limit 2"
            print(f"{name:19} picks {picks:13}{said}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and measure in a temporary folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--versions", type=int, default=8, help="kernel versions the rows are spread over")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--db", type=Path, help="a database to make and keep, or to measure again; default: none")
    parser.add_argument("--server", help="a PostgreSQL database, empty or with the same rows; default: none")
    options = parser.parse_args(arguments)
    with scratch.folder("database") as folder:
        path = options.db or folder / "results.db"
        if not path.exists():
            make(path, options)
        if options.server:
            compare(path, options.server, options.runs)
        else:
            measure(path, options.runs)


if __name__ == "__main__":
    main()
