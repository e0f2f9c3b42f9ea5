"""Reading: one path from stored rows to typed records."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from sqlalchemy import Connection, Select, Table, Text, func, select

from fp8tune.ceiling import FLOP_PER_S, ceiling_gb_per_s
from fp8tune.errors import DatabaseError
from fp8tune.records import (
    RECORDED,
    Code,
    ComparableRows,
    Device,
    Evidence,
    Facts,
    FinalsRun,
    KernelVersion,
    Kind,
    NamedInts,
    Outcome,
    Problem,
    ProcessTimes,
    Published,
    Row,
    Status,
    Subject,
    Telemetry,
)
from fp8tune.stats.means import trimmed_mean
from fp8tune.stats.study import CACHED_RATE
from fp8tune.store import schema as db
from fp8tune.store.connected import Connected, reads
from fp8tune.store.schema import row_checksum
from fp8tune.store.texts import checked, parse_axes, parse_document, parse_named_ints
from fp8tune.store.write import (
    COPY_CEILING,
    STAGES,
    TrialRow,
    blocks_checksum,
    last_status,
    read_trials,
)
from fp8tune_kernels.spec import CHECKS

Keep = Callable[[Sequence[ComparableRows]], Collection[ComparableRows]]
"""All pools -> those to read: :func:`fp8tune.stats.rank.competing`."""

Samples = tuple[float, ...]
_STAGES = {number: stage for stage, number in STAGES.items()}
_KINDS = {str(kind): kind for kind in Kind}
_STATUSES = {str(status): status for status in Status}
_FEW = 300  # studies that are looked up one by one; more are read with all others


@dataclass(frozen=True, order=True)
class Versions:
    """The torch and Triton that rows were timed with."""

    torch: str
    triton: str

    def __str__(self) -> str:
        return f"torch {self.torch or '(none)'} and triton {self.triton or '(none)'}"

    def is_like(self, other: Versions) -> bool:
        """Return True for the same releases, whatever CUDA their wheels were built for."""
        return self.triton == other.triton and self.torch.partition("+")[0] == other.torch.partition("+")[0]


@dataclass(frozen=True)
class Tally:
    """The configs that were tried on a subject."""

    subject: Subject
    outcomes: Mapping[NamedInts, Outcome]

    @property
    def counts(self) -> Counter[Status]:
        """Number of configs by outcome."""
        return Counter(outcome.status for outcome in self.outcomes.values())

    @property
    def failures(self) -> dict[NamedInts, Outcome]:
        """Failed configs; wrong bytes first."""
        right = (Status.OK, Status.PRUNED)
        failed = {config: outcome for config, outcome in self.outcomes.items() if outcome.status not in right}
        return dict(sorted(failed.items(), key=lambda item: item[1].status is not Status.WRONG))

    @property
    def has_right(self) -> bool:
        """Return True if a config is right, and timed where times are taken, or if none was tried."""
        return Status.OK in self.counts or not self.outcomes


@dataclass(frozen=True)
class History:
    """Outcomes of the configs of one problem."""

    outcomes: Mapping[NamedInts, Outcome]
    commit: str
    """Git commit of the working tree that last timed it; empty outside git."""


@dataclass(frozen=True)
class Timed:
    """What one process timed of one config in one sweep's finals."""

    stage: str
    process: str
    blocks: tuple[tuple[int, float], ...]

    def of_run(self, run: FinalsRun) -> ProcessTimes:
        """Return it as a part of these finals."""
        return ProcessTimes(run, self.process, self.blocks)


NO_HISTORY = History({}, "")


