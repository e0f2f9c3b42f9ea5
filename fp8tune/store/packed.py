"""Finished problems as ``fp8tune compact`` leaves them: one row of ``packed_trials`` for thousands of others.

Trials that may be compared (one problem, kernel version, device and kind) are packed together or not at all. Readers
take them from here beside the plain rows; a writer unpacks them first (:func:`unpack`), ids included. The samples of
the screen are the one thing that packing leaves out.

``columns`` is packed by :func:`fp8tune.store.packing.pack`: each column of ``candidates`` as ``candidates.NAME``, of
``codes`` as ``codes.NAME``, of ``trials`` as ``trials.NAME``, in the order of the ids. ``samples`` has a block for each
trial that is not of the screen, in the same order.
"""

from __future__ import annotations

import functools
import math
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from sqlalchemy import Column, Connection, Select, Table, delete, insert, select

from fp8tune.errors import DatabaseError
from fp8tune.records import Code, Status
from fp8tune.store import optional
from fp8tune.store.columns import pack_samples, unpack_samples
from fp8tune.store.packing import DAMAGED, Columns, pack, pack_blocks, unpack_blocks
from fp8tune.store.postgresql import ServerError
from fp8tune.store.schema import Candidates, Codes, PackedTrials, Trials

Ids = tuple[int, int, int, str]
"""The ids of a problem, a kernel version and a device, and a kind."""

POOL = ("problem_id", "version_id", "device_id", "kind")

Note = Callable[[Table, int, str], None]
"""Takes a row that cannot be read: its table, its id, the reason."""

TABLES = (Candidates, Codes, Trials)
"""What is packed, each table after those that it refers to."""

_IN_ORDER = [column.name for index in Trials.indexes for column in index.columns]
_CHUNK = 500
_SAMPLES = Trials.c.samples.name


def columns_of(table: Table) -> list[str]:
    """The columns of a table that ``columns`` holds."""
    shared = POOL if table is Candidates else (_SAMPLES,)
    return [column.name for column in table.c if column.name not in shared]


@functools.cache
def _record(*names: str) -> Any:
    return namedtuple("Trial", names)


class Pool:
    """The rows of one packed row, column by column. Everything raises DatabaseError for what plain rows may not say."""

    def __init__(self, row: Any) -> None:
        self.id: int = row.id
        self.ids: Ids = (row.problem_id, row.version_id, row.device_id, row.kind)
        self._columns = Columns(row.columns)
        self._samples: bytes = row.samples
        self._values: dict[str, list[Any]] = {}

    def values(self, table: Table, name: str) -> list[Any]:
        """One column, checked as that of plain rows is."""
        if table is Candidates and name in POOL:
            return [self.ids[POOL.index(name)]] * len(self.values(table, "id"))
        if table is Trials and name == _SAMPLES:
            return list(map(pack_samples, self.samples()))
        key = f"{table.name}.{name}"
        if key not in self._values:
            self._values[key] = self._checked(table.c[name], key)
        return self._values[key]

    def _checked(self, column: Column[Any], key: str) -> list[Any]:
        if key not in self._columns.names and column.nullable:  # a column that is newer than the row
            return [None] * len(self.values(column.table, "id"))
        found, extremes = self._columns.with_extremes(key)
        expected = (float, int) if (kind := column.type.python_type) is float else kind
        for value in extremes:
            if not isinstance(value, expected):
                raise DatabaseError(DAMAGED)
            if check := getattr(column.type, "process_result_value", None):
                check(value, None)
        if not column.nullable and None in found:
            raise DatabaseError(DAMAGED)
        return found

    def rows(self, table: Table, names: Sequence[str]) -> list[tuple[Any, ...]]:
        """Some columns of a table, a tuple a row, by rising id."""
        try:
            return list(zip(*(self.values(table, name) for name in names), strict=True))
        except ValueError:
            raise DatabaseError(DAMAGED) from None

    def samples(self) -> list[tuple[float, ...]]:
        """The samples of every trial in us: none of the screen."""
        stages = self.values(Trials, "stage")
        if not self._samples:
            return [()] * len(stages)
        blocks = unpack_blocks(self._samples)
        if len(blocks) != sum(stage != "screen" for stage in stages):
            raise DatabaseError(DAMAGED)
        rest = iter(blocks)
        return [() if stage == "screen" else next(rest) for stage in stages]

    def joined(self, *, samples: bool = False) -> list[Any]:
        """Each trial with what its candidate says, under the names of the columns; ``samples_us`` if told to."""
        columns = [column.name for column in Candidates.c if column.name != "id"]
        of = {row[0]: row[1:] for row in self.rows(Candidates, ["id", *columns])}
        names = columns_of(Trials)
        place = names.index("candidate_id")
        record = _record(*names, *columns, "samples_us")
        rows = self.rows(Trials, names)
        timed = self.samples() if samples else [()] * len(rows)
        try:
            return [record(*row, *of[row[place]], mine) for row, mine in zip(rows, timed, strict=True)]
        except KeyError:
            raise DatabaseError(DAMAGED) from None

    def fastest_mb_per_s(self, most: float = math.inf) -> float | None:
        """The highest rate of a candidate that is not above ``most``: bytes moved over the mean of its blocks."""
        moved = dict(self.rows(Candidates, ("id", "bytes_moved")))
        blocks: dict[int, list[float]] = {}
        for id, _, _, status, time_us, *_ in sorted(self.rows(Trials, _IN_ORDER)):
            if status == Status.OK and time_us:
                blocks.setdefault(id, []).append(time_us)
        # as SQL adds them up, in this order: of plain rows it comes out the same
        rates = (moved[id] / (sum(times_us) / len(times_us)) for id, times_us in blocks.items() if moved[id])
        return max((rate for rate in rates if rate <= most), default=None)

    def codes(self) -> dict[int, Code]:
        """What is known of the machine code of candidates, by their id."""
        names = list(Code.__dataclass_fields__)
        return {id: Code(*said) for id, *said in self.rows(Codes, ["candidate_id", *names])}

    def check(self) -> None:
        """Raise DatabaseError for a row that cannot be unpacked."""
        known = set(self.values(Candidates, "id"))
        for table in TABLES:
            self.rows(table, columns_of(table))
        self.samples()
        if not known.issuperset(self.values(Trials, "candidate_id") + self.values(Codes, "candidate_id")):
            raise DatabaseError(DAMAGED)

    def refers_to(self, table: Table) -> set[int]:
        """The ids of the rows of a table that its rows refer to, or that are packed in it."""
        if table in TABLES:
            return set(self.values(table, "id"))
        found: set[int] = set()
        for ours in TABLES:
            for column in ours.c:
                if any(foreign.column.table is table for foreign in column.foreign_keys):
                    found.update(self.values(ours, column.name))
        return found


