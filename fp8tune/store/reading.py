"""The queries behind :class:`fp8tune.store.results.Store` that turn stored rows back into records, one trial at a time.

What ranking needs, a million trials at once, is :mod:`fp8tune.store.gathering`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from sqlalchemy import Connection, Select, Table, func, inspect, select

from fp8tune.errors import DatabaseError
from fp8tune.records import (
    Code,
    Device,
    Facts,
    KernelVersion,
    Kind,
    NamedInts,
    Outcome,
    Problem,
    Published,
    Row,
    Status,
    Telemetry,
)
from fp8tune.store.columns import unpack_samples
from fp8tune.store.schema import (
    Calibrations,
    Candidates,
    Codes,
    Completions,
    Configs,
    Devices,
    KernelVersions,
    LookupKeys,
    Problems,
    PublishedOperations,
    Sweeps,
    Trials,
    Workers,
)

_YIELD = 1000


class ById(dict[int, Any]):
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
            lookup_keys=_items(connection, LookupKeys),
            versions=ById(
                (id, version if version.source_hash else None)
                for id, version in _records(connection, KernelVersions, KernelVersion).items()
            ),
            devices=_records(connection, Devices, Device),
        )


def _items(connection: Connection, table: Table) -> ById:
    return ById((row.id, row.items) for row in connection.execute(select(table.c.id, table.c["items"])))


def _records(connection: Connection, table: Table, record: type[Any]) -> ById:
    names = list(record.__dataclass_fields__)
    query = select(*(table.c[name] for name in ("id", *names)))
    return ById((row[0], record(**dict(zip(names, row[1:], strict=True)))) for row in connection.execute(query))


def chosen(kernel: str | None, arch: str | None, kinds: Collection[Kind] | None) -> Select[Any]:
    """The ids of the candidates of a kernel, an arch and kinds; None means any."""
    query = select(Candidates.c.id)
    if kernel is not None:
        query = query.where(Candidates.c.problem_id.in_(select(Problems.c.id).where(Problems.c.kernel == kernel)))
    if arch is not None:
        query = query.where(Candidates.c.device_id.in_(select(Devices.c.id).where(Devices.c.arch == arch)))
    if kinds is not None:
        query = query.where(Candidates.c.kind.in_([str(kind) for kind in kinds]))
    return query


def last_status(newest: Mapping[Status, float]) -> Status:
    """What became of a candidate, from when each status was last stored.

    Wrong once is wrong for ever; otherwise the last trial says, so that a retry can clear a crash.
    """
    if Status.WRONG in newest:
        return Status.WRONG
    return max(newest, key=lambda status: (newest[status], status is not Status.OK, status))


def facts(row: Any, code: Code | None = None) -> Facts:
    """The compiler's facts among a candidate's columns."""
    return Facts(row.registers, row.spill_bytes, row.shared_bytes, row.compile_s, code)


def codes(connection: Connection) -> dict[int, Code]:
    """What is known of the machine code of candidates, by their id. Small: configs that were only compiled."""
    if not inspect(connection).has_table(Codes.name):
        return {}
    names = list(Code.__dataclass_fields__)
    query = select(Codes.c.candidate_id, *(Codes.c[name] for name in names))
    return {row[0]: Code(*row[1:]) for row in connection.execute(query)}


def tried(
    connection: Connection,
    version: KernelVersion,
    device: Device,
    kind: Kind,
    problem: Problem,
    sweep: int | None,
    round: int | None,
    stage: str | None,
) -> dict[NamedInts, Outcome]:
    """Config -> what became of it; the median time of its trials, and the reason of the last that failed."""
    query = (
        select(
            Candidates.c.id, Configs.c["items"], Trials.c.status, Trials.c.reason, Trials.c.time_us, Trials.c.created_at
        )
        .add_columns(
            Candidates.c.registers, Candidates.c.spill_bytes, Candidates.c.shared_bytes, Candidates.c.compile_s
        )
        .join(Candidates, Candidates.c.id == Trials.c.candidate_id)
        .join(Configs, Configs.c.id == Candidates.c.config_id)
        .join(KernelVersions, KernelVersions.c.id == Candidates.c.version_id)
        .where(KernelVersions.c.kernel == version.kernel, KernelVersions.c.source_hash == version.source_hash)
        .where(Candidates.c.device_id.in_(device_ids(device)), Candidates.c.problem_id.in_(problem_ids(problem)))
        .where(Candidates.c.kind == str(kind))
        .order_by(Trials.c.created_at, Trials.c.id)
    )
    if stage is not None:
        query = query.where(Trials.c.stage == stage)
    if sweep is not None:
        query = query.where(Trials.c.sweep_id == sweep)
    if round is not None:
        query = query.where(Trials.c.round == round)
    by_config: dict[NamedInts, list[Any]] = {}
    for row in connection.execute(query):
        by_config.setdefault(row.items or NamedInts(), []).append(row)
    return {config: _outcome(rows) for config, rows in by_config.items()}


def finished_sweep(connection: Connection, request: str, device: Device) -> list[tuple[KernelVersion, Problem]] | None:
    """The problems that the newest finished sweep of a request completed, in its order; None where there is none."""
    finished = (
        Sweeps.c.request == request,
        Sweeps.c.device_id.in_(device_ids(device)),
        Sweeps.c.finished_at.is_not(None),
    )
    sweep = connection.execute(select(func.max(Sweeps.c.id)).where(*finished)).scalar()
    if sweep is None:
        return None
    shared = Shared.load(connection)
    query = select(Completions.c.version_id, Completions.c.problem_id).where(Completions.c.sweep_id == sweep)
    found = connection.execute(query.order_by(Completions.c.id))
    pairs = [(shared.versions[row.version_id], shared.problems[row.problem_id]) for row in found]
    return [(version, problem) for version, problem in pairs if version is not None]


def calibration(connection: Connection, device: Device) -> dict[str, float]:
    """Name -> the value last measured of a device."""
    mine = select(Calibrations.c.name, Calibrations.c.value).where(Calibrations.c.device_id.in_(device_ids(device)))
    rows = connection.execute(mine.order_by(Calibrations.c.created_at, Calibrations.c.value))
    return {row.name: row.value for row in rows}


def device_ids(device: Device) -> Select[Any]:
    """The id of a device, as a query; likewise the next."""
    return select(Devices.c.id).where(
        *(Devices.c[name] == getattr(device, name) for name in Device.__dataclass_fields__)
    )


def problem_ids(problem: Problem) -> Select[Any]:
    """A problem's."""
    names = [name for name in Problem.__dataclass_fields__ if name != "shape"]
    return select(Problems.c.id).where(
        Problems.c.canonical == problem.shape.canonical,
        *(Problems.c[name] == getattr(problem, name) for name in names),
    )


