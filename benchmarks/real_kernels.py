"""Gains of offline tuning for autotuned kernels of other libraries, from their recordings and a database of sweeps.

    fp8tune record -o run1.json -- python train.py    # three times: three fresh processes tune at run time
    fp8tune sweep --kernel module:kernel --recording run1.json --db real.db
    python -m benchmarks.real_kernels --db real.db run1.json run2.json run3.json --output study

Needs no GPU. All recordings are of one program. The database may
hold other kernels too.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fp8tune.errors import Fp8tuneError
from fp8tune.output.tables import Column, markdown_lines, notice
from fp8tune.records import Kind, NamedInts, Subject
from fp8tune.replay import recording
from fp8tune.replay.configs import encoded
from fp8tune.replay.recording import Kernel, Launch, Recording
from fp8tune.stats.means import geomean
from fp8tune.stats.shared import cover
from fp8tune.stats.study import Study
from fp8tune.store.results import Store, Tally
from fp8tune.studies import read_studies
from fp8tune.tables.current import NO_TABLES

BOUNDS = (0.01, 0.02, 0.05)
"""What a covering set may lose on any launch."""


@dataclass(frozen=True)
class Swept:
    """A launch as it was recorded by each run, and what its sweep says."""

    launch: str
    """Its id."""
    shape: str
    key: str
    """What the autotuner looks its config up by."""
    picked: tuple[str | None, ...]
    """The config of run-time tuning in each recording; None where it is not known."""
    ours: str | None
    """The sweep's pick; None for a launch that was not swept."""
    ours_us: float | None
    theirs_over_ours: tuple[float | None, ...]
    """The time of each recording's config over our pick's; None for a config without a time."""
    statuses: Mapping[str, int] = field(default_factory=dict)
    """Status -> configs that ended so."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Config that is not right -> status and reason."""


@dataclass(frozen=True)
class Covered:
    """The fewest configs that lose at most so much on any launch."""

    within: float
    configs: tuple[str, ...]
    worst: float


@dataclass(frozen=True)
class Studied:
    """One kernel."""

    kernel: str
    declared: int
    """Configs."""
    refusal: str
    tuning_s: tuple[float, ...]
    """Seconds of run-time tuning in each recording; the first compiles too."""
    launches: tuple[Swept, ...]
    covered: tuple[Covered, ...]
    """For each of :data:`BOUNDS`; none where nothing was swept."""

    @property
    def picks(self) -> Mapping[str, tuple[str | None, ...]]:
        """Key -> the config of each recording, where there was a choice."""
        return {item.key: item.picked for item in self.launches} if self.declared > 1 else {}

    @property
    def agreed(self) -> int:
        """Keys for which all recordings picked the same."""
        return sum(len(set(picked)) == 1 for picked in self.picks.values())

    @property
    def ratios(self) -> list[float]:
        """Return the time of run-time tuning's pick over ours, for all launches and recordings."""
        return [ratio for item in self.launches for ratio in item.theirs_over_ours if ratio is not None]

    @property
    def not_right(self) -> Mapping[str, int]:
        """Config -> launches on which it is wrong or does not run."""
        return Counter(config for item in self.launches for config in item.failures)


def study(recordings: Sequence[Recording], store: Store) -> list[Studied]:
    """Every kernel of the first recording, in its order."""
    kinds = (Kind.MEASURED, Kind.SIMULATED)
    results = {
        (candidates.problem.kernel, candidates.problem.input_layout): candidates
        for candidates in read_studies(store, kinds=kinds, tables=NO_TABLES)
    }
    return [_studied(kernel, recordings, results, store) for kernel in recordings[0].kernels]


def _studied(
    kernel: Kernel, recordings: Sequence[Recording], results: Mapping[tuple[str, str], Study], store: Store
) -> Studied:
    same = [value for item in recordings for value in item.kernels if value.name == kernel.name]
    swept = [results.get((kernel.name, f"recorded-{launch.id}")) for launch in kernel.launches]
    launches = [
        _swept(launch, same, candidates, store) for launch, candidates in zip(kernel.launches, swept, strict=True)
    ]
    # run-time tuning would take a config of the list that is wrong elsewhere
    wrong = {config for item in launches for config, status in item.failures.items() if status.startswith("wrong")}
    right = [
        {config: slowdown for config, slowdown in candidates.slowdowns.items() if str(config) not in wrong}
        for candidates in swept
        if candidates
    ]
    covered = [
        Covered(item.within, tuple(map(str, item.configs)), item.worst)
        for item in ((cover(right, bound) for bound in BOUNDS) if right and all(right) else ())
    ]
    tuning_s = tuple(value.tuning_s for value in same)
    return Studied(kernel.name, len(kernel.configs), kernel.refusal, tuning_s, tuple(launches), tuple(covered))


