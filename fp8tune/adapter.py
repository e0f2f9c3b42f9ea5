"""Studies from stored rows, with what the installed tables hold for them. Goes when the store returns studies."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from fp8tune import lookups
from fp8tune.ceiling import ceiling_of
from fp8tune.errors import DatabaseError, UsageError
from fp8tune.records import (
    Device,
    Evidence,
    Finalist,
    KernelVersion,
    Kind,
    NamedInts,
    Outcome,
    Pick,
    Problem,
    Status,
    Subject,
)
from fp8tune.replay import recording
from fp8tune.replay.configs import encoded
from fp8tune.replay.problems import in_words
from fp8tune.replay.recording import Kernel, Launch
from fp8tune.stats.decide import MeasuringPlan, decide_study, pairs_of, plan_of
from fp8tune.stats.means import group_by, median
from fp8tune.stats.pairs import Pairs
from fp8tune.stats.rank import TIMED_KINDS, answering, competing
from fp8tune.stats.study import Origin, Result, Stage, Study, Today, Verdict, process_us
from fp8tune.store import names
from fp8tune.store.layers import Reader
from fp8tune.tables.files import File
from fp8tune.tables.formats import Options, load
from fp8tune.tables.picks import KernelPicks
from fp8tune.tables.picks import Pick as TablePick
from fp8tune.tables.select import CurrentTable, Selection, select
from fp8tune.text import visible
from fp8tune_kernels.runtime.chain import Step
from fp8tune_kernels.runtime.user_tables import installed
from fp8tune_kernels.tables import Key, Table, table


class CurrentTables:
    """Tables whose configs stay until others are proven faster."""

    def __init__(self, table: Callable[[str], Table]) -> None:
        """Read the table of an arch with ``table``, once."""
        self.table = functools.cache(table)
        """Function that returns the table of an arch."""

        @functools.cache
        def configs(arch: str) -> Mapping[tuple[str, str, Key | None], NamedInts]:
            return {row[:3]: NamedInts(row[3]) for row in self.table(arch).rows}

        self._configs = configs

    def config(self, kernel: str, device: Device, key: NamedInts | None) -> NamedInts | None:
        """Return the row's config for a lookup key, or the fallback config for None; None if there is no such row.

        A device's own row comes before the arch's. A key without a row has none, whatever a lookup gives there: that
        was chosen without it.
        """
        return self.own_config(kernel, device, key) or self._config(kernel, device.arch, "", key)

    def own_config(self, kernel: str, device: Device, key: NamedInts | None) -> NamedInts | None:
        """Return the config of a row of the device's own; None if there is no such row."""
        return self._config(kernel, device.arch, device.name, key) if device.name else None

    def takes_nearest(self, kernel: str, arch: str) -> bool | None:
        """Return True if unseen keys take the row of the nearest key; None if the table has no row for them."""
        has_fallback = self._config(kernel, arch, "", None) is not None
        return kernel in self.table(arch).nearest if has_fallback else None

    def _config(self, kernel: str, arch: str, device: str, key: NamedInts | None) -> NamedInts | None:
        return self._configs(arch).get((kernel, device, None if key is None else tuple(sorted(key.items()))))


CACHED = "Its times are too short to tell configs apart, or faster than memory allows: what was there stays."
NO_CONFIGS: Mapping[Problem, NamedInts] = {}
NO_TABLES = CurrentTables(lambda arch: Table())
SHIPPED = CurrentTables(table)
INSTALLED = CurrentTables(installed)
"""The user's own tables over the shipped ones."""


def completed(config: NamedInts | None, version: KernelVersion | None) -> NamedInts | None:
    """Return a table's config with the default of every axis that its row leaves out."""
    return config if config is None or version is None else NamedInts({**version.default, **config})


