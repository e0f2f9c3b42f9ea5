"""The results database as the rest of fp8tune sees it: records go in, records come out, connections never leave.

A trial is committed as soon as it is added, and never stored twice: candidate, sweep, stage, round and process name it.
"""

from __future__ import annotations

import contextlib
import math
import time
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any, Self

from sqlalchemy import Connection, Table, inspect, select, update

from fp8tune.errors import DatabaseError
from fp8tune.records import (
    ComparableRows,
    Decided,
    Device,
    Evidence,
    FinalsRun,
    KernelVersion,
    Kind,
    NamedInts,
    Outcome,
    Problem,
    Published,
    Row,
    Status,
    Subject,
)
from fp8tune.redaction import redacted
from fp8tune.store import (
    database,
    exclusions,
    migrations,
    optional,
    outcomes,
    packed,
    picks,
    process_times,
    retrying,
    units,
    unreadable,
)
from fp8tune.store.exclusions import Exclusion
from fp8tune.store.gathering import Gathering, Keep, are_there
from fp8tune.store.outcomes import History
from fp8tune.store.postgresql import ServerError
from fp8tune.store.reading import Reading, reads, writes
from fp8tune.store.schema import (
    Calibrations,
    ChecksUsed,
    Completions,
    Devices,
    Finals,
    PackedTrials,
    ProblemFlops,
    PublishedOperations,
    RecordedLaunches,
    ReferencesChecked,
    Sweeps,
    Trials,
)
from fp8tune.store.units import Lease, Queue, QueuedSweep, Unit, UnitState
from fp8tune.store.unreadable import RowName
from fp8tune.text import visible

COPY_CEILING = "copy_ceiling_gb_per_s"
"""Name of the copy behind :mod:`fp8tune.ceiling`: device to device, read plus written."""

_MANY = 10_000  # rows that change how a server best answers
_YIELD = 1000  # rows read at a time where a whole table is streamed


@dataclass(frozen=True, order=True)
class Versions:
    """The torch and Triton that rows were timed with."""

    torch: str
    triton: str

    def __str__(self) -> str:
        return f"torch {self.torch or '(none)'} and triton {self.triton or '(none)'}"

    def is_like(self, other: Versions) -> bool:
        """Whether both are the same releases; what a wheel of torch was built for is left out."""
        return self.triton == other.triton and self.torch.partition("+")[0] == other.torch.partition("+")[0]


@dataclass(frozen=True)
class Tally:
    """The configs that were tried on a subject."""

    subject: Subject
    outcomes: Mapping[NamedInts, Outcome]

    @property
    def counts(self) -> Counter[Status]:
        """How many configs ended how."""
        return Counter(outcome.status for outcome in self.outcomes.values())

    @property
    def failures(self) -> dict[NamedInts, Outcome]:
        """What failed; wrong bytes first."""
        failed = {
            c: outcome for c, outcome in self.outcomes.items() if outcome.status not in (Status.OK, Status.PRUNED)
        }
        return dict(sorted(failed.items(), key=lambda item: item[1].status is not Status.WRONG))

    @property
    def has_right(self) -> bool:
        """Return True if a config is right, and timed where times are taken, or if none was tried or pruned."""
        return Status.OK in self.counts or not self.outcomes