def _swept(launch: Launch, same: Sequence[Kernel], candidates: Study | None, store: Store) -> Swept:
    picked = [_picked(value, launch.id) for value in same]
    key = json.dumps(launch.key)
    names = tuple(None if config is None else str(config) for config in picked)
    if candidates is None:
        return Swept(launch.id, "", key, names, None, None, (None,) * len(names))
    pick, slowdowns = candidates.pick.config, candidates.slowdowns
    ours = slowdowns.get(pick, math.nan) if pick else math.nan
    over = [slowdowns[config] / ours if config and config in slowdowns else None for config in picked]
    tally = _tally(candidates, store)
    counts, failures = (tally.counts, tally.failures) if tally else ({}, {})
    return Swept(
        launch.id,
        str(candidates.problem.shape),
        key,
        names,
        str(pick),
        candidates.choice.time_us,
        tuple(over),
        {str(status): count for status, count in counts.items()},
        {str(config): f"{outcome.status}: {outcome.reason}" for config, outcome in failures.items()},
    )


def _picked(kernel: Kernel, launch_id: str) -> NamedInts | None:
    """Return the pick of run-time tuning, as rows hold it."""
    launch = next((value for value in kernel.launches if value.id == launch_id), None)
    return encoded(kernel, launch.config) if launch and launch.config else None


def _tally(candidates: Study, store: Store) -> Tally | None:
    """Count all configs that were tried."""
    if candidates.version is None:
        return None
    return store.tally(Subject(candidates.version, candidates.device, candidates.kind, candidates.problem))


def rows(studied: Iterable[Studied]) -> Iterator[tuple[str, ...]]:
    """The cells of the table, a row a kernel."""
    for item in studied:
        covering = [f"{len(value.configs)} ({100 * value.worst:.1f} %)" for value in item.covered] or ["-"] * len(
            BOUNDS
        )
        first, later = item.tuning_s[:1], item.tuning_s[1:]
        tuning = " / ".join(f"{max(part):.1f}" for part in (first, later) if part)
        mean = f"{geomean(item.ratios):.3f} ({max(item.ratios):.3f})" if item.ratios else "-"
        yield (
            f"`{item.kernel.rpartition('.')[2]}`",
            str(item.declared),
            f"{sum(value.ours is not None for value in item.launches)} of {len(item.launches)}",
            *covering,
            tuning,
            f"{item.agreed} of {len(item.picks)}" if item.picks else "-",
            mean,
            str(len(item.not_right)),
        )


HEADERS = (
    "kernel",
    "configs",
    "launches swept",
    *(f"within {100 * bound:.0f} % (worst)" for bound in BOUNDS),
    "tuning s, first / later",
    "keys with one pick",
    "their pick / ours, mean (worst)",
    "configs not right",
)


def table(studied: Sequence[Studied]) -> str:
    """Return the table as Markdown."""
    cells = list(rows(studied))
    columns = [
        Column(header, [row[place] for row in cells], align="right" if place else "left")
        for place, header in enumerate(HEADERS)
    ]
    return "\n".join(markdown_lines(columns)) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Read, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_kernels", description=__doc__.splitlines()[0])
    parser.add_argument("recordings", nargs="+", type=Path, help="of the same program, each in a fresh process")
    parser.add_argument("--db", required=True, help="the database that the kernels were swept into")
    parser.add_argument("--output", type=Path, help="a folder for study.json and study.md")
    options = parser.parse_args(arguments)
    try:
        with Store.open(options.db, writable=False) as store:
            studied = study([recording.read(path) for path in options.recordings], store)
    except Fp8tuneError as error:
        notice(f"fp8tune: {error}")
        return error.exit_code
    print(table(studied))
    for item in studied:
        for config, launches in item.not_right.items():
            reason = next(value.failures[config] for value in item.launches if config in value.failures)
            print(f"{item.kernel} {config}: on {launches} of {len(item.launches)} launches, {reason}")
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "study.json").write_text(json.dumps([asdict(item) for item in studied], indent=1) + "\n")
        (options.output / "study.md").write_text(table(studied))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
