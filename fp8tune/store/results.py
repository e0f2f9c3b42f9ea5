"""The results database as the rest of fp8tune sees it: records go in, records come out, connections never leave.

A trial is committed as soon as it is added. Its identity (candidate, sweep, stage, round, process) is unique, so that
nothing is stored twice, whether a sweep continues, a file is imported again or two databases are merged.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

from sqlalchemy import Connection, Select, String, Table, func, insert, inspect, select, type_coerce, update

from fp8tune.errors import DatabaseError
from fp8tune.records import Device, Evidence, KernelVersion, Kind, NamedInts, Outcome, Problem, Published, Row
from fp8tune.redaction import redacted
from fp8tune.store import database, gathering, reading, tallies, unreadable, visits
from fp8tune.store.schema import (
    METADATA,
    SCHEMA_VERSION,
    Calibrations,
    Candidates,
    Completions,
    Devices,
    Finals,
    Judges,
    KernelVersions,
    Meta,
    Problems,
    Sweeps,
    Trials,
)
from fp8tune.store.unreadable import RowName
from fp8tune.store.writing import Writer
from fp8tune.text import visible

COPY_CEILING = "copy_ceiling_gb_per_s"
"""Name of the copy behind :mod:`fp8tune.ceiling`: device to device, read plus written."""

_YIELD = 1000
"""Rows read at a time where a whole table is streamed."""


class Store:
    """An open results database. A context manager; one thread at a time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._writable = False
        self._writer = Writer(connection)

    @classmethod
    def open(cls, url: str, *, create: bool = False, writable: bool = True) -> Self:
        """Open a plain path or a database URL.

        ``create`` makes a missing database; ``writable=False`` works on a file and folder that may not be written.
        Raises DatabaseError where the database is missing, damaged, foreign, locked, read-only or of a newer schema.
        """
        store = cls(database.connect(url, create=create, writable=writable))
        try:
            store._check_schema(database.label(url), create=create and writable)
            if writable:
                database.begin_writing(store._connection)
                store._writable = True
                store._add_missing_tables()
                store._remove_passwords()
        except BaseException:
            store.close()
            raise
        return store

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close; SQLite is left as one plain file where no other process has it open."""
        database.close(self._connection, wrote=self._writable)

    # Sweeps

    def begin_sweep(
        self,
        request: str,
        device: Device,
        *,
        command: str,
        commit: str,
        timer: str,
        seed: int,
        again: bool = False,
        uid: str | None = None,
    ) -> int:
        """The id of the sweep to add rows to: an unfinished one of this request, device and ``again``, or a new one.

        ``uid`` names a sweep that is the same in every database, such as that of published rows.
        """
        with self._transaction(write=True):
            device_id = self._writer.device_id(device)
            wanted = (Sweeps.c.request == request, Sweeps.c.device_id == device_id, Sweeps.c.again == again)
            unfinished = select(Sweeps.c.id).where(*wanted, Sweeps.c.finished_at.is_(None)).order_by(Sweeps.c.id.desc())
            if uid is None and (found := self._scalar(unfinished)) is not None:
                return int(found)
            values = {"request": request, "device_id": device_id, "command": visible(command), "commit": commit}
            values |= {"timer": timer, "seed": seed, "again": again, "started_at": time.time()}
            return self._writer.id(Sweeps, {"uid": uid or uuid.uuid4().hex}, values)

    def sweep_uid(self, sweep_id: int) -> str:
        """The name of a sweep in every copy of the database."""
        with self._transaction():
            return str(self._scalar(select(Sweeps.c.uid).where(Sweeps.c.id == sweep_id)))

    def finish_sweep(self, sweep_id: int) -> None:
        """Note that a sweep ran to its end: the same request begins a new one from now on."""
        with self._transaction(write=True):
            self._connection.execute(update(Sweeps).where(Sweeps.c.id == sweep_id).values(finished_at=time.time()))

    def finished_sweep(self, request: str, device: Device) -> list[tuple[KernelVersion, Problem]] | None:
        """What the newest finished sweep of a request on this very device was about; None where there is none."""
        with self._transaction():
            return reading.finished_sweep(self._connection, request, device)

    def mark_complete(
        self, sweep_id: int, version: KernelVersion, device: Device, problem: Problem, planned: int
    ) -> None:
        """Note that all ``planned`` configs of a problem have a row, so that its best is a pick."""
        with self._transaction(write=True):
            key = {"sweep_id": sweep_id, "version_id": self._writer.version_id(version, problem.kernel)}
            key |= {"device_id": self._writer.device_id(device), "problem_id": self._writer.problem_id(problem)}
            self._writer.id(Completions, key, {"planned": planned})

    def end_finals(
        self,
        sweep_id: int,
        version: KernelVersion,
        device: Device,
        problem: Problem,
        *,
        tie_band: float,
        keep_band: float,
        floor_us: float,
    ) -> None:
        """Note that a problem's finals were judged in a sweep and may stand: from now on they count instead of those
        before."""
        with self._transaction(write=True):
            key = {"sweep_id": sweep_id, "version_id": self._writer.version_id(version, problem.kernel)}
            key |= {"device_id": self._writer.device_id(device), "problem_id": self._writer.problem_id(problem)}
            bands = {"replaces": "", "tie_band": tie_band, "keep_band": keep_band, "floor_us": floor_us}
            self._writer.id(Finals, key, bands)

    def record_reference(self, sweep_id: int, version: KernelVersion, reference: str) -> None:
        """Note the hash of the reference that a sweep holds a kernel version's outputs to."""
        with self._transaction(write=True):
            key = {"sweep_id": sweep_id, "version_id": self._writer.version_id(version, version.kernel)}
            self._writer.id(Judges, key, {"reference": reference})

    def record_ceiling(self, sweep_id: int, device: Device, gb_per_s: float) -> None:
        """Keep the copy ceiling measured in a sweep, in GB/s; a later measurement in the same sweep replaces it."""
        self.record_calibration(sweep_id, device, COPY_CEILING, gb_per_s)

    def record_calibration(self, sweep_id: int, device: Device, name: str, value: float) -> None:
        """Keep a named value of a device (unit in the name), as measured in a sweep."""
        with self._transaction(write=True):
            key = {"sweep_id": sweep_id, "device_id": self._writer.device_id(device), "name": name}
            values = {"value": value, "created_at": time.time()}
            self._writer.id(Calibrations, key, values, newer=values)

    # Rows in

    def add(self, sweep_id: int, row: Row, *, once: bool = False) -> bool:
        """Store one trial and commit; False where it is there already. Keeps times to 1e-6 us, samples to 1 ns.

        ``once``: also where another process stored the same status in this round, as when two run the same sweep.
        """
        if not once:
            return self.add_many(sweep_id, [row]) == 1
        with self._transaction(write=True):
            return self._writer.insert_trial_once(self._writer.trial(sweep_id, row))

    def add_many(self, sweep_id: int, rows: Iterable[Row]) -> int:
        """Store many trials in one commit, all or nothing. Returns how many were new."""
        with self._transaction(write=True):
            return self._writer.insert_trials(self._writer.trial(sweep_id, row) for row in rows)[0]

    def add_published(self, rows: Iterable[Published]) -> int:
        """Store what others printed of whole operations in one commit, all or nothing. Returns how many were new."""
        with self._transaction(write=True):
            return self._writer.insert_published(self._writer.published(row) for row in rows)[0]

    def merge(self, other: Store) -> tuple[int, int]:
        """Take over every row of another database, all or nothing. Returns (rows added, rows already there)."""
        with other._transaction(), self._transaction(write=True):
            added, given = self._writer.merge(other._stream)
            return added, given - added

    # Records out

    def tried(
        self,
        version: KernelVersion,
        device: Device,
        kind: Kind,
        problem: Problem,
        *,
        sweep: int | None = None,
        round: int | None = None,
        stage: str | None = "screen",
        reference: str = "",
    ) -> dict[NamedInts, Outcome]:
        """Configs of a problem that have a row (in any sweep and round, unless given), with what became of them.

        ``reference``: the hash of today's. What another judged is left out then, and what an unknown one found wrong.
        """
        with self._transaction():
            return reading.tried(self._connection, version, device, kind, problem, sweep, round, stage, reference)

    def tally(self, subject: tallies.Subject) -> tallies.Tally:
        """What became of the configs of a problem that was tried."""
        return tallies.Tally(
            subject, self.tried(subject.version, subject.device, subject.kind, subject.problem, stage=None)
        )

    def tried_subjects(self, kernel: str | None = None, arch: str | None = None) -> list[tallies.Subject]:
        """Every problem with the newest kernel version that was tried on it, on each device."""
        with self._transaction():
            return tallies.subjects(self._connection, kernel, arch)

    def finals(
        self, version: KernelVersion, device: Device, problem: Problem, sweep: int
    ) -> dict[NamedInts, list[visits.Timed]]:
        """Config -> what a sweep's finals of a problem timed so far, ended or not."""
        with self._transaction():
            return visits.of_sweep(self._connection, version, device, problem, sweep)

    def tick_us(self, version: KernelVersion, device: Device, problem: Problem, sweep: int) -> float | None:
        """The smallest step between two samples of a block in a sweep's finals of a problem; None where unknown."""
        with self._transaction():
            return visits.tick_us(self._connection, version, device, problem, sweep)

    def calibration(self, device: Device) -> dict[str, float]:
        """The newest value of everything that was ever measured of this very device, by name."""
        with self._transaction():
            return reading.calibration(self._connection, device)

    def evidence(
        self,
        kernel: str | None = None,
        arch: str | None = None,
        kinds: Collection[Kind] | None = None,
        *,
        keep: gathering.Keep | None = None,
        problems: Collection[Problem] | None = None,
        device: Device | None = None,
        finalists_only: bool = False,
    ) -> list[Evidence]:
        """All candidates that have rows, each with one time a process; of one kernel, one arch, some kinds or problems,
        or one device with the software that drove it.

        ``keep`` says which pools to read: :func:`fp8tune.choose.ranking.competing` leaves out what cannot win;
        ``finalists_only`` also leaves out what finals decided against before they began, which is enough for picks.
        """
        wish = gathering.Wish(kernel, arch, kinds, problems, device, keep, finalists_only)
        with self._transaction():
            return gathering.evidence(self._connection, COPY_CEILING, wish)

    def rows(self, kernel: str | None = None, arch: str | None = None) -> Iterator[Row]:
        """Every trial with all that is kept of it, samples included, in the order stored."""
        with self._transaction():
            yield from reading.rows(self._connection, kernel, arch)

    def published(self) -> list[Published]:
        """What others printed of whole operations, in the order stored."""
        with self._transaction():
            return reading.published(self._connection)

    def arches(self) -> list[str]:
        """Arches that have rows, sorted."""
        return self._names(select(Devices.c.arch).distinct().join(Candidates, Candidates.c.device_id == Devices.c.id))

    def kernels(self) -> list[str]:
        """Kernels that have rows, sorted."""
        return self._names(
            select(Problems.c.kernel).distinct().join(Candidates, Candidates.c.problem_id == Problems.c.id)
        )

    # Health

    @property
    def schema_version(self) -> int:
        """The schema of the file."""
        with self._transaction():
            return self._read_version()

    def integrity(self) -> list[str]:
        """What SQLite finds wrong with the file; empty where all is well or the database is no SQLite file."""
        if self._connection.dialect.name != "sqlite":
            return []
        with self._transaction(), unreadable.any_text(self._connection):
            found = self._connection.exec_driver_sql("PRAGMA integrity_check(10)").scalars().all()
        return [str(line) for line in found if line != "ok"]

    def unreadable(self) -> dict[RowName, str]:
        """Every row that cannot be read or is missing, by its table and id, with the reason."""
        with self._transaction():
            return unreadable.find(self._connection)

    def forget(self, rows: Iterable[RowName]) -> dict[str, int]:
        """Remove rows and all that refer to them in one commit. Returns how many went from each table."""
        with self._transaction(write=True):
            return unreadable.forget(self._connection, rows)

    def counts(self) -> dict[tuple[str, Kind], int]:
        """(arch, kind) -> trials stored."""
        per_candidate = select(Trials.c.candidate_id, func.count().label("trials")).group_by(Trials.c.candidate_id)
        trials = per_candidate.subquery()
        query = (
            select(Candidates.c.device_id, Candidates.c.kind, func.sum(trials.c.trials))
            .join(trials, trials.c.candidate_id == Candidates.c.id)
            .where(Candidates.c.kind.in_(list(map(str, Kind))))
            .group_by(Candidates.c.device_id, Candidates.c.kind)
        )
        counts: dict[tuple[str, Kind], int] = {}
        with self._transaction():
            devices = unreadable.readable(self._connection, select(Devices.c.id, Devices.c.arch))
            arches = {row.id: row.arch for row in devices}
            for device, kind, number in self._connection.execute(query):
                if device in arches:
                    place = arches[device], Kind(kind)
                    counts[place] = counts.get(place, 0) + int(number)
        return dict(sorted(counts.items()))

    def timed_sources(self) -> dict[str, set[str]]:
        """Kernel -> the source hashes of its code that have rows from a GPU."""
        query = (
            select(KernelVersions.c.kernel, KernelVersions.c.source_hash)
            .join(Candidates, Candidates.c.version_id == KernelVersions.c.id)
            .where(Candidates.c.kind == str(Kind.MEASURED), KernelVersions.c.source_hash != "")
        )
        found: dict[str, set[str]] = {}
        with self._transaction():
            for row in unreadable.readable(self._connection, query.distinct()):
                found.setdefault(row.kernel, set()).add(row.source_hash)
        return found

    def unfinished_sweeps(self) -> list[str]:
        """The commands of sweeps that were begun and not finished, oldest first."""
        with self._transaction():
            query = select(Sweeps.c.command).where(Sweeps.c.finished_at.is_(None)).order_by(Sweeps.c.id)
            return [row.command for row in unreadable.readable(self._connection, query)]

    # Connection

    @contextmanager
    def _transaction(self, *, write: bool = False) -> Iterator[None]:
        if write and not self._writable:
            raise DatabaseError("the database was opened for reading only: open it with writable=True")
        try:
            with database.transaction(self._connection, write=write):
                yield
        except BaseException:
            self._writer.forget()
            raise

    def _scalar(self, query: Select[Any]) -> Any:
        return self._connection.execute(query.limit(1)).scalar()

    def _names(self, query: Select[Any]) -> list[str]:
        with self._transaction():
            return sorted({row[0] for row in unreadable.readable(self._connection, query)})

    def _add_missing_tables(self) -> None:
        """The one kind of change that old databases take so far: a table more, which older versions never read."""
        are_there = set(inspect(self._connection).get_table_names())
        self._connection.rollback()  # ends the transaction that looking began
        if not are_there >= set(METADATA.tables):
            with self._transaction(write=True):
                METADATA.create_all(self._connection)

    def _remove_passwords(self) -> None:
        """Old versions stored commands as they were typed."""
        stored = select(Sweeps.c.id, type_coerce(Sweeps.c.command, String))
        with self._transaction():
            old = self._connection.execute(stored.where(Sweeps.c.command.contains("://"))).all()
        changed = {id: redacted(command) for id, command in old if redacted(command) != command}
        if not changed:
            return
        database.overwrite_what_is_removed(self._connection)
        with self._transaction(write=True):
            for id, command in changed.items():
                self._connection.execute(update(Sweeps).where(Sweeps.c.id == id).values(command=command))

    def _stream(self, table: Table) -> Iterator[Mapping[str, Any]]:
        if not inspect(self._connection).has_table(table.name):  # a database from before this table
            return
        query = select(*table.c).order_by(table.c.id)
        try:
            for row in self._connection.execute(query, execution_options={"yield_per": _YIELD}).mappings():
                yield dict(row)
        except DatabaseError:
            if row_and_reason := unreadable.first(self._connection, table):
                raise DatabaseError(
                    f"{row_and_reason}; nothing was imported: run fp8tune forget --unreadable --db THAT_FILE first"
                ) from None
            raise

    def _check_schema(self, label: str, *, create: bool) -> None:
        with database.transaction(self._connection, write=create):
            tables = inspect(self._connection).get_table_names()
            if not tables and create:
                METADATA.create_all(self._connection)
                self._connection.execute(insert(Meta).values(name="schema_version", value=str(SCHEMA_VERSION)))
            elif not tables:
                raise database.EmptyDatabaseError(f"{label} is empty: run fp8tune sweep or fp8tune import to fill it")
            elif "meta" not in tables or "trials" not in tables:
                raise DatabaseError(f"{label} is not a results database of fp8tune: give another file with --db")
            version = self._read_version()
            if version > SCHEMA_VERSION:
                raise DatabaseError(
                    f"{label} was written by a newer fp8tune (schema {version}, this one: {SCHEMA_VERSION}): upgrade"
                )

    def _read_version(self) -> int:
        text = self._scalar(select(Meta.c.value).where(Meta.c.name == "schema_version"))
        if not re.fullmatch("[0-9]{1,9}", str(text)):
            raise DatabaseError(f"the database states no schema version ({text!r:.80}): it was not written by fp8tune")
        return int(text)