def _outcome(rows: Iterable[Any]) -> Outcome:
    newest: dict[Status, float] = {}
    reasons, times = {}, []
    for row in rows:
        status = Status(row.status)
        newest[status] = row.created_at
        reasons[status] = row.reason
        if status is Status.OK and row.time_us is not None:
            times.append(row.time_us)
    status = last_status(newest)
    time_us = median(times) if times and status is Status.OK else None
    return Outcome(status, time_us, reasons[status], facts=facts(row))


def rows(connection: Connection, kernel: str | None, arch: str | None) -> Iterator[Row]:
    """Every trial as it was given to the store, in the order stored."""
    shared, known_codes = Shared.load(connection), codes(connection)
    columns = [column for column in Candidates.c if column.name != "id"]
    query = (
        select(*Trials.c, *columns, Workers.c.process, Workers.c.commit)
        .join(Candidates, Candidates.c.id == Trials.c.candidate_id)
        .join(Workers, Workers.c.id == Trials.c.worker_id)
        .where(Trials.c.candidate_id.in_(chosen(kernel, arch, None)))
        .order_by(Trials.c.id)
    )
    for found in connection.execution_options(yield_per=_YIELD).execute(query):
        yield _row(found, shared, known_codes.get(found.candidate_id))


def published(connection: Connection) -> list[Published]:
    """What others printed of whole operations, in the order stored. Few."""
    if not inspect(connection).has_table(PublishedOperations.name):
        return []
    shared = Shared.load(connection)
    told = [name for name in Published.__dataclass_fields__ if name in PublishedOperations.c]
    return [
        Published(
            operation=shared.problems[row.problem_id].kernel,
            shape=shared.problems[row.problem_id].shape,
            device=shared.devices[row.device_id],
            **{name: getattr(row, name) for name in told},
        )
        for row in connection.execute(select(PublishedOperations).order_by(PublishedOperations.c.id))
    ]


def _row(found: Any, shared: Shared, code: Code | None) -> Row:
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
            facts=facts(found, code),
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
