"""The results database at a million rows: ``show`` and ``export`` as whole processes, inserts with one commit a trial.

    python -m benchmarks.database
    python -m benchmarks.database --rows 100000 --runs 3 --versions 1

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
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fp8tune.records import Device, KernelVersion, Kind, NamedInts, Outcome, Problem, Row, Status
from fp8tune.store.results import Store

AXES = (
    ("BLOCK_SIZE", (32, 64, 128, 256)),
    ("BLOCK_SIZE_ITER", (32, 64, 128, 256)),
    ("num_warps", (4, 8)),
    ("num_stages", (1, 2, 3)),
)
NAMES = [name for name, _ in AXES]
CONFIGS = [NamedInts(list(zip(NAMES, values, strict=True))) for values in itertools.product(*(at for _, at in AXES))]
DEVICE = Device("sm_90", "NVIDIA H100 80GB HBM3", "0123456789abcdef", 132, "580.1", "cuda 13.0", "2.11.0", "3.6.0")
KERNELS = ("colwise", "rowwise-2d")
SAMPLES = 30
FINALISTS, PROCESSES, ROUNDS = 8, 6, 6
SINGLE_COMMITS = 5_000


@dataclass(frozen=True)
class Run:
    """One whole process."""

    seconds: float
    peak_mb: float


def sweep_of(version: KernelVersion, problem: Problem, generator: random.Random) -> list[Row]:
    """A screen of all configs, two more rounds of those within 1.3x, and finals: 6 processes of 6 rounds."""
    slowdowns = {config: 1 + 0.6 * generator.random() for config in CONFIGS}
    ranked = sorted(CONFIGS, key=slowdowns.__getitem__)
    near = [config for config in CONFIGS if slowdowns[config] < 1.3]
    first = 5 + 6e-6 * problem.shape["M"] * problem.shape["K"]
    made = Row(problem, None, DEVICE, Kind.MEASURED, Outcome(Status.OK), version, bytes_moved=3 * 16640 * 5120)
    made = replace(made, lookup_key=NamedInts(K=problem.shape["K"], G=problem.shape["G"]), commit="c0ffee")
    plan = [("screen", 0, CONFIGS), ("screen", 1, near), ("screen", 2, near)]
    plan += [("final", number, ranked[:FINALISTS]) for number in range(PROCESSES * ROUNDS)]
    rows = []
    for stage, number, configs in plan:
        process, round = divmod(number, ROUNDS) if stage == "final" else (PROCESSES, number)
        for position, config in enumerate(configs):
            samples = [first * slowdowns[config] * generator.gauss(1, 0.0035) for _ in range(SAMPLES)]
            outcome = Outcome(Status.OK, statistics.mean(samples), samples_us=tuple(samples), tick_us=0.032)
            place = replace(made, stage=stage, round=round, position=position)
            rows.append(replace(place, config=config, outcome=outcome, process=f"{version.source_hash} {process}"))
    return rows


def problems(count: int) -> Iterator[Problem]:
    """Distinct problems, half of each kernel."""
    for number in range(count):
        index, kernel = divmod(number, len(KERNELS))
        yield Problem(KERNELS[kernel], NamedInts(M=16640, K=512 * (index % 32 + 1), G=index // 32 + 1), "jagged")


def fill(store: Store, rows: int, versions: int) -> int:
    """Store at least so many rows, spread over kernel versions that all swept the same problems. Returns how many."""
    generator, stored = random.Random(0), 0
    a_sweep = len(CONFIGS) + len(CONFIGS) + FINALISTS * PROCESSES * ROUNDS  # about half of the configs run twice more
    for number in range(versions):
        sweep = begin(store, f"request {number}")
        store.record_ceiling(sweep, DEVICE, 3000.0)
        for problem in problems(-(-rows // (versions * a_sweep))):
            version = KernelVersion(problem.kernel, f"{number:016x}", CONFIGS[5], AXES, ("K", "G"))
            stored += store.add_many(sweep, sweep_of(version, problem, generator))
            store.mark_complete(sweep, version, DEVICE, problem, len(CONFIGS))
            store.end_finals(sweep, version, DEVICE, problem, tie_band=0.01, keep_band=0.015, floor_us=0.0)
        store.finish_sweep(sweep)
    return stored


def begin(store: Store, request: str) -> int:
    """A sweep to add rows to."""
    return store.begin_sweep(request, DEVICE, command="benchmark", commit="", timer="do_bench", seed=0)


def rows_per_second(store: Store, request: str) -> float:
    """Trials stored one commit each, as a sweep does: a screen's, each the first of its candidate."""
    version = KernelVersion("colwise", request, CONFIGS[5], AXES, ("K", "G"))
    made = (sweep_of(version, problem, random.Random(1))[: len(CONFIGS)] for problem in problems(1_000))
    rows = list(itertools.islice(itertools.chain.from_iterable(made), SINGLE_COMMITS))
    sweep = begin(store, request)
    begun = time.perf_counter()
    for row in rows:
        store.add(sweep, row, once=True)
    return len(rows) / (time.perf_counter() - begun)


def run(*arguments: object) -> Run:
    """A command of fp8tune from the start of Python to its end."""
    begun = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "fp8tune.cli", *map(str, arguments)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds, process.returncode = time.perf_counter() - begun, os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"fp8tune {arguments[0]} exited with {process.returncode}")
    return Run(seconds, usage.ru_maxrss / 1024)


def report(name: str, runs: Iterable[Run], limit_s: float) -> None:
    """The median of several runs, the worst of their memory."""
    runs = list(runs)
    times = sorted(one.seconds for one in runs)
    line = f"median {statistics.median(times):.2f} s ({times[0]:.2f} to {times[-1]:.2f}), limit {limit_s:g} s"
    print(f"{name:22}{line}; peak memory {max(one.peak_mb for one in runs):.0f} MB, limit 500 MB")


def measure(path: Path, options: argparse.Namespace) -> None:
    """Fill a database and print its figures."""
    with Store.open(str(path), create=True) as store:
        alone = rows_per_second(store, "first")
        begun = time.perf_counter()
        stored = fill(store, options.rows, options.versions)
        seconds = time.perf_counter() - begun
        late = rows_per_second(store, "last")
    print(f"{stored:,} rows, {options.versions} kernel versions, {path.stat().st_size / 1e6:.0f} MB")
    print(f"insert, a commit each  {alone:,.0f} rows/s while empty, {late:,.0f} rows/s when full, wanted 2,000")
    print(f"insert, one commit     {stored / seconds:,.0f} rows/s (making the rows included)")
    table = path.with_name("table.py")
    report("show", [run("show", "--db", path) for _ in range(options.runs)], 2)
    export = ("export", "--arch", DEVICE.arch, "--db", path, "--output", table)
    report("export", [run(*export) for _ in range(options.runs)], 2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and measure in a temporary folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--versions", type=int, default=8, help="kernel versions the rows are spread over")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder) / "results.db", options)


if __name__ == "__main__":
    main()
