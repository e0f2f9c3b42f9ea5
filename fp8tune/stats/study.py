"""Records of a tuned problem: the study, its results and its decision. Imports no numerics, so that reading is fast."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from fp8tune.records import Device, Facts, KernelVersion, Kind, NamedInts, Problem, ProcessTimes, Status
from fp8tune.stats.means import trimmed_mean

# Times the copy rate. What is faster came from a cache: reading twice as much as writing reaches 1.06.
CACHED_RATE = 1.15


class Stage(StrEnum):
    """Phase of a sweep that timed a config. Times of two stages are never compared."""

    COARSE = "screen"  # all right configs in one process
    FINAL = "final"  # the finalists in fresh processes


class Verdict(StrEnum):
    """Strength of the evidence for a pick."""

    CERTIFIED = "certified"
    """Proven faster than every other finalist."""
    NEAR_TIE = "near-tie"
    """At most the keep band slower than the fastest: of those tied with it the default, else the first in order."""
    ONLY = "only"
    """The only finalist: nothing else was timed, or the coarse pass left nothing near it."""
    AMBIGUOUS = "ambiguous"
    """It may lose more than the keep band: measured too little, or too noisy."""
    KEPT_INCUMBENT = "kept-incumbent"
    """The current config: another is preferred, but not proven faster by more than the keep band."""
    UNRESOLVABLE = "unresolvable"
    """Too short for the timer to tell configs apart, or timed from a cache."""
    QUICK = "quick"
    """Chosen by the coarse pass alone."""
    PUBLISHED = "published"
    """Reported by others, not measured here."""


SETTLED = (Verdict.CERTIFIED, Verdict.NEAR_TIE, Verdict.KEPT_INCUMBENT, Verdict.ONLY)
OPEN = (Verdict.AMBIGUOUS, Verdict.UNRESOLVABLE)


class Precedence(StrEnum):
    """Reason why the next best config is not the pick, where it is faster or was not confirmed."""

    NONE = ""
    TIED = "tied"  # within the tie band: the default comes first, then the canonical order
    DEFAULT = "default stays"  # nothing is proven faster than the default
    CURRENT = "committed stays"  # nothing is proven faster than the current config by more than the keep band
    TOO_SHORT = "too short"  # times are too short to tell configs apart
    UNCONFIRMED = "coarse pass"  # the coarse pass alone timed it, in one process, which proves nothing


class Origin(StrEnum):
    """Source of today's config."""

    OWN_TABLE = "own table"
    SHIPPED_TABLE = "shipped table"
    RECORDING = "recording"  # run-time tuning chose it when the launch was recorded
    DEFAULT = "default"


@dataclass(frozen=True)
class Today:
    """The config that a launch uses without the pick. Every gain is over its time."""

    config: NamedInts
    origin: Origin = Origin.DEFAULT


@dataclass(frozen=True)
class Result:
    """One config in one study. Summary, finalist and pick are all this type."""

    config: NamedInts | None  # None for a published row whose source names no config
    status: Status = Status.OK
    coarse_us: float | None = None  # median of the coarse pass, or of published figures
    figures: int = 1  # processes or printed figures that ``coarse_us`` rests on
    finals: tuple[ProcessTimes, ...] = field(default=(), repr=False)
    control: tuple[ProcessTimes, ...] = field(default=(), repr=False)
    """Finals of the default under its second name: the A/A control."""
    source: str = ""  # publication that reports it; empty for our own
    note: str = ""
    facts: Facts = Facts()
    check: str = "exact"
    ceiling_gb_per_s: float | None = None
    copy_gb_per_s: float | None = None  # rate of a device-to-device copy in the sweep that timed it
    peak_flop_per_s: float | None = None
    newest: float = field(default=0.0, compare=False)
    """Moment when the last of its rows was stored, in seconds since the epoch."""

    @property
    def stage(self) -> Stage:
        """Stage that ``value_us`` comes from."""
        return Stage.FINAL if self.finals else Stage.COARSE

    @property
    def value_us(self) -> float:
        """Time that ranks results within one stage: the median over processes; infinite without a time."""
        if self.finals:
            return statistics.median(map(process_us, self.finals))
        return math.inf if self.coarse_us is None else self.coarse_us


def process_us(times: ProcessTimes) -> float:
    """Return the time of one process: the trimmed mean of its blocks."""
    return trimmed_mean(time_us for _, time_us in times.blocks)


@dataclass(frozen=True)
class Decision:
    """The pick of one study. Shares are fractions: 0.01 is one percent."""

    pick: NamedInts  # empty where a published row names no config
    verdict: Verdict
    time_us: float  # geometric mean over the processes of the finals, or the median of the coarse pass
    runner_up: NamedInts | None = None
    """The fastest other config of the stage that decided. It may be faster than the pick."""
    lower: float = -math.inf  # lower bound of the pick's slowdown against the runner-up
    upper: float = math.inf  # upper bound of the pick's slowdown against every other finalist
    processes: int = 0  # processes that the decision rests on, or printed figures of a publication
    is_contested: bool = False
    """True if the pick, or a preferred config, may be on the other side of the edge of the tie band."""
    precedence: Precedence = Precedence.NONE
    times_us: Mapping[NamedInts, float] = field(default_factory=dict, compare=False, repr=False)
    """Time of each config of the stage that decided."""
    ratios: Mapping[NamedInts, float] = field(default_factory=dict, compare=False, repr=False)
    """Time of each compared config over the pick's, paired by process in the finals."""

    @property
    def ratio(self) -> float | None:
        """Time of the runner-up over the pick's: below 1 if the runner-up is faster."""
        return None if self.runner_up is None else self.ratios[self.runner_up]

    @property
    def needs_more(self) -> bool:
        """True if more processes could change or settle the pick."""
        return self.verdict is Verdict.AMBIGUOUS or self.is_contested