def find_today(version: KernelVersion, device: Device, key: NamedInts, recorded: NamedInts | None = None) -> Today:
    """Return the config that a launch of a key uses now: a table's, else the recorded one, else the default.

    Args:
        version: The kernel.
        device: The device, whose own rows come first.
        key: The lookup key.
        recorded: Config that run-time tuning chose when the launch was recorded.
    """
    result = lookups.look_up(lookups.Declared.of(version), device, key)
    if result.step is not Step.DEFAULT:
        return Today(result.config, Origin.OWN_TABLE if result.is_own else Origin.SHIPPED_TABLE)
    return Today(result.config) if recorded is None else Today(recorded, Origin.RECORDING)


def recorded_launch(document: str) -> tuple[Kernel, Launch]:
    """Parse the stored JSON of a recorded launch.

    Raises:
        DatabaseError: The text is damaged.
    """
    try:
        parts = json.loads(document)
        return recording.from_json(parts["kernel"], Kernel), recording.from_json(parts["launch"], Launch)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DatabaseError(f"a recorded launch is damaged ({error}): record the kernel and sweep it again") from None


def recorded_configs(documents: Mapping[Problem, str]) -> dict[Problem, NamedInts]:
    """Return the config that run-time tuning chose for each recorded launch, where it is known."""
    configs = {}
    for problem, document in documents.items():
        # A damaged launch and a config outside of the declared list leave the default as today's config.
        with contextlib.suppress(DatabaseError, ValueError):
            kernel, launch = recorded_launch(document)
            if launch.config is not None:
                configs[problem] = encoded(kernel, launch.config)
    return configs


def read_studies(
    store: Reader,
    kernel: str | None = None,
    arch: str | None = None,
    kinds: Collection[Kind] | None = None,
    *,
    problems: Collection[Problem] | None = None,
    device: Device | None = None,
    tables: CurrentTables = SHIPPED,
) -> list[Study]:
    """Read and decide the study that answers each question; None means any."""
    evidence = store.evidence(kernel, arch, kinds, keep=competing, problems=problems, device=device)
    documents = store.recorded_launches(kernel)
    studies = studies_of(evidence, tables, recorded_configs(documents))
    return [_in_words(study, documents.get(study.problem, "")) for study in studies]


def _in_words(study: Study, document: str) -> Study:
    """Return the study with sizes that print as the recorded arguments do, if it is of a recorded launch."""
    with contextlib.suppress(DatabaseError):
        if document:
            return replace(study, problem=in_words(study.problem, recorded_launch(document)[1]))
    return study


def studies_of(
    evidence: Iterable[Evidence],
    tables: CurrentTables = NO_TABLES,
    recorded: Mapping[Problem, NamedInts] = NO_CONFIGS,
) -> list[Study]:
    """Decide the study that answers each question. The same evidence in any order gives the same decisions.

    Args:
        evidence: Stored rows. Those without a time count only as failures.
        tables: Tables whose configs stay until beaten.
        recorded: Configs that run-time tuning chose for recorded launches.
    """
    timed = [study for study in _grouped(evidence) if study.kind in TIMED_KINDS and study.results]
    return [decide_study(_with_tables(study, tables, recorded)) for study in answering(timed)]


def compiled_studies(evidence: Iterable[Evidence]) -> list[Study]:
    """Return the studies of configs that were only compiled, undecided, with all results whatever their status."""
    static = [row for row in evidence if row.kind is Kind.STATIC]
    return [
        replace(_study_of(rows), results=tuple(map(_result_of, sorted(rows, key=_order))))
        for rows in group_by(static, _pool).values()
    ]


def _grouped(evidence: Iterable[Evidence]) -> list[Study]:
    return [_study_of(rows) for rows in group_by(evidence, _pool).values()]


def _pool(row: Evidence) -> tuple[object, ...]:
    return row.problem, row.kind, row.version and row.version.source_hash, row.device


def _study_of(rows: list[Evidence]) -> Study:
    timed = sorted((row for row in rows if row.status is Status.OK and row.times_us), key=_order)
    first = timed[0] if timed else rows[0]
    failures = {row.config: row.status for row in rows if row.status is not Status.OK and row.config is not None}
    return Study(
        problem=first.problem,
        device=first.device,
        kind=first.kind,
        version=first.version,
        results=tuple(map(_result_of, timed)),
        failures=failures,
        lookup_key=first.lookup_key,
        bytes_moved=first.bytes_moved,
        flops=first.flops,
        complete=first.complete,
        has_finals=first.has_finals,
    )


