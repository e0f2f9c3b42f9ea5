"""Reading: one path from stored rows to typed records."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, Select, Table, func, inspect, select

from fp8tune.ceiling import FLOP_PER_S, ceiling_gb_per_s
from fp8tune.errors import DatabaseError
from fp8tune.records import (
    RECORDED,
    ClockLimits,
    Compiler,
    Device,
    Facts,
    FinalsRun,
    Kind,
    NamedInts,
    Outcome,
    Problem,
    ProcessTimes,
    Program,
    Row,
    Status,
    Subject,
    Telemetry,
)
from fp8tune.stats.study import CACHED_RATE, Result, Study
from fp8tune.store import schema as db
from fp8tune.store.database import Database, reads
from fp8tune.store.rows import Names, by_id, checked_rows, damaged, problem_of, record, reported_damage
from fp8tune.store.texts import parse_document, parse_named_ints
from fp8tune.store.trials import STAGES, Trial, chunks, outcome_of, read_trials
from fp8tune_kernels.spec import CHECKS

COPY_CEILING = "copy_ceiling_gb_per_s"
"""Calibration of a device-to-device copy, read plus written."""

STAGE_NAMES = {number: stage for stage, number in STAGES.items()}
FEW = 300  # studies that are looked up one by one; more are read with all others

Keep = Callable[[Sequence[Study]], Collection[Study]]
"""Studies without results -> those to read: :func:`fp8tune.stats.rank.competing`."""


@dataclass(frozen=True)
class Tally:
    """Outcomes of the configs that were tried on a subject."""

    subject: Subject
    outcomes: Mapping[NamedInts, Outcome]
    check: str = ""
    """By what outputs are right, in the newest sweep; empty if none was compared."""

    @property
    def counts(self) -> Counter[Status]:
        """Number of configs by outcome."""
        return Counter(outcome.status for outcome in self.outcomes.values())

    @property
    def failures(self) -> dict[NamedInts, Outcome]:
        """Failed configs; those with wrong output first."""
        right = (Status.OK, Status.PRUNED)
        failed = {config: outcome for config, outcome in self.outcomes.items() if outcome.status not in right}
        return dict(sorted(failed.items(), key=lambda item: item[1].status is not Status.WRONG))

    @property
    def has_right(self) -> bool:
        """Return True if a config is right, and timed where times are taken, or if none was tried."""
        return Status.OK in self.counts or not self.outcomes


@dataclass(frozen=True)
class Timed:
    """Blocks of one config in one process of one sweep's finals."""

    stage: str
    process: str
    blocks: tuple[tuple[int, float], ...]

    def of_run(self, run: FinalsRun) -> ProcessTimes:
        """Return it as a part of these finals."""
        return ProcessTimes(run, self.process, self.blocks)


