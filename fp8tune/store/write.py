"""Writing: batched, idempotent, and one transaction per batch."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os.path
import struct
import time
import uuid
import zlib
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from statistics import fmean, geometric_mean, median
from typing import Any, NamedTuple

from sqlalchemy import Connection, Table, Text, bindparam, delete, func, insert, select, update

from fp8tune.errors import DatabaseError
from fp8tune.records import Device, FinalsRun, KernelVersion, Kind, NamedInts, Problem, Published, Row, Status, Subject
from fp8tune.redaction import redacted
from fp8tune.stats.means import trimmed_mean
from fp8tune.store import schema as db
from fp8tune.store.connected import Connected, writes
from fp8tune.store.database import Database, insert_ignoring
from fp8tune.store.schema import row_checksum
from fp8tune.store.texts import UNSTATED
from fp8tune.text import visible

COPY_CEILING = "copy_ceiling_gb_per_s"
"""Calibration of a device-to-device copy, read plus written."""

STAGES = {"screen": db.COARSE, "final": db.FINAL, "duplicate": db.CONTROL}
"""Stage of a row -> its number in the database."""

_CHUNK = 500  # ids in one statement
_REMEMBERED = 50_000  # ids kept in memory: enough for any sweep, bounded for an import of millions
_COUNTED = {"preserve_rowcount": True}  # the number of rows an insert really stored, from every driver
_DETAILS = ("samples", *db.TELEMETRY)

Values = Mapping[str, Any]
_NOTHING: Values = {}


class Named(NamedTuple):
    """A stored row: its id here, and the checksum of what names it in every copy."""

    id: int
    identity: int


class Writing(Connected):
    """Methods that store records. Unique columns identify rows, so writing twice adds nothing."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._named: dict[tuple[object, ...], Named] = {}
        self._identities: dict[tuple[str, int], int] = {}
        self._result_ids: dict[tuple[object, ...], tuple[int, dict[str, Any]]] = {}
        self._waiting: list[tuple[int, Row]] = []
        self._waits_s, self._stored_at = 0.0, -math.inf
        self._is_merging = False

    def _before_reading(self) -> None:
        self.flush()

    def _begin(self, *, write: bool) -> None:
        super()._begin(write=write)
        if write and self._waiting:
            self._store_rows(self._waiting, once=True)

    def _committed(self) -> None:
        if self._waiting:
            self._waiting.clear()
            self._stored_at = time.monotonic()

    def _forget(self) -> None:
        self._named.clear()
        self._identities.clear()
        self._result_ids.clear()

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
        """Return the id of an unfinished sweep of this request, device and ``again``, or of a new one.

        ``uid`` names a sweep that is the same in every database, such as that of published rows.
        """
        of, named = db.Sweeps.c, self._device(device)
        wanted = (of.request == request, of.device_id == named.id, of.again == int(again))
        unfinished = select(of.id).where(*wanted, of.finished_at.is_(None)).order_by(of.id.desc())
        if uid is None and (id := self._connection.scalar(unfinished.limit(1))) is not None:
            return int(id)
        values: dict[str, Any] = {
            "device_id": named,
            "request": request,
            "command": stored_command(command),
            "git_commit": commit,
        }
        values |= {"timer": timer, "seed": seed, "again": int(again), "started_at": time.time()}
        return self._name(db.Sweeps, {"uid": uid or uuid.uuid4().hex}, values).id

    @writes
    def finish_sweep(self, sweep_id: int) -> None:
        """Note that a sweep ran to its end: the same request begins a new one from now on."""
        finished = update(db.Sweeps).where(db.Sweeps.c.id == sweep_id)
        self._connection.execute(finished.values(finished_at=time.time()))

    @writes
    def mark_complete(self, sweep_id: int, subject: Subject, planned: int) -> None:
        """Note that all planned configs of a problem have a row, so that the best of them is a pick."""
        study = self._study(subject)
        self._run_of(sweep_id, study, planned=planned, **self._of_sweep(sweep_id, subject.version))
        self.update_study(study.id)

    @writes
    def end_finals(self, sweep_id: int, subject: Subject, run: FinalsRun) -> None:
        """Note that the finals of a problem ended: from now on they count, not earlier ones."""
        values = {name: value for name, value in vars(run).items() if name != "sweep"}
        study = self._study(subject)
        self._run_of(sweep_id, study, **values)
        self.update_study(study.id)

    @writes
    def record_reference(self, sweep_id: int, version: KernelVersion, reference: str) -> None:
        """Note the hash of the reference that a sweep compares the outputs of a kernel version with."""
        self._of_sweep(sweep_id, version)["reference"] = reference

    @writes
    def record_check(self, sweep_id: int, version: KernelVersion, check: str) -> None:
        """Note the check by which the outputs of a kernel version are right in a sweep."""
        self._of_sweep(sweep_id, version)["check_used"] = check

    @writes
    def record_launches(self, documents: Mapping[Problem, str]) -> None:
        """Keep the recorded launch that each problem stands for, as JSON; a newer recording replaces it."""
        for problem, document in documents.items():
            key = {"problem_id": self._problem(problem).id}
            self._connection.execute(
                delete(db.RecordedLaunches).where(db.RecordedLaunches.c.problem_id == key["problem_id"])
            )
            self._connection.execute(insert(db.RecordedLaunches), {**key, "document": document})

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
        sweep = Named(sweep_id, self._identity(db.Sweeps, sweep_id))
        values = {"value": float(value), "created_at": time.time()}
        self._name(db.Calibrations, {"sweep_id": sweep, "name": name}, values, newer=values)

    # Rows

    @writes
    def add(self, sweep_id: int, row: Row, *, once: bool = False) -> bool:
        """Store one trial and commit; False if it is there already.

        ``once``: False also if another process of the same sweep stored the same status in this round.
        """
        return self._store_rows([(sweep_id, row)], once=once) == 1

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
            try:
                self.run(lambda: None, write=True)
            finally:
                self._waiting.clear()

    @writes
    def add_many(self, sweep_id: int, rows: Iterable[Row]) -> int:
        """Store many trials in one commit, all or nothing. Returns how many were new."""
        return self._store_rows([(sweep_id, row) for row in rows], once=False)

    @writes
    def add_published(self, rows: Iterable[Published]) -> int:
        """Store whole operations as others printed them. Returns how many were new."""
        values = []
        for row in rows:
            problem = Problem(row.operation, row.shape, UNSTATED, fp8_dtype=UNSTATED, scale_mode=UNSTATED)
            ids = {"problem_id": self._problem(problem).id, "device_id": self._device(row.device).id}
            values.append(ids | {name: getattr(row, name) for name in ("recipe", "source", "note", *db.PUBLISHED)})
        return self._insert(db.PublishedOperations, values)

    @writes
    def forget(self, rows: Collection[tuple[str, int]]) -> dict[str, int]:
        """Remove rows, named by table and id, and all that refer to them. Returns how many went from each table."""
        removed: dict[str, int] = {}
        for table, id in rows:
            of = db.METADATA.tables[table]
            gone = self._connection.execute(delete(of).where(of.c["id"] == id)).rowcount
            removed[table] = removed.get(table, 0) + gone
        self._forget()
        for id in self._connection.scalars(select(db.Studies.c.id)).all():
            self.update_study(id)
        return removed

    # Shared rows

    def _device(self, device: Device) -> Named:
        return self._name(db.Devices, vars(device))

    def _config(self, config: NamedInts | None) -> Named:
        config = config or NamedInts()
        return self._name(db.Configs, {"canonical": config.canonical}, {"text": str(config)})

    def _problem(self, problem: Problem, **newer: Any) -> Named:
        key = {name: getattr(problem, name) for name in db.unique_names(db.Problems) if name != "canonical"}
        key["canonical"] = problem.shape.canonical
        return self._name(db.Problems, key, {"shape": str(problem.shape)}, newer=newer)

    def _version(self, version: KernelVersion | None, kernel: str) -> Named:
        version = version or KernelVersion(kernel, "")
        values = {
            "default_id": self._config(version.default),
            "axes": axes_text(version.axes),
            "key": " ".join(version.key),
        }
        key = {"kernel": version.kernel, "source_hash": version.source_hash}
        # The newest declaration of a source counts: a grid may change without the code.
        place = ("version", *key.values(), *values.values())
        if place not in self._named:
            self._named[place] = self._name(db.Versions, key, values, newer=values)
        return self._named[place]

    def _study(self, subject: Subject | Row, **newer: Any) -> Named:
        problem = subject.problem
        version = self._version(subject.version, problem.kernel)
        key = {"problem_id": self._problem(problem), "version_id": version, "device_id": self._device(subject.device)}
        place = ("study", *key.values(), subject.kind, *newer.values())
        if place not in self._named:
            self._named[place] = self._name(db.Studies, key | {"kind": str(subject.kind)}, newer, newer=newer)
        return self._named[place]

    def _results(self, rows: Sequence[Values]) -> list[int]:
        """Return the ids of results, inserted where they are new. Facts of the compiler replace older ones.

        Each row has ``study_id`` and ``config_id`` (both Named), ``source``, ``note``, and what else is known.
        """
        of, names = db.Results.c, db.unique_names(db.Results)
        keys = [(row["study_id"].id, row["config_id"].id, row["source"], row["note"]) for row in rows]
        plain = [
            {**row, "study_id": key[0], "config_id": key[1], "crc": 0} for row, key in zip(rows, keys, strict=True)
        ]
        new = {key: row for key, row in zip(keys, plain, strict=True) if key not in self._result_ids}
        if new:
            if len(self._result_ids) >= _REMEMBERED:
                self._result_ids.clear()
                new = dict(zip(keys, plain, strict=True))
            filled = [{**defaults(db.Results), **row} for row in new.values()]
            self._insert(
                db.Results, [{name: row[name] for name in _names(db.Results) if name != "id"} for row in filled]
            )
            query = select(of.id, *(of[name] for name in (*names, *db.FACTS)))
            for ids in chunks({key[0] for key in new}):
                for found in self._connection.execute(query.where(of.study_id.in_(ids))):
                    self._result_ids[tuple(found[1:5])] = found[0], dict(zip(db.FACTS, found[5:], strict=True))
        for key, row in zip(keys, plain, strict=True):
            id, facts = self._result_ids[key]
            newer = {name: row[name] for name in db.FACTS if row.get(name) is not None and row[name] != facts[name]}
            if self._is_merging:
                newer = {name: value for name, value in newer.items() if facts[name] is None or value > facts[name]}
            if newer:
                self._connection.execute(update(db.Results).where(of.id == id).values(**newer))
                facts.update(newer)
        return [self._result_ids[key][0] for key in keys]

    def _run_of(self, sweep_id: int, study: Named, **newer: Any) -> None:
        sweep = Named(sweep_id, self._identity(db.Sweeps, sweep_id))
        self._name(db.StudyRuns, {"study_id": study, "sweep_id": sweep}, newer, newer=newer)

    def _of_sweep(self, sweep_id: int, version: KernelVersion) -> dict[str, str]:
        """Return the facts of a kernel version that each study of a sweep notes when it begins."""
        return self._sweep_facts.setdefault((sweep_id, version.kernel, version.source_hash), {})

    @functools.cached_property
    def _sweep_facts(self) -> dict[tuple[int, str, str], dict[str, str]]:
        return {}

    def _name(self, table: Table, key: Values, rest: Values = _NOTHING, newer: Values = _NOTHING) -> Named:
        """Return the row with this unique key, inserted with the other values if it is new.

        Values in ``newer`` other than None replace what the row says.
        """
        place = (table.name, *key.values(), *newer.values())
        if place in self._named:
            return self._named[place]
        if len(self._named) >= _REMEMBERED:
            self._forget()
        row = {**defaults(table), **key, **rest, **newer}
        references = {name: value.identity for name, value in row.items() if isinstance(value, Named)}
        plain = {name: value.id if isinstance(value, Named) else value for name, value in row.items()}
        if "crc" in table.c and "crc" not in rest:
            plain["crc"] = row_checksum(table, plain, references)
        identity = row_checksum(table, plain, references, identity=True)
        statement, has_id = _inserting(table, self._connection.dialect.name), "id" in table.c
        result = self._connection.execute(statement, plain, execution_options=_COUNTED)
        id = result.scalar() if has_id else 0 if result.rowcount == 1 else None
        if id is None:
            id = self._update(table, plain, references, newer)
        self._named[place] = named = Named(int(id), identity)
        self._identities[table.name, named.id] = identity
        return named

    def _update(self, table: Table, plain: Values, references: Mapping[str, int], newer: Values) -> int:
        same = [table.c[name] == plain[name] for name in db.unique_names(table)]
        stored = dict(self._connection.execute(select(table).where(*same)).mappings().one())
        changes = {name: plain[name] for name in newer if plain[name] is not None and plain[name] != stored[name]}
        if self._is_merging:  # whichever is merged into which, the same stays
            changes = {name: value for name, value in changes.items() if stored[name] is None or value > stored[name]}
        if changes:
            if "crc" in table.c:
                changes["crc"] = row_checksum(table, stored | changes, references)
            self._connection.execute(update(table).where(*same).values(**changes))
        return int(stored.get("id", 0))

    def _identity(self, table: Table, id: int) -> int:
        """Return the checksum of what names a stored row."""
        if (table.name, id) not in self._identities:
            row = dict(self._connection.execute(select(table).where(table.c.id == id)).mappings().one())
            references = {
                column.name: self._identity(key.column.table, row[column.name])
                for column in table.c
                for key in column.foreign_keys
                if row[column.name] is not None
            }
            self._identities[table.name, id] = row_checksum(table, row, references, identity=True)
        return self._identities[table.name, id]

    # Trials

    def _store_rows(self, rows: Sequence[tuple[int, Row]], *, once: bool) -> int:
        trials, details, timed = [], [], set()
        studies = [self._begun_study(sweep_id, row) for sweep_id, row in rows]
        results = self._results(
            [_result(study, self._config(row.config), row) for study, (_, row) in zip(studies, rows, strict=True)]
        )
        for (sweep_id, row), study, result in zip(rows, studies, results, strict=True):
            sweep = Named(sweep_id, self._identity(db.Sweeps, sweep_id))
            process = {"sweep_id": sweep, "name": row.process, "git_commit": row.commit}
            trial = _trial(row, result, self._name(db.Processes, process, {"started_at": time.time()}).id)
            trials.append({name: trial[name] for name in _names(db.Trials)} | {"sweep_id": sweep_id})
            if any(trial[name] is not None for name in _DETAILS):
                details.append(trial)
            if row.outcome.time_us is not None or row.kind in (Kind.STATIC, Kind.INTERPRETER):
                timed.add(study.id)
            if (code := row.outcome.facts.code) is not None:
                self._connection.execute(delete(db.Codes).where(db.Codes.c.result_id == result))
                self._connection.execute(insert(db.Codes), {"result_id": result, **vars(code)})
        if once:
            trials = self._not_there(trials)
        stored = self._insert(db.Trials, trials)
        there = {(t["result_id"], t["stage"], t["process_id"], t["round"]) for t in trials}
        self._insert(db.TrialDetails, [d for d in details if tuple(d[name] for name in db._TRIAL_KEY) in there])
        self.summarize({trial["result_id"] for trial in trials})
        for study_id in {study.id for study in studies} if stored else ():
            self.update_study(study_id, is_timed=study_id in timed)
        return stored

    def _begun_study(self, sweep_id: int, row: Row) -> Named:
        """Return the study of a row, noted as begun in its sweep."""
        lookup_key = None if row.lookup_key is None else str(row.lookup_key)
        newer = {"lookup_key": lookup_key, "bytes_moved": row.bytes_moved}
        study = self._study(row, **{name: value for name, value in newer.items() if value is not None})
        place = ("begun", sweep_id, study.id)
        if place not in self._named:
            version = row.version or KernelVersion(row.problem.kernel, "")
            self._run_of(sweep_id, study, **self._of_sweep(sweep_id, version))
            self._named[place] = study
        return study

    def _not_there(self, trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Leave out trials in whose round of the sweep some process came to the same status."""
        names = ("result_id", "stage", "round", "status", "sweep_id")
        of = db.Trials.c
        query = select(of.result_id, of.stage, of.round, of.status, db.Processes.c.sweep_id)
        query = query.join(db.Processes, db.Processes.c.id == of.process_id)
        there = {
            tuple(row)
            for ids in chunks({trial["result_id"] for trial in trials})
            for row in self._connection.execute(query.where(of.result_id.in_(ids)))
        }
        new = []
        for trial in trials:
            place = tuple(trial[name] for name in names)
            if place not in there:
                there.add(place)
                new.append(trial)
        return new

    def _insert(self, table: Table, rows: Sequence[Values]) -> int:
        if not rows:
            return 0
        statement = insert_ignoring(self._connection, table)
        rows = [{name: row[name] for name in _names(table) if name in row} for row in rows]
        return int(self._connection.execute(statement, rows, execution_options=_COUNTED).rowcount)

    def update_study(self, study_id: int, *, is_timed: bool = False) -> None:
        """Count the results and runs of a study anew, and note that it was timed just now."""
        row = dict(self._connection.execute(select(db.Studies).where(db.Studies.c.id == study_id)).mappings().one())
        if is_timed:
            row["timed_at"] = time.time()
        for name, table in (("results", db.Results), ("runs", db.StudyRuns)):
            of_study = select(func.count()).select_from(table).where(table.c.study_id == study_id)
            row[name] = self._connection.scalar(of_study)
        names = {"problem_id": db.Problems, "version_id": db.Versions, "device_id": db.Devices}
        references = {name: self._identity(table, row[name]) for name, table in names.items()}
        values = {name: row[name] for name in ("timed_at", "results", "runs")}
        values["crc"] = row_checksum(db.Studies, row, references)
        self._connection.execute(update(db.Studies).where(db.Studies.c.id == study_id).values(**values))

    def summarize(self, results: Collection[int]) -> None:
        """Bring the summaries and checksums of results up to date with their trials."""
        for ids in chunks(results):
            trials: dict[int, list[TrialRow]] = {}
            for trial in read_trials(self._connection, ids):
                trials.setdefault(trial.result_id, []).append(trial)
            query = select(db.Results, db.Studies.c.kind).join(db.Studies, db.Studies.c.id == db.Results.c.study_id)
            rows = self._connection.execute(query.where(db.Results.c.id.in_(ids))).mappings()
            values = [
                {"result": row["id"], **self._summary(dict(row), trials.get(row["id"], []))} for row in rows.all()
            ]
            self._connection.execute(_update_summary(), values)

    def _summary(self, row: dict[str, Any], trials: Sequence[TrialRow]) -> Values:
        if trials:
            row["status"] = str(last_status(trials))
        if coarse := coarse_times(trials, is_published=row["kind"] == Kind.PUBLISHED):
            # A pruned result has no coarse trials left, and keeps the time that it had.
            row["coarse_us"], row["coarse_processes"] = median(coarse), len(coarse)
        if finals := [t for t in trials if t.stage == db.FINAL and t.time_us is not None]:
            newest = max((t.began, t.sweep_id) for t in finals)
            by_process: dict[int, list[float]] = {}
            for t in finals:
                if (t.began, t.sweep_id) == newest and t.time_us is not None:
                    by_process.setdefault(t.process_id, []).append(t.time_us)
            row["final_us"] = geometric_mean(map(trimmed_mean, by_process.values()))
        tables = {"study_id": db.Studies, "config_id": db.Configs}
        references = {name: self._identity(table, row[name]) for name, table in tables.items()}
        blocks = [
            (t.stage, self._identity(db.Processes, t.process_id), t.round, t.time_us) for t in trials if t.is_block
        ]
        crc = row_checksum(db.Results, row, references) ^ blocks_checksum(blocks)
        names = ("status", "coarse_us", "coarse_processes", "final_us")
        return {f"new_{name}": row[name] for name in names} | {"new_crc": crc}


class TrialRow(NamedTuple):
    """A stored trial with what tells which of several counts."""

    result_id: int
    stage: int
    process_id: int
    round: int
    status: str
    time_us: float | None
    sweep_id: int
    began: float
    reference: str
    """Hash of the reference that checked it; empty if unknown."""
    reason: str

    @property
    def is_block(self) -> bool:
        """True for a timed block of the finals."""
        return self.stage != db.COARSE and self.time_us is not None


def read_trials(connection: Connection, results: Any, **wanted: Any) -> Iterator[TrialRow]:
    """Yield the trials of results, oldest first: of each sweep and process in the order they were stored."""
    trials, processes = db.Trials.c, db.Processes.c
    columns = [trials[name] for name in ("result_id", "stage", "process_id", "round", "status", "time_us")]
    query = (
        select(*columns, processes.sweep_id, db.Sweeps.c.started_at, db.StudyRuns.c.reference, trials.reason)
        .join_from(db.Trials, db.Processes, processes.id == trials.process_id)
        .join(db.Sweeps, db.Sweeps.c.id == processes.sweep_id)
        .join(db.Results, db.Results.c.id == trials.result_id)
        .outerjoin(
            db.StudyRuns,
            (db.StudyRuns.c.study_id == db.Results.c.study_id) & (db.StudyRuns.c.sweep_id == processes.sweep_id),
        )
        .where(trials.result_id.in_(results))
        .order_by(processes.started_at, processes.id, trials.stage, trials.round, trials.position)
    )
    places = {"stage": trials.stage, "round": trials.round, "sweep": processes.sweep_id}
    query = query.where(*(places[name] == value for name, value in wanted.items() if value is not None))
    return map(TrialRow._make, connection.execute(query))


def last_status(trials: Sequence[TrialRow]) -> Status:
    """Return what became of a config: wrong if that stands, otherwise the outcome of its last trial.

    Trials that the newest reference checked count, and since its first one those of an unknown reference. Under one
    reference, wrong once is wrong until a later sweep runs the same round of the coarse pass again.
    """
    noted = [place for place, trial in enumerate(trials) if trial.reference]
    if noted:
        newest = trials[noted[-1]].reference
        since = next(place for place in noted if trials[place].reference == newest)
        trials = [t for n, t in enumerate(trials) if t.reference == newest or (not t.reference and n >= since)]
    for place, trial in enumerate(trials):
        if trial.status == Status.WRONG and not any(
            trial.stage == later.stage == db.COARSE
            and (later.status, later.round) == (Status.OK, trial.round)
            and later.sweep_id != trial.sweep_id
            for later in trials[place + 1 :]
        ):
            return Status.WRONG
    return Status(next((t.status for t in reversed(trials) if t.status != Status.WRONG), Status.WRONG))


def coarse_times(trials: Iterable[TrialRow], *, is_published: bool) -> list[float]:
    """Return the times of the coarse pass: one a process, or one in all if one sweep's worker was replaced."""
    sweeps, by_process = set(), dict[int, list[float]]()
    for trial in trials:
        if trial.stage == db.COARSE and trial.time_us is not None:
            sweeps.add(trial.sweep_id)
            by_process.setdefault(trial.process_id, []).append(trial.time_us)
    if len(by_process) > 1 == len(sweeps) and not is_published:  # figures of publications are not one run
        by_process = {0: list(itertools.chain(*by_process.values()))}
    return sorted(_middle_mean(times) for times in by_process.values())


def _middle_mean(times_us: Iterable[float]) -> float:
    """Return the mean without the least and the largest time, to 1e-6 us: the last digits depend on the order."""
    ordered = sorted(times_us)
    return round(1e6 * fmean(ordered[1:-1] if len(ordered) > 2 else ordered)) / 1e6


def blocks_checksum(blocks: Sequence[tuple[int, int, int, float | None]]) -> int:
    """Return the checksum of final blocks: (stage, identity of the process, round, time). The order does not count."""
    if not blocks:
        return 0
    total = 0
    for stage, process, round, time_us in blocks:
        total += zlib.crc32(struct.pack("<BIqd", stage, process, round, time_us))
    return total & 0xFFFFFFFF


def stored_command(command: str) -> str:
    """Return a command line without passwords, and with files by their base names."""
    words = redacted(visible(command)).split(" ")
    return " ".join(os.path.basename(word) if word.startswith(("/", "~", "../", "./")) else word for word in words)


def axes_text(axes: object) -> str:
    """Serialize a declared grid."""
    return json.dumps(axes, separators=(",", ":"))


def _result(study: Named, config: Named, row: Row) -> Values:
    facts = {name: getattr(row.outcome.facts, name) for name in db.FACTS}
    return {"study_id": study, "config_id": config, "source": row.source, "note": row.note, **facts}


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


@functools.cache
def _names(table: Table) -> list[str]:
    return [column.name for column in table.c]


@functools.cache
def defaults(table: Table) -> Values:
    """Return the value of each column that a row leaves out."""

    def default(column: Any) -> Any:
        text = None if column.server_default is None else str(column.server_default.arg)
        return text if text is None or isinstance(column.type, Text) else int(text)

    return {column.name: default(column) for column in table.c if column.name not in ("id", "crc")}


@functools.cache
def _update_summary() -> Any:
    names = ("status", "coarse_us", "coarse_processes", "final_us", "crc")
    statement = update(db.Results).where(db.Results.c.id == bindparam("result"))
    return statement.values({name: bindparam(f"new_{name}") for name in names})


@functools.cache
def _inserting(table: Table, dialect: str) -> Any:
    from sqlalchemy.dialects import postgresql, sqlite

    statement = (sqlite if dialect == "sqlite" else postgresql).insert(table).on_conflict_do_nothing()
    return statement.returning(table.c.id) if "id" in table.c else statement


def chunks(ids: Iterable[int]) -> Iterator[list[int]]:
    """Yield sorted ids in lists that one statement can take."""
    remaining = iter(sorted(ids))
    while chunk := list(itertools.islice(remaining, _CHUNK)):
        yield chunk