def _result_of(row: Evidence) -> Result:
    return Result(
        config=row.config,
        status=row.status,
        coarse_us=row.screen_us if row.finals or not row.times_us else median(row.times_us),
        figures=len(row.times_us),
        finals=row.finals,
        control=row.duplicate,
        source=row.source,
        note=row.note,
        facts=row.facts,
        check=row.check,
        ceiling_gb_per_s=row.ceiling_gb_per_s,
        copy_gb_per_s=row.copy_gb_per_s,
        peak_flop_per_s=row.peak_flop_per_s,
        newest=row.newest,
    )


def _order(row: Evidence) -> tuple[object, ...]:
    """Return the sort key of results: finals first, for the coarse times chose them; names decide between equals."""
    config = "" if row.config is None else row.config.canonical
    value_us = median(row.times_us) if row.times_us else 0.0
    return row.stage != "final", value_us, config, row.source, row.note


def _with_tables(study: Study, tables: CurrentTables, recorded: Mapping[Problem, NamedInts]) -> Study:
    if study.lookup_key is None:
        return study
    current = tables.config(study.problem.kernel, study.device, study.lookup_key)
    today = None
    if study.version is not None:
        today = find_today(study.version, study.device, study.lookup_key, recorded.get(study.problem))
    return replace(study, current=completed(current, study.version), today=today)


@dataclass(frozen=True)
class KernelSummary:
    """All picks of one kernel."""

    kernel: str
    picks: int
    """Problems, counted once for each device."""
    devices: tuple[str, ...]
    """Names of the GPUs, or arches where they have none; sorted."""
    ceiling_share: float | None
    """Median over its picks; None where none is known."""
    verdicts: Mapping[str, int]
    """Verdict -> number of picks, the most first."""
    newest: float
    """Moment when its newest row was stored, in seconds since the epoch."""

    def count(self, *verdicts: Verdict) -> int:
        """Return the number of picks with one of some verdicts."""
        return sum(self.verdicts.get(verdict, 0) for verdict in verdicts)


def summarize(picks: Iterable[Pick]) -> list[KernelSummary]:
    """Summarize the picks of each kernel, by name."""
    by_kernel = group_by(picks, lambda pick: pick.problem.kernel)
    return [_summary(kernel, by_kernel[kernel]) for kernel in sorted(by_kernel)]


def _summary(kernel: str, picks: Sequence[Pick]) -> KernelSummary:
    shares = [pick.ceiling_share for pick in picks if pick.ceiling_share is not None]
    return KernelSummary(
        kernel=kernel,
        picks=len(picks),
        devices=tuple(sorted({pick.device.name or pick.device.arch for pick in picks})),
        ceiling_share=median(shares) if shares else None,
        verdicts=dict(Counter(str(pick.verdict or Verdict.PUBLISHED) for pick in picks).most_common()),
        newest=max(pick.newest for pick in picks),
    )


def pick_of(study: Study) -> Pick:
    """Return a study's decision as the store keeps it."""
    decision, pick, rival, ceiling = study.choice, study.pick, study.next_best, ceiling_of(study)
    today = study.rival(study.today.config) if study.today else None
    is_bounded = rival is not None and rival.config == decision.runner_up
    return Pick(
        problem=study.problem,
        config=pick.config,
        device=study.device,
        kind=study.kind,
        version=study.version,
        lookup_key=study.lookup_key,
        bytes_moved=study.bytes_moved,
        source=pick.source,
        note=pick.note,
        runner_up=rival.config if rival else None,
        runner_up_stage=str(rival.stage) if rival else None,
        stage=str(pick.stage),
        verdict=None if decision.verdict is Verdict.PUBLISHED else str(decision.verdict),
        time_us=decision.time_us,
        processes=decision.processes,
        ceiling_share=ceiling.share if ceiling else None,
        bound=str(ceiling.bound) if ceiling else None,
        runner_up_us=rival.time_us if rival else None,
        runner_up_ratio=rival.ratio if rival else None,
        slowdown_lower_share=_finite(decision.lower) if is_bounded else None,
        slowdown_upper_share=_finite(decision.upper),
        noise_floor_share=study.noise,
        today=study.today.config if study.today else None,
        today_origin=str(study.today.origin) if study.today else None,
        today_us=today.time_us if today else None,
        speedup_ratio=study.speedup,
        is_default=pick.config is not None and pick.config == study.default,
        is_incumbent=pick.config is not None and pick.config == study.current,
        is_complete=study.complete,
        checked_by=pick.check,
        newest=pick.newest,
    )


