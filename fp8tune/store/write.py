"""Writing: batched, idempotent, and one transaction per batch."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import operator
import os.path
import time
import uuid
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Select, Table, bindparam, delete, func, insert, literal, select, update

from fp8tune.errors import DatabaseError
from fp8tune.records import (
    ClockLimits,
    Device,
    FinalsRun,
    KernelVersion,
    Kind,
    NamedInts,
    Problem,
    Published,
    Row,
    Subject,
)
from fp8tune.redaction import redacted
from fp8tune.store import schema as db
from fp8tune.store.database import Database, insert_ignoring, writes
from fp8tune.store.schema import defaults, row_checksum, unique_names
from fp8tune.store.texts import UNSTATED
from fp8tune.store.trials import STAGES, Trial, chunks, read_trials, summary
from fp8tune.text import visible

COPY_CEILING = "copy_ceiling_gb_per_s"
"""Calibration of a device-to-device copy, read plus written."""

_COUNTED = {"preserve_rowcount": True}  # the number of rows an insert really stored, from every driver
_DETAILS = ("samples", *db.TELEMETRY)

Values = Mapping[str, Any]


class Writing(Database):
    """Methods that store records. Unique columns identify rows, so writing twice adds nothing."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._known: dict[str, dict[tuple[object, ...], int]] = {}
        """Ids of rows that this transaction named already."""
        self._facts: dict[tuple[int, str, str], dict[str, str]] = {}
        self._waiting: list[tuple[int, Row]] = []
        self._waits_s, self._stored_at = 0.0, -math.inf
        self._is_merging = False

    def _begin(self, *, write: bool) -> None:
        self._known.clear()
        super()._begin(write=write)

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
        limits: ClockLimits = ClockLimits(),
    ) -> int:
        """Return the id of an unfinished sweep of this request, device, ``again`` and limits, or of a new one.

        ``uid`` names a sweep that is the same in every database, such as that of published rows.
        """
        of, device_id = db.Sweeps.c, self._id(db.Devices, vars(device))
        same = (of.request == request, of.device_id == device_id, of.again == int(again), of.finished_at.is_(None))
        unfinished = select(of.id, *(of[name] for name in vars(limits))).where(*same).order_by(of.id.desc())
        for row in self._connection.execute(unfinished) if uid is None else ():
            if not ClockLimits(*row[1:]).difference(limits):
                return int(row.id)
        values = {"device_id": device_id, "request": request, "command": stored_command(command), "git_commit": commit}
        values |= {"timer": timer, "seed": seed, "again": int(again), "started_at": time.time()}
        return self._id(db.Sweeps, {"uid": uid or uuid.uuid4().hex, **values, **vars(limits)})

    @writes
    def finish_sweep(self, sweep_id: int) -> None:
        """Note that a sweep ran to its end: the same request begins a new one from now on."""
        finished = update(db.Sweeps).where(db.Sweeps.c.id == sweep_id)
        self._connection.execute(finished.values(finished_at=time.time()))

    @writes
    def mark_complete(self, sweep_id: int, subject: Subject, planned: int) -> None:
        """Note that all planned configs of a problem have a row, so that the best of them is a pick."""
        study = self._study(subject)
        self._run_of(sweep_id, study, planned=planned, **self._facts_of(sweep_id, subject.version))
        if len(self._limits_of(study)) > 1:
            self.summarize(self._connection.scalars(select(db.Results.c.id).where(db.Results.c.study_id == study)))
        self._update_studies([study])

    def _limits_of(self, study: int) -> list[ClockLimits]:
        """Return the different limits at which a study was timed, the newest last."""
        columns = [db.Sweeps.c[name] for name in vars(ClockLimits())]
        query = select(*columns).join(db.StudyRuns, db.StudyRuns.c.sweep_id == db.Sweeps.c.id)
        query = query.where(db.StudyRuns.c.study_id == study).order_by(db.Sweeps.c.started_at.desc())
        newest_first = dict.fromkeys(ClockLimits(*row) for row in self._connection.execute(query))
        return [*newest_first][::-1]

    @writes
    def end_finals(self, sweep_id: int, subject: Subject, run: FinalsRun) -> None:
        """Note that the finals of a problem ended: from now on they count, not earlier ones."""
        study = self._study(subject)
        self._run_of(sweep_id, study, **{name: value for name, value in vars(run).items() if name != "sweep"})
        self._update_studies([study])

    def record_reference(self, sweep_id: int, version: KernelVersion, reference: str) -> None:
        """Note the hash of the reference that a sweep compares the outputs of a kernel version with."""
        self._facts_of(sweep_id, version)["reference"] = reference

    def record_check(self, sweep_id: int, version: KernelVersion, check: str) -> None:
        """Note the check by which the outputs of a kernel version are right in a sweep."""
        self._facts_of(sweep_id, version)["check_used"] = check

    @writes
    def record_launches(self, documents: Mapping[Problem, str]) -> None:
        """Keep the recorded launch that each problem stands for, as JSON; a newer recording replaces it."""
        for problem, document in documents.items():
            self._replace(db.RecordedLaunches, {"problem_id": self._problem(problem), "document": document})

    @writes
    def record_flops(self, flops: Mapping[Problem, int]) -> None:
        """Keep the floating-point operations of problems; the newest declaration counts."""
        for problem, count in flops.items():
            self._problem(problem, flops=count)

    def record_ceiling(self, sweep_id: int, device: Device, gb_per_s: float) -> None:
        """Keep the copy rate measured in a sweep; a later measurement in the same sweep replaces it."""
        self.record_calibration(sweep_id, device, COPY_CEILING, gb_per_s)

    @writes
    def record_calibration(self, sweep_id: int, device: Device, name: str, value: float) -> None:
        """Keep a named value measured of the sweep's device; the unit is in the name."""
        row = {"sweep_id": sweep_id, "name": name, "value": float(value), "created_at": time.time()}
        self._id(db.Calibrations, row, ("value", "created_at"))

    # Rows

    @writes
    def add(self, sweep_id: int, row: Row, *, once: bool = False) -> bool:
        """Store one trial and commit; False if it is there already.

        ``once``: False also if another process of the same sweep stored the same status in this round.
        """
        return self._store_rows([(sweep_id, row)], once=once) == 1

    @writes
    def add_many(self, sweep_id: int, rows: Iterable[Row]) -> int:
        """Store many trials in one commit, all or nothing. Returns how many were new."""
        return self._store_rows([(sweep_id, row) for row in rows], once=False)

    @contextlib.contextmanager
    def adding_together(self, within_s: float) -> Iterator[None]:
        """Store the trials of :meth:`add_soon` that come within so many seconds in one commit."""
        self._waits_s = within_s
        try:
            yield
            self.flush()
        except BaseException:
            with contextlib.suppress(DatabaseError):  # of a lease or a server that is gone, which it ends for
                self.flush()
            raise
        finally:
            self._waits_s = 0.0
            self._waiting.clear()

    def add_soon(self, sweep_id: int, row: Row) -> None:
        """Store one trial now or with the next ones, unless a process came to the same status in its round."""
        self._waiting.append((sweep_id, row))
        if time.monotonic() - self._stored_at >= self._waits_s:
            self.flush()

    def flush(self) -> None:
        """Store all waiting trials."""
        if self._waiting and self._open is None:
            waiting, self._waiting = self._waiting, []
            self.run(lambda: self._store_rows(waiting, once=True), write=True)
            self._stored_at = time.monotonic()

    def run(self, work: Any, *, write: bool = False) -> Any:
        """Run a transaction as :meth:`Database.run` does, after all waiting trials are stored."""
        self.flush()
        return super().run(work, write=write)

    @writes
    def add_published(self, rows: Iterable[Published]) -> int:
        """Store whole operations as others printed them. Returns how many were new."""
        values = []
        for row in rows:
            problem = Problem(row.operation, row.shape, UNSTATED, fp8_dtype=UNSTATED, scale_mode=UNSTATED)
            ids = {"problem_id": self._problem(problem), "device_id": self._id(db.Devices, vars(row.device))}
            values.append(ids | {name: getattr(row, name) for name in ("recipe", "source", "note", *db.PUBLISHED)})
        return self._insert(db.PublishedOperations, values)

    @writes
    def forget(self, rows: Collection[tuple[str, int]]) -> dict[str, int]:
        """Remove rows, named by table and id, and all that refer to them. Returns how many went from each table."""
        trials, removed, touched = db.Trials.c, dict[str, int](), set[int]()
        sweeps = select(db.Processes.c.id).where(db.Processes.c.sweep_id.in_([i for t, i in rows if t == "sweeps"]))
        processes = {*self._connection.scalars(sweeps), *(i for table, i in rows if table == "processes")}
        for ids in chunks(processes):
            touched |= set(self._connection.scalars(select(trials.result_id).where(trials.process_id.in_(ids))))
            self._connection.execute(delete(db.Trials).where(trials.process_id.in_(ids)))
        left = {trial.result_id for trial in read_trials(self._connection, touched)}
        for name in dict.fromkeys(table for table, _ in rows):
            of = db.METADATA.tables[name]
            for ids in chunks(id for table, id in rows if table == name):
                gone = self._connection.execute(delete(of).where(of.c["id"].in_(ids))).rowcount
                removed[name] = removed.get(name, 0) + gone
        for ids in chunks(touched - left):
            self._connection.execute(delete(db.Results).where(db.Results.c.id.in_(ids)))
        self.summarize(left)
        self._update_studies(self._connection.scalars(select(db.Studies.c.id)).all())
        return removed

    # Rows that others refer to

    def _ids(self, table: Table, rows: Sequence[Values], newer: tuple[str, ...] = ()) -> list[int]:
        """Return the ids of rows, inserted where their unique columns are new.

        Values of the columns in ``newer`` other than None replace the stored ones. While another database is merged,
        the larger value stays: whichever is merged into which, the outcome is the same.
        """
        names = unique_names(table)
        place_of = operator.itemgetter(*names, *newer) if len(names) + len(newer) > 1 else lambda row: (row[names[0]],)
        known = self._known.setdefault(table.name, {})
        places = list(map(place_of, rows))
        new = {place: row for place, row in zip(places, rows, strict=True) if place not in known}
        stored = self._stored(table, list(new.values()), newer)
        end = len(names)
        if missing := [{**defaults(table), **row} for place, row in new.items() if place[:end] not in stored]:
            # The checksum of a result covers its blocks: summarize() makes it.
            self._insert(
                table, [{**row, "crc": row_checksum(table, row) if _is_plain(table) else 0} for row in missing]
            )
            stored |= self._stored(table, missing, newer)
        for place, row in new.items():
            id, *values = stored[place[:end]]
            known[place] = id
            changes = {name: row[name] for name, old in zip(newer, values, strict=True) if self._wins(row[name], old)}
            if changes:
                same = [table.c[name] == row[name] for name in names]
                if _is_plain(table):
                    old_row = self._connection.execute(select(table).where(*same)).mappings().one()
                    changes["crc"] = row_checksum(table, {**old_row, **changes})
                self._connection.execute(update(table).where(*same).values(**changes))
        return [known[place] for place in places]

    def _id(self, table: Table, row: Values, newer: tuple[str, ...] = ()) -> int:
        return self._ids(table, [row], newer)[0]

    def _stored(self, table: Table, rows: Sequence[Values], newer: tuple[str, ...]) -> dict[tuple[Any, ...], Any]:
        """Return the id and the ``newer`` values of the stored rows with the unique columns of these rows."""
        if not rows:
            return {}
        names, end = unique_names(table), len(unique_names(table))
        if len(rows) == 1:
            results = [self._connection.execute(_one_stored(table, newer), {name: rows[0][name] for name in names})]
        else:
            some_of = (table.c[names[0]].in_(some) for some in chunks({row[names[0]] for row in rows}))
            results = [self._connection.execute(_all_stored(table, newer).where(some)) for some in some_of]
        return {tuple(row[:end]): row[end:] for result in results for row in result}

    def _wins(self, value: Any, old: Any) -> bool:
        return bool(value is not None and value != old and (old is None or not self._is_merging or value > old))

    def _problem(self, problem: Problem, flops: int | None = None) -> int:
        shape = {"canonical": problem.shape.canonical, "shape": str(problem.shape), "flops": flops}
        return self._id(db.Problems, vars(problem) | shape, ("flops",))

    def _study(self, subject: Subject, lookup_key: NamedInts | None = None, bytes_moved: int | None = None) -> int:
        problem, version = subject.problem, subject.version or KernelVersion(subject.problem.kernel, "")
        declared = {
            "axes": json.dumps(version.axes, separators=(",", ":")),
            "key": " ".join(version.key),
            "default_id": self._id(db.Configs, config_row(version.default)),
        }
        code = {"kernel": version.kernel, "source_hash": version.source_hash}
        row = {
            "problem_id": self._problem(problem),
            # The newest declaration of a source counts: a grid may change without the code.
            "version_id": self._id(db.Versions, code | declared, tuple(declared)),
            "device_id": self._id(db.Devices, vars(subject.device)),
            "kind": str(subject.kind),
            "lookup_key": None if lookup_key is None else str(lookup_key),
            "bytes_moved": bytes_moved,
        }
        return self._id(db.Studies, row, ("lookup_key", "bytes_moved"))

    def _run_of(self, sweep_id: int, study: int, **values: Any) -> None:
        self._id(db.StudyRuns, {"study_id": study, "sweep_id": sweep_id, **values}, tuple(values))

    def _facts_of(self, sweep_id: int, version: KernelVersion) -> dict[str, str]:
        """Return the reference and the check that each study of a sweep notes when it begins."""
        return self._facts.setdefault((sweep_id, version.kernel, version.source_hash), {})

    # Results and trials

    def _store_rows(self, rows: Sequence[tuple[int, Row]], *, once: bool) -> int:
        begun_study = functools.cache(self._begun_study)  # many rows are of few studies
        studies = [
            begun_study(sweep_id, row.problem, row.version, row.device, row.kind, row.lookup_key, row.bytes_moved)
            for sweep_id, row in rows
        ]
        configs = self._ids(db.Configs, [config_row(row.config) for _, row in rows])
        of_rows = zip(studies, configs, rows, strict=True)
        results = self._ids(db.Results, [_result(study, config, row) for study, config, (_, row) in of_rows], db.FACTS)
        processes = self._ids(db.Processes, [_process(*row) for row in rows])
        trials, timed = [], set()
        for (sweep_id, row), study, result, process in zip(rows, studies, results, processes, strict=True):
            trials.append({**_trial(row, result, process), "sweep_id": sweep_id})
            if row.outcome.time_us is not None or row.kind in (Kind.STATIC, Kind.INTERPRETER):
                timed.add(study)
            if (code := row.outcome.facts.code) is not None:
                self._replace(db.Codes, {"result_id": result, **vars(code)})
        if once:
            trials = self._without_stored(trials)
        stored = self._insert(db.Trials, trials)
        self._insert(db.TrialDetails, [t for t in trials if any(t[name] is not None for name in _DETAILS)])
        self.summarize({trial["result_id"] for trial in trials})
        if stored:
            self._update_studies(set(studies), timed)
        return stored

    def _begun_study(
        self,
        sweep_id: int,
        problem: Problem,
        version: KernelVersion | None,
        device: Device,
        kind: Kind,
        lookup_key: NamedInts | None,
        bytes_moved: int | None,
    ) -> int:
        """Return the study of a row, noted as begun in its sweep."""
        version = version or KernelVersion(problem.kernel, "")
        study = self._study(Subject(version, device, kind, problem), lookup_key, bytes_moved)
        self._run_of(sweep_id, study, **self._facts_of(sweep_id, version))
        return study

    def _without_stored(self, trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Leave out trials in whose round of the sweep some process came to the same status."""

        def place(trial: Any) -> tuple[Any, ...]:
            return tuple(trial[name] for name in ("result_id", "stage", "round", "status", "sweep_id"))

        stored = map(Trial._asdict, read_trials(self._connection, {trial["result_id"] for trial in trials}))
        first = {place(trial): trial for trial in reversed(trials)}
        for trial in stored:
            first.pop(place(trial), None)
        return list(first.values())[::-1]

    def _replace(self, table: Table, row: Values) -> None:
        """Store a row whose first column is its key in place of the stored one."""
        key = next(iter(row))
        self._connection.execute(delete(table).where(table.c[key] == row[key]))
        self._connection.execute(insert(table), row)

    def _insert(self, table: Table, rows: Sequence[Values]) -> int:
        if not rows:
            return 0
        names = [column.name for column in table.c if column.name in rows[0]]
        values = [{name: row[name] for name in names} for row in rows]
        statement = insert_ignoring(self._connection, table)
        return int(self._connection.execute(statement, values, execution_options=_COUNTED).rowcount)

    def _update_studies(self, studies: Iterable[int], timed: Collection[int] = ()) -> None:
        """Count the results and runs of studies anew, and note that some were timed just now."""

        def count(table: Table) -> Any:
            query = select(func.count()).select_from(table).where(table.c.study_id == db.Studies.c.id)
            return query.correlate(db.Studies).scalar_subquery()

        query = select(db.Studies, count(db.Results).label("count"), count(db.StudyRuns).label("count_runs"))
        for ids in chunks(studies):
            values: list[Values] = []
            for row in self._connection.execute(query.where(db.Studies.c.id.in_(ids))).mappings():
                new = {"results": row["count"], "runs": row["count_runs"], "timed_at": row["timed_at"]}
                new |= {"timed_at": time.time()} if row["id"] in timed else {}
                values.append({**new, "crc": row_checksum(db.Studies, {**row, **new}), "row": row["id"]})
            self._update_many(db.Studies, values)

    def summarize(self, results: Iterable[int]) -> None:
        """Bring the summaries and checksums of results up to date with their trials."""
        query = select(db.Results, db.Studies.c.kind).join(db.Studies, db.Studies.c.id == db.Results.c.study_id)
        for ids in chunks(results):
            trials: dict[int, list[Trial]] = {}
            for trial in read_trials(self._connection, ids):
                trials.setdefault(trial.result_id, []).append(trial)
            values: list[Values] = []
            result = self._connection.execute(query.where(db.Results.c.id.in_(ids)))
            columns, limits = list(result.keys()), dict[int, list[ClockLimits]]()
            for stored in result.all():
                row = dict(zip(columns, stored, strict=True))  # SQLAlchemy's mapping looks up each name
                of_result = trials.get(row["id"], [])
                study, is_published = row["study_id"], row["kind"] == Kind.PUBLISHED
                if study not in limits:
                    limits[study] = self._limits_of(study) or [ClockLimits()]
                new = {**row, **summary(of_result, is_published=is_published, limits=limits[study][-1])}
                names = ("status", "coarse_us", "coarse_processes", "final_us")
                crc = row_checksum(db.Results, new, blocks_of(of_result))
                values.append({**{name: new[name] for name in names}, "crc": crc, "row": row["id"]})
            self._update_many(db.Results, values)

    def _update_many(self, table: Table, rows: Sequence[Values]) -> None:
        """Update rows, each by its id in ``row``."""
        if rows:
            names = [name for name in rows[0] if name != "row"]
            statement = update(table).where(table.c["id"] == bindparam("row"))
            values: dict[str, Any] = {name: bindparam(f"new_{name}") for name in names}
            new = [{"row": row["row"], **{f"new_{name}": row[name] for name in names}} for row in rows]
            self._connection.execute(statement.values(values), new)


def blocks_of(trials: Iterable[Trial]) -> list[tuple[int, int, int, float | None]]:
    """Return the blocks that the checksum of a result covers."""
    return sorted((t.stage, t.process_id, t.round, t.time_us) for t in trials if t.is_block)


def stored_command(command: str) -> str:
    """Return a command line without passwords, and with files by their base names."""
    words = redacted(visible(command)).split(" ")
    return " ".join(os.path.basename(word) if word.startswith(("/", "~", "../", "./")) else word for word in words)


@functools.cache
def _all_stored(table: Table, newer: tuple[str, ...]) -> Select[Any]:
    id = table.c["id"] if "id" in table.c else literal(0)
    return select(*(table.c[name] for name in unique_names(table)), id, *(table.c[name] for name in newer))


@functools.cache
def _one_stored(table: Table, newer: tuple[str, ...]) -> Select[Any]:
    return _all_stored(table, newer).where(*(table.c[name] == bindparam(name) for name in unique_names(table)))


def _is_plain(table: Table) -> bool:
    """Return True if the checksum of a row covers its own columns only."""
    return table is not db.Results


def config_row(config: NamedInts | None) -> Values:
    """Return the row of a config; None stands for a publication that names none."""
    config = config or NamedInts()
    return {"canonical": config.canonical, "text": str(config)}


def _result(study: int, config: int, row: Row) -> Values:
    facts = {name: getattr(row.outcome.facts, name) for name in db.FACTS}
    return {"study_id": study, "config_id": config, "source": row.source, "note": row.note, **facts}


def _process(sweep_id: int, row: Row) -> Values:
    return {"sweep_id": sweep_id, "name": row.process, "git_commit": row.commit, "started_at": time.time()}


def _trial(row: Row, result_id: int, process_id: int) -> dict[str, Any]:
    outcome = row.outcome
    return {
        "result_id": result_id,
        "stage": STAGES[row.stage],
        "process_id": process_id,
        "round": row.round,
        "position": row.position,
        "status": str(outcome.status),
        "reason": redacted(outcome.reason)[:2000],
        "time_us": None if outcome.time_us is None else round(outcome.time_us, 6),
        "tick_us": outcome.tick_us,
        **vars(outcome.telemetry),
        "samples": array("f", outcome.samples_us).tobytes() if outcome.samples_us else None,
    }
