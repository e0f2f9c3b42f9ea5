"""Studies from stored rows, with what the installed tables hold for them. Goes when the store returns studies."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fp8tune import lookups, recording
from fp8tune.autotuned.configs import encoded
from fp8tune.ceiling import ceiling_of
from fp8tune.errors import DatabaseError
from fp8tune.recording import Kernel, Launch
from fp8tune.records import (
    Device,
    Evidence,
    Finalist,
    KernelVersion,
    Kind,
    NamedInts,
    Pick,
    Problem,
    Status,
)
from fp8tune.stats.decide import decide_study
from fp8tune.stats.means import grouped, median
from fp8tune.stats.rank import TIMED_KINDS, answering, competing
from fp8tune.stats.shared import Nearest
from fp8tune.stats.study import Origin, Result, Study, Today, Verdict, process_us
from fp8tune.store.layers import Reader
from fp8tune_kernels.catalog import SPANS
from fp8tune_kernels.runtime.chain import Step
from fp8tune_kernels.runtime.nearest import nearest as nearest_row
from fp8tune_kernels.runtime.user_tables import installed
from fp8tune_kernels.tables import Key, Row, Table, table


class CurrentTables:
    """Tables whose configs stay until others are proven faster."""

    def __init__(self, table: Callable[[str], Table]) -> None:
        """Read the table of an arch with ``table``, once."""
        self._table = functools.cache(table)

        @functools.cache
        def configs(arch: str) -> Mapping[tuple[str, str, Key | None], NamedInts]:
            return {row[:3]: NamedInts(row[3]) for row in self._table(arch).rows}

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
        return kernel in self._table(arch).nearest if has_fallback else None

    def _config(self, kernel: str, arch: str, device: str, key: NamedInts | None) -> NamedInts | None:
        return self._configs(arch).get((kernel, device, None if key is None else tuple(sorted(key.items()))))


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
    return studies_of(evidence, tables, recorded_configs(store.recorded_launches(kernel)))


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
        for rows in grouped(static, _pool).values()
    ]


def _grouped(evidence: Iterable[Evidence]) -> list[Study]:
    return [_study_of(rows) for rows in grouped(evidence, _pool).values()]


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
    result = Result(
        config=row.config,
        status=row.status,
        coarse_us=row.screen_us,
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
    return result if row.finals or not row.times_us else replace(result, coarse_us=median(row.times_us))


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


def nearest_of(rows: Sequence[Row]) -> Nearest:
    """Return the lookup of the nearest key among the rows of a table of one kernel."""

    def nearest(study: Study, left_out: frozenset[NamedInts]) -> NamedInts | None:
        gone = {tuple(sorted(key.items())) for key in left_out}
        comparable = [row for row in rows if row[1] in (study.device.name, "") and row[2] not in gone]
        key = tuple(sorted((study.lookup_key or NamedInts()).items()))
        row = nearest_row(key, comparable, SPANS.get(study.problem.kernel), study.default)
        return NamedInts(row[3]) if row else None

    return nearest


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
    by_kernel = grouped(picks, lambda pick: pick.problem.kernel)
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