class Names:
    """All rows that trials refer to, by id. Small beside the trials, so they are read whole and checked."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.identities: dict[str, dict[int, int]] = {}
        self.configs = {row.id: parsed(db.Configs, row.id, row.text) for row in self._rows(db.Configs)}
        self.problems = {row.id: _problem(row) for row in self._rows(db.Problems)}
        self.flops = {row.id: row.flops for row in self._rows(db.Problems) if row.flops is not None}
        self.devices = {row.id: _record(Device, row) for row in self._rows(db.Devices)}
        self.versions = {row.id: self._version(row) for row in self._rows(db.Versions)}

    def _rows(self, table: Table) -> list[Any]:
        """Return the rows of a table. Raises DatabaseError for one that was changed by nobody of ours."""
        rows = list(self._connection.execute(select(table)))
        links = {column.name: key.column.table.name for column in table.c for key in column.foreign_keys}
        texts = [column.name for column in table.c if isinstance(column.type, Text)]
        identities: dict[int, int] = {}
        for row in rows:
            values = dict(row._mapping)
            try:
                references = {
                    name: self.identities[other][values[name]]
                    for name, other in links.items()
                    if values[name] is not None
                }
            except KeyError:
                raise damaged(self._connection, table.name, values.get("id", "")) from None
            if row_checksum(table, values, references) != row.crc:
                raise damaged(self._connection, table.name, values.get("id", ""))
            for name in texts:  # constraints hold in our own files alone
                if values[name]:
                    checked(name, values[name])
            if "id" in values:
                identities[row.id] = row_checksum(table, values, references, identity=True)
        self.identities[table.name] = identities
        return rows

    def checked_rows(self, table: Table) -> list[Any]:
        """Return the rows of another small table, after those that it refers to were read."""
        for column in table.c:
            for key in column.foreign_keys:
                if key.column.table.name not in self.identities:
                    self.checked_rows(key.column.table)
        return self._rows(table)

    def _version(self, row: Any) -> KernelVersion | None:
        """Return None for rows of another implementation."""
        try:
            axes, key = parse_axes(row.axes), tuple(row.key.split())
        except ValueError:
            raise damaged(self._connection, "versions", row.id) from None
        version = KernelVersion(checked("kernel", row.kernel), row.source_hash, self.configs[row.default_id], axes, key)
        return version if row.source_hash else None

    def subject(self, study: Any) -> tuple[Problem, Device, Kind, KernelVersion | None]:
        """Return what a study is about."""
        kind = _KINDS[study.kind]
        return self.problems[study.problem_id], self.devices[study.device_id], kind, self.versions[study.version_id]


class Reading(Connected):
    """Methods that return records."""

    # Sweeps and devices

    @reads
    def sweep_uid(self, sweep_id: int) -> str:
        """Return the name of a sweep in every copy of the database."""
        return str(self._connection.scalar(select(db.Sweeps.c.uid).where(db.Sweeps.c.id == sweep_id)))

    @property
    def changes(self) -> object:
        """A value that each commit of another process changes."""
        return self.run(self._changes)

    def _changes(self) -> object:
        query = "SELECT pg_current_snapshot()::text" if self.database.is_server else "PRAGMA data_version"
        return self._connection.exec_driver_sql(query).scalar_one()

    @reads
    def finished_sweep(self, request: str, device: Device) -> list[tuple[KernelVersion, Problem]] | None:
        """Return the studies that the newest finished sweep of a request on this very device completed."""
        of = db.Sweeps.c
        same = (of.request == request, of.device_id.in_(_same(db.Devices, device)), of.finished_at.is_not(None))
        sweep = self._connection.scalar(select(func.max(of.id)).where(*same))
        if sweep is None:
            return None
        names = Names(self._connection)
        runs = select(db.StudyRuns.c.study_id).where(
            db.StudyRuns.c.sweep_id == sweep, db.StudyRuns.c.planned.is_not(None)
        )
        studies = self._connection.execute(
            select(db.Studies).where(db.Studies.c.id.in_(runs)).order_by(db.Studies.c.id)
        )
        subjects = (names.subject(study) for study in studies)
        return [(version, problem) for problem, _, _, version in subjects if version is not None]

    @reads
    def unfinished_sweeps(self) -> list[str]:
        """Return the commands of sweeps that were begun and not finished, oldest first."""
        query = select(db.Sweeps.c.command).where(db.Sweeps.c.finished_at.is_(None)).order_by(db.Sweeps.c.id)
        return list(self._connection.scalars(query))

    @reads
    def at_work(self, request: str, *, since: float) -> list[Device]:
        """Return the devices on which a request was begun after a moment and has not ended."""
        of = db.Sweeps.c
        query = select(db.Devices).join(db.Sweeps, of.device_id == db.Devices.c.id)
        rows = self._connection.execute(
            query.where(of.request == request, of.finished_at.is_(None), of.started_at >= since)
        )
        return [_record(Device, row) for row in rows]

    def calibration(self, device: Device) -> dict[str, float]:
        """Return the newest value of everything that was measured of this very device, by name."""
        return self.calibrations(device).get(device, {})

    @reads
    def calibrations(self, of: Device | None = None) -> dict[Device, dict[str, float]]:
        """Return the newest values of each device by name, the device measured last at the end; of one name or all."""
        names, values = Names(self._connection), dict[Device, dict[str, float]]()
        sweeps = {row.id: row.device_id for row in names.checked_rows(db.Sweeps)}
        rows = names.checked_rows(db.Calibrations)
        for row in sorted(rows, key=lambda row: (row.created_at, row.value)):
            device = names.devices[sweeps[row.sweep_id]]
            if of is None or (device.arch, device.name) == (of.arch, of.name):
                values[device] = {**values.pop(device, {}), row.name: row.value}
        return values

    # Evidence

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
        """Return one record per result; None means any.

        Args:
            kernel: Name of a kernel.
            arch: Arch of the device.
            kinds: Kinds of rows.
            keep: Chooses among all pools those to read.
            problems: Problems to read.
            device: One device, with the software that drove it.
        """
        if problems is not None and not self._may_have(kernel, problems):
            return []
        gathering = Gathering(self._connection)
        studies = gathering.select(kernel, arch, kinds, problems, device)
        if keep is not None:
            pools = {gathering.pool(study): study for study in studies}
            studies = [pools[pool] for pool in keep(list(pools))]
        with _collecting_no_garbage():
            return gathering.read(studies)

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
        """Return each study as the pool that :meth:`evidence` offers to ``keep``."""
        gathering = Gathering(self._connection)
        return [gathering.pool(study) for study in gathering.select(kernel, arch, kinds, problems, device)]

    def _may_have(self, kernel: str | None, problems: Collection[Problem]) -> bool:
        """Return False if no problem is stored: a sweep asks for each, mostly in vain."""
        shapes = {problem.shape.canonical for problem in problems}
        query = select(db.Problems.c.id).where(db.Problems.c.canonical.in_(shapes)).limit(1)
        query = query if kernel is None else query.where(db.Problems.c.kernel == kernel)
        return len(problems) > _FEW or self._connection.scalar(query) is not None

    @reads
    def tried_subjects(self, kernel: str | None = None, arch: str | None = None) -> list[Subject]:
        """Return every problem with the newest kernel version that was tried on it, on each device."""
        gathering, newest = Gathering(self._connection), dict[object, Subject]()
        kinds = [kind for kind in Kind if kind is not Kind.PUBLISHED]
        studies = gathering.select(kernel, arch, kinds, None, None)
        for study in sorted(studies, key=lambda study: (study.timed_at, study.id)):
            problem, device, kind, version = gathering.names.subject(study)
            if version is not None:
                newest[device, kind, problem] = Subject(version, device, kind, problem)
        return list(newest.values())

    # Outcomes of configs

    def tally(self, subject: Subject) -> Tally:
        """Return what became of the configs of a problem."""
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
        """Return the last outcome of each config, with the median time of its trials.

        ``reference`` is the hash of today's: trials that another one checked are left out.
        """
        wanted = {"sweep": sweep, "round": round, "stage": None if stage is None else STAGES[stage]}
        results = self._results_of(subject)
        trials = self._trials(results, wanted, reference)
        outcomes = {results[id][0]: _outcome(rows, results[id][1]) for id, rows in trials.items()}
        return outcomes | (self._pruned(results, trials) if sweep is round is None and not reference else {})

    @reads
    def tried_in_rounds(
        self, subject: Subject, *, sweep: int | None = None, reference: str = ""
    ) -> dict[int, dict[NamedInts, Outcome]]:
        """Return the outcomes of each round of the coarse pass, all with one question."""
        results, by_round = self._results_of(subject), dict[int, dict[int, list[TrialRow]]]()
        trials = self._trials(results, {"sweep": sweep, "stage": db.COARSE}, reference)
        for id, rows in trials.items():
            for row in rows:
                by_round.setdefault(row.round, {}).setdefault(id, []).append(row)
        outcomes = {
            number: {results[id][0]: _outcome(rows, results[id][1]) for id, rows in of_round.items()}
            for number, of_round in by_round.items()
        }
        if sweep is None and not reference and (pruned := self._pruned(results, trials)):
            outcomes[0] = {**pruned, **outcomes.get(0, {})}
        return outcomes

    def histories(self, known: Mapping[Subject, Collection[NamedInts]]) -> dict[Subject, History]:
        """Return the outcomes and the commit of many problems, without the configs that are known of each."""
        return {
            subject: History({c: o for c, o in self.tried(subject).items() if c not in configs}, self.commit(subject))
            for subject, configs in known.items()
        }

    @reads
    def commit(self, subject: Subject) -> str:
        """Return the git commit of the working tree that last timed a problem; empty outside git."""
        timed = (db.Results.c.study_id.in_(_study_ids(subject)), db.Trials.c.time_us.is_not(None))
        query = select(db.Processes.c.git_commit).join_from(db.Trials, db.Results).join(db.Processes).where(*timed)
        newest = query.order_by(db.Processes.c.started_at.desc(), db.Processes.c.id.desc()).limit(1)
        return str(self._connection.scalar(newest) or "")

    @reads
    def finals(self, subject: Subject, sweep: int) -> dict[NamedInts, list[Timed]]:
        """Return what a sweep's finals of a problem timed so far, ended or not."""
        results, timed = self._results_of(subject), dict[NamedInts, list[Timed]]()
        query = select(db.Processes.c.id, db.Processes.c.name).where(db.Processes.c.sweep_id == sweep)
        processes = {row.id: row.name for row in self._connection.execute(query)}
        for id, rows in self._trials(results, {"sweep": sweep}, "").items():
            blocks: dict[tuple[str, str], list[tuple[int, float]]] = {}
            for row in rows:
                if row.is_block and row.time_us is not None:
                    blocks.setdefault((_STAGES[row.stage], processes[row.process_id]), []).append(
                        (row.round, row.time_us)
                    )
            if blocks:
                timed[results[id][0]] = [Timed(*place, tuple(sorted(blocks[place]))) for place in sorted(blocks)]
        return timed

    @reads
    def tick_us(self, subject: Subject, sweep: int) -> float | None:
        """Return the smallest step between two samples in a sweep's finals of a problem; None if unknown."""
        details = db.TrialDetails.c
        query = select(func.min(details.tick_us)).select_from(db.TrialDetails)
        query = query.join(db.Results, db.Results.c.id == details.result_id)
        query = query.join(db.Processes, db.Processes.c.id == details.process_id)
        wanted = (db.Results.c.study_id.in_(_study_ids(subject)), db.Processes.c.sweep_id == sweep)
        tick: float | None = self._connection.scalar(query.where(*wanted, details.stage != db.COARSE))
        return tick

    def _results_of(self, subject: Subject) -> dict[int, tuple[NamedInts, Any]]:
        """Return the config and the row of each result of a subject."""
        of_study = db.Results.c.study_id.in_(_study_ids(subject, kind=True))
        query = select(db.Results, db.Configs.c.text.label("config")).join(db.Configs).where(of_study)
        rows = self._connection.execute(query.order_by(db.Results.c.id))
        return {row.id: (parsed(db.Configs, row.config_id, row.config), row) for row in rows}

    def _trials(self, results: Collection[int], wanted: Mapping[str, Any], reference: str) -> dict[int, list[TrialRow]]:
        trials: dict[int, list[TrialRow]] = {}
        for row in read_trials(self._connection, list(results), **wanted) if results else ():
            if not reference or not _is_outdated(row, reference):
                trials.setdefault(row.result_id, []).append(row)
        return trials

    def _pruned(
        self, results: Mapping[int, tuple[NamedInts, Any]], trials: Collection[int]
    ) -> dict[NamedInts, Outcome]:
        """Return the outcomes of results whose coarse trials were removed, from what is left of them."""
        return {
            config: Outcome(Status(row.status), row.coarse_us, facts=_facts(row))
            for id, (config, row) in results.items()
            if id not in trials and row.coarse_us is not None
        }

    # All trials

    def rows(self, kernel: str | None = None, arch: str | None = None) -> Iterator[Row]:
        """Yield every trial with its samples, in the order of the studies."""
        self._before_reading()
        with self.database.transaction() as connection:
            gathering = Gathering(connection)
            studies = {study.id: study for study in gathering.select(kernel, arch, None, None, None)}
            names, codes = gathering.names, gathering.codes
            processes = {row.id: row for row in names.checked_rows(db.Processes)}
            query = select(db.Results, db.Trials, *(c for c in db.TrialDetails.c if c.name not in db.Trials.c))
            query = query.join_from(db.Results, db.Trials).outerjoin(db.TrialDetails).order_by(db.Results.c.id)
            result = connection.execute(query, execution_options={"yield_per": 1000})
            for row in result.mappings():
                if (study := studies.get(row[db.Results.c.study_id])) is None:
                    continue
                problem, device, kind, version = names.subject(study)
                config = names.configs[row[db.Results.c.config_id]]
                process = processes[row[db.Trials.c.process_id]]
                outcome = Outcome(
                    Status(row[db.Trials.c.status]),
                    row[db.Trials.c.time_us],
                    row[db.Trials.c.reason],
                    unpack_samples(row["samples"]),
                    row["tick_us"],
                    _facts(row, codes.get(row[db.Results.c.id])),
                    Telemetry(*(_whole(name, row[name]) for name in Telemetry.__dataclass_fields__)),
                )
                yield Row(
                    problem=problem,
                    config=None if kind is Kind.PUBLISHED and not config else config,
                    device=device,
                    kind=kind,
                    outcome=outcome,
                    version=version,
                    lookup_key=gathering.lookup_key(study),
                    bytes_moved=study.bytes_moved,
                    commit=process.git_commit,
                    source=row[db.Results.c.source],
                    note=row[db.Results.c.note],
                    stage=_STAGES[row[db.Trials.c.stage]],
                    round=row[db.Trials.c.round],
                    process=process.name,
                    position=row[db.Trials.c.position],
                )

    @reads
    def samples(self, subject: Subject, stage: str = "final") -> dict[NamedInts, dict[tuple[str, int], Samples]]:
        """Return the samples of each config's blocks of a stage, by process and round; of several sweeps the last's."""
        results, samples = self._results_of(subject), dict[NamedInts, dict[tuple[str, int], Samples]]()
        details = db.TrialDetails.c
        query = select(details.result_id, db.Processes.c.name, details.round, details.samples)
        query = query.join(db.Processes, db.Processes.c.id == details.process_id).order_by(db.Processes.c.id)
        wanted = (details.result_id.in_(list(results)), details.stage == STAGES[stage])
        for id, process, round, blob in self._connection.execute(query.where(*wanted)):
            if blob:
                samples.setdefault(results[id][0], {})[process, round] = unpack_samples(blob)
        return samples

    # Everything else

    @reads
    def published(self) -> list[Published]:
        """Return whole operations as others printed them, in the order stored."""
        names, of = Names(self._connection), db.PublishedOperations.c
        rows = self._connection.execute(select(db.PublishedOperations).order_by(of.id)).all()
        printed = ("recipe", "source", "note", *db.PUBLISHED)
        return [
            Published(
                names.problems[row.problem_id].kernel,
                names.problems[row.problem_id].shape,
                device=names.devices[row.device_id],
                **{name: getattr(row, name) for name in printed},
            )
            for row in rows
        ]

    @reads
    def recorded_launches(self, kernel: str | None = None) -> dict[Problem, str]:
        """Return the JSON of the recorded launch and kernel of each problem; of one kernel or of all."""
        query = select(db.Problems, db.RecordedLaunches.c.document).join(db.RecordedLaunches)
        query = query if kernel is None else query.where(db.Problems.c.kernel == kernel)
        rows = self._connection.execute(query.order_by(db.Problems.c.id)).all()
        for row in rows:
            parse_document(row.document)
        return {_problem(row): row.document for row in rows}

    @reads
    def arches(self) -> list[str]:
        """Return the arches that have rows, sorted."""
        return sorted(self._connection.scalars(select(db.Devices.c.arch).distinct().join(db.Studies)))

    @reads
    def kernels(self) -> list[str]:
        """Return the kernels that have rows, sorted."""
        return sorted(self._connection.scalars(select(db.Problems.c.kernel).distinct().join(db.Studies)))

    @reads
    def counts(self, without: Collection[ComparableRows] = ()) -> dict[tuple[str, Kind], int]:
        """Return the number of trials by arch and kind, pruned ones included; without those of some pools."""
        gathering, counts = Gathering(self._connection), Counter[tuple[str, Kind]]()
        left_out = {(pool.problem, pool.device, pool.kind, pool.version) for pool in without}
        studies = {
            study.id: (gathering.names.devices[study.device_id].arch, _KINDS[study.kind])
            for study in gathering.studies
            if not left_out or gathering.names.subject(study) not in left_out
        }
        stored = (
            select(db.Results.c.study_id, func.count()).join_from(db.Trials, db.Results).group_by(db.Results.c.study_id)
        )
        removed = select(db.RemovedTrials.c.study_id, db.RemovedTrials.c.trials)
        for query in (stored, removed):
            for study, number in self._connection.execute(query):
                if study in studies:
                    counts[studies[study]] += number
        return dict(sorted(counts.items()))

    @reads
    def timed_with(self) -> list[Versions]:
        """Return the versions that rows from a GPU were timed with, sorted."""
        query = select(db.Devices.c.torch, db.Devices.c.triton).distinct().join(db.Studies)
        rows = self._connection.execute(query.where(db.Studies.c.kind == Kind.MEASURED))
        return sorted(Versions(row.torch, row.triton) for row in rows)

    @reads
    def timed_sources(self) -> dict[str, set[str]]:
        """Return the source hashes of each kernel that have rows from a GPU."""
        query = select(db.Versions.c.kernel, db.Versions.c.source_hash).distinct().join(db.Studies)
        wanted = (db.Studies.c.kind == Kind.MEASURED, db.Versions.c.source_hash != "")
        sources: dict[str, set[str]] = {}
        for kernel, source_hash in self._connection.execute(query.where(*wanted)):
            sources.setdefault(kernel, set()).add(source_hash)
        return sources

    @reads
    def integrity(self) -> list[str]:
        """Return what is wrong with the database; empty if all is well."""
        problems: list[str] = []
        if not self.database.is_server:
            lines = self._connection.exec_driver_sql("PRAGMA integrity_check(10)").scalars().all()
            problems = [str(line) for line in lines if line != "ok"]
        if not problems:
            try:
                self.evidence()
            except DatabaseError as error:
                problems.append(str(error))
        return problems