def finalists_of(study: Study) -> Iterator[Finalist]:
    """Yield the finalists of a study as the store keeps them."""
    for result in study.results:
        if result.finals and result.config is not None:
            times_us = list(map(process_us, result.finals))
            yield Finalist(
                problem=study.problem,
                config=result.config,
                device=study.device,
                kind=study.kind,
                version=study.version,
                source=result.source,
                note=result.note,
                time_us=study.times_us[result.config],
                slowdown_ratio=study.slowdowns[result.config],
                processes=len(times_us),
                blocks=sum(len(times.blocks) for times in result.finals),
                fastest_process_us=min(times_us),
                slowest_process_us=max(times_us),
                screen_us=result.coarse_us,
                is_pick=result.config == study.choice.pick,
                is_default=result.config == study.default,
                is_incumbent=result.config == study.current,
                newest=result.newest,
            )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def select_rows(store: Reader, arch: str, kernels: Collection[str] = (), tables: CurrentTables = SHIPPED) -> Selection:
    """Select the rows of an arch's table.

    Args:
        store: The results.
        arch: The arch.
        kernels: Kernels to select; empty for all.
        tables: Tables whose configs stay until beaten.
    """
    evidence = store.evidence(arch=arch, keep=competing)
    if kernels:
        evidence = [row for row in evidence if row.problem.kernel in kernels]
    return select(studies_of(evidence, tables), compiled_studies(evidence), arch, CurrentTable(tables.table(arch)))


def read_picks(store: Reader, arch: str, kernel: str, device: str | None = None) -> KernelPicks:
    """Read the picks of a kernel on one device: the one named, else the one with the most problems.

    Raises:
        UsageError: Nothing was swept to the end, there is no such device, or several have as many problems.
    """
    studies = _named_studies(store, arch, kernel)
    name, notices = _chosen_device(group_by(studies, lambda study: study.device.name), device)
    here = [study for study in studies if study.device.name == name]
    usable = [study for study in here if study.is_usable]
    left_out = "left out, not swept to the end: run fp8tune sweep again"
    notices += [f"{study.problem.shape} {left_out}" for study in here if not study.is_usable]
    if not usable:
        raise UsageError(f"no problem of {kernel} was swept to the end on {name or arch}: run fp8tune sweep again")
    launches = {problem: recorded_launch(text) for problem, text in store.recorded_launches(kernel).items()}
    newest = max(usable, key=lambda study: study.newest)
    recorded = launches[newest.problem][0] if newest.problem in launches else None
    alike = [study for study in usable if _is_of(recorded, launches.get(study.problem))]
    other = "left out, recorded of a kernel with other configs or another key: record and sweep it again"
    notices += [f"{study.problem.shape} {other}" for study in usable if recorded and study not in alike]
    places = {problem: place for place, problem in enumerate(launches)}
    alike.sort(key=lambda study: places.get(study.problem, len(places)))
    picks = []
    for study in alike:
        wrong = sum(status is Status.WRONG for status in study.failures.values())
        if wrong > len(study.times_us):
            count = f"{wrong} of {wrong + len(study.times_us)} configs are wrong"
            advice = "see that what they were compared with is right, or sweep with --reference"
            notices.append(f"{study.problem.shape}: {count}: {advice}")
        launch = launches[study.problem][1] if study.problem in launches else None
        picks.append(TablePick(study, _evidence_line(store, study), launch))
    return KernelPicks(kernel, newest.device, tuple(picks), recorded, tuple(dict.fromkeys(notices)))


