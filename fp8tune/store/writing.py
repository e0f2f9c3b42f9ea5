"""The statements behind :class:`fp8tune.store.results.Store` that store: what trials share is found or inserted once.

A table's unique columns identify its rows, never an id. So the same code stores, continues a sweep and merges.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

from sqlalchemy import Connection, Insert, Table, UniqueConstraint, bindparam, insert, select, update
from sqlalchemy.dialects import sqlite

from fp8tune.errors import DatabaseError
from fp8tune.records import Device, Finalist, KernelVersion, NamedInts, Pick, Problem, Published, Row, Subject
from fp8tune.store import packed
from fp8tune.store.columns import UNSTATED, pack_samples
from fp8tune.store.schema import (
    FACTS,
    METADATA,
    Candidates,
    ChecksUsed,
    Codes,
    Configs,
    Devices,
    KernelVersions,
    LookupKeys,
    PackedTrials,
    ProblemFlops,
    Problems,
    PublishedOperations,
    RecordedLaunches,
    Trials,
    Workers,
)

_ROWS: tuple[Table, ...] = (Trials, PublishedOperations)
"""Tables of what was timed, here or by others: what an import counts."""

_SHARED = [table for table in METADATA.sorted_tables if "id" in table.c and table not in (*_ROWS, PackedTrials)]
"""Tables that other tables refer to, or that say something once; each after those it refers to."""

_DECLARED = (KernelVersions, RecordedLaunches, ProblemFlops, ChecksUsed)
"""Tables whose rows may say something else in another database."""

_CHUNK = 1000
_COUNTED = {"preserve_rowcount": True}  # how many rows an insert really stored, from every driver

_REMEMBERED = 50_000  # ids kept in memory: enough for any sweep, bounded for an import of millions

Values = Mapping[str, Any]
_NOTHING: Values = {}


class Writer:
    """Stores records through one connection, inside transactions that the store opens. Remembers ids between them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._ids: dict[Hashable, int] = {}
        self._packed: set[packed.Ids] | None = None

    def forget(self) -> None:
        """Drop remembered ids: after a transaction was rolled back they may name rows that are not there."""
        self._ids.clear()
        self._packed = None

    def device_id(self, device: Device) -> int:
        """The id of a device, inserted where there is none; likewise the methods below."""
        return self._known(device, lambda: self.id(Devices, vars(device)))

    def problem_id(self, problem: Problem) -> int:
        """A problem; its shape is found in any order of its names."""
        key = vars(problem) | {"canonical": problem.shape.canonical}
        shape = {"shape": key.pop("shape")}
        return self._known(problem, lambda: self.id(Problems, key, shape))

    def version_id(self, version: KernelVersion | None, kernel: str) -> int:
        """A kernel version. The newest declaration of a source wins: a grid may change without the code."""
        wanted = version or KernelVersion(kernel, "")
        declared = dict(vars(wanted))
        key = {name: declared.pop(name) for name in ("kernel", "source_hash")}
        return self._known(wanted, lambda: self.id(KernelVersions, key, declared, newer=declared))

    def swept(self, sweep_id: int, subject: Subject) -> Values:
        """What names a problem in a sweep."""
        version_id = self.version_id(subject.version, subject.problem.kernel)
        ids = {"device_id": self.device_id(subject.device), "problem_id": self.problem_id(subject.problem)}
        return {"sweep_id": sweep_id, "version_id": version_id, **ids}

    def trial(self, sweep_id: int, row: Row) -> Values:
        """A trial's columns, with all that it refers to stored."""
        outcome = row.outcome
        return {
            "candidate_id": self._candidate_id(row),
            "sweep_id": sweep_id,
            "stage": row.stage,
            "round": row.round,
            "worker_id": self.id(Workers, {"process": row.process, "commit": row.commit}),
            "position": row.position,
            "status": str(outcome.status),
            "reason": outcome.reason,
            "time_us": None if outcome.time_us is None else round(outcome.time_us, 6),
            "tick_us": outcome.tick_us,
            **vars(outcome.telemetry),
            "created_at": time.time(),
            "samples": pack_samples(outcome.samples_us),
        }

    def published(self, row: Published) -> Values:
        """A published row's columns, with its problem and device stored."""
        problem = Problem(row.operation, row.shape, UNSTATED, fp8_dtype=UNSTATED, scale_mode=UNSTATED)
        values = {name: value for name, value in vars(row).items() if name in PublishedOperations.c}
        return {"problem_id": self.problem_id(problem), "device_id": self.device_id(row.device), **values}

    def insert(self, table: Table, rows: Iterable[Values]) -> tuple[int, int]:
        """Store rows that are not there yet. Returns (stored, given)."""
        stored = given = 0
        remaining = iter(rows)
        while chunk := list(itertools.islice(remaining, _CHUNK)):
            result = self._connection.execute(self._statement(table), chunk, execution_options=_COUNTED)
            stored, given = stored + result.rowcount, given + len(chunk)
        return stored, given

    def insert_trials_once(self, trials: Iterable[Values]) -> int:
        """Store trials, but for those in whose round of the sweep some process came to the same status."""
        return self._connection.execute(_insert_once(), list(trials), execution_options=_COUNTED).rowcount

    def merge(self, read: Callable[[Table], Iterator[Values]]) -> tuple[int, int]:
        """Take over another database, read table by table. Returns (rows stored, rows given)."""
        ids: dict[str, dict[int, int]] = {}
        for table in _SHARED:
            ids[table.name] = {row["id"]: self._merged_id(table, row, ids) for row in read(table)}
        counts = [self.insert(table, (_translated(table, row, ids) for row in read(table))) for table in _ROWS]
        return sum(stored for stored, _ in counts), sum(given for _, given in counts)

    def id(self, table: Table, key: Values, rest: Values = _NOTHING, newer: Values | None = None) -> int:
        """The id of the row with this unique key, inserted with ``rest`` if there is none.

        If there is one, ``newer`` replaces what it says (None leaves it).
        """
        if newer:
            return self._find_or_insert(table, key, rest, newer)
        return self._known((table, *key.values()), lambda: self._find_or_insert(table, key, rest, {}))

    def _known(self, name: Hashable, find: Callable[[], int]) -> int:
        if name not in self._ids:
            if len(self._ids) >= _REMEMBERED:
                self.forget()
            self._ids[name] = find()
        return self._ids[name]

    def _find_or_insert(self, table: Table, key: Values, rest: Values, newer: Values) -> int:
        result = self._connection.execute(self._statement(table), {**key, **rest}, execution_options=_COUNTED)
        if result.rowcount == 1 and result.inserted_primary_key:
            return int(result.inserted_primary_key[0])
        query = select(table.c.id).where(*(table.c[name] == value for name, value in key.items()))
        found = int(self._connection.execute(query).scalar_one())
        if changes := {name: value for name, value in newer.items() if value is not None}:
            self._connection.execute(update(table).where(table.c.id == found).values(**changes))
        return found

    def _candidate_id(self, row: Row) -> int:
        name = (row.problem, row.config, row.version, row.device, row.kind, row.source, row.note)
        return self._known(name, lambda: self._find_candidate(row))

    def decided(self, of: Pick | Finalist) -> Values:
        """The columns that say what a pick or finalist is about."""
        found = dict(self._candidate_key(of))
        if isinstance(of, Pick):
            found["lookup_key_id"] = self._ints_id(LookupKeys, of.lookup_key)
            for name, config in (("runner_up_id", of.runner_up), ("today_id", of.today)):
                found[name] = None if config is None else self._ints_id(Configs, config)
        return found

    def _candidate_key(self, of: Row | Pick | Finalist) -> Values:
        return {
            "problem_id": self.problem_id(of.problem),
            "config_id": self._ints_id(Configs, of.config),
            "version_id": self.version_id(of.version, of.problem.kernel),
            "device_id": self.device_id(of.device),
            "kind": str(of.kind),
            "source": of.source,
            "note": of.note,
        }

    def _find_candidate(self, row: Row) -> int:
        key = self._candidate_key(row)
        self._unpack(key)
        lookup_key_id = self._ints_id(LookupKeys, row.lookup_key)
        facts = {name: getattr(row.outcome.facts, name) for name in FACTS} | {"bytes_moved": row.bytes_moved}
        newer = facts if row.lookup_key is None else facts | {"lookup_key_id": lookup_key_id}
        candidate = self.id(Candidates, key, facts | {"lookup_key_id": lookup_key_id}, newer)
        if (code := row.outcome.facts.code) is not None:
            self.id(Codes, {"candidate_id": candidate}, vars(code), newer=vars(code))
        return candidate

    def _unpack(self, candidate: Values) -> None:
        """Make plain rows of the packed trials that a candidate belongs to."""
        of = PackedTrials.c
        if self._packed is None:  # what is packed never grows while the database is open
            query = select(*(of[name] for name in packed.POOL))
            self._packed = {(row[0], row[1], row[2], row[3]) for row in self._connection.execute(query)}
        pool = (candidate["problem_id"], candidate["version_id"], candidate["device_id"], candidate["kind"])
        if pool in self._packed:
            same = (of[name] == value for name, value in zip(packed.POOL, pool, strict=True))
            packed.unpack(self._connection, select(of.id).where(*same))
            self._packed.remove(pool)

    def _ints_id(self, table: Table, items: NamedInts | None) -> int:
        return self.id(table, {"canonical": UNSTATED if items is None else items.canonical}, {"items": items})

    def _merged_id(self, table: Table, row: Values, ids: Mapping[str, Mapping[int, int]]) -> int:
        values = _translated(table, row, ids)
        if table is Candidates:
            self._unpack(values)
        key = {name: values.pop(name) for name in _unique_names(table)}
        newer = {name: values[name] for name in FACTS} if table is Candidates else None
        if table in _DECLARED and self._yields_to(table, key, values):
            newer = values
        return self.id(table, key, values, newer)

    def _yields_to(self, table: Table, key: Values, declared: Values) -> bool:
        """Whether what another database declares replaces what ours does: the same, whichever is merged into which."""
        columns = [table.c[name] for name in declared]
        same = (table.c[name] == value for name, value in key.items())
        ours = self._connection.execute(select(*columns).where(*same)).first()
        return ours is not None and _text(declared.values()) > _text(ours)

    def _statement(self, table: Table) -> Insert:
        return insert_ignoring(table, self._connection.dialect.name)