class Reading(Database):
    """Methods that return records."""

    # Studies

    @reads
    def studies(
        self,
        kernel: str | None = None,
        arch: str | None = None,
        kinds: Collection[Kind] | None = None,
        *,
        problems: Collection[Problem] | None = None,
        device: Device | None = None,
        keep: Keep | None = None,
    ) -> list[Study]:
        """Return studies with their results, undecided. ``keep`` chooses those whose results are read."""
        if problems is not None and len(problems) <= FEW:  # a sweep asks for each of its problems, mostly in vain
            shapes = {problem.shape.canonical for problem in problems}
            if self._connection.scalar(select(db.Problems.c.id).where(db.Problems.c.canonical.in_(shapes))) is None:
                return []
        names = Names(self._connection)
        studies = names.matching(kernel, arch, kinds, problems=problems, device=device)
        if keep is not None:
            chosen = {identity(study) for study in keep(list(studies.values()))}
            studies = {id: study for id, study in studies.items() if identity(study) in chosen}
        with reported_damage("results"):
            return _with_results(names, studies)

    def pools(self, *places: Any, **conditions: Any) -> list[Study]:
        """Return studies without their results, as :meth:`studies` offers them to ``keep``."""
        return list(self.study_ids(*places, **conditions).values())

    @reads
    def study_ids(self, *places: Any, **conditions: Any) -> dict[int, Study]:
        """Return studies without their results, by the id of their row."""
        return Names(self._connection).matching(*places, **conditions)

    @reads
    def arches(self) -> list[str]:
        """Return the arches that have rows, sorted."""
        return sorted(self._connection.scalars(select(db.Devices.c.arch).distinct().join(db.Studies)))

    @reads
    def kernels(self) -> list[str]:
        """Return the kernels that have rows, sorted."""
        return sorted(self._connection.scalars(select(db.Problems.c.kernel).distinct().join(db.Studies)))

    @reads
    def integrity(self) -> list[str]:
        """Return the faults of the database; empty if all is well."""
        if not self.is_server:
            lines = map(str, self._connection.exec_driver_sql("PRAGMA integrity_check(10)").scalars())
            if faults := [line for line in lines if line != "ok"]:
                return faults
        try:
            self.studies()
        except DatabaseError as error:
            return [str(error)]
        return []

    # Sweeps and devices

    @property
    def changes(self) -> object:
        """A value that each commit of another process changes."""
        query = "SELECT pg_current_snapshot()::text" if self.is_server else "PRAGMA data_version"
        return self.run(lambda: self._connection.exec_driver_sql(query).scalar_one())

    @reads
    def sweep_uid(self, sweep_id: int) -> str:
        """Return the name of a sweep in every copy of the database."""
        return str(self._connection.scalar(select(db.Sweeps.c.uid).where(db.Sweeps.c.id == sweep_id)))

    @reads
    def limits_of(self, sweep_uid: str) -> ClockLimits:
        """Return the clock and power limits at which a sweep timed."""
        query = select(*(db.Sweeps.c[name] for name in db.LIMITS)).where(db.Sweeps.c.uid == sweep_uid)
        return ClockLimits(*(self._connection.execute(query).first() or ()))

    @reads
    def unfinished_sweeps(self) -> list[str]:
        """Return the commands of sweeps that were begun and not finished, oldest first."""
        query = select(db.Sweeps.c.command).where(db.Sweeps.c.finished_at.is_(None)).order_by(db.Sweeps.c.id)
        return list(self._connection.scalars(query))

    @reads
    def calibration(self, device: Device) -> dict[str, float]:
        """Return the newest value of everything that was measured of this very device, by name."""
        names = Names(self._connection)
        same = {id for id, sweep in names.sweeps.items() if names.devices[sweep.device_id] == device}
        return {row.name: row.value for row in _calibrations(self._connection) if row.sweep_id in same}

    # Configs of one subject

    def tally(self, subject: Subject) -> Tally:
        """Return the outcomes of a problem's configs."""
        check = self._check(subject) if subject.kind in (Kind.MEASURED, Kind.INTERPRETER) else ""
        return Tally(subject, self.tried(subject, stage=None), check)

    @reads
    def _check(self, subject: Subject) -> str:
        """Return the check of a subject's newest sweep."""
        study = _study_ids(subject).where(db.Studies.c.kind == str(subject.kind))
        query = select(db.StudyRuns.c.check_used).join(db.Sweeps).where(db.StudyRuns.c.study_id.in_(study))
        return str(self._connection.scalar(query.order_by(db.Sweeps.c.started_at.desc()).limit(1)) or "")

    def tried(
        self, subject: Subject, *, sweep: int | None = None, stage: str | None = "screen"
    ) -> dict[NamedInts, Outcome]:
        """Return the last outcome of each config, with the median time of its trials."""
        return self._outcomes(subject, lambda trial: 0, sweep, stage).get(0, {})

    def tried_in_rounds(
        self, subject: Subject, *, sweep: int | None = None, reference: str = "", limits: ClockLimits = ClockLimits()
    ) -> dict[int, dict[NamedInts, Outcome]]:
        """Return the coarse pass's outcomes by round.

        Trials that another reference than today's, given by its hash, checked are left out, and times at other clock
        or power limits.
        """
        return self._outcomes(subject, lambda trial: trial.round, sweep, "screen", reference, limits)

    @reads
    def _outcomes(
        self,
        subject: Subject,
        part: Callable[[Trial], int],
        sweep: int | None,
        stage: str | None,
        reference: str = "",
        limits: ClockLimits = ClockLimits(),
    ) -> dict[int, dict[NamedInts, Outcome]]:
        """Return the last outcome of each config in each part of the trials."""
        results, parts = self._results_of(subject), dict[int, dict[int, list[Trial]]]()
        left, number = set(results), None if stage is None else STAGES[stage]
        for trial in read_trials(self._connection, results, sweep=sweep, stage=number):
            left.discard(trial.result_id)
            if not trial.is_outdated(reference) and trial.is_comparable(limits):
                parts.setdefault(part(trial), {}).setdefault(trial.result_id, []).append(trial)
        outcomes = {
            number: {results[id][0]: outcome_of(trials, results[id][1]) for id, trials in parts[number].items()}
            for number in sorted(parts)
        }
        # results whose coarse trials were removed have their summaries
        pruned = {results[id][0]: outcome_of([], results[id][1]) for id in left if results[id][1].coarse_us}
        if pruned and sweep is None and not reference:
            outcomes[0] = pruned | outcomes.get(0, {})
        return outcomes

    @reads
    def finals(self, subject: Subject, sweep: int) -> dict[NamedInts, list[Timed]]:
        """Return the blocks that a sweep's finals have for a problem so far, ended or not."""
        results, blocks = self._results_of(subject), dict[tuple[int, int, str], list[tuple[int, float]]]()
        for trial in read_trials(self._connection, results, sweep=sweep):
            if trial.is_block and trial.time_us is not None:
                place = trial.result_id, trial.stage, trial.process
                blocks.setdefault(place, []).append((trial.round, trial.time_us))
        timed: dict[NamedInts, list[Timed]] = {}
        for (result, stage, process), times in sorted(blocks.items()):
            timed.setdefault(results[result][0], []).append(Timed(STAGE_NAMES[stage], process, tuple(sorted(times))))
        return timed

    @reads
    def commit(self, subject: Subject) -> str:
        """Return the git commit of the working tree that last timed a problem; empty outside git."""
        c = db.Processes.c
        timed = (db.Results.c.study_id.in_(_study_ids(subject)), db.Trials.c.time_us.is_not(None))
        query = select(c.git_commit).join_from(db.Trials, db.Results).join(db.Processes).where(*timed)
        return str(self._connection.scalar(query.order_by(c.started_at.desc(), c.id.desc()).limit(1)) or "")

    @reads
    def tick_us(self, subject: Subject, sweep: int) -> float | None:
        """Return the smallest step between two samples in a sweep's finals of a problem; None if unknown."""
        details = db.TrialDetails.c
        query = select(func.min(details.tick_us)).join(db.Results, db.Results.c.id == details.result_id)
        query = query.join(db.Processes, db.Processes.c.id == details.process_id).where(details.stage != db.COARSE)
        same = (db.Results.c.study_id.in_(_study_ids(subject)), db.Processes.c.sweep_id == sweep)
        tick: float | None = self._connection.scalar(query.where(*same))
        return tick

    @reads
    def output_bits(self, subject: Subject, axis: str) -> dict[NamedInts, dict[int, str]]:
        """Return the hashes of outputs on a problem by config and size. Raises DatabaseError for damaged ones."""
        bits: dict[NamedInts, dict[int, str]] = {}
        if inspect(self._connection).has_table(db.OutputBits.name):  # a database may be older than the table
            results, c = self._results_of(subject), db.OutputBits.c
            for ids in chunks(results):
                query = select(db.OutputBits).where(c.result_id.in_(ids), c.axis == axis)
                for row in self._connection.execute(query).mappings():
                    if db.row_checksum(db.OutputBits, dict(row)) != row["crc"]:
                        raise damaged(db.OutputBits.name, "", "its checksum differs")
                    bits.setdefault(results[row["result_id"]][0], {})[row["size"]] = row["bits"]
        return bits

    def _results_of(self, subject: Subject) -> dict[int, tuple[NamedInts, Any]]:
        """Return the config and the row of a subject's results."""
        of_study = db.Results.c.study_id.in_(_study_ids(subject).where(db.Studies.c.kind == str(subject.kind)))
        query = select(db.Results, db.Configs.c.text.label("config")).join(db.Configs).where(of_study)
        with reported_damage("configs"):
            rows = self._connection.execute(query.order_by(db.Results.c.id))
            return {row.id: (parse_named_ints(row.config), row) for row in rows}

    # Rows, recorded launches, machine code

    def rows(self, kernel: str | None = None, arch: str | None = None) -> Iterator[Row]:
        """Yield every trial with its samples, in the order of the studies."""
        with self.transaction() as connection:
            names = Names(connection)
            studies = names.matching(kernel, arch)
            details = [db.TrialDetails.c[name] for name in db.DETAILS]
            query = select(db.Results, db.Trials, *details).join_from(db.Results, db.Trials).outerjoin(db.TrialDetails)
            result = connection.execute(query.order_by(db.Results.c.id).execution_options(yield_per=1000))
            c, trial = db.Results.c, db.Trials.c
            for row in result.mappings():
                if (study := studies.get(row[c.study_id])) is None:
                    continue
                config, process = names.configs[row[c.config_id]], names.processes[row[trial.process_id]]
                values = {name: row[name] for name in Telemetry.__dataclass_fields__}
                telemetry = {n: v if v is None or n == "power_w" else int(v) for n, v in values.items()}
                outcome = Outcome(
                    Status(row[trial.status]),
                    row[trial.time_us],
                    row[trial.reason],
                    tuple(round(sample, 3) for sample in array("f", row["samples"] or b"")),
                    row["tick_us"],
                    Facts(**{name: row[name] for name in db.FACTS}),
                    Telemetry(**telemetry),
                )
                yield Row(
                    config=None if study.kind is Kind.PUBLISHED and not config else config,
                    outcome=outcome,
                    commit=process.git_commit,
                    source=row[c.source],
                    note=row[c.note],
                    stage=STAGE_NAMES[row[trial.stage]],
                    round=row[trial.round],
                    process=process.name,
                    position=row[trial.position],
                    **{name: getattr(study, name) for name in OF_STUDY},
                )

    @reads
    def recorded_launches(self, kernel: str | None = None) -> dict[Problem, str]:
        """Return the JSON of the recorded launch and kernel of each problem; of one kernel or of all."""
        query = select(db.Problems, db.RecordedLaunches.c.document).join(db.RecordedLaunches)
        query = query if kernel is None else query.where(db.Problems.c.kernel == kernel)
        rows = self._connection.execute(query.order_by(db.Problems.c.id)).all()
        for row in rows:
            parse_document(row.document)
        with reported_damage("problems"):
            return {problem_of(row): row.document for row in rows}

    @reads
    def programs(self, kernel: str | None = None, arch: str | None = None) -> dict[Program, dict[Compiler, str]]:
        """Return each launch's hash of machine code, by each compiler that is known to have compiled it."""
        names, programs = Names(self._connection), dict[Program, dict[Compiler, str]]()
        compilers = {id: record(Compiler, row) for id, row in by_id(self._connection, db.Compilers).items()}
        with reported_damage("programs"):
            for row in checked_rows(self._connection, db.Programs):
                problem, version = names.problems[row.problem_id], names.versions[row.version_id]
                compiler, config = compilers[row.compiler_id], names.configs[row.config_id]
                if kernel in (None, problem.kernel) and arch in (None, compiler.arch):
                    program = problem, version.source_hash if version else "", config
                    programs.setdefault(program, {})[compiler] = row.code_hash
        return programs


