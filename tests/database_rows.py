"""Rows for the tests of store, ranking and export: a small kernel on a made-up device."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fp8tune.importing import archives
from fp8tune.importing.files import ImportReport, load
from fp8tune.importing.published import LookupKey
from fp8tune.records import (
    Device,
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
from fp8tune.stats.study import Result, Study
from fp8tune.store.read import identity, result_order
from fp8tune.store.results import Store
from fp8tune.studies import NOTHING_RECORDED, decided
from fp8tune.tables.current import NO_TABLES, CurrentTables, Recorded
from fp8tune.tables.select import select
from fp8tune_kernels import tables
from fp8tune_kernels.tables import Table

H100 = Device("sm_90", "NVIDIA H100 80GB HBM3", "0123456789abcdef", 132, "580.1", "cuda 13.0", "2.11.0", "3.6.0")
H200 = Device("sm_90", "NVIDIA H200", "fedcba9876543210", 132, "580.1", "cuda 13.0", "2.11.0", "3.6.0")
STUDY_FIELDS = {field.name for field in fields(Study)}
AXES = (("BLOCK_SIZE", (32, 64, 128)), ("num_warps", (4, 8)), ("num_stages", (1, 2)))
KERNEL = KernelVersion("colwise", "aaaa", NamedInts(BLOCK_SIZE=64, num_warps=4, num_stages=2), AXES, ("K", "G"))


def import_file(store: Store, path: Path, lookup_key: LookupKey = lambda problem: None) -> ImportReport:
    """Load a file and store it."""
    with archives.unpacked(path) as file:
        return load(file, lookup_key).store(store)


def installed(*rows: tables.Row, nearest: tuple[str, ...] = ()) -> CurrentTables:
    """The current configs of a table with these rows."""
    return CurrentTables(lambda arch, triton: Table(rows, nearest))


def config(block: int = 32, warps: int = 4, stages: int = 1) -> NamedInts:
    return NamedInts(BLOCK_SIZE=block, num_warps=warps, num_stages=stages)


def problem(K: int = 5120, G: int = 64, M: int = 16640, routing: str = "jagged") -> Problem:
    return Problem("colwise", NamedInts(M=M, K=K, G=G), routing)


def key_of(problem: Problem) -> NamedInts:
    return NamedInts(K=problem.shape["K"], G=problem.shape["G"])


def row(
    time_us: float | None = 100.0,
    *,
    size: Problem | None = None,
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
    size = size or problem()
    outcome = Outcome(status, time_us, "" if status is Status.OK else str(status), facts=facts)
    return Row(
        size,
        config,
        device,
        kind,
        outcome,
        version,
        key_of(size),
        bytes_moved=3 * size.shape["M"] * size.shape["K"],
        commit="c0ffee",
        stage=stage,
        round=round,
        process=process,
    )


def evidence(
    *times_us: float,
    size: Problem | None = None,
    config: NamedInts | None = config(),
    device: Device = H100,
    kind: Kind = Kind.MEASURED,
    status: Status = Status.OK,
    version: KernelVersion | None = KERNEL,
    **others: Any,
) -> Study:
    """A study with one result, of which ``others`` are fields of either."""
    size = size or problem()
    return study_of(size, config, device, kind, status, times_us, version, key_of(size), **others)


def study_of(
    problem: Problem,
    config: NamedInts | None,
    device: Device,
    kind: Kind,
    status: Status = Status.OK,
    times_us: tuple[float, ...] = (),
    version: KernelVersion | None = None,
    lookup_key: NamedInts | None = None,
    **others: Any,
) -> Study:
    """A study with one result, of which ``others`` are fields of either."""
    of_study = {name: others.pop(name) for name in list(others) if name in STUDY_FIELDS}
    values = {"coarse_us": statistics.median(times_us) if times_us else None, "figures": max(1, len(times_us))}
    result = Result(config, status, **{**values, **others})
    is_timed = status is Status.OK and (times_us or result.finals)
    of_study |= {"results": (result,) if is_timed or kind is Kind.STATIC else (), "lookup_key": lookup_key}
    of_study |= {"failures": {} if status is Status.OK or config is None else {config: status}}
    return Study(problem, device, kind, version, **{"has_finals": bool(result.finals), **of_study})


def merged(rows: Iterable[Study]) -> list[Study]:
    """Studies as the store reads them: of the same problem, device, kind and code, the results together."""
    groups: dict[object, list[Study]] = {}
    for study in rows:
        groups.setdefault(identity(study), []).append(study)
    studies = []
    for group in groups.values():
        timed = sorted((study for study in group if study.results), key=lambda study: result_order(study.results[0]))
        failures = {config: status for study in group for config, status in study.failures.items()}
        results = tuple(sorted((result for study in group for result in study.results), key=result_order))
        has_finals, newest = any(study.has_finals for study in group), max(study.newest for study in group)
        values = {"results": results, "failures": failures, "has_finals": has_finals, "newest": newest}
        studies.append(replace((timed or group)[0], **values))
    return studies


def studies_of(
    rows: Iterable[Study], tables: CurrentTables = NO_TABLES, recorded: Mapping[Problem, Recorded] = NOTHING_RECORDED
) -> list[Study]:
    """Decided studies of rows of :func:`evidence`."""
    return decided(merged(rows), tables, recorded)


def subject(size: Problem | None = None, device: Device = H100, version: KernelVersion = KERNEL) -> Subject:
    return Subject(version, device, Kind.MEASURED, size or problem())


def begin(store: Store, device: Device = H100, request: str = "request", *, again: bool = False) -> int:
    return store.begin_sweep(
        request, device, command="fp8tune sweep", commit="c0ffee", timer="do_bench", seed=0, again=again
    )


def end_finals(store: Store, sweep: int, size: Problem | None = None, device: Device = H100) -> None:
    store.end_finals(sweep, subject(size, device), FinalsRun("", tie_band=0.01, keep_band=0.015))


def finished_sweep(
    store: Store, times_us: Mapping[Problem, Mapping[NamedInts, float]], device: Device = H100, request: str = "request"
) -> None:
    """Store a sweep that ran to its end."""
    sweep = begin(store, device, request)
    for size, times in times_us.items():
        store.add_many(sweep, [row(time_us, size=size, config=name, device=device) for name, time_us in times.items()])
        store.mark_complete(sweep, subject(size, device), len(times))
    store.finish_sweep(sweep)


def only_study(*rows: Study) -> Study:
    """The one study that some rows give."""
    (study,) = studies_of(rows)
    return study


def table_text(rows: Iterable[Study], arch: str = "sm_90", tables: CurrentTables = NO_TABLES) -> str:
    """The module of a table with some rows alone."""
    rows = list(rows)
    return select(studies_of(rows, tables), compiled_studies(rows), arch, tables).table.render()


def compiled_studies(rows: Iterable[Study]) -> list[Study]:
    return [study for study in merged(rows) if study.kind is Kind.STATIC]


def stored_results(store: Store, **filters: Any) -> list[Result]:
    """The results of all studies, one after the other."""
    return [result for study in store.studies(**filters) for result in study.results]
