"""The config for an arch that a kernel was compiled for and nobody timed it on.

Of the configs that compile there, the one that lost least where the kernel was timed, what it spills here counted in.
A ranking by what the machine code does lost 8.8 % where this loses 6.4 %: thirteen kernels on sm_90, each shape held
out in turn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fp8tune.choose.ranking import Losses, all_candidates, grouped, usable
from fp8tune.records import Evidence, Facts, Kind, NamedInts, Status

TIMED_ON = "sm_90"
"""The arch with measured rows of every kernel."""

SPILLED_BYTES = 100
"""Spilling as many bytes doubles what a config is expected to lose: a round number, chosen once on an H100."""


@dataclass(frozen=True)
class Timed:
    """What every config of one kernel loses on :data:`TIMED_ON`, over all problems and devices there."""

    slowdowns: Mapping[NamedInts, float]
    """Geometric mean of its time over the best; of configs that have a time on every problem."""
    problems: int


@dataclass(frozen=True)
class Fitting:
    """A config that compiles for an arch."""

    config: NamedInts
    facts: Facts
    """The worst of all problems that it was compiled for."""
    slowdown: float | None
    """On :data:`TIMED_ON`; None where it was not timed there."""

    @property
    def expected(self) -> float:
        """Its slowdown times what it spills on this arch; infinite where it was not timed."""
        spills = 1 + (self.facts.spill_bytes or 0) / SPILLED_BYTES
        return math.inf if self.slowdown is None else self.slowdown * spills


def timed(evidence: Iterable[Evidence]) -> dict[str, Timed]:
    """Kernel -> what its configs lose, from its problems that were swept to the end."""
    here = (entry for entry in evidence if entry.device.arch == TIMED_ON and entry.kind is Kind.MEASURED)
    by_kernel = grouped(usable(all_candidates(here)), lambda candidates: candidates.problem.kernel)
    return {
        kernel: Timed({each.config: each.mean_slowdown for each in Losses.of(found).shared()}, len(found))
        for kernel, found in by_kernel.items()
    }


def fitting(static: Iterable[Evidence], times: Timed | None) -> list[Fitting]:
    """The configs of one kernel version on one arch that compile for all problems tried, in the order of choice.

    The least expected slowdown comes first; of those that were not timed, what spills least, then the default.
    """
    found = []
    for config, entries in grouped(static, lambda entry: entry.config).items():
        if config is not None and all(entry.status is Status.OK for entry in entries):
            worst = max((e.facts for e in entries), key=lambda facts: (facts.spill_bytes or 0, facts.registers or 0))
            fits = Fitting(config, worst, times.slowdowns.get(config) if times else None)
            default = entries[0].version.default if entries[0].version else None
            rank = fits.expected, worst.spill_bytes or 0, config != default, config.canonical
            found.append((rank, fits))
    return [fits for _, fits in sorted(found, key=lambda item: item[0])]


def choose(static: Sequence[Evidence], times: Timed | None) -> Fitting | None:
    """The first that was timed elsewhere; where none was, the default if it compiles."""
    found = fitting(static, times)
    defaults = {entry.version.default for entry in static if entry.version}
    timed_elsewhere = [fits for fits in found if fits.slowdown is not None]
    return next(iter(timed_elsewhere), None) or next((fits for fits in found if fits.config in defaults), None)


@dataclass(frozen=True)
class CompiledKernel:
    """What compiling one kernel version for one arch gave."""

    kernel: str
    arch: str
    fitting: Sequence[Fitting]
    """In the order of choice."""
    failed: int
    """Configs that do not compile."""
    choice: Fitting | None

    @property
    def spilling(self) -> int:
        """Configs that compile and spill."""
        return sum(bool(each.facts.spill_bytes) for each in self.fitting)


def compiled(static: Iterable[Evidence], times: Mapping[str, Timed]) -> list[CompiledKernel]:
    """Of each kernel and arch the version that was compiled last, by kernel and arch."""
    tried = [row for row in static if row.kind is Kind.STATIC and row.version and row.status is not Status.PRUNED]
    found = []
    for (kernel, arch), rows in sorted(grouped(tried, lambda row: (row.problem.kernel, row.device.arch)).items()):
        latest = max(rows, key=lambda row: (row.newest, row.version.source_hash if row.version else ""))
        newest = [row for row in rows if row.version == latest.version]
        fits = fitting(newest, times.get(kernel))
        failed = len({row.config for row in newest}) - len(fits)
        found.append(CompiledKernel(kernel, arch, fits, failed, choose(newest, times.get(kernel))))
    return found
