"""Checked rows: what a database says, verified by checksums and rules for names, and the records that it makes."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Table, Text, select

from fp8tune.errors import DatabaseError
from fp8tune.records import Device, FinalsRun, KernelVersion, Kind, Problem
from fp8tune.stats.study import Study
from fp8tune.store import schema as db
from fp8tune.store.texts import check_text, parse_axes, parse_named_ints


def checked_rows(
    connection: Connection,
    table: Table,
    blocks: Mapping[int, list[Any]] | None = None,
    studies: Sequence[int] | None = None,
) -> list[Any]:
    """Return the rows of a table. Raises DatabaseError for one that was changed by another program.

    Args:
        connection: A transaction of the database.
        table: A table with checksums.
        blocks: Blocks of each result, which its checksum covers.
        studies: Studies to read; None for all.
    """
    names = list(db.checked_columns(table))
    others = [name for name in ("id", "finished_at") if name in table.c]
    texts = [(place, name) for place, name in enumerate(names) if isinstance(table.c[name].type, Text)]
    query = select(*(table.c[name] for name in (*names, "crc", *others))).order_by(*table.primary_key)
    if studies is not None:
        query = query.where(table.c.study_id.in_(studies))
    rows, count = connection.execute(query).all(), len(names)
    for row in rows:
        # The id of a result comes last: SQLAlchemy looks up a name for each row.
        covered = row[:count] if blocks is None else (*row[:count], sorted(blocks.get(row[-1], ())))
        if zlib.crc32(repr(covered).encode()) != row[count]:
            raise damaged(table.name, getattr(row, "id", ""), "its checksum differs")
        for place, name in texts:  # a file that another program wrote need not have our constraints
            if row[place]:
                check_text(name, row[place])
    return list(rows)


def damaged(table: str, id: object, fault: str) -> DatabaseError:
    """Return the error for a row that no program of ours wrote so."""
    where = f"{table}:{id}" if id != "" else f"a row of {table}"
    remedy = "restore the database from git or a copy"
    if id != "" and table in ("results", "studies"):
        remedy += f", or run fp8tune db forget {where}"
    return DatabaseError(f"{where} is damaged, {fault[:100]}: {remedy}")


@contextlib.contextmanager
def reported_damage(table: str) -> Iterator[None]:
    """Report values that no program of ours writes, and references to missing rows."""
    try:
        yield
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        is_missing = isinstance(error, KeyError)
        raise damaged(table, "", f"it refers to row {error}, which is missing" if is_missing else str(error)) from error


def by_id(connection: Connection, table: Table) -> dict[int, Any]:
    """Return the rows of a table by their ids."""
    return {row.id: row for row in checked_rows(connection, table)}


def record(make: type[Any], row: Any, **values: Any) -> Any:
    """Return the record with the values of a row, of which ``values`` take the place of columns."""
    return make(**values, **{name: getattr(row, name) for name in make.__dataclass_fields__ if name not in values})


def problem_of(row: Any) -> Problem:
    """Return the problem of a row."""
    problem: Problem = record(Problem, row, shape=parse_named_ints(row.shape))
    return problem


class Names:
    """All rows that results belong to, by id. Small beside the results, so they are read whole and checked."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.sweeps, self.processes = by_id(connection, db.Sweeps), by_id(connection, db.Processes)
        self.rows, versions = by_id(connection, db.Studies), by_id(connection, db.Versions)
        problems, self.runs = by_id(connection, db.Problems), dict[int, list[Any]]()
        with reported_damage("studies"):
            began = {id: (sweep.started_at, sweep.uid) for id, sweep in self.sweeps.items()}
            for run in sorted(checked_rows(connection, db.StudyRuns), key=lambda run: began[run.sweep_id]):
                self.runs.setdefault(run.study_id, []).append(run)
            self.configs = {id: parse_named_ints(row.text) for id, row in by_id(connection, db.Configs).items()}
            self.devices: dict[int, Device] = {
                id: record(Device, row) for id, row in by_id(connection, db.Devices).items()
            }
            self.problems = {id: problem_of(row) for id, row in problems.items()}
            # None for rows of another implementation
            self.versions = {id: self._version(row) if row.source_hash else None for id, row in versions.items()}
            self.studies = {
                id: Study(
                    problem=self.problems[row.problem_id],
                    device=self.devices[row.device_id],
                    kind=Kind(row.kind),
                    version=self.versions[row.version_id],
                    lookup_key=None if row.lookup_key is None else parse_named_ints(row.lookup_key),
                    bytes_moved=row.bytes_moved,
                    flops=problems[row.problem_id].flops,
                    complete=row.kind == Kind.PUBLISHED
                    or any(run.planned is not None for run in self.runs.get(id, ())),
                    planned=max((run.planned or 0 for run in self.runs.get(id, ())), default=0),
                    has_finals=self.finals(id) is not None,
                    newest=row.timed_at,
                )
                for id, row in self.rows.items()
            }

    def _version(self, row: Any) -> KernelVersion:
        default, axes = self.configs[row.default_id], parse_axes(row.axes)
        version: KernelVersion = record(KernelVersion, row, default=default, axes=axes, key=tuple(row.key.split()))
        return version

    def finals(self, study: int) -> tuple[int, FinalsRun] | None:
        """Return the sweep whose finals count, and its bands: the last that ended."""
        for run in reversed(self.runs.get(study, ())):
            if run.tie_band is not None:
                uid = self.sweeps[run.sweep_id].uid
                return run.sweep_id, FinalsRun(uid, run.tie_band, run.keep_band, run.floor_us or 0.0)
        return None

    def matching(
        self,
        kernel: str | None = None,
        arch: str | None = None,
        kinds: Collection[Kind] | None = None,
        *,
        problems: Collection[Problem] | None = None,
        device: Device | None = None,
    ) -> dict[int, Study]:
        """Return the studies of a kernel, an arch and kinds that meet conditions, by id; None means any."""
        problems = None if problems is None else set(problems)
        return {
            id: study
            for id, study in self.studies.items()
            if (kernel is None or study.problem.kernel == kernel)
            and (arch is None or study.device.arch == arch)
            and (kinds is None or study.kind in kinds)
            and (problems is None or study.problem in problems)
            and (device is None or study.device == device)
        }
