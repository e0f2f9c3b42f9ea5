"""The queries behind :class:`fp8tune.store.Store` that turn stored trials back into records.

Trials are aggregated per candidate, process and status inside the database, from one covering index: no blob is read
and a million trials become one record a candidate. SQL has no median that every database knows, so the few times of one
process are joined to one text there and their median is taken here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from sqlalchemy import Connection, Select, String, cast, func, select
from sqlalchemy.orm import DeclarativeBase

from fp8tune.columns import unpack_samples
from fp8tune.errors import DatabaseError
from fp8tune.records import (
    Device,
    Evidence,
    Facts,
    KernelVersion,
    Kind,
    NamedInts,
    Outcome,
    Problem,
    Row,
    Status,
    Telemetry,
)
from fp8tune.schema import (
    Calibrations,
    Candidates,
    Completions,
    Configs,
    Devices,
    KernelVersions,
    LookupKeys,
    Problems,
    Trials,
    Workers,
)

_YIELD = 1000


class _ById(dict[int, Any]):
    """Records by id; an id that is not there is a damaged database."""

    def __missing__(self, id: int) -> Any:
        raise DatabaseError(f"the database is damaged, a row refers to a missing one ({id}): run fp8tune doctor")


@dataclass(frozen=True)
class Shared:
    """What candidates refer to, by id. Small beside the trials, so it is read whole."""

    problems: Mapping[int, Problem]
    configs: Mapping[int, NamedInts | None]
    lookup_keys: Mapping[int, NamedInts | None]
    versions: Mapping[int, KernelVersion | None]
    devices: Mapping[int, Device]

    @classmethod
    def load(cls, connection: Connection) -> Shared:
        """Read all shared records. Raises DatabaseError where one holds a text that fp8tune never writes."""
        return cls(
            problems=_records(connection, Problems, Problem),
            configs=_items(connection, Configs),
            lookup_keys=_ById(
                (row.id, row.items) for row in connection.execute(select(LookupKeys.id, LookupKeys.items))
            ),
            versions=_ById(
                (id, version if version.source_hash else None)
                for id, version in _records(connection, KernelVersions, KernelVersion).items()
            ),
            devices=_records(connection, Devices, Device),
        )


def _items(connection: Connection, table: type[Configs] | type[LookupKeys]) -> _ById:
    return _ById((row.id, row.items) for row in connection.execute(select(table.id, table.items)))


def _records(connection: Connection, table: type[DeclarativeBase], record: type[Any]) -> _ById:
    names = list(record.__dataclass_fields__)
    query = select(*(getattr(table, name) for name in ("id", *names)))
    return _ById((row[0], record(**dict(zip(names, row[1:], strict=True)))) for row in connection.execute(query))


def chosen(kernel: str | None, arch: str | None, kinds: Collection[Kind] | None) -> Select[Any]:
    """The ids of the candidates of a kernel, an arch and kinds; None means any."""
    query = select(Candidates.id)
    if kernel is not None:
        query = query.where(Candidates.problem_id.in_(select(Problems.id).where(Problems.kernel == kernel)))
    if arch is not None:
        query = query.where(Candidates.device_id.in_(select(Devices.id).where(Devices.arch == arch)))
    if kinds is not None:
        query = query.where(Candidates.kind.in_([str(kind) for kind in kinds]))
    return query


@dataclass
class _Summary:
    """What the trials of one candidate come to."""

    times: dict[str, list[float]]
    """stage -> one time a process."""
    newest: dict[Status, float]
    sweep: int = 0

    def status(self) -> Status:
        """Wrong once is wrong for ever; otherwise the last trial says, so that a retry can clear a crash."""
        if Status.WRONG in self.newest:
            return Status.WRONG
        return max(self.newest, key=lambda status: (self.newest[status], status is not Status.OK, status))

    def times_us(self, stage: str) -> tuple[float, ...]:
        """Sorted, so that the order of insertion leaves no trace; none where the candidate failed."""
        return tuple(sorted(self.times.get(stage, ()))) if self.status() is Status.OK else ()


def _summaries(connection: Connection, candidates: Select[Any] | None) -> dict[int, _Summary]:
    group = (Trials.candidate_id, Trials.stage, Trials.worker_id, Trials.status)
    times = func.aggregate_strings(cast(Trials.time_us, String), " ")
    query = select(*group, times, func.max(Trials.created_at), func.max(Trials.sweep_id)).group_by(*group)
    if candidates is not None:
        query = query.where(Trials.candidate_id.in_(candidates))
    found: dict[int, _Summary] = {}
    for candidate, stage, _, status_text, joined, newest, sweep in connection.execute(query):
        summary = found.setdefault(candidate, _Summary({}, {}))
        status = Status(status_text)
        if joined is not None and status is Status.OK:
            summary.times.setdefault(stage, []).append(_median(joined))
        summary.newest[status] = max(newest, summary.newest.get(status, newest))
        summary.sweep = max(sweep, summary.sweep)
    return found


def _median(joined: str) -> float:
    try:
        values = [float(text) for text in joined.split(" ")]
    except ValueError:
        values = []
    if not values or not 0 < min(values) <= max(values) < math.inf:
        raise DatabaseError(f"refused {joined[:80]!r}: a time is a positive number of microseconds")
    return values[0] if len(values) == 1 else median(values)


def evidence(
    connection: Connection, kernel: str | None, arch: str | None, kinds: Collection[Kind] | None, ceiling: str
) -> list[Evidence]:
    """One record a candidate that has trials; ``ceiling`` names the calibration to attach."""
    shared = Shared.load(connection)
    completed = {tuple(row) for row in connection.execute(_COMPLETED)}
    ceilings = _ceilings(connection, ceiling)
    wanted = chosen(kernel, arch, kinds)
    everything = kernel is None and arch is None and kinds is None
    summaries = _summaries(connection, None if everything else wanted)
    query = select(*Candidates.__table__.c).where(Candidates.id.in_(wanted)).order_by(Candidates.id)
    return [
        _evidence(row, shared, summaries[row.id], completed, ceilings)
        for row in connection.execute(query)
        if row.id in summaries
    ]


_COMPLETED = select(Completions.version_id, Completions.device_id, Completions.problem_id).distinct()


def _ceilings(connection: Connection, name: str) -> dict[tuple[int | None, int], float]:
    """(sweep, device) -> the value measured there; (None, device) -> the device's newest."""
    query = select(Calibrations).where(Calibrations.name == name).order_by(Calibrations.created_at, Calibrations.id)
    found: dict[tuple[int | None, int], float] = {}
    for row in connection.execute(query.with_only_columns(*Calibrations.__table__.c)):
        found[row.sweep_id, row.device_id] = found[None, row.device_id] = row.value
    return found


