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

from sqlalchemy import Label, Select, Table, bindparam, delete, func, insert, select, update

from fp8tune.errors import DatabaseError
from fp8tune.records import (
    ClockLimits,
    Compiler,
    Device,
    FinalsRun,
    KernelVersion,
    Kind,
    NamedInts,
    Problem,
    Row,
    Subject,
)
from fp8tune.redaction import redacted
from fp8tune.store import schema as db
from fp8tune.store.database import insert_ignoring, writes
from fp8tune.store.read import COPY_CEILING, Reading
from fp8tune.store.trials import STAGES, Trial, chunks, read_trials, summary
from fp8tune.text import visible

_NEWER: Mapping[Table, Sequence[str]] = {
    db.Versions: ("default_id", "axes", "key"),  # a grid may change without the code
    db.Problems: ("flops",),
    db.RecordedLaunches: ("document",),
    db.Studies: ("lookup_key", "bytes_moved", "timed_at"),
    db.StudyRuns: ("planned", "reference", "check_used", "tie_band", "keep_band", "floor_us"),
    db.Results: db.FACTS,
    db.Programs: ("code_hash",),
    db.OutputBits: ("bits",),
    db.Calibrations: ("value", "created_at"),
}
"""Columns whose newer value, other than None, replaces the stored one."""


@functools.cache
def _query_of_one(table: Table) -> Select[Any]:
    """Return the query of the row with given unique columns, built once: that takes longer than its execution."""
    return select(table).where(*(table.c[name] == bindparam(name) for name in db.unique_names(table)))


def _count(table: Table) -> Label[int]:
    """Return the number of rows of a study, as the column ``new_NAME``."""
    query = select(func.count()).select_from(table).where(table.c.study_id == db.Studies.c.id)
    return query.correlate(db.Studies).scalar_subquery().label(f"new_{table.name}")


_COUNTS = select(db.Studies, _count(db.Results), _count(db.StudyRuns))

_SUMMARY = ("status", "coarse_us", "coarse_processes", "final_us", "crc")

Values = Mapping[str, Any]


