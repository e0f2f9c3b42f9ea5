"""Rows for the tests of store, ranking and export: a small kernel on a made-up device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fp8tune.adapter import NO_TABLES, CurrentTables, compiled_studies, studies_of
from fp8tune.records import (
    Device,
    Evidence,
    Facts,
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
from fp8tune.stats.study import Study
from fp8tune.store.results import Store
from fp8tune.tables.select import CurrentTable, select
from fp8tune_kernels import tables
from fp8tune_kernels.tables import Table

H100 = Device("sm_90", "NVIDIA H100 80GB HBM3", "0123456789abcdef", 132, "580.1", "cuda 13.0", "2.11.0", "3.6.0")
H200 = Device("sm_90", "NVIDIA H200", "fedcba9876543210", 132, "580.1", "cuda 13.0", "2.11.0", "3.6.0")
AXES = (("BLOCK_SIZE", (32, 64, 128)), ("num_warps", (4, 8)), ("num_stages", (1, 2)))
KERNEL = KernelVersion("colwise", "aaaa", NamedInts(BLOCK_SIZE=64, num_warps=4, num_stages=2), AXES, ("K", "G"))


def installed(*rows: tables.Row, nearest: tuple[str, ...] = ()) -> CurrentTables:
    """The current configs of a table with these rows."""
    return CurrentTables(lambda arch: Table(rows, nearest))


def config(block: int = 32, warps: int = 4, stages: int = 1) -> NamedInts:
    return NamedInts(BLOCK_SIZE=block, num_warps=warps, num_stages=stages)


def problem(K: int = 5120, G: int = 64, M: int = 16640, routing: str = "jagged") -> Problem:
    return Problem("colwise", NamedInts(M=M, K=K, G=G), routing)


def key_of(problem: Problem) -> NamedInts:
    return NamedInts(K=problem.shape["K"], G=problem.shape["G"])


def row(
    time_us: float | None = 100.0,
    *,
    of: Problem | None = None,
    config: NamedInts = config(),
    device: Device = H100,
    kind: Kind = Kind.MEASURED,
    status: Status = Status.OK,
    version: KernelVersion = KERNEL,
    process: str = "w1",
    round: int = 0,
    stage: str = "screen",
    facts: Facts = Facts(),
) -> Row:
    of = of or problem()
    outcome = Outcome(status, time_us, "" if status is Status.OK else str(status), facts=facts)
    return Row(
        of,
        config,
        device,
        kind,
        outcome,
        version,
        key_of(of),
        bytes_moved=3 * of.shape["M"] * of.shape["K"],
        commit="c0ffee",
        stage=stage,
        round=round,
        process=process,
    )


def evidence(
    *times_us: float,
    of: Problem | None = None,
    config: NamedInts | None = config(),
    device: Device = H100,
    kind: Kind = Kind.MEASURED,
    status: Status = Status.OK,
    version: KernelVersion | None = KERNEL,
    **others: object,
) -> Evidence:
    of = of or problem()
    return Evidence(of, config, device, kind, status, tuple(times_us), version, key_of(of), **others)


def subject(of: Problem | None = None, device: Device = H100, version: KernelVersion = KERNEL) -> Subject:
    return Subject(version, device, Kind.MEASURED, of or problem())


def begin(store: Store, device: Device = H100, request: str = "request", *, again: bool = False) -> int:
    return store.begin_sweep(
        request, device, command="fp8tune sweep", commit="c0ffee", timer="do_bench", seed=0, again=again
    )


def end_finals(store: Store, sweep: int, of: Problem | None = None, device: Device = H100) -> None:
    store.end_finals(sweep, subject(of, device), FinalsRun("", tie_band=0.01, keep_band=0.015))


def finished_sweep(
    store: Store, times_us: Mapping[Problem, Mapping[NamedInts, float]], device: Device = H100, request: str = "request"
) -> None:
    """Store a sweep that ran to its end."""
    sweep = begin(store, device, request)
    for of, times in times_us.items():
        for config, time_us in times.items():
            store.add(sweep, row(time_us, of=of, config=config, device=device))
        store.mark_complete(sweep, subject(of, device), len(times))
    store.finish_sweep(sweep)


def only_study(*rows: Evidence) -> Study:
    """The one study that some rows give."""
    (study,) = studies_of(rows)
    return study


def table_text(rows: Iterable[Evidence], arch: str = "sm_90", tables: CurrentTables = NO_TABLES) -> str:
    """The module of a table of some rows alone."""
    rows = list(rows)
    current = CurrentTable(tables.table(arch))
    return select(studies_of(rows, tables), compiled_studies(rows), arch, current).table.render()
