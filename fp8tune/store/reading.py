"""The queries behind :class:`fp8tune.store.results.Store` that turn stored rows back into records, one trial at a time.

What ranking needs, a million trials at once, is :mod:`fp8tune.store.gathering`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from fp8tune.store import judgements, unreadable
from fp8tune.store.columns import unpack_samples
from fp8tune.store.judgements import Judged
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
from fp8tune.store.unreadable import ById, MissingRowError, readable, stream


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
        """Read all shared records that can be read."""
        return cls(
            problems=_records(connection, Problems, Problem),
            configs=_items(connection, Configs),
            lookup_keys=_items(connection, LookupKeys),
            versions=ById(
                connection,
                KernelVersions,
                (
                    (id, version if version.source_hash else None)
                    for id, version in _records(connection, KernelVersions, KernelVersion).items()
                ),
            ),
            devices=_records(connection, Devices, Device),
        )


def _items(connection: Connection, table: Table) -> ById:
    found = readable(connection, select(table.c.id, table.c["items"]))
    return ById(connection, table, ((row.id, row.items) for row in found))


def _records(connection: Connection, table: Table, record: type[Any]) -> ById:
    names = list(record.__dataclass_fields__)
    query = select(*(table.c[name] for name in ("id", *names)))
    found = readable(connection, query)
    return ById(connection, table, ((row[0], record(**dict(zip(names, row[1:], strict=True)))) for row in found))


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


def facts(row: Any, code: Code | None = None) -> Facts:
    """The compiler's facts among a candidate's columns."""
    return Facts(row.registers, row.spill_bytes, row.shared_bytes, row.compile_s, code)


def codes(connection: Connection) -> dict[int, Code]:
    """What is known of the machine code of candidates, by their id. Small: configs that were only compiled."""
    if not inspect(connection).has_table(Codes.name):
        return {}
    names = list(Code.__dataclass_fields__)
    query = select(Codes.c.candidate_id, *(Codes.c[name] for name in names))
    return {row[0]: Code(*row[1:]) for row in readable(connection, query)}


def tried(
    connection: Connection,
    version: KernelVersion,
    device: Device,
    kind: Kind,
    problem: Problem,
    sweep: int | None,
    round: int | None,
    stage: str | None,
    reference: str,
) -> dict[NamedInts, Outcome]:
    """Config -> what became of it; the median time of its trials, and the reason of the last that failed."""
    references = judgements.references(connection)
    query = (
        select(
            Candidates.c.id, Configs.c["items"], Trials.c.status, Trials.c.reason, Trials.c.time_us, Trials.c.created_at
        )
        .add_columns(Trials.c.stage, Trials.c.round, Trials.c.sweep_id, Candidates.c.version_id)
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
    by_config: dict[NamedInts, list[tuple[Any, Judged]]] = {}
    for row in readable(connection, query):
        by = references.get((row.sweep_id, row.version_id), "")
        judged = Judged(Status(row.status), row.created_at, row.stage, row.round, row.sweep_id, by)
        if not (reference and judgements.is_outdated(judged.status, by, reference)):
            by_config.setdefault(row.items or NamedInts(), []).append((row, judged))
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
    pairs = []
    for row in readable(connection, query.order_by(Completions.c.id)):
        with contextlib.suppress(MissingRowError):
            pairs.append((shared.versions[row.version_id], shared.problems[row.problem_id]))
    return [(version, problem) for version, problem in pairs if version is not None]


def calibration(connection: Connection, device: Device) -> dict[str, float]:
    """Name -> the value last measured of a device."""
    mine = select(Calibrations.c.name, Calibrations.c.value).where(Calibrations.c.device_id.in_(device_ids(device)))
    rows = readable(connection, mine.order_by(Calibrations.c.created_at, Calibrations.c.value))
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


def _outcome(rows: Sequence[tuple[Any, Judged]]) -> Outcome:
    status = judgements.last_status([judged for _, judged in rows])
    mine = [row for row, judged in rows if judged.status is status]
    times = [row.time_us for row in mine if row.time_us is not None]
    time_us = median(times) if times and status is Status.OK else None
    return Outcome(status, time_us, mine[-1].reason, facts=facts(rows[-1][0]))


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
    for found in stream(connection, query, Trials.c.id):
        try:
            row = _row(found, shared, known_codes.get(found.candidate_id))
        except MissingRowError:  # named already
            continue
        except DatabaseError as error:
            unreadable.of(connection).add(Trials, found.id, str(error))
            continue
        yield row


def published(connection: Connection) -> list[Published]:
    """What others printed of whole operations, in the order stored. Few."""
    if not inspect(connection).has_table(PublishedOperations.name):
        return []
    shared = Shared.load(connection)
    told = [name for name in Published.__dataclass_fields__ if name in PublishedOperations.c]
    found = []
    for row in readable(connection, select(*PublishedOperations.c).order_by(PublishedOperations.c.id)):
        with contextlib.suppress(MissingRowError):
            problem, device = shared.problems[row.problem_id], shared.devices[row.device_id]
            values = {name: getattr(row, name) for name in told}
            found.append(Published(operation=problem.kernel, shape=problem.shape, device=device, **values))
    return found


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
