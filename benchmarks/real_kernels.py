"""Gains of offline tuning for autotuned kernels of other libraries, from their recordings and a database of sweeps.

    fp8tune record -o run1.json -- python train.py    # three times: three fresh processes tune at run time
    fp8tune sweep --kernel module:kernel --recording run1.json --db real.db
    python -m benchmarks.real_kernels real.db run1.json run2.json run3.json

Needs no GPU. All recordings are of one program. The database may hold other kernels too.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from benchmarks.tables import table
from fp8tune.records import Kind, NamedInts, Outcome, Subject
from fp8tune.replay import recording
from fp8tune.replay.configs import encoded
from fp8tune.replay.recording import Kernel, Launch, Recording
from fp8tune.stats.means import geomean
from fp8tune.stats.shared import Cover, cover
from fp8tune.stats.study import Study
from fp8tune.store.results import Store
from fp8tune.studies import read_studies
from fp8tune.tables.current import NO_TABLES

BOUNDS = (0.01, 0.02, 0.05)  # losses of a covering set on any launch
HEADINGS = (
    "kernel",
    "configs",
    "launches swept",
    *(f"within {bound:.0%} (worst)" for bound in BOUNDS),
    "tuning s, first / later",
    "keys with one pick",
    "run-time pick / ours, mean (worst)",
    "configs not right",
)


@dataclass(frozen=True)
class Swept:
    """A launch with what run-time tuning picked in each recording, and its sweep."""

    launch: Launch
    picked: Sequence[NamedInts | None]
    study: Study | None
    failures: Mapping[NamedInts, Outcome] = field(default_factory=dict)  # configs that are not right

    @property
    def ratios(self) -> list[float]:
        """Time of each recording's config over that of the sweep's pick, as far as both were timed."""
        if self.study is None or self.study.pick.config is None:
            return []
        times, ours = self.study.slowdowns, self.study.slowdowns[self.study.pick.config]
        return [times[config] / ours for config in self.picked if config is not None and config in times]


@dataclass(frozen=True)
class Studied:
    """One kernel of the program."""

    kernel: Kernel
    tuning_s: Sequence[float]  # run-time tuning in each recording; the first compiles too
    launches: Sequence[Swept]

    @cached_property
    def not_right(self) -> Mapping[NamedInts, int]:
        """Number of launches on which a config is wrong or does not run."""
        return Counter(config for item in self.launches for config in item.failures)

    def covers(self) -> Iterator[Cover]:
        """Yield the fewest configs that lose at most each of :data:`BOUNDS` on any launch; none without sweeps."""
        # Run-time tuning would take a config that is wrong elsewhere.
        wrong = {c for item in self.launches for c, outcome in item.failures.items() if outcome.status == "wrong"}
        times = [item.study.slowdowns for item in self.launches if item.study]
        right = [{config: slow for config, slow in slowdowns.items() if config not in wrong} for slowdowns in times]
        if right and all(right):
            yield from (cover(right, bound) for bound in BOUNDS)

    def cells(self) -> list[str]:
        """Return the row of the table."""
        ratios = [ratio for item in self.launches for ratio in item.ratios]
        keys = {json.dumps(item.launch.key): item.picked for item in self.launches}
        agreed = sum(len(set(picked)) == 1 for picked in keys.values())
        return [
            f"`{self.kernel.name.rpartition('.')[2]}`",
            str(len(self.kernel.configs)),
            f"{sum(item.study is not None for item in self.launches)} of {len(self.launches)}",
            *([f"{len(item.configs)} ({item.worst:.1%})" for item in self.covers()] or ["-"] * len(BOUNDS)),
            " / ".join(f"{max(part):.1f}" for part in (self.tuning_s[:1], self.tuning_s[1:]) if part),
            f"{agreed} of {len(keys)}" if len(self.kernel.configs) > 1 else "-",
            f"{geomean(ratios):.3f} ({max(ratios):.3f})" if ratios else "-",
            str(len(self.not_right)),
        ]


def study(recordings: Sequence[Recording], store: Store) -> Iterator[Studied]:
    """Yield every kernel of the first recording, in its order."""
    stored = read_studies(store, kinds=(Kind.MEASURED, Kind.SIMULATED), tables=NO_TABLES)
    studies = {(item.problem.kernel, item.problem.input_layout): item for item in stored}
    for kernel in recordings[0].kernels:
        runs = [item for run in recordings for item in run.kernels if item.name == kernel.name]
        launches = []
        for launch in kernel.launches:
            same = [{item.id: item for item in run.launches}.get(launch.id) for run in runs]
            picked = [encoded(kernel, item.config) if item and item.config else None for item in same]
            swept, failures = studies.get((kernel.name, f"recorded-{launch.id}")), {}
            if swept is not None and swept.version is not None:
                failures = store.tally(Subject(swept.version, swept.device, swept.kind, swept.problem)).failures
            launches.append(Swept(launch, picked, swept, failures))
        yield Studied(kernel, [run.tuning_s for run in runs], launches)


def main(db: str, *paths: str) -> None:
    """Print the table, and the configs that are not right."""
    with Store.open(db, writable=False) as store:
        kernels = list(study([recording.read(Path(path)) for path in paths], store))
    print(table(HEADINGS, [item.cells() for item in kernels], align="---:"))
    for item in kernels:
        for config, count in item.not_right.items():
            outcome = next(launch.failures[config] for launch in item.launches if config in launch.failures)
            where = f"on {count} of {len(item.launches)} launches"
            print(f"{item.kernel.name} {config}: {where}, {outcome.status}: {outcome.reason}")


if __name__ == "__main__":
    main(*sys.argv[1:])