def _evidence(
    row: Any,
    shared: Shared,
    summary: _Summary,
    completed: set[tuple[Any, ...]],
    ceilings: Mapping[tuple[int | None, int], float],
) -> Evidence:
    kind, status = Kind(row.kind), summary.status()
    stage = "final" if "final" in summary.times else "screen"
    return Evidence(
        problem=shared.problems[row.problem_id],
        config=shared.configs[row.config_id],
        device=shared.devices[row.device_id],
        kind=kind,
        status=status,
        times_us=summary.times_us(stage),
        version=shared.versions[row.version_id],
        lookup_key=shared.lookup_keys[row.lookup_key_id],
        bytes_moved=row.bytes_moved,
        source=row.source,
        note=row.note,
        facts=_facts(row),
        complete=kind is Kind.PUBLISHED or (row.version_id, row.device_id, row.problem_id) in completed,
        ceiling_gb_per_s=ceilings.get((summary.sweep, row.device_id), ceilings.get((None, row.device_id))),
        stage=stage,
        newest=max(summary.newest.values()),
    )


def _facts(row: Any) -> Facts:
    return Facts(row.registers, row.spill_bytes, row.shared_bytes, row.compile_s)


def tried(
    connection: Connection,
    version: KernelVersion,
    device: Device,
    kind: Kind,
    problem: Problem,
    sweep: int | None,
    round: int | None,
) -> dict[NamedInts, Outcome]:
    """Config -> what became of it; the median time of its trials, and the reason of the last that failed."""
    query = (
        select(Candidates.id, Configs.items, Trials.status, Trials.reason, Trials.time_us, Trials.created_at)
        .add_columns(Candidates.registers, Candidates.spill_bytes, Candidates.shared_bytes, Candidates.compile_s)
        .join(Candidates, Candidates.id == Trials.candidate_id)
        .join(Configs, Configs.id == Candidates.config_id)
        .join(KernelVersions, KernelVersions.id == Candidates.version_id)
        .where(KernelVersions.kernel == version.kernel, KernelVersions.source_hash == version.source_hash)
        .where(Candidates.device_id.in_(_device(device)), Candidates.problem_id.in_(_problem(problem)))
        .where(Candidates.kind == str(kind))
        .order_by(Trials.created_at, Trials.id)
    )
    if sweep is not None:
        query = query.where(Trials.sweep_id == sweep)
    if round is not None:
        query = query.where(Trials.round == round)
    by_config: dict[NamedInts, list[Any]] = {}
    for row in connection.execute(query):
        by_config.setdefault(row.items or NamedInts(), []).append(row)
    return {config: _outcome(rows) for config, rows in by_config.items()}


