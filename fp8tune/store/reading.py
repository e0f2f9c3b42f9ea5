"""An open database, its transactions, and the queries that turn stored rows back into records, one trial at a time.

What ranking needs, a million trials at once: :mod:`fp8tune.store.gathering`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Select, Table, func, select

from fp8tune.errors import DatabaseError
from fp8tune.records import (
    Code,
    ComparableRows,
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
    Subject,
    Telemetry,
)
from fp8tune.store import database, last_writes, optional, retrying, unreadable
from fp8tune.store.columns import unpack_samples
from fp8tune.store.packed import POOL
from fp8tune.store.schema import (
    FACTS,
    Calibrations,
    Candidates,
    Codes,
    Completions,
    Configs,
    Devices,
    KernelVersions,
    LookupKeys,
    PackedTrials,
    Problems,
    PublishedOperations,
    RecordedLaunches,
    Sweeps,
    Trials,
    Workers,
)
from fp8tune.store.unreadable import ById, MissingRowError, packed_pools, readable, stream
from fp8tune.store.writing import Writer

Found = TypeVar("Found")


class Connected:
    """One open connection."""

    def __init__(self, connection: Connection, *, writable: bool) -> None:
        self._connection = connection
        self._writable = writable
        self._writer = Writer(connection)
        self._fence: Callable[[Connection], None] | None = None
        """Asked at the beginning of each write; raises where nothing may be stored."""

    def close(self) -> None:
        """Close; SQLite is left as one plain file where no other process has it open."""
        database.close(self._connection, wrote=self._writable)

    @property
    def changes(self) -> Hashable:
        """What another process's commit changes."""
        return self._whole(lambda: database.moment(self._connection))

    def _store_waiting(self) -> None:
        """Store what waits to be stored with others: whatever is asked next knows it."""

    def _waiting_stored(self) -> int:
        """Likewise, within the transaction of a write. Returns how many trials there were."""
        return 0

    def _forget_waiting(self, count: int) -> None:
        """The first of those that wait are stored."""

    @contextlib.contextmanager
    def _transaction(self, *, write: bool = False) -> Iterator[None]:
        if write and not self._writable:
            raise DatabaseError("the database was opened for reading only: open it with writable=True")
        if not write:
            self._store_waiting()
        try:
            with database.transaction(self._connection, write=write):
                if write:
                    optional.make(self._connection)
                    last_writes.note(self._connection)
                    if self._fence is not None:
                        self._fence(self._connection)
                    stored = self._waiting_stored()
                yield
            if write:
                self._forget_waiting(stored)
                optional.note_made(self._connection)
                last_writes.note_committed(self._connection)
        except BaseException:
            self._writer.forget()
            raise

    def _whole(self, work: Callable[[], Found], *, write: bool = False) -> Found:
        """What ``work`` returns within a transaction of its own, which may be done several times."""
        return retrying.whole(self._connection, lambda: self._transaction(write=write), work, write=write)


Samples = tuple[float, ...]
"""Times in us."""

Of = TypeVar("Of", bound=Connected)
Given = ParamSpec("Given")
_SUBJECTS = 256
"""Whose queries are kept: each is asked for several times, and to make one takes longer than to run it."""

_Method = Callable[Concatenate[Of, Given], Found]


def reads(method: _Method[Of, Given, Found]) -> _Method[Of, Given, Found]:
    """A method that reads in a transaction of its own: all that it reads is of one moment."""
    return _within_transaction(method, write=False)


def writes(method: _Method[Of, Given, Found]) -> _Method[Of, Given, Found]:
    """A method that writes in a transaction of its own, all or nothing."""
    return _within_transaction(method, write=True)


def _within_transaction(method: _Method[Of, Given, Found], *, write: bool) -> _Method[Of, Given, Found]:
    @functools.wraps(method)
    def within(self: Of, /, *args: Given.args, **kwargs: Given.kwargs) -> Found:
        given: Any = [retrying.repeatable(each) for each in args]
        named: Any = {name: retrying.repeatable(each) for name, each in kwargs.items()}
        return self._whole(lambda: method(self, *given, **named), write=write)

    return within