class Writing(Reading):
    """Methods that store records. Unique columns identify rows, so writing twice adds nothing."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._facts: dict[tuple[int, str, str], dict[str, str]] = {}
        """Reference and check that each study of a sweep and a kernel version notes when it begins."""
        self._waiting: list[tuple[int, Row]] = []
        self._waits_s, self._stored_at = 0.0, -math.inf
        self._is_merging = False

    # Sweeps

    @writes
    def begin_sweep(
        self,
        request: str,
        device: Device,
        *,
        command: str,
        commit: str = "",
        timer: str = "",
        seed: int = 0,
        again: bool = False,
        uid: str | None = None,
        limits: ClockLimits = ClockLimits(),
    ) -> int:
        """Return the id of an unfinished sweep with this request, device, ``again`` and limits, or of a new one.

        ``uid`` names a sweep that is the same in every database, such as that of published rows.
        """
        c, device_id = db.Sweeps.c, self._device(device)
        same = (c.request == request, c.device_id == device_id, c.again == int(again), c.finished_at.is_(None))
        unfinished = select(c.id, *(c[name] for name in db.LIMITS)).where(*same).order_by(c.id.desc())
        for id, *stored in self._connection.execute(unfinished) if uid is None else ():
            if not ClockLimits(*stored).difference(limits):
                return int(id)
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
        study = self._study(subject, sweep_id, planned=planned)
        if len(self._limits_of(study)) > 1:
            self.summarize(self._connection.scalars(select(db.Results.c.id).where(db.Results.c.study_id == study)))
        self._update_studies([study])

    @writes
    def end_finals(self, sweep_id: int, subject: Subject, run: FinalsRun) -> None:
        """Note that the finals of a problem ended: from now on they count, not earlier ones."""
        bands = {name: value for name, value in vars(run).items() if name != "sweep"}
        self._update_studies([self._study(subject, sweep_id, **bands)])

    def record_reference(self, sweep_id: int, version: KernelVersion, reference: str) -> None:
        """Note the hash of the reference that checks a kernel version in a sweep."""
        self._facts_of(sweep_id, version)["reference"] = reference

    def record_check(self, sweep_id: int, version: KernelVersion, check: str) -> None:
        """Note the check by which the outputs of a kernel version are right in a sweep."""
        self._facts_of(sweep_id, version)["check_used"] = check

    @writes
    def record_launches(self, documents: Mapping[Problem, str]) -> None:
        """Keep the recorded launch that each problem stands for, as JSON; a newer recording replaces it."""
        rows = [{"problem_id": self._problem(problem), "document": text} for problem, text in documents.items()]
        self._ids(db.RecordedLaunches, rows)

    @writes
    def record_output_bits(self, subject: Subject, axis: str, bits: Mapping[NamedInts, Mapping[int, str]]) -> None:
        """Keep the hashes of outputs on a problem, by config and size, in place of earlier ones."""
        db.OutputBits.create(self._connection, checkfirst=True)  # a database may be older than the table
        results, c = {config: id for id, (config, _) in self._results_of(subject).items()}, db.OutputBits.c
        for ids in chunks(results.values()):
            self._connection.execute(delete(db.OutputBits).where(c.result_id.in_(ids), c.axis == axis))
        rows = [
            {"result_id": id, "axis": axis, "size": size, "bits": text}
            for config, id in results.items()
            for size, text in bits.get(config, {}).items()
        ]
        self._ids(db.OutputBits, rows)

    @writes
    def record_flops(self, flops: Mapping[Problem, int]) -> None:
        """Keep the floating-point operations of problems; the newest declaration counts."""
        for problem, count in flops.items():
            self._problem(problem, flops=count)

    def record_ceiling(self, sweep_id: int, device: Device, gb_per_s: float) -> None:
        """Keep the copy rate measured in a sweep."""
        self.record_calibration(sweep_id, device, COPY_CEILING, gb_per_s)

    @writes
    def record_calibration(self, sweep_id: int, device: Device, name: str, value: float) -> None:
        """Keep a named value measured of the sweep's device, in place of an earlier one; the unit is in the name."""
        row = {"sweep_id": sweep_id, "name": name, "value": float(value), "created_at": time.time()}
        self._ids(db.Calibrations, [row])

    @writes
    def keep_programs(self, compiler: Compiler, hashes: Mapping[tuple[KernelVersion, Problem, NamedInts], str]) -> None:
        """Keep the hashes of machine code that a compiler made of launches, also of launches without results here."""
        self._store_programs((compiler, *launch, code_hash) for launch, code_hash in hashes.items())

    # Trials

    @writes
    def add(self, sweep_id: int, row: Row, *, once: bool = False) -> bool:
        """Store one trial and commit; False if it is there already.

        ``once``: False also if another process of the same sweep stored the same status in this round.
        """
        return self._store_rows([(sweep_id, row)], once=once) == 1

    @writes
    def add_many(self, sweep_id: int, rows: Iterable[Row]) -> int:
        """Store many trials in one commit, all or nothing. Returns how many were new."""
        return self._store_rows([(sweep_id, row) for row in rows])

    @contextlib.contextmanager
    def adding_together(self, within_s: float) -> Iterator[None]:
        """Store the trials of :meth:`add_soon` that come within so many seconds in one commit."""
        self._waits_s = within_s
        try:
            yield
            self.flush()
        except BaseException:
            with contextlib.suppress(DatabaseError):  # of a server that is gone, which it ends for
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
    def forget(self, rows: Collection[tuple[str, int]]) -> dict[str, int]:
        """Remove rows, named by table and id, with all that refers to them. Returns how many went from each table."""
        ids: dict[str, set[int]] = {"results": set(), "processes": set(), "sweeps": set()}
        for name, id in rows:
            ids.setdefault(name, set()).add(id)
        of_processes = db.Processes.c.id.in_(ids["processes"]) | db.Processes.c.sweep_id.in_(ids["sweeps"])
        query = select(db.Trials.c.result_id).distinct().join(db.Processes).where(of_processes)
        touched = set(self._connection.scalars(query))
        removed = {name: self._delete(db.METADATA.tables[name], some) for name, some in ids.items()}
        left = {trial.result_id for trial in read_trials(self._connection, touched)}
        removed["results"] += self._delete(db.Results, touched - left)
        self.summarize(left)
        self._update_studies(self._connection.scalars(select(db.Studies.c.id)).all())
        return {name: count for name, count in removed.items() if count}

    def _delete(self, table: Table, ids: Iterable[int]) -> int:
        """Remove rows with all that refers to them. Returns how many there were."""
        gone = (delete(table).where(table.c["id"].in_(some)) for some in chunks(ids))
        return sum(self._connection.execute(statement).rowcount for statement in gone)

    # Rows that others refer to

    def _ids(self, table: Table, rows: Sequence[Values]) -> list[int]:
        """Return the ids of rows with the same columns, inserted where their unique columns are new.

        While another database is merged, the larger of two newer values stays: whichever is merged into which, the
        outcome is the same.
        """
        names, known, defaults = db.unique_names(table), self._known.setdefault(table.name, {}), db.defaults(table)
        identity, places = operator.itemgetter(*names), [tuple(row.values()) for row in rows]
        new = {place: row for place, row in zip(places, rows, strict=True) if place not in known}
        if len(new) == 1:
            queries = [self._connection.execute(_query_of_one(table), *new.values())]
        else:
            of_rows = (table.c[names[0]].in_(firsts) for firsts in chunks({row[names[0]] for row in new.values()}))
            queries = [self._connection.execute(select(table).where(condition)) for condition in of_rows]
        stored = {identity(row): dict(row) for query in queries for row in query.mappings()}
        missing = {identity(row): {**defaults, **row} for row in new.values() if identity(row) not in stored}
        if missing:
            if "id" in table.c:  # no other writer comes between
                newest = self._connection.scalar(select(func.max(table.c["id"]))) or 0
                for id, complete in enumerate(missing.values(), newest + 1):
                    complete["id"] = id
            if "crc" in table.c:
                for complete in missing.values():
                    complete["crc"] = db.row_checksum(table, complete, *([[]] if table is db.Results else []))
            self._connection.execute(insert(table), list(missing.values()))
            stored |= missing
        for place, row in new.items():
            old, changes = stored[identity(row)], dict[str, Any]()
            known[place] = old.get("id", 0)
            for name in _NEWER.get(table, ()):
                value, before = row.get(name), old[name]
                if value not in (None, before) and (before is None or not self._is_merging or value > before):
                    changes[name] = value
            if changes:
                if "crc" in table.c and table is not db.Results:  # which summaries bring up to date
                    changes["crc"] = db.row_checksum(table, old | changes)
                same = (table.c[name] == row[name] for name in names)
                self._connection.execute(update(table).where(*same).values(**changes))
                stored[identity(row)] = old | changes
        return [known[place] for place in places]

    def _id(self, table: Table, row: Values) -> int:
        return self._ids(table, [row])[0]

    def _device(self, device: Device) -> int:
        return self._id(db.Devices, vars(device))

    def _problem(self, problem: Problem, flops: int | None = None) -> int:
        shape = {"canonical": problem.shape.canonical, "shape": str(problem.shape), "flops": flops}
        return self._id(db.Problems, vars(problem) | shape)

    def _config(self, config: NamedInts | None) -> int:
        return self._id(db.Configs, _config(config))

    def _version(self, version: KernelVersion) -> int:
        kernel = {"kernel": version.kernel, "source_hash": version.source_hash, "key": " ".join(version.key)}
        axes, default = json.dumps(version.axes, separators=(",", ":")), self._config(version.default)
        return self._id(db.Versions, {**kernel, "axes": axes, "default_id": default})

    def _study(self, subject: Subject, sweep_id: int | None, /, row: Row | None = None, **run: Any) -> int:
        """Return the study of a subject, with what a row says of it, noted as begun in a sweep."""
        version = subject.version or KernelVersion(subject.problem.kernel, "")
        lookup_key = row.lookup_key if row else None
        study = {
            "problem_id": self._problem(subject.problem),
            "version_id": self._version(version),
            "device_id": self._device(subject.device),
            "kind": str(subject.kind),
            "lookup_key": None if lookup_key is None else str(lookup_key),
            "bytes_moved": row.bytes_moved if row else None,
        }
        id = self._id(db.Studies, study)
        if sweep_id is not None:
            facts = self._facts_of(sweep_id, version)
            self._ids(db.StudyRuns, [{"study_id": id, "sweep_id": sweep_id, **facts, **run}])
        return id

    def _store_programs(self, programs: Iterable[tuple[Compiler, KernelVersion, Problem, NamedInts, str]]) -> None:
        rows = [
            {
                "problem_id": self._problem(problem),
                "version_id": self._version(version),
                "config_id": self._config(config),
                "compiler_id": self._id(db.Compilers, vars(compiler)),
                "code_hash": code_hash,
            }
            for compiler, version, problem, config, code_hash in programs
            if code_hash
        ]
        self._ids(db.Programs, rows)

    def _facts_of(self, sweep_id: int, version: KernelVersion) -> dict[str, str]:
        return self._facts.setdefault((sweep_id, version.kernel, version.source_hash), {})

    def _limits_of(self, study: int) -> list[ClockLimits]:
        """Return the different limits at which a study was timed, the newest first."""
        query = select(*(db.Sweeps.c[name] for name in db.LIMITS)).join(db.StudyRuns)
        query = query.where(db.StudyRuns.c.study_id == study).order_by(db.Sweeps.c.started_at.desc())
        return list(dict.fromkeys(ClockLimits(*row) for row in self._connection.execute(query)))

    # Results and trials

    def _store_rows(self, sweeps_and_rows: Sequence[tuple[int, Row]], *, once: bool = False) -> int:
        sweeps, rows = [sweep for sweep, _ in sweeps_and_rows], [row for _, row in sweeps_and_rows]
        begun: dict[tuple[object, ...], int] = {}  # many rows are of few studies
        studies, now = list[int](), time.time()
        for sweep, row in sweeps_and_rows:
            place = (sweep, row.problem, row.version, row.device, row.kind, row.lookup_key, row.bytes_moved)
            if place not in begun:
                subject: Any = Subject(row.version, row.device, row.kind, row.problem)  # type: ignore[arg-type]
                begun[place] = self._study(subject, sweep, row)
            studies.append(begun[place])
        configs = self._ids(db.Configs, [_config(row.config) for row in rows])
        names = [
            {"study_id": study, "config_id": config, "source": row.source, "note": row.note}
            | {name: getattr(row.outcome.facts, name) for name in db.FACTS}
            for study, config, row in zip(studies, configs, rows, strict=True)
        ]
        results = self._ids(db.Results, names)
        places = [
            {"sweep_id": sweep, "name": row.process, "git_commit": row.commit, "started_at": now}
            for sweep, row in sweeps_and_rows
        ]
        trials = list(map(_trial, rows, results, self._ids(db.Processes, places), sweeps))
        self._store_programs(
            (row.outcome.facts.compiler, row.version, row.problem, row.config, row.outcome.facts.code_hash)
            for row in rows
            if row.outcome.facts.compiler and row.version and row.config is not None
        )
        if once:  # leave out trials in whose round of the sweep some process came to the same status
            place_of = operator.itemgetter("result_id", "stage", "round", "status", "sweep_id")
            known = {place_of(trial._asdict()) for trial in read_trials(self._connection, set(results))}
            first = {place_of(trial): trial for trial in reversed(trials)}
            trials = [trial for place, trial in first.items() if place not in known][::-1]
        stored = self._insert(db.Trials, trials)
        self._insert(db.TrialDetails, [t for t in trials if any(t[name] is not None for name in db.DETAILS)])
        self.summarize(set(results))
        if stored:
            untimed = (Kind.STATIC, Kind.INTERPRETER)
            of_rows = zip(studies, rows, strict=True)
            timed = {id for id, row in of_rows if row.outcome.time_us is not None or row.kind in untimed}
            self._update_studies(set(studies), timed)
        return stored

    def _insert(self, table: Table, rows: Sequence[Values]) -> int:
        """Store rows that are not there yet. Returns how many were new."""
        if not rows:
            return 0
        names = [column.name for column in table.c if column.name in rows[0]]
        values, counted = [{name: row[name] for name in names} for row in rows], {"preserve_rowcount": True}
        statement = insert_ignoring(self._connection, table)
        return int(self._connection.execute(statement, values, execution_options=counted).rowcount)

    def summarize(self, results: Iterable[int]) -> None:
        """Bring the summaries and checksums of results up to date with their trials."""
        query = select(db.Results, db.Studies.c.kind).join(db.Studies)
        limits = functools.cache(lambda study: next(iter(self._limits_of(study)), ClockLimits()))
        for ids in chunks(results):
            trials: dict[int, list[Trial]] = {}
            for trial in read_trials(self._connection, ids):
                trials.setdefault(trial.result_id, []).append(trial)
            changes, rows = list[Values](), self._connection.execute(query.where(db.Results.c.id.in_(ids)))
            columns = list(rows.keys())
            for stored in rows.all():
                row = dict(zip(columns, stored, strict=True))  # SQLAlchemy's mapping looks up each name
                of_result = trials.get(row["id"], [])
                is_published = row["kind"] == Kind.PUBLISHED
                row |= summary(of_result, is_published=is_published, limits=limits(row["study_id"]))
                blocks = sorted((t.stage, t.process_id, t.round, t.time_us) for t in of_result if t.is_block)
                row["crc"] = db.row_checksum(db.Results, row, blocks)
                changes.append({"row_id": row["id"], **{name: row[name] for name in _SUMMARY}})
            self._update(db.Results, changes)

    def _update_studies(self, studies: Iterable[int], timed: Collection[int] = ()) -> None:
        """Count the results and runs of studies anew, and note that some were timed just now."""
        for ids in chunks(studies):
            changes = list[Values]()
            for row in self._connection.execute(_COUNTS.where(db.Studies.c.id.in_(ids))).mappings():
                timed_at = time.time() if row["id"] in timed else row["timed_at"]
                new = {"results": row["new_results"], "runs": row["new_study_runs"], "timed_at": timed_at}
                changes.append({"row_id": row["id"], **new, "crc": db.row_checksum(db.Studies, {**row, **new})})
            self._update(db.Studies, changes)

    def _update(self, table: Table, changes: Sequence[Values]) -> None:
        """Change columns of rows, each named by its ``row_id``."""
        if changes:
            self._connection.execute(update(table).where(table.c["id"] == bindparam("row_id")), changes)


def stored_command(command: str) -> str:
    """Return a command line without passwords, and with files by their base names."""
    words = redacted(visible(command)).split(" ")
    return " ".join(os.path.basename(word) if word.startswith(("/", "~", "../", "./")) else word for word in words)


def _config(config: NamedInts | None) -> Values:
    """Return the row of a config; None stands for a publication that names none."""
    config = config or NamedInts()
    return {"canonical": config.canonical, "text": str(config)}


def _trial(row: Row, result: int, process: int, sweep: int) -> dict[str, Any]:
    outcome = row.outcome
    return {
        "result_id": result,
        "process_id": process,
        "sweep_id": sweep,
        "stage": STAGES[row.stage],
        "round": row.round,
        "position": row.position,
        "status": str(outcome.status),
        "reason": redacted(outcome.reason)[:2000],
        "time_us": None if outcome.time_us is None else round(outcome.time_us, 6),
        "tick_us": outcome.tick_us,
        **vars(outcome.telemetry),
        "samples": array("f", outcome.samples_us).tobytes() if outcome.samples_us else None,
    }