@dataclass(frozen=True)
class Rival:
    """Another config beside the pick. The ratio is its time over the pick's in the same stage."""

    config: NamedInts
    stage: Stage
    time_us: float
    ratio: float


@dataclass(frozen=True)
class Study:
    """All results that compare with each other on one problem and device, the best first, with their decision."""

    problem: Problem
    device: Device
    kind: Kind
    version: KernelVersion | None  # None for published rows of another implementation
    results: tuple[Result, ...] = ()  # results with a time; of compiled kernels, all results
    failures: Mapping[NamedInts, Status] = field(default_factory=dict)
    """Configs that were tried here and have no time, with the reason."""
    lookup_key: NamedInts | None = None
    bytes_moved: int | None = None
    flops: int | None = None
    complete: bool = True  # False while a sweep of the problem has begun and not finished
    has_finals: bool = False  # True if finals ran, even if none of the results has any
    current: NamedInts | None = None
    """Config in the committed table's row for the key. It stays until another is proven faster."""
    today: Today | None = None
    decision: Decision | None = None  # None until :func:`fp8tune.stats.decide.decide_study`
    noise: float | None = None  # difference between the default and its A/A control, as a share

    def __hash__(self) -> int:
        """Hash what identifies the study: the fields hold mappings."""
        return hash((self.problem, self.device, self.kind, self.version))

    @property
    def newest(self) -> float:
        """Moment when the last row was stored, in seconds since the epoch."""
        return max((result.newest for result in self.results), default=0.0)

    @property
    def default(self) -> NamedInts:
        """The kernel's declared default; empty where no version is known."""
        return self.version.default if self.version else NamedInts()

    @property
    def axes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The declared grid, which defines the canonical order of configs."""
        return self.version.axes if self.version else ()

    @property
    def source_hash(self) -> str:
        """Hash of the kernel's code; empty for another implementation."""
        return self.version.source_hash if self.version else ""

    @property
    def is_usable(self) -> bool:
        """True if a table can be made from it: swept to the end, with a result that names its config."""
        return self.complete and any(result.config is not None for result in self.results)

    @property
    def choice(self) -> Decision:
        """The decision. Raises ValueError for a study that is not decided."""
        if self.decision is None:
            raise ValueError(f"the study of {self.problem} is not decided")
        return self.decision

    @cached_property
    def pick(self) -> Result:
        """Result of the pick."""
        config = self.choice.pick
        same = (result for result in self.results if (result.config or NamedInts()) == config)
        return min(same, key=lambda result: (not result.finals, result.value_us, result.source, result.note))

    @cached_property
    def coarse_us(self) -> Mapping[NamedInts, float]:
        """Coarse time of each named config; the best of several rows that published the same one."""
        results = sorted(self.results, key=lambda result: -result.value_us)
        times = {r.config: r.value_us if r.coarse_us is None else r.coarse_us for r in results if r.config is not None}
        return {config: time_us for config, time_us in times.items() if math.isfinite(time_us)}

    @cached_property
    def finals(self) -> Mapping[NamedInts, tuple[ProcessTimes, ...]]:
        """Finals of each finalist."""
        return {r.config: r.finals for r in self.results if r.finals and r.config is not None}

    @cached_property
    def times_us(self) -> Mapping[NamedInts, float]:
        """Time of each config: of finalists in the finals, of others in the coarse pass."""
        return {**self.coarse_us, **(self.choice.times_us if self.finals else {})}

    @cached_property
    def slowdowns(self) -> Mapping[NamedInts, float]:
        """Time of each config over the best one's of the same stage, at least 1."""
        ratios: dict[NamedInts, float] = {}
        for times in (self.coarse_us, self.choice.times_us if self.finals else {}):
            best_us = min(times.values(), default=math.nan)
            ratios |= {config: max(1.0, time_us / best_us) for config, time_us in times.items()}
        return ratios

    def rival(self, config: NamedInts) -> Rival | None:
        """Compare a config with the pick, in the finals if both have them, else in the coarse pass."""
        decision, coarse_us = self.choice, self.coarse_us
        if config in decision.ratios:
            stage = Stage.FINAL if self.finals else Stage.COARSE
            return Rival(config, stage, decision.times_us[config], decision.ratios[config])
        if config not in coarse_us or decision.pick not in coarse_us:
            return None
        return Rival(config, Stage.COARSE, coarse_us[config], coarse_us[config] / coarse_us[decision.pick])

    @cached_property
    def next_best(self) -> Rival | None:
        """The next best config that was timed. It may be faster than the pick."""
        rivals = [rival for config in self.times_us if config != self.choice.pick if (rival := self.rival(config))]
        return min(rivals, key=lambda rival: (rival.ratio, rival.config.canonical), default=None)

    @property
    def precedence(self) -> Precedence:
        """Reason why the next best config is not the pick, where it is faster or was not confirmed."""
        if self.next_best is None or self.next_best.config == self.choice.runner_up:
            return self.choice.precedence
        return Precedence.UNCONFIRMED if self.finals else Precedence.NONE

    @property
    def speedup(self) -> float | None:
        """Time of today's config over the pick's: 1 if the pick is in use, None if today's config has no time."""
        if self.today is None:
            return None
        return rival.ratio if (rival := self.rival(self.today.config)) else None