def _device(device: Device) -> Select[Any]:
    return select(Devices.id).where(
        *(getattr(Devices, name) == getattr(device, name) for name in Device.__dataclass_fields__)
    )


def _problem(problem: Problem) -> Select[Any]:
    names = [name for name in Problem.__dataclass_fields__ if name != "shape"]
    return select(Problems.id).where(
        Problems.canonical == problem.shape.canonical,
        *(getattr(Problems, name) == getattr(problem, name) for name in names),
    )


def _outcome(rows: Iterable[Any]) -> Outcome:
    summary, reasons, times = _Summary({}, {}), {}, []
    for row in rows:
        status = Status(row.status)
        summary.newest[status] = row.created_at
        reasons[status] = row.reason
        if status is Status.OK and row.time_us is not None:
            times.append(row.time_us)
    status = summary.status()
    time_us = median(times) if times and status is Status.OK else None
    return Outcome(status, time_us, reasons[status], facts=_facts(row))


def rows(connection: Connection, kernel: str | None, arch: str | None) -> Iterator[Row]:
    """Every trial as it was given to the store, in the order stored."""
    shared = Shared.load(connection)
    columns = [column for column in Candidates.__table__.c if column.name != "id"]
    query = (
        select(*Trials.__table__.c, *columns, Workers.process, Workers.commit)
        .join(Candidates, Candidates.id == Trials.candidate_id)
        .join(Workers, Workers.id == Trials.worker_id)
        .where(Trials.candidate_id.in_(chosen(kernel, arch, None)))
        .order_by(Trials.id)
    )
    for found in connection.execution_options(yield_per=_YIELD).execute(query):
        yield _row(found, shared)


def _row(found: Any, shared: Shared) -> Row:
    return Row(
        problem=shared.problems[found.problem_id],
        config=shared.configs[found.config_id],
        device=shared.devices[found.device_id],
        kind=Kind(found.kind),
        outcome=Outcome(
            status=Status(found.status),
            time_us=found.time_us,
            reason=found.reason,
            samples_us=unpack_samples(found.samples),
            tick_us=found.tick_us,
            facts=_facts(found),
            telemetry=Telemetry(*(getattr(found, name) for name in Telemetry.__dataclass_fields__)),
        ),
        version=shared.versions[found.version_id],
        lookup_key=shared.lookup_keys[found.lookup_key_id],
        bytes_moved=found.bytes_moved,
        commit=found.commit,
        source=found.source,
        note=found.note,
        stage=found.stage,
        round=found.round,
        process=found.process,
        position=found.position,
    )