class Reading(Connected):
    """What an open database says of single problems, sweeps and devices."""

    @reads
    def sweep_uid(self, sweep_id: int) -> str:
        """The name of a sweep in every copy of the database."""
        return str(self._connection.scalar(select(Sweeps.c.uid).where(Sweeps.c.id == sweep_id)))

    @reads
    def finished_sweep(self, request: str, device: Device) -> list[tuple[KernelVersion, Problem]] | None:
        """What the newest finished sweep of a request on this very device was about; None where there is none."""
        same = (Sweeps.c.request == request, Sweeps.c.device_id.in_(device_ids(device)))
        sweep = self._connection.scalar(select(func.max(Sweeps.c.id)).where(*same, Sweeps.c.finished_at.is_not(None)))
        if sweep is None:
            return None
        shared = Shared.load(self._connection)
        query = select(Completions.c.version_id, Completions.c.problem_id).where(Completions.c.sweep_id == sweep)
        pairs = []
        for row in readable(self._connection, query.order_by(Completions.c.id)):
            with contextlib.suppress(MissingRowError):
                version, problem = shared.versions[row.version_id], shared.problems[row.problem_id]
                pairs += [(version, problem)] if version is not None else []
        return pairs

    @reads
    def unfinished_sweeps(self) -> list[str]:
        """The commands of sweeps that were begun and not finished, oldest first."""
        query = select(Sweeps.c.command).where(Sweeps.c.finished_at.is_(None)).order_by(Sweeps.c.id)
        return [row.command for row in readable(self._connection, query)]

    @reads
    def tried_subjects(self, kernel: str | None = None, arch: str | None = None) -> list[Subject]:
        """Every problem with the newest kernel version that was tried on it, on each device."""
        shared = Shared.load(self._connection)
        kinds = [kind for kind in Kind if kind is not Kind.PUBLISHED]
        ids = [Candidates.c[name] for name in POOL]
        query = select(*ids, func.max(Candidates.c.id)).where(Candidates.c.id.in_(chosen(kernel, arch, kinds)))
        found = [tuple(row) for row in self._connection.execute(query.group_by(*ids))]
        if optional.is_there(self._connection, PackedTrials):
            of = PackedTrials
            listed = select(*(of.c[name] for name in POOL), of.c.last_candidate)
            found += readable(self._connection, listed.where(of.c.id.in_(chosen(kernel, arch, kinds, of))))
        newest: dict[object, Subject] = {}
        for problem, version_id, device, kind, _ in sorted(found, key=itemgetter(4)):
            if (version := shared.versions[version_id]) is not None:
                subject = Subject(version, shared.devices[device], Kind(kind), shared.problems[problem])
                newest[subject.device, subject.kind, subject.problem] = subject
        return list(newest.values())

    @reads
    def calibration(self, device: Device) -> dict[str, float]:
        """The newest value of everything that was ever measured of this very device, by name."""
        query = select(Calibrations.c.name, Calibrations.c.value).where(
            Calibrations.c.device_id.in_(device_ids(device))
        )
        rows = readable(self._connection, query.order_by(Calibrations.c.created_at, Calibrations.c.value))
        return {row.name: row.value for row in rows}

    @reads
    def calibrations(self, of: Device | None = None) -> dict[Device, dict[str, float]]:
        """Device -> the newest of its values by name, the device measured last at the end; of one name or of all."""
        query = (
            select(Calibrations.c.device_id, Calibrations.c.name, Calibrations.c.value)
            .join(Devices, Devices.c.id == Calibrations.c.device_id)
            .order_by(Calibrations.c.created_at, Calibrations.c.value)
        )
        if of is not None:
            query = query.where(Devices.c.arch == of.arch, Devices.c.name == of.name)
        devices = dict(_records(self._connection, Devices, Device))
        found: dict[Device, dict[str, float]] = {}
        for row in readable(self._connection, query):
            if row.device_id in devices:
                device = devices[row.device_id]
                found[device] = {**found.pop(device, {}), row.name: row.value}
        return found

    def rows(self, kernel: str | None = None, arch: str | None = None) -> Iterator[Row]:
        """Every trial with all that is kept of it, samples included, in the order stored; packed ones last."""
        with self._transaction():
            yield from _rows(self._connection, kernel, arch)

    @reads
    def samples(self, subject: Subject, stage: str = "final") -> dict[NamedInts, dict[tuple[str, int], Samples]]:
        """Config -> (process, round) -> the samples in us of that block; of a stage of a problem, packed or not.

        Of several sweeps, those of the last. Blocks without samples are left out: of the screen none are kept in a
        database that was compacted.
        """
        shared = Shared.load(self._connection)
        found: dict[NamedInts, dict[tuple[str, int], Samples]] = {}
        columns = (Trials.c.id, Trials.c.round, Trials.c.samples, Candidates.c.config_id, Workers.c.process)
        query = (
            select(*columns)
            .join(Candidates, Candidates.c.id == Trials.c.candidate_id)
            .join(Workers, Workers.c.id == Trials.c.worker_id)
            .where(Candidates.c.id.in_(candidates_of(subject)), Candidates.c.kind == str(subject.kind))
            .where(Trials.c.stage == stage)
        )
        blocks = [
            (shared.configs.get(row.config_id), (row.process, row.round), unpack_samples(row.samples))
            for row in readable(self._connection, query.order_by(Trials.c.id))
        ]
        blocks += [
            (row.config, (row.process, row.round), row.outcome.samples_us)
            for row in _packed_rows(self._connection, shared, packed_of(subject, subject.kind))
            if row.stage == stage
        ]
        for config, place, samples_us in blocks:
            if samples_us:
                found.setdefault(config or NamedInts(), {})[place] = samples_us
        return found

    @reads
    def published(self) -> list[Published]:
        """What others printed of whole operations, in the order stored. Few."""
        shared = Shared.load(self._connection)
        printed = [name for name in Published.__dataclass_fields__ if name in PublishedOperations.c]
        found = []
        for row in readable(self._connection, select(*PublishedOperations.c).order_by(PublishedOperations.c.id)):
            with contextlib.suppress(MissingRowError):
                problem, device = shared.problems[row.problem_id], shared.devices[row.device_id]
                values = {name: getattr(row, name) for name in printed}
                found.append(Published(operation=problem.kernel, shape=problem.shape, device=device, **values))
        return found

    @reads
    def recorded_launches(self, kernel: str | None = None) -> dict[Problem, str]:
        """Problem -> the JSON of its recorded launch and kernel; of one kernel or of all."""
        table = RecordedLaunches
        if not optional.is_there(self._connection, table):
            return {}
        problems = ById(self._connection, Problems, _records(self._connection, Problems, Problem))
        query = select(table.c.problem_id, table.c.document).order_by(table.c.id)
        if kernel is not None:
            query = query.where(table.c.problem_id.in_(select(Problems.c.id).where(Problems.c.kernel == kernel)))
        found = {}
        for row in readable(self._connection, query):
            with contextlib.suppress(MissingRowError):
                found[problems[row.problem_id]] = row.document
        return found

    @reads
    def arches(self) -> list[str]:
        """Arches that have rows, sorted."""
        query = select(Devices.c.arch).distinct()
        return sorted({row.arch for row in self._having_rows(query, Devices, "device_id")})

    @reads
    def kernels(self) -> list[str]:
        """Kernels that have rows, sorted."""
        query = select(Problems.c.kernel).distinct()
        return sorted({row.kernel for row in self._having_rows(query, Problems, "problem_id")})

    @reads
    def counts(self, without: Collection[ComparableRows] = ()) -> dict[tuple[str, Kind], int]:
        """(arch, kind) -> trials stored; of all but some rows that may be compared with each other."""
        per_candidate = select(Trials.c.candidate_id, func.count().label("trials")).group_by(Trials.c.candidate_id)
        trials = per_candidate.subquery()
        ids = (Candidates.c.problem_id, Candidates.c.version_id, Candidates.c.device_id, Candidates.c.kind)
        query = (
            select(*ids, func.sum(trials.c.trials))
            .join(trials, trials.c.candidate_id == Candidates.c.id)
            .where(Candidates.c.kind.in_(list(map(str, Kind))))
            .group_by(*ids)
        )
        found = [tuple(row) for row in self._connection.execute(query)]
        if optional.is_there(self._connection, PackedTrials):
            packed = select(*(PackedTrials.c[name] for name in POOL), PackedTrials.c.trials)
            found += readable(self._connection, packed)
        counts: dict[tuple[str, Kind], int] = {}
        arches = {row.id: row.arch for row in readable(self._connection, select(Devices.c.id, Devices.c.arch))}
        shared = Shared.load(self._connection) if without else None
        left_out = {(rows.problem, rows.version, rows.device, rows.kind) for rows in without}
        for problem, version, device, kind, number in found:
            if device not in arches:
                continue
            if shared and _ids_named(shared, problem, version, device, kind) in left_out:
                continue
            place = arches[device], Kind(kind)
            counts[place] = counts.get(place, 0) + int(number)
        return dict(sorted(counts.items()))

    @reads
    def timed_sources(self) -> dict[str, set[str]]:
        """Kernel -> the source hashes of its code that have rows from a GPU."""
        query = select(KernelVersions.c.kernel, KernelVersions.c.source_hash).distinct()
        query = query.where(KernelVersions.c.source_hash != "")
        found: dict[str, set[str]] = {}
        for row in self._having_rows(query, KernelVersions, "version_id", Kind.MEASURED):
            found.setdefault(row.kernel, set()).add(row.source_hash)
        return found

    def _having_rows(self, query: Select[Any], table: Table, column: str, kind: Kind | None = None) -> list[Any]:
        """Of rows that candidates refer to by a column, those to which any does, packed or not."""
        found: list[Any] = []
        for of in (Candidates, PackedTrials):
            if optional.is_there(self._connection, of):
                mine = query.join(of, of.c[column] == table.c.id)
                found += readable(self._connection, mine if kind is None else mine.where(of.c.kind == str(kind)))
        return found