OF_STUDY = ("problem", "device", "kind", "version", "lookup_key", "bytes_moved")
"""Fields of a study that its rows and picks have too."""


def _with_results(names: Names, studies: Mapping[int, Study]) -> list[Study]:
    """Return the studies with their results, in the order they were begun."""
    few = list(studies) if len(studies) <= FEW else None
    blocks, common = _blocks(names.connection, few), _common(names, studies)
    statuses, unknown, no_facts = {str(status): status for status in Status}, Facts(), [None] * len(db.FACTS)
    results, untimed = {id: list[Result]() for id in studies}, {id: list[NamedInts]() for id in studies}
    failures, counts = {id: dict[NamedInts, Status]() for id in studies}, Counter[int]()
    runs = {id: names.finals(id) for id in studies}
    for row in checked_rows(names.connection, db.Results, blocks, few):
        id, config_id, source, note, status_text, coarse_us, processes, _, *facts, _, result_id = row
        if id not in studies:
            continue
        counts[id] += 1
        status, config = statuses[status_text], names.configs[config_id]
        finals, control = tuple[ProcessTimes, ...](), tuple[ProcessTimes, ...]()
        if status is not Status.OK:
            failures[id][config] = status
        if (of_result := blocks.get(result_id)) and (run := runs[id]):
            finals, control = (_process_times(of_result, names, *run, stage) for stage in (db.FINAL, db.CONTROL))
        is_timed = studies[id].kind not in (Kind.STATIC, Kind.INTERPRETER)
        if is_timed and (status is not Status.OK or (not finals and coarse_us is None)):
            if status is Status.OK and config:
                untimed[id].append(config)
            continue
        result = Result(
            config=None if source and not config else config,  # a publication that names none
            status=status,
            coarse_us=coarse_us,
            figures=len(finals) or max(1, processes),
            finals=finals,
            control=control,
            source=source,
            note=note,
            facts=unknown if facts == no_facts else Facts(*facts),
            **common[id],
        )
        results[id].append(result)
    for id in studies:  # checksums notice no row that is missing
        if (counts[id], len(names.runs.get(id, ()))) != (names.rows[id].results, names.rows[id].runs):
            raise damaged("studies", id, "rows of it are missing")
    return [
        replace(
            study,
            results=tuple(sorted(results[id], key=result_order)),
            failures=failures[id],
            untimed=tuple(untimed[id]),
        )
        for id, study in studies.items()
    ]