def read_picks_of_devices(store: Reader, arch: str, kernel: str) -> list[KernelPicks]:
    """Read the picks of a kernel on each device of an arch; a device without complete sweeps becomes a notice.

    Raises:
        UsageError: No device has a complete sweep.
    """
    picks, refused = [], []
    for name in sorted({study.device.name for study in _named_studies(store, arch, kernel)}):
        try:
            picks.append(read_picks(store, arch, kernel, name))
        except UsageError as error:
            refused.append(str(error))
    if not picks:
        raise UsageError(refused[0])
    return [replace(picks[0], notices=(*picks[0].notices, *refused)), *picks[1:]]


def read_for_format(
    store: Reader, arch: str, kernels: Sequence[str], device: str | None, name: str
) -> list[KernelPicks]:
    """Read the picks of one kernel, for each device that one file of a format holds."""
    names.check_arch(arch, store)
    (kernel,) = names.stored_kernels(kernels, store)
    if load(name).has_all_devices and device is None:
        return read_picks_of_devices(store, arch, kernel)
    return [read_picks(store, arch, kernel, device)]


def format_files(kernels: Sequence[KernelPicks], name: str, options: Options) -> list[File]:
    """Return the files of a format.

    Raises:
        UsageError: The format cannot hold these picks.
    """
    files = load(name).write(kernels, options)
    if not files:
        raise UsageError(f"{kernels[0].kernel} has no pick that --for {name} can hold: run fp8tune sweep")
    return list(files)


def _named_studies(store: Reader, arch: str, kernel: str) -> list[Study]:
    studies = [study for study in read_studies(store, kernel, arch) if any(r.config is not None for r in study.results)]
    if not studies:
        raise UsageError(
            f"{kernel} has no timed rows for {arch}: run fp8tune sweep, or name another database with --db"
        )
    return studies


def _is_of(recorded: Kernel | None, launch: tuple[Kernel, Launch] | None) -> bool:
    """Return True for a launch of the same kernel: configs of another declaration have other numbers."""
    if recorded is None or launch is None:
        return recorded is None and launch is None
    return (launch[0].configs, launch[0].key) == (recorded.configs, recorded.key)


def _chosen_device(by_name: Mapping[str, Sequence[Study]], device: str | None) -> tuple[str, list[str]]:
    """Return the name of the device to export, and a notice where there are others."""
    counts = ", ".join(f"{name or 'not named'} ({len(studies)})" for name, studies in sorted(by_name.items()))
    if device is not None:
        if device not in by_name:
            raise UsageError(f"no rows of a device {device!r}: name one of these, with their problems: {counts}")
        return device, []
    most = max(map(len, by_name.values()))
    first, *others = (name for name, studies in by_name.items() if len(studies) == most)
    if others:
        raise UsageError(f"as many problems were swept on several devices: name one with --device: {counts}")
    return first, [f"{first or 'not named'}, which has the most problems of {counts}"] if len(by_name) > 1 else []


def _evidence_line(store: Reader, study: Study) -> str:
    """``certified, 12.34 us, 6 processes, NVIDIA H200, driver 580.1, triton 3.6.0, commit c0ffee, code 0123abcd``."""
    decision, device, version = study.choice, study.device, study.version
    is_published, count = decision.verdict is Verdict.PUBLISHED, decision.processes
    commit = store.commit(Subject(version, device, study.kind, study.problem)) if version else ""
    parts = [
        f"published by {study.pick.source}" if is_published else decision.verdict,
        f"{decision.time_us:.2f} us",
        "" if is_published else f"{count} process{'' if count == 1 else 'es'}",
        device.name or device.arch,
        f"driver {device.driver}" if device.driver else "",
        f"triton {device.triton}" if device.triton else "",
        f"commit {commit}" if commit else "",
        f"code {version.source_hash}" if version else "",
    ]
    return visible(", ".join(filter(None, parts)))