def _ids_named(shared: Shared, problem: int, version: int, device: int, kind: str) -> tuple[object, ...] | None:
    """What the ids of a candidate stand for; None where one of them cannot be read."""
    try:
        return shared.problems[problem], shared.versions[version], shared.devices[device], Kind(kind)
    except MissingRowError:
        return None


@dataclass(frozen=True)
class Shared:
    """What candidates refer to, by id. Small beside the trials, so it is read whole."""

    problems: Mapping[int, Problem]
    configs: Mapping[int, NamedInts | None]
    lookup_keys: Mapping[int, NamedInts | None]
    versions: Mapping[int, KernelVersion | None]
    """None where rows are of another implementation."""
    devices: Mapping[int, Device]

    @classmethod
    def load(cls, connection: Connection) -> Shared:
        """Read all shared records that can be read."""
        versions = _records(connection, KernelVersions, KernelVersion)
        ours = ((id, version if version.source_hash else None) for id, version in versions)
        return cls(
            problems=ById(connection, Problems, _records(connection, Problems, Problem)),
            configs=items(connection, Configs),
            lookup_keys=items(connection, LookupKeys),
            versions=ById(connection, KernelVersions, ours),
            devices=ById(connection, Devices, _records(connection, Devices, Device)),
        )


def items(connection: Connection, table: Table, ids: Collection[int] | None = None) -> ById:
    """The named integers of all rows of a table, or of some, by their id."""
    query = select(table.c.id, table.c["items"])
    return ById(connection, table, readable(connection, query if ids is None else query.where(table.c.id.in_(ids))))