class Store(Reading):
    """An open results database. A context manager; one thread at a time."""

    def __init__(self, connection: Connection, *, writable: bool) -> None:
        super().__init__(connection, writable=writable)
        self._waiting: list[tuple[int, Row]] = []
        """Trials to be stored with others, each with the id of its sweep."""
        self._waits_s, self._stored_at = 0.0, -math.inf

    @classmethod
    def open(cls, url: str, *, create: bool = False, writable: bool = True) -> Self:
        """Open a plain path or a database URL.

        ``create`` makes a missing database; ``writable=False`` needs no write permission. An older schema is migrated,
        for reading in a temporary copy. Raises DatabaseError if it cannot be used.
        """
        label = database.label(url)
        return cls(retrying.reached(label, lambda: _opened(url, label, create, writable)), writable=writable)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Sweeps

    @writes
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
        """The id of an unfinished sweep of this request, device and ``again``, or of a new one.

        ``uid`` names a sweep that is the same in every database, such as that of published rows.
        """
        device_id = self._writer.device_id(device)
        wanted = (Sweeps.c.request == request, Sweeps.c.device_id == device_id, Sweeps.c.again == again)
        unfinished = select(Sweeps.c.id).where(*wanted, Sweeps.c.finished_at.is_(None)).order_by(Sweeps.c.id.desc())
        if uid is None and (found := self._connection.scalar(unfinished.limit(1))) is not None:
            return int(found)
        values = {"request": request, "device_id": device_id, "command": visible(command), "commit": commit}
        values |= {"timer": timer, "seed": seed, "again": again, "started_at": time.time()}
        return self._writer.id(Sweeps, {"uid": uid or uuid.uuid4().hex}, values)

    @writes
    def finish_sweep(self, sweep_id: int) -> None:
        """Note that a sweep ran to its end: the same request begins a new one from now on."""
        self._connection.execute(update(Sweeps).where(Sweeps.c.id == sweep_id).values(finished_at=time.time()))

    @writes
    def mark_complete(self, sweep_id: int, subject: Subject, planned: int) -> None:
        """Note that all ``planned`` configs of a problem have a row, so that its best is a pick."""
        self._writer.id(Completions, self._writer.swept(sweep_id, subject), {"planned": planned})

    @writes
    def end_finals(self, sweep_id: int, subject: Subject, run: FinalsRun) -> None:
        """Note that a problem's finals ended: from now on they count instead of those before."""
        numbers = {name: value for name, value in vars(run).items() if name != "sweep"}
        self._writer.id(Finals, self._writer.swept(sweep_id, subject), numbers)

    @writes
    def record_reference(self, sweep_id: int, version: KernelVersion, reference: str) -> None:
        """Note the hash of the reference that a sweep compares a kernel version's outputs with."""
        key = {"sweep_id": sweep_id, "version_id": self._writer.version_id(version, version.kernel)}
        self._writer.id(ReferencesChecked, key, {"reference": reference})

    @writes
    def record_check(self, sweep_id: int, version: KernelVersion, check: str) -> None:
        """Note by which check a kernel version's outputs are right in a sweep, as one line: ``exact`` needs none."""
        key = {"sweep_id": sweep_id, "version_id": self._writer.version_id(version, version.kernel)}
        self._writer.id(ChecksUsed, key, {"check": check}, newer={"check": check})

    @writes
    def record_launches(self, documents: Mapping[Problem, str]) -> None:
        """Keep the recorded launch that each problem stands for, as JSON; a newer recording's replaces it."""
        self._of_problems(RecordedLaunches, "document", documents)

    @writes
    def record_flops(self, flops: Mapping[Problem, int]) -> None:
        """Keep the floating-point operations of problems; the newest declaration counts."""
        self._of_problems(ProblemFlops, "flops", flops)

    def _of_problems(self, table: Table, column: str, values: Mapping[Problem, Any]) -> None:
        for problem, value in values.items():
            key = {"problem_id": self._writer.problem_id(problem)}
            self._writer.id(table, key, {column: value}, newer={column: value})

    def record_ceiling(self, sweep_id: int, device: Device, gb_per_s: float) -> None:
        """Keep the copy ceiling measured in a sweep, in GB/s; a later measurement in the same sweep replaces it."""
        self.record_calibration(sweep_id, device, COPY_CEILING, gb_per_s)

    @writes
    def record_calibration(self, sweep_id: int, device: Device, name: str, value: float) -> None:
        """Keep a named value of a device (unit in the name), as measured in a sweep."""
        key = {"sweep_id": sweep_id, "device_id": self._writer.device_id(device), "name": name}
        values = {"value": value, "created_at": time.time()}
        self._writer.id(Calibrations, key, values, newer=values)

    # Rows in

    @writes
    def add(self, sweep_id: int, row: Row, *, once: bool = False) -> bool:
        """Store one trial and commit; False if it is there already. Keeps times to 1e-6 us, samples to 1 ns.

        ``once``: False also if another process, running the same sweep, stored the same status in this round.
        """
        trial = self._writer.trial(sweep_id, row)
        return (self._writer.insert_trials_once([trial]) if once else self._writer.insert(Trials, [trial])[0]) == 1

    @contextlib.contextmanager
    def adding_together(self, within_s: float) -> Iterator[None]:
        """Within this, :meth:`add_soon` stores trials that come within so many seconds in one commit.

        Anything else that is asked or stored meanwhile stores them first, as does the end of this.
        """
        self._waits_s = within_s
        try:
            yield
            self._store_waiting()
        except BaseException:
            with contextlib.suppress(DatabaseError):  # of a lease or a server that is gone: it ends for that
                self._store_waiting()
            raise
        finally:
            self._waits_s = 0.0
            self._waiting.clear()

    def add_soon(self, sweep_id: int, row: Row) -> None:
        """Store one trial unless some process came to the same status in its round; now, or with the next ones."""
        self._waiting.append((sweep_id, row))
        if time.monotonic() - self._stored_at >= self._waits_s:
            self._store_waiting()

    def _store_waiting(self) -> None:
        if self._waiting:
            try:
                self._whole(lambda: None, write=True)
            finally:
                self._waiting.clear()

    def _waiting_stored(self) -> int:
        if self._waiting:
            self._writer.insert_trials_once(starmap(self._writer.trial, self._waiting))
        return len(self._waiting)

    def _forget_waiting(self, count: int) -> None:
        if count:
            del self._waiting[:count]
            self._stored_at = time.monotonic()

    @writes
    def add_many(self, sweep_id: int, rows: Iterable[Row]) -> int:
        """Store many trials in one commit, all or nothing. Returns how many were new."""
        return self._writer.insert(Trials, (self._writer.trial(sweep_id, row) for row in rows))[0]

    @writes
    def add_published(self, rows: Iterable[Published]) -> int:
        """Store what others printed of whole operations in one commit, all or nothing. Returns how many were new."""
        return self._writer.insert(PublishedOperations, (self._writer.published(row) for row in rows))[0]

    def merge(self, other: Store) -> tuple[int, int]:
        """Take over every row of another database, all or nothing. Returns (rows added, rows already there)."""

        def merged() -> tuple[int, int]:
            added, given = self._writer.merge(other._stream)
            if added >= _MANY:
                database.note_many_new_rows(self._connection)
            return added, given - added

        with other._transaction():
            return self._whole(merged, write=True)

    # Records out, beside those of Reading

    def tally(self, subject: Subject) -> Tally:
        """What became of the configs of a problem that was tried."""
        return Tally(subject, self.tried(subject, stage=None))

    @reads
    def tried(
        self,
        subject: Subject,
        *,
        sweep: int | None = None,
        round: int | None = None,
        stage: str | None = "screen",
        reference: str = "",
    ) -> dict[NamedInts, Outcome]:
        """Config -> how its trials ended; see :func:`fp8tune.store.outcomes.tried`."""
        return outcomes.tried(self._connection, subject, outcomes.Wanted(stage, sweep, round), reference)

    @reads
    def commit(self, subject: Subject) -> str:
        """The git commit of the working tree that last timed a problem; empty outside git."""
        return outcomes.commit(self._connection, subject)

    @reads
    def tried_in_rounds(
        self, subject: Subject, *, sweep: int | None = None, reference: str = ""
    ) -> dict[int, dict[NamedInts, Outcome]]:
        """Round of the screen -> what :meth:`tried` says of it: all of them at once."""
        return outcomes.tried_in_rounds(self._connection, subject, outcomes.Wanted("screen", sweep), reference)

    @reads
    def histories(self, known: Mapping[Subject, Collection[NamedInts]]) -> dict[Subject, History]:
        """What :meth:`tried` and :meth:`commit` say of many problems, without the configs that are known of each."""
        return outcomes.histories(self._connection, known, outcomes.Wanted("screen"))

    @reads
    def finals(self, subject: Subject, sweep: int) -> dict[NamedInts, list[process_times.Timed]]:
        """Config -> what a sweep's finals of a problem timed so far, ended or not."""
        return process_times.of_sweep(self._connection, subject, sweep)

    @reads
    def tick_us(self, subject: Subject, sweep: int) -> float | None:
        """The smallest step between two samples of a block in a sweep's finals of a problem; None where unknown."""
        return process_times.tick_us(self._connection, subject, sweep)

    @reads
    def evidence(
        self,
        kernel: str | None = None,
        arch: str | None = None,
        kinds: Collection[Kind] | None = None,
        *,
        keep: Keep | None = None,
        problems: Collection[Problem] | None = None,
        device: Device | None = None,
    ) -> list[Evidence]:
        """One record a candidate that has rows; None means any.

        ``device``: with the software that drove it. ``keep``: which pools to read, see
        :func:`fp8tune.stats.rank.competing`.
        """
        if problems is not None and not are_there(self._connection, kernel, arch, kinds, problems):
            return []
        gathering = Gathering.begin(self._connection, COPY_CEILING)
        wanted = gathering.wanted(kernel, arch, kinds, problems, device)
        if keep is None:
            return gathering.read(wanted)
        return gathering.read_kept(wanted, keep, few=problems is not None)

    @reads
    def pools(
        self,
        kernel: str | None = None,
        arch: str | None = None,
        kinds: Collection[Kind] | None = None,
        *,
        problems: Collection[Problem] | None = None,
        device: Device | None = None,
    ) -> list[ComparableRows]:
        """What :meth:`evidence` would offer to ``keep``: all rows that may be compared with each other, as one."""
        gathering = Gathering.begin(self._connection, COPY_CEILING)
        return gathering.pools(gathering.wanted(kernel, arch, kinds, problems, device))

    @reads
    def timed_with(self) -> list[Versions]:
        """The versions that rows from a GPU were timed with, sorted."""
        query = select(Devices.c.torch, Devices.c.triton).distinct()
        rows = self._having_rows(query, Devices, "device_id", Kind.MEASURED)
        return sorted({Versions(row.torch, row.triton) for row in rows})

    # Picks, as they were decided

    @writes  # makes the tables that are lacking, which it counts
    def rows_now(self) -> str:
        """A text that changes with the rows that picks are decided from."""
        return picks.rows_now(self._connection)

    @writes
    def keep_picks(self, decided: Decided, rows: str, by: str) -> None:
        """Keep these picks and finalists alone. ``rows``: :meth:`rows_now` of before; ``by``: what decided."""
        picks.keep(self._connection, decided, self._writer.decided, rows, by)

    @reads
    def has_kept_picks(self, by: str) -> bool:
        """Whether the kept picks were decided from the rows as they are now, and by this."""
        decided_from = picks.decided_from(self._connection)
        return decided_from[1] == by and decided_from[0] == picks.rows_now(self._connection)

    @reads
    def kept_picks(self) -> Decided:
        """The picks and finalists that were kept, stale or not. Raises DatabaseError where they cannot be read."""
        return picks.kept(self._connection)

    # GPUs that are not relied on, see fp8tune.store.exclusions

    @writes
    def exclude(self, device: Device, worker: str, reason: str) -> None:
        """Note that a GPU is not relied on, which worker found that, and why."""
        exclusions.exclude(self._connection, device, visible(worker), visible(redacted(reason)))

    @writes
    def readmit(self, device: Device) -> None:
        """Forget what was noted of a GPU: it is well now."""
        exclusions.readmit(self._connection, device)

    @reads
    def exclusions(self) -> list[Exclusion]:
        """GPUs that are not relied on, the oldest note first."""
        return exclusions.exclusions(self._connection)

    # Units of work, see fp8tune.store.units

    @writes
    def add_units(self, sweep: QueuedSweep, added: Sequence[Unit]) -> int:
        """Queue a sweep and its units in one commit; what is there already stays. Returns how many units are new."""
        return units.add(self._connection, sweep, added)

    @writes
    def take_unit(
        self,
        device: str,
        worker: str,
        *,
        last_kernel: str = "",
        without: Collection[str] = (),
        lease_s: float = units.LEASE_S,
    ) -> Lease | None:
        """The next unit for a device name, which nobody else gets; None where none is waiting.

        ``worker``: who takes it, as ``fp8tune queue`` shows it. ``last_kernel``: what its last unit was of, which goes
        first among units of one worth. ``without``: keys of sweeps that it cannot do. ``lease_s``: seconds after which
        the unit comes back unless the lease is renewed.
        """
        return units.take(self._connection, device, worker, last_kernel=last_kernel, without=without, lease_s=lease_s)

    @writes
    def renew_lease(self, lease: Lease) -> None:
        """The heartbeat of who has a unit. Raises LeaseLostError where it was given to another."""
        units.renew(self._connection, lease)

    @writes
    def finish_unit(self, lease: Lease, finding: str = "") -> None:
        """Note that a unit is done, and what was found of its problems. Raises LeaseLostError."""
        units.finish(self._connection, lease, visible(redacted(finding)))

    @writes
    def fail_unit(self, lease: Lease, reason: str) -> UnitState:
        """Note that a unit could not be done: it waits for another try, or failed for good. Raises LeaseLostError."""
        return units.fail(self._connection, lease, visible(redacted(reason)))

    @writes
    def give_back_unit(self, lease: Lease, reason: str) -> None:
        """Give a unit back as it was taken: the attempt does not count. Raises LeaseLostError."""
        units.give_back(self._connection, lease, visible(redacted(reason)))

    @writes
    def return_units_of(self, worker: str, reason: str, *, counts: bool = True) -> int:
        """Give back what a worker has that is known to be gone: at once, and not when its lease ends.

        ``counts``: whether its attempt does. Returns how many units there were.
        """
        return units.return_of(self._connection, worker, visible(redacted(reason)), counts=counts)

    @writes
    def return_expired_units(self) -> int:
        """Give back units whose leases have ended, as taking does. Returns how many there were."""
        return units.return_expired(self._connection)

    @writes
    def retry_failed_units(self) -> int:
        """Have units that failed wait again. Returns how many there were."""
        return units.retry_failed(self._connection)

    @writes
    def forget_units(self, sweep_key: str | None = None) -> int:
        """Remove a queued sweep and its units, or all; measured rows stay. Returns how many units went."""
        return units.forget(self._connection, sweep_key)

    @reads
    def count_units(self, device: str | None = None, *, without: Collection[str] = ()) -> Counter[UnitState]:
        """How many units of a device name are in which state, but for those of some sweeps; None means any."""
        return units.counts(self._connection, device, without)

    @reads
    def queue(self, sweep_keys: Collection[str] | None = None) -> Queue:
        """Queued sweeps and their units as they are; None means all."""
        return units.queue(self._connection, sweep_keys)

    @contextlib.contextmanager
    def fenced(self, lease: Lease) -> Iterator[None]:
        """Within this, every write raises LeaseLostError once the unit is no longer the lease's, and stores nothing."""
        self._fence = lambda connection: units.check(connection, lease)
        try:
            yield
        finally:
            self._fence = None

    # Health

    @property
    @reads
    def schema_version(self) -> int:
        """The schema that is read: a database of an older fp8tune is migrated, or a copy of it."""
        return migrations.version(self._connection)

    def integrity(self) -> list[str]:
        """What SQLite finds wrong with the file; empty where all is well or the database is no SQLite file."""
        if self._connection.dialect.name != "sqlite":
            return []
        with self._transaction(), unreadable.any_text(self._connection):
            found = self._connection.exec_driver_sql("PRAGMA integrity_check(10)").scalars().all()
        return [str(line) for line in found if line != "ok"]

    @reads
    def unreadable(self) -> dict[RowName, str]:
        """Every row that cannot be read or is missing, by its table and id, with the reason."""
        return unreadable.find(self._connection)

    @writes
    def forget(self, rows: Iterable[RowName]) -> dict[str, int]:
        """Remove rows and all that refer to them in one commit. Returns how many went from each table."""
        return unreadable.forget(self._connection, rows)

    def _stream(self, table: Table) -> Iterator[Mapping[str, Any]]:
        if not optional.is_there(self._connection, table):
            return
        query = select(*table.c).order_by(table.c.id)
        try:
            for row in self._connection.execute(query, execution_options={"yield_per": _YIELD}).mappings():
                yield dict(row)
            if table in packed.TABLES:
                names = list(table.c.keys())
                for pool in packed.pools(self._connection, select(PackedTrials.c.id), _refuse):
                    for found in pool.rows(table, names):
                        yield dict(zip(names, found, strict=True))
        except ServerError:
            raise
        except DatabaseError:
            if row_and_reason := unreadable.first(self._connection, table):
                raise DatabaseError(
                    f"{row_and_reason}; nothing was imported: run fp8tune forget --unreadable --db THAT_FILE first"
                ) from None
            raise