def _blocks(connection: Connection, studies: Sequence[int] | None) -> dict[int, list[Any]]:
    """Return the final blocks of each result: stage, process, round, time."""
    c = db.Trials.c
    query = select(c.result_id, c.stage, c.process_id, c.round, c.time_us)
    query = query.where(c.stage != db.COARSE, c.time_us.is_not(None))
    if studies is not None:
        query = query.join(db.Results).where(db.Results.c.study_id.in_(studies))
    blocks: dict[int, list[Any]] = {}
    for result, *block in connection.execute(query).all():
        blocks.setdefault(result, []).append(tuple(block))
    return blocks


def _process_times(
    blocks: Sequence[Any], names: Names, sweep: int, run: FinalsRun, stage: int
) -> tuple[ProcessTimes, ...]:
    """Return the blocks of a stage in a sweep, by process."""
    by_process: dict[str, list[tuple[int, float]]] = {}
    for block_stage, process_id, round, time_us in blocks:
        process = names.processes[process_id]
        if block_stage == stage and process.sweep_id == sweep:
            by_process.setdefault(process.name, []).append((round, time_us))
    return tuple(ProcessTimes(run, name, tuple(sorted(times))) for name, times in sorted(by_process.items()))


def _common(names: Names, studies: Mapping[int, Study]) -> dict[int, dict[str, Any]]:
    """Return the fields that all results of a study have in common: its check and the rates of its device."""
    values: dict[tuple[str, int | None, int], float] = {}
    for row in _calibrations(names.connection):
        device = names.sweeps[row.sweep_id].device_id
        values[row.name, row.sweep_id, device] = values[row.name, None, device] = row.value
    fastest: dict[tuple[str, str], float] = {}
    common = {}
    for id, study in studies.items():
        runs, device, place = names.runs.get(id, []), names.rows[id].device_id, (study.device.name, str(study.kind))
        sweep = runs[0].sweep_id if len(runs) == 1 else None

        def calibrated(name: str, device: int = device, sweep: int | None = sweep) -> float | None:
            return values.get((name, sweep, device), values.get((name, None, device)))

        copy, checks = calibrated(COPY_CEILING), {run.check_used for run in runs} or {CHECKS[0]}
        if copy and place not in fastest:  # the highest rate of any kernel on devices of this name; see fp8tune.ceiling
            on = [number for number, named in names.devices.items() if named.name == study.device.name]
            rates = [rate for number in on if (rate := values.get((COPY_CEILING, None, number))) is not None]
            mb_per_s: Any = db.Studies.c.bytes_moved / func.coalesce(db.Results.c.final_us, db.Results.c.coarse_us)
            query = select(func.max(mb_per_s)).join_from(db.Results, db.Studies).join(db.Problems)
            query = query.where(db.Studies.c.device_id.in_(on), db.Studies.c.kind == place[1])
            query = query.where(db.Results.c.status == Status.OK, mb_per_s <= 1e3 * CACHED_RATE * max(rates))
            query = query.where(~db.Problems.c.input_layout.startswith(RECORDED))
            fastest[place] = (names.connection.scalar(query) or 0.0) / 1e3
        common[id] = {
            # Of several checks the least strict counts.
            "check": max(checks, key=lambda check: ([*CHECKS, name := check.partition(" ")[0]].index(name), check)),
            "ceiling_gb_per_s": copy and ceiling_gb_per_s(copy, [fastest[place]]),
            "copy_gb_per_s": copy,
            "peak_flop_per_s": None if study.flops is None else calibrated(FLOP_PER_S + study.problem.in_dtype),
        }
    return common