class Gathering:
    """All that results share, read once."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.names = connection, Names(connection)
        self.studies = self.names.checked_rows(db.Studies)
        sweeps = {row.id: row for row in self.names.checked_rows(db.Sweeps)}
        self.complete: set[int] = set()
        self.finals: dict[int, tuple[int, FinalsRun]] = {}
        self.runs: dict[int, list[Any]] = {}
        runs = self.names.checked_rows(db.StudyRuns)
        for run in sorted(runs, key=lambda run: (sweeps[run.sweep_id].started_at, sweeps[run.sweep_id].uid)):
            self.runs.setdefault(run.study_id, []).append(run)
            if run.planned is not None:
                self.complete.add(run.study_id)
            if run.tie_band is not None:
                bands = FinalsRun(sweeps[run.sweep_id].uid, run.tie_band, run.keep_band, run.floor_us or 0.0)
                self.finals[run.study_id] = run.sweep_id, bands
        self.calibrations: dict[tuple[str, int | None, int], float] = {}
        for row in sorted(self.names.checked_rows(db.Calibrations), key=lambda row: (row.created_at, row.value)):
            device = sweeps[row.sweep_id].device_id
            self.calibrations[row.name, row.sweep_id, device] = self.calibrations[row.name, None, device] = row.value
        self._fastest: dict[tuple[str, str], float] = {}

    @property
    def codes(self) -> dict[int, Code]:
        """Facts of the machine code of configs that were only compiled, by result."""
        rows = self.connection.execute(select(db.Codes))
        return {row.result_id: Code(*(getattr(row, name) or 0 for name in db.CODE)) for row in rows}

    def select(
        self,
        kernel: str | None,
        arch: str | None,
        kinds: Collection[Kind] | None,
        problems: Collection[Problem] | None,
        device: Device | None,
    ) -> list[Any]:
        """Return the studies of a kernel, an arch, kinds, problems and a device; None means any."""
        problems = None if problems is None else set(problems)

        def is_wanted(study: Any) -> bool:
            problem, on = self.names.problems[study.problem_id], self.names.devices[study.device_id]
            return (
                (kernel is None or problem.kernel == kernel)
                and (arch is None or on.arch == arch)
                and (kinds is None or study.kind in kinds)
                and (problems is None or problem in problems)
                and (device is None or on == device)
            )

        return [study for study in self.studies if is_wanted(study)]

    def pool(self, study: Any) -> ComparableRows:
        """Return a study as a pool of comparable rows."""
        problem, device, kind, version = self.names.subject(study)
        is_complete, has_finals = self.is_complete(study), study.id in self.finals
        return ComparableRows(problem, device, kind, version, is_complete, float(study.timed_at), has_finals)

    def lookup_key(self, study: Any) -> NamedInts | None:
        """Return the key under which an exported table holds a study."""
        return None if study.lookup_key is None else parsed(db.Studies, study.id, study.lookup_key)

    def is_complete(self, study: Any) -> bool:
        """Return True if a study was swept to its end; a publication is as complete as it will ever be."""
        return study.kind == Kind.PUBLISHED or study.id in self.complete

    def read(self, studies: Sequence[Any]) -> list[Evidence]:
        """Return the evidence of studies, in the order of their results."""
        by_id = {study.id: study for study in studies}
        query = select(db.Results).order_by(db.Results.c.id)
        if len(by_id) <= _FEW:
            query = query.where(db.Results.c.study_id.in_(list(by_id)))
        results = [row for row in self.connection.execute(query).mappings() if row["study_id"] in by_id]
        counts = Counter(row["study_id"] for row in results)
        for study in studies:  # checksums notice no row that is missing
            if (counts[study.id], len(self.runs.get(study.id, ()))) != (study.results, study.runs):
                raise damaged(self.connection, "studies", study.id)
        blocks = self._blocks(by_id, len(by_id) <= _FEW)
        codes, shared = self.codes, {id: self._shared(study) for id, study in by_id.items()}
        return [
            self._evidence(row, shared[row["study_id"]], blocks.get(row["id"], ()), codes.get(row["id"]))
            for row in results
        ]

    def _blocks(self, studies: Collection[int], few: bool) -> dict[int, list[Any]]:
        """Return the final blocks of each result: stage, process, round, time."""
        self.processes = {row.id: row for row in self.names.checked_rows(db.Processes)}
        of = db.Trials.c
        query = select(of.result_id, of.stage, of.process_id, of.round, of.time_us)
        query = query.where(of.stage != db.COARSE, of.time_us.is_not(None))
        if few:
            query = query.join(db.Results).where(db.Results.c.study_id.in_(list(studies)))
        blocks: dict[int, list[Any]] = {}
        for result, *block in self.connection.execute(query):
            blocks.setdefault(result, []).append(block)
        return blocks

    def _shared(self, study: Any) -> dict[str, Any]:
        """Return the fields that all evidence of a study has in common."""
        problem, device, kind, version = self.names.subject(study)
        runs = self.runs.get(study.id, [])
        sweep = runs[0].sweep_id if len(runs) == 1 else None

        def calibrated(name: str) -> float | None:
            newest = self.calibrations.get((name, None, study.device_id))
            return self.calibrations.get((name, sweep, study.device_id), newest)

        copy, flops = calibrated(COPY_CEILING), self.names.flops.get(study.problem_id)
        used = {run.check_used for run in runs} or {CHECKS[0]}
        return {
            "problem": problem,
            "device": device,
            "kind": kind,
            "version": version,
            "lookup_key": self.lookup_key(study),
            "bytes_moved": study.bytes_moved,
            "flops": flops,
            # Of several checks the least strict counts.
            "check": max(used, key=lambda c: ([*CHECKS, name := c.partition(" ")[0]].index(name), c)),
            "complete": self.is_complete(study),
            "ceiling_gb_per_s": copy and self._ceiling(copy, device.name, study.kind),
            "copy_gb_per_s": copy,
            "peak_flop_per_s": calibrated(FLOP_PER_S + problem.in_dtype) if flops is not None else None,
            "newest": float(study.timed_at),
            "has_finals": study.id in self.finals,
        }

    def _evidence(self, row: Any, shared: dict[str, Any], blocks: Sequence[Any], code: Code | None) -> Evidence:
        identities, study = self.names.identities, row["study_id"]
        processes = identities["processes"]
        try:
            crc = blocks_checksum([(stage, processes[p], round, time_us) for stage, p, round, time_us in blocks])
            references = {
                "study_id": identities["studies"][study],
                "config_id": identities["configs"][row["config_id"]],
            }
        except KeyError:
            raise damaged(self.connection, "results", row["id"]) from None
        if row_checksum(db.Results, row, references) ^ crc != row["crc"]:
            raise damaged(self.connection, "results", row["id"])
        config, coarse_us = self.names.configs[row["config_id"]], row["coarse_us"]
        status = _STATUSES[checked("status", row["status"])]
        by_stage = self._finals(study, blocks) if blocks and study in self.finals else {}
        timed = by_stage.get(db.FINAL, ())
        times_us = tuple(sorted(trimmed_mean(time_us for _, time_us in times.blocks) for times in timed))
        if not times_us and coarse_us is not None:
            times_us = (coarse_us,) * max(1, row["coarse_processes"])
        return Evidence(
            config=None if shared["kind"] is Kind.PUBLISHED and not config else config,
            status=status,
            times_us=times_us if status is Status.OK else (),
            source=row["source"] and checked("source", row["source"]),
            note=row["note"] and checked("note", row["note"]),
            facts=_facts(row, code),
            stage="final" if timed else "screen",
            screen_us=coarse_us if timed else None,
            finals=timed,
            duplicate=by_stage.get(db.CONTROL, ()),
            **shared,
        )

    def _finals(self, study: int, blocks: Sequence[Any]) -> dict[int, tuple[ProcessTimes, ...]]:
        sweep, run = self.finals[study]
        by_process: dict[tuple[int, str], list[tuple[int, float]]] = {}
        for stage, process_id, round, time_us in blocks:
            process = self.processes[process_id]
            if process.sweep_id == sweep:
                by_process.setdefault((stage, process.name), []).append((round, time_us))
        by_stage: dict[int, list[ProcessTimes]] = {}
        for (stage, process), of_process in sorted(by_process.items()):
            by_stage.setdefault(stage, []).append(ProcessTimes(run, process, tuple(sorted(of_process))))
        return {stage: tuple(times) for stage, times in by_stage.items()}

    def _ceiling(self, copy_gb_per_s: float, device: str, kind: str) -> float:
        """Return the copy rate, or the highest rate of any kernel on devices of this name; see fp8tune.ceiling."""
        if (device, kind) not in self._fastest:
            on = [id for id, named in self.names.devices.items() if named.name == device]
            rates = [rate for id in on if (rate := self.calibrations.get((COPY_CEILING, None, id))) is not None]
            mb_per_s: Any = db.Studies.c.bytes_moved / func.coalesce(db.Results.c.final_us, db.Results.c.coarse_us)
            query = select(func.max(mb_per_s)).join_from(db.Results, db.Studies).join(db.Problems)
            wanted: tuple[Any, ...] = (
                db.Studies.c.device_id.in_(on),
                db.Studies.c.kind == kind,
                db.Results.c.status == Status.OK,
            )
            wanted += (mb_per_s <= 1e3 * CACHED_RATE * max(rates), ~db.Problems.c.input_layout.startswith(RECORDED))
            self._fastest[device, kind] = (self.connection.scalar(query.where(*wanted)) or 0.0) / 1e3
        return ceiling_gb_per_s(copy_gb_per_s, [self._fastest[device, kind]])


def parsed(table: Table, id: int, text: str) -> NamedInts:
    """Parse stored integers. Raises DatabaseError for a damaged text."""
    try:
        return parse_named_ints(text)
    except ValueError as error:
        raise DatabaseError(
            f"{table.name}:{id} is damaged ({error}): restore the database from git or a copy"
        ) from None


def unpack_samples(blob: bytes | None) -> Samples:
    """Return the stored samples of a block, in microseconds."""
    return tuple(np.frombuffer(blob, "<f4").astype(float).round(3).tolist()) if blob else ()


def damaged(connection: Connection, table: str, id: object) -> DatabaseError:
    """Return the error for a row whose checksum differs."""
    where = f"{table}:{id}" if id != "" else f"a row of {table}"
    remedy = "restore the database from git or a copy"
    if table == "results":
        remedy += f", or run fp8tune forget {where}"
    return DatabaseError(f"{where} is damaged, its checksum differs: {remedy}")


def _record(record: type[Any], row: Any) -> Any:
    values = {name: getattr(row, name) for name in record.__dataclass_fields__}
    return record(**{n: checked(n, v) if isinstance(v, str) and v else v for n, v in values.items()})


def _problem(row: Any) -> Problem:
    names = [name for name in Problem.__dataclass_fields__ if name not in ("shape", "seed")]
    shape = parsed(db.Problems, row.id, row.shape)
    return Problem(shape=shape, seed=row.seed, **{name: checked(name, getattr(row, name)) for name in names})


def _facts(row: Any, code: Code | None = None) -> Facts:
    row = getattr(row, "_mapping", row)
    return Facts(row["registers"], row["spill_bytes"], row["shared_bytes"], row["compile_s"], code)


def _whole(name: str, value: float | None) -> Any:
    return value if value is None or name == "power_w" else int(value)


def _outcome(trials: Sequence[TrialRow], row: Any) -> Outcome:
    status = last_status(trials)
    mine = [trial for trial in trials if trial.status == status]
    times_us = [trial.time_us for trial in mine if trial.time_us is not None]
    time_us = median(times_us) if times_us and status is Status.OK else None
    return Outcome(status, time_us, mine[-1].reason, facts=_facts(row))


def _is_outdated(trial: TrialRow, today: str) -> bool:
    """Return True if a trial says nothing of the bytes any more.

    An unknown reference is believed where it found no fault. A compile error is whatever raised before a launch.
    """
    if trial.status not in (Status.OK, Status.UNTIMED, Status.WRONG, Status.COMPILE_ERROR):
        return False
    return trial.reference != today and (bool(trial.reference) or trial.status == Status.WRONG)


def _same(table: Table, record: Any) -> Select[Any]:
    return select(table.c.id).where(*(table.c[name] == value for name, value in vars(record).items()))


def _study_ids(subject: Subject, *, kind: bool = False) -> Select[Any]:
    problem, version, of = subject.problem, subject.version, db.Studies.c
    values = {**vars(problem), "canonical": problem.shape.canonical}
    same = (db.Problems.c[name] == value for name, value in values.items() if name != "shape")
    versions = select(db.Versions.c.id).where(
        db.Versions.c.kernel == version.kernel, db.Versions.c.source_hash == version.source_hash
    )
    query = select(of.id).where(of.problem_id.in_(select(db.Problems.c.id).where(*same)), of.version_id.in_(versions))
    query = query.where(of.device_id.in_(_same(db.Devices, subject.device)))
    return query.where(of.kind == str(subject.kind)) if kind else query


@contextlib.contextmanager
def _collecting_no_garbage() -> Iterator[None]:
    """Keep the garbage collector off: records hold no cycles, and walking them again and again doubles the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