def is_empty(connection: Connection) -> bool:
    """Whether nothing is packed."""
    if not optional.is_there(connection, PackedTrials):
        return True
    return connection.scalar(select(PackedTrials.c.id).limit(1)) is None


def pools(connection: Connection, wanted: Select[Any], note: Note, *, check: bool = True) -> Iterator[Pool]:
    """The packed pools whose ids a query selects, by rising id; those that cannot be read are noted and left out.

    Without ``check`` reading a column may still raise DatabaseError: unpacking all takes longer than reading some.
    """
    if is_empty(connection):
        return
    for id in connection.execute(wanted.order_by(PackedTrials.c.id)).scalars().all():
        try:
            row = connection.execute(select(*PackedTrials.c).where(PackedTrials.c.id == id)).one()
            pool = Pool(row)
            if check:
                pool.check()
        except ServerError:
            raise
        except DatabaseError as error:
            note(PackedTrials, id, str(error))
            continue
        yield pool


def packed(connection: Connection, ids: Ids) -> dict[str, Any]:
    """A pool's plain rows as a row of ``packed_trials``; its id is that of the first candidate.

    Raises DatabaseError for rows that cannot be read, or that would not be read back as they are.
    """
    columns: dict[str, list[Any]] = {}
    mine = select(Candidates.c.id).where(*(Candidates.c[name] == value for name, value in zip(POOL, ids, strict=True)))
    for table in TABLES:
        of = table.c.id if table is Candidates else table.c.candidate_id
        names = columns_of(table)
        query = select(*(table.c[name] for name in names)).where(of.in_(mine)).order_by(table.c.id)
        found = connection.execute(query).all()
        columns |= {f"{table.name}.{name}": [row[at] for row in found] for at, name in enumerate(names)}
    timed = select(Trials.c.samples).where(Trials.c.candidate_id.in_(mine), Trials.c.stage != "screen")
    blocks = [unpack_samples(blob) for blob in connection.execute(timed.order_by(Trials.c.id)).scalars()]
    ours = SimpleNamespace(columns=pack(columns), samples=pack_blocks(blocks) if any(blocks) else b"")
    pool = Pool(SimpleNamespace(**vars(ours), id=columns["candidates.id"][0], **dict(zip(POOL, ids, strict=True))))
    moments = zip(columns["trials.time_us"], columns["trials.created_at"], strict=True)
    return {
        "id": pool.id,
        **dict(zip(POOL, ids, strict=True)),
        "candidates": len(columns["candidates.id"]),
        "trials": len(columns["trials.id"]),
        "last_candidate": columns["candidates.id"][-1],
        "newest": max((created_at for time_us, created_at in moments if time_us is not None), default=None),
        "fastest_mb_per_s": pool.fastest_mb_per_s(),
        **vars(ours),
    }


def _say_nothing(table: Table, id: int, reason: str) -> None:
    """What cannot be read stays packed: readers name it."""


def unpack(connection: Connection, wanted: Select[Any]) -> int:
    """Make plain rows again of packed ones, whose ids a query selects; within the caller's transaction. How many."""
    number = 0
    for pool in pools(connection, wanted, _say_nothing):
        if connection.dialect.name == "sqlite":
            # what refers to a missing row can be removed after it was unpacked, until the commit
            connection.exec_driver_sql("PRAGMA defer_foreign_keys=ON")
        for table in TABLES:
            names = list(table.c.keys())
            rows = [dict(zip(names, row, strict=True)) for row in pool.rows(table, names)]
            for start in range(0, len(rows), _CHUNK):
                connection.execute(insert(table), rows[start : start + _CHUNK])
        connection.execute(delete(PackedTrials).where(PackedTrials.c.id == pool.id))
        number += 1
    return number


def unpack_referring(connection: Connection, table: Table, ids: Iterable[int]) -> None:
    """Unpack what holds some rows of a table, or refers to them."""
    gone = set(ids)
    every = pools(connection, select(PackedTrials.c.id), _say_nothing)
    holding = [pool.id for pool in every if gone & pool.refers_to(table)]
    for id in holding:
        unpack(connection, select(PackedTrials.c.id).where(PackedTrials.c.id == id))