def _refuse(table: Table, id: int, reason: str) -> None:
    """Raise DatabaseError for a row that cannot be read."""
    raise DatabaseError(reason)


def _opened(url: str, label: str, create: bool, writable: bool) -> Connection:
    """A connection to a database of today's schema. Raises DatabaseError."""
    connection = database.connect(url, create=create, writable=writable)
    wrote = False
    try:
        with database.transaction(connection, write=create and writable):
            is_older = _is_older(connection, label, create=create and writable)
        if writable:
            database.begin_writing(connection)
            wrote = True
        elif is_older:
            connection = database.private_copy(connection, label)
        if is_older:
            with database.transaction(connection, write=True):
                migrations.migrate(connection)
            optional.note_made(connection)
    except BaseException:
        database.close(connection, wrote=wrote)
        raise
    return connection


def _is_older(connection: Connection, label: str, *, create: bool) -> bool:
    """Whether the database lacks migrations; makes the tables of an empty one if told to. Raises DatabaseError."""
    tables = inspect(connection).get_table_names()
    if not tables and create:
        migrations.create(connection)
        return False
    if not tables:
        raise database.EmptyDatabaseError(f"{label} is empty: run fp8tune sweep or fp8tune import to fill it")
    if "meta" not in tables or "trials" not in tables:
        raise DatabaseError(f"{label} is not a results database of fp8tune: give another file with --db")
    optional.note(connection, tables)
    version, ours = migrations.version(connection), migrations.SCHEMA_VERSION
    if version > ours:
        raise DatabaseError(f"{label} was written by a newer fp8tune (schema {version}, this one: {ours}): upgrade")
    return version < ours