@dataclass(frozen=True)
class Attempt:
    """One config of a study. The slowdown is its time over the pick's in the same stage."""

    config: NamedInts | None
    status: Status
    stage: Stage = Stage.COARSE
    time_us: float | None = None
    slowdown: float | None = None
    interval: tuple[float, float] | None = None
    """One-sided bounds of the slowdown; None without finals of several processes."""
    reason: str = ""  # why it has no time


@dataclass(frozen=True, eq=False)
class Explanation:
    """A decided study, with the stored outcomes of configs that have no time in it."""

    study: Study
    outcomes: Mapping[NamedInts, Outcome] = field(default_factory=dict)

    @cached_property
    def pairs(self) -> Pairs | None:
        """All pairs of finalists; None without finals."""
        study = self.study
        return pairs_of(study.finals, study.default, study.axes) if study.finals else None

    @property
    def plan(self) -> MeasuringPlan:
        """Bands that the verdict goes by."""
        return plan_of(self.study.finals) if self.study.finals else MeasuringPlan()

    @cached_property
    def attempts(self) -> Sequence[Attempt]:
        """The pick, then the other finalists and the coarse configs, each by time, then those without a time."""
        timed = [self._timed(place) for place in range(len(self.study.results))]
        pick = self.study.pick.config
        timed.sort(key=lambda a: (a.config != pick, a.stage is not Stage.FINAL, a.time_us, str(a.config)))
        known = {attempt.config for attempt in timed}
        rest = [Attempt(c, o.status, reason=o.reason) for c, o in self.outcomes.items() if c not in known]
        return [*timed, *sorted(rest, key=lambda attempt: (attempt.status, attempt.reason, str(attempt.config)))]

    def _timed(self, place: int) -> Attempt:
        study, result, pick = self.study, self.study.results[place], self.study.pick
        config, times_us = result.config, self.study.choice.times_us
        if not result.finals or config is None or config not in times_us:
            slowdown = result.value_us / pick.coarse_us if pick.coarse_us else None
            return Attempt(config, Status.OK, Stage.COARSE, result.value_us, slowdown)
        slowdown = study.choice.ratios.get(config, times_us[config] / study.choice.time_us)
        interval, pairs = None, self.pairs
        if pairs and config != pick.config and config in pairs.configs and pick.config in pairs.configs:
            at = pairs.configs.index(config), pairs.configs.index(pick.config)
            low, high = math.exp(pairs.lower[at]), math.exp(pairs.upper[at])
            interval = (low, high) if math.isfinite(high) else None
        return Attempt(config, Status.OK, Stage.FINAL, times_us[config], slowdown, interval)


def reasons(explanation: Explanation) -> list[str]:
    """Return the steps from the times to the verdict, one sentence each."""
    decision, pairs = explanation.study.choice, explanation.pairs
    if decision.verdict is Verdict.PUBLISHED:
        return ["Others published these rows: their sources say too little for a verdict."]
    is_unresolvable = decision.verdict is Verdict.UNRESOLVABLE
    if pairs is None:
        coarse = "There were no finals: the screen, in one process, chose the pick."
        return [coarse, CACHED] if is_unresolvable else [coarse]
    count, loss, keep = len(pairs.configs), decision.upper, explanation.plan.keep_band
    configs = "1 config" if count == 1 else f"{count} configs in turns"
    steps = [f"The finals timed {configs}, in {decision.processes} fresh processes."]
    if is_unresolvable:
        return [*steps, CACHED]
    if count == 1:
        return [*steps, "No other config was in the finals, so there is nothing to compare it with: only."]
    if loss <= 0:
        return [*steps, "Paired over processes, the pick is proven faster than every other finalist: certified."]
    steps.append(f"Paired over processes, the pick loses at most {100 * loss:.1f} % against any other finalist.")
    if loss > keep:
        end = f"That is above the band of {100 * keep:.1f} % within which a pick is kept: ambiguous."
    elif decision.verdict is Verdict.KEPT_INCUMBENT:
        end = f"That is within {100 * keep:.1f} %, and a new table would hold another config: kept-incumbent."
    else:
        end = f"That is within {100 * keep:.1f} %, and a new table would hold the same config: near-tie."
    return [*steps, end]