def _records(connection: Connection, table: Table, record: type[Any], id: str = "id") -> Iterable[tuple[int, Any]]:
    """What each row of a table says, as a record that its columns were made of, by its id."""
    names = list(record.__dataclass_fields__)
    found = readable(connection, _selected(table, id, *names))
    return ((row[0], record(**dict(zip(names, row[1:], strict=True)))) for row in found)


@functools.cache
def _selected(table: Table, *names: str) -> Select[Any]:
    return select(*(table.c[name] for name in names))


def codes(connection: Connection) -> dict[int, Code]:
    """What is known of the machine code of candidates, by their id. Few: configs that were only compiled."""
    return dict(_records(connection, Codes, Code, "candidate_id"))


def chosen(kernel: str | None, arch: str | None, kinds: Collection[Kind] | None, of: Table = Candidates) -> Select[Any]:
    """The ids of the candidates, or of the packed rows, of a kernel, an arch and kinds; None means any."""
    query = select(of.c.id)
    if kernel is not None:
        query = query.where(of.c.problem_id.in_(select(Problems.c.id).where(Problems.c.kernel == kernel)))
    if arch is not None:
        query = query.where(of.c.device_id.in_(select(Devices.c.id).where(Devices.c.arch == arch)))
    if kinds is not None:
        query = query.where(of.c.kind.in_([str(kind) for kind in kinds]))
    return query