def identity(record: Study | Row | Subject) -> tuple[object, ...]:
    """Return what makes results comparable: problem, device, kind, and the kernel's code."""
    return record.problem, record.device, record.kind, None if record.version is None else record.version.source_hash


def subjects_of(studies: Iterable[Study]) -> list[Subject]:
    """Return every problem with the newest kernel version that was tried on it, on each device."""
    newest: dict[object, Subject] = {}
    for study in sorted(studies, key=lambda study: study.newest):
        if study.version is not None and study.kind is not Kind.PUBLISHED:
            subject = Subject(study.version, study.device, study.kind, study.problem)
            newest[study.device, study.kind, study.problem] = subject
    return list(newest.values())


def result_order(result: Result) -> tuple[object, ...]:
    """Return the sort key of results: finals first, for the coarse times chose them; names decide between equals."""
    config = "" if result.config is None else result.config.canonical
    value_us = 0.0 if not result.finals and result.coarse_us is None else result.value_us
    return not result.finals, value_us, config, result.source, result.note


def _calibrations(connection: Connection) -> list[Any]:
    return sorted(checked_rows(connection, db.Calibrations), key=lambda row: (row.created_at, row.value))


def _study_ids(subject: Subject) -> Select[Any]:
    problem, version, c = subject.problem, subject.version, db.Studies.c

    def same(table: Table, values: Mapping[str, Any]) -> Select[Any]:
        return select(table.c.id).where(*(table.c[name] == value for name, value in values.items()))

    values = {**vars(problem), "canonical": problem.shape.canonical}
    problems = same(db.Problems, {name: value for name, value in values.items() if name != "shape"})
    versions = same(db.Versions, {"kernel": version.kernel, "source_hash": version.source_hash})
    query = select(c.id).where(c.problem_id.in_(problems), c.version_id.in_(versions))
    return query.where(c.device_id.in_(same(db.Devices, vars(subject.device))))
