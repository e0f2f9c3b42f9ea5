"""Studies from stored rows, with what the installed tables hold for them. Goes when the store returns studies."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from fp8tune import lookups, recording
from fp8tune.autotuned.configs import encoded
from fp8tune.errors import DatabaseError
from fp8tune.recording import Kernel, Launch
from fp8tune.records import Device, Evidence, KernelVersion, Kind, NamedInts, Problem, Status
from fp8tune.stats.decide import decide_study
from fp8tune.stats.means import grouped, median
from fp8tune.stats.rank import TIMED_KINDS, answering, competing
from fp8tune.stats.study import Origin, Result, Study, Today
from fp8tune.store.layers import Reader
from fp8tune_kernels.runtime.chain import Step
from fp8tune_kernels.runtime.user_tables import installed
from fp8tune_kernels.tables import Key, Table, table


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