@functools.lru_cache(_SUBJECTS)
def candidates_of(subject: Subject) -> Select[Any]:
    """The ids of all candidates of one problem, kernel version and device, of any kind; their configs are joined."""
    version = subject.version
    return (
        select(Candidates.c.id)
        .join(Configs, Configs.c.id == Candidates.c.config_id)
        .join(KernelVersions, KernelVersions.c.id == Candidates.c.version_id)
        .where(KernelVersions.c.kernel == version.kernel, KernelVersions.c.source_hash == version.source_hash)
        .where(Candidates.c.device_id.in_(device_ids(subject.device)))
        .where(Candidates.c.problem_id.in_(_problem_ids(subject.problem)))
    )


@functools.lru_cache(_SUBJECTS)
def packed_of(subject: Subject, kind: Kind | None = None) -> Select[Any]:
    """The ids of the packed rows of one problem, kernel version and device; of any kind if none is given."""
    of, version = PackedTrials, subject.version
    versions = select(KernelVersions.c.id).where(
        KernelVersions.c.kernel == version.kernel, KernelVersions.c.source_hash == version.source_hash
    )
    query = select(of.c.id).where(
        of.c.version_id.in_(versions),
        of.c.device_id.in_(device_ids(subject.device)),
        of.c.problem_id.in_(_problem_ids(subject.problem)),
    )
    return query if kind is None else query.where(of.c.kind == str(kind))


def device_ids(device: Device) -> Select[Any]:
    """The id of a device, as a query."""
    return select(Devices.c.id).where(*(Devices.c[name] == value for name, value in vars(device).items()))


def _problem_ids(problem: Problem) -> Select[Any]:
    wanted = vars(problem) | {"canonical": problem.shape.canonical}
    return select(Problems.c.id).where(*(Problems.c[name] == wanted[name] for name in wanted if name != "shape"))


def _rows(connection: Connection, kernel: str | None, arch: str | None) -> Iterator[Row]:
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
            row = _row(found, shared, known_codes.get(found.candidate_id), unpack_samples(found.samples), found)
        except MissingRowError:  # named already
            continue
        except DatabaseError as error:
            unreadable.leave_out(connection, Trials, found.id, str(error))
            continue
        yield row
    yield from _packed_rows(connection, shared, chosen(kernel, arch, None, PackedTrials))


def _packed_rows(connection: Connection, shared: Shared, wanted: Select[Any]) -> Iterator[Row]:
    query = select(Workers.c.id, Workers.c.process, Workers.c.commit)
    workers = ById(connection, Workers, ((row.id, row) for row in readable(connection, query)))
    for pool in packed_pools(connection, wanted):
        known_codes = pool.codes()
        for found in pool.joined(samples=True):
            with contextlib.suppress(MissingRowError):
                code, worker = known_codes.get(found.candidate_id), workers[found.worker_id]
                yield _row(found, shared, code, found.samples_us, worker)


_SAME_NAME = ("bytes_moved", "source", "note", "stage", "round", "position")


def _row(found: Any, shared: Shared, code: Code | None, samples_us: Samples, worker: Any) -> Row:
    return Row(
        problem=shared.problems[found.problem_id],
        config=shared.configs[found.config_id],
        device=shared.devices[found.device_id],
        kind=Kind(found.kind),
        outcome=Outcome(
            status=Status(found.status),
            time_us=found.time_us,
            reason=found.reason,
            samples_us=samples_us,
            tick_us=found.tick_us,
            facts=Facts(**{name: getattr(found, name) for name in FACTS}, code=code),
            telemetry=Telemetry(*(getattr(found, name) for name in Telemetry.__dataclass_fields__)),
        ),
        version=shared.versions[found.version_id],
        lookup_key=shared.lookup_keys[found.lookup_key_id],
        **{name: getattr(found, name) for name in _SAME_NAME},
        process=worker.process,
        commit=worker.commit,
    )