@functools.cache
def insert_ignoring(table: Table, dialect: str) -> Insert:
    """Insert, silently leaving out what is there already."""
    if dialect == "sqlite":
        return sqlite.insert(table).on_conflict_do_nothing()
    from sqlalchemy.dialects import postgresql  # imports asyncio, which nobody else needs

    return postgresql.insert(table).on_conflict_do_nothing()


@functools.cache  # the making costs more than a trial
def _insert_once() -> Insert:
    columns = [column for column in Trials.c if column.name != "id"]
    given = {column.name: bindparam(column.name, type_=column.type) for column in columns}
    same = [Trials.c.candidate_id, Trials.c.sweep_id, Trials.c.stage, Trials.c.round, Trials.c.status]
    there = select(Trials.c.id).where(*(column == given[column.name] for column in same)).exists()
    return insert(Trials).from_select([*given], select(*given.values()).where(~there))


def _text(values: Iterable[Any]) -> str:
    return repr([value.canonical if isinstance(value, NamedInts) else value for value in values])


def _unique_names(table: Table) -> list[str]:
    """The columns that identify a row in every copy of the database."""
    constraint = next(item for item in table.constraints if isinstance(item, UniqueConstraint))
    return [column.name for column in constraint.columns]


def _translated(table: Table, row: Values, ids: Mapping[str, Mapping[int, int]]) -> dict[str, Any]:
    """Another database's row without its own id and with our ids of what it refers to."""
    values = {name: value for name, value in row.items() if name != "id"}
    for column in table.c:
        for foreign in column.foreign_keys:
            ours = ids[foreign.column.table.name]
            if values[column.name] not in ours:
                raise DatabaseError(
                    f"{table.name}:{row['id']} refers to a row that is missing; nothing was imported: "
                    "run fp8tune forget --unreadable --db THAT_FILE first"
                )
            values[column.name] = ours[values[column.name]]
    return values
