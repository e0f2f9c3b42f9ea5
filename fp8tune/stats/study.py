"""Records of a tuned problem: the study, its results and its decision. Imports no numerics library, to load fast."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from fp8tune.records import Device, Facts, KernelVersion, Kind, NamedInts, Problem, ProcessTimes, Status
from fp8tune.stats.means import trimmed_mean

# Multiple of the copy rate above which data came from a cache. Reading twice as much as writing reaches 1.06.
CACHED_RATE = 1.15


class Stage(StrEnum):
    """Phase of a sweep that timed a config. Times of different stages are never compared."""

    COARSE = "screen"  # all correct configs in one process
    FINAL = "final"  # the finalists in fresh processes


class Verdict(StrEnum):
    """Trust in a pick, the most trusted first. People see these words."""

    PROVEN = "proven"
    """Confirmed in fresh processes: no rival is over 1.5 % faster."""
    OPEN = "open"
    """Confirmed, but noise may hide a rival that is over 1.5 % faster."""
    ALONE = "alone"
    """One config was timed: there is nothing to compare it with."""
    QUICK = "quick"
    """Coarse pass in one process, not confirmed."""
    STALE = "stale"
    """Measured with other code, Triton or driver than this GPU runs now. Only shown: a database cannot know it."""
    PUBLISHED = "published"
    """Reported by others, not measured here."""
    WRONG = "wrong"
    """No config gives the right output, so there is no pick."""


class Precedence(StrEnum):
    """Reason why the next best config is not the pick, if it is faster or was timed only in the coarse pass."""

    NONE = ""
    """It is slower."""
    TIED = "tied"
    """Both are within the tie band, where the default comes first, then canonical order."""
    DEFAULT = "default stays"
    """Nothing is proven faster than the default."""
    CURRENT = "today's config stays"
    """Nothing is proven faster than today's config by more than the keep band."""
    TOO_SHORT = "too short"
    """Times are too short for the timer to distinguish configs."""
    UNCONFIRMED = "coarse pass"
    """Only the coarse pass timed it: one process proves nothing."""


class Origin(StrEnum):
    """Source of today's config."""

    OWN_TABLE = "own table"
    SHIPPED_TABLE = "shipped table"
    RECORDING = "recording"  # run-time tuning chose it when the launch was recorded
    PROGRAM = "program"  # the program passed it to a kernel without an autotuner
    DEFAULT = "default"


@dataclass(frozen=True)
class Today:
    """The config that a launch uses before the pick is applied. Speedups are relative to its time."""

    config: NamedInts
    origin: Origin = Origin.DEFAULT


@dataclass(frozen=True)
class Result:
    """Result of one config in one study, in the coarse pass and in the finals."""

    config: NamedInts | None  # None for a published row whose source names no config
    status: Status = Status.OK
    coarse_us: float | None = None  # median of the coarse pass or of published figures
    figures: int = 1  # number of processes, or of published figures, behind ``coarse_us``
    finals: tuple[ProcessTimes, ...] = field(default=(), repr=False)
    control: tuple[ProcessTimes, ...] = field(default=(), repr=False)
    """Finals of the A/A control, which is the default config under a second name."""
    source: str = ""  # publication that reports the result; empty if measured here
    note: str = ""
    facts: Facts = Facts()
    check: str = "exact"
    ceiling_gb_per_s: float | None = None
    copy_gb_per_s: float | None = None  # rate of a device-to-device copy in the sweep that timed it
    peak_flop_per_s: float | None = None

    @property
    def stage(self) -> Stage:
        """Stage in which ``value_us`` was measured."""
        return Stage.FINAL if self.finals else Stage.COARSE

    @property
    def times_us(self) -> tuple[float, ...]:
        """Time of each process that timed the config, in order; none without a time."""
        if self.finals:
            return tuple(sorted(map(process_us, self.finals)))
        return () if self.coarse_us is None else (self.coarse_us,) * self.figures

    @property
    def value_us(self) -> float:
        """Time for ranking within one stage: median over final processes or coarse time; infinite without either."""
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
    """Fastest config besides the pick in the deciding stage. It may be faster than the pick."""
    lower: float = -math.inf  # lower bound of the pick's slowdown against the runner-up
    upper: float = math.inf  # upper bound of the pick's slowdown against every other finalist
    processes: int = 0  # number of processes, or of published figures, behind the decision
    is_unresolvable: bool = False
    """True if an open decision cannot be settled: times are too short for the timer, or data came from a cache."""
    precedence: Precedence = Precedence.NONE
    times_us: Mapping[NamedInts, float] = field(default_factory=dict, compare=False, repr=False)
    """Time of each config in the deciding stage."""
    ratios: Mapping[NamedInts, float] = field(default_factory=dict, compare=False, repr=False)
    """Time of each compared config divided by the pick's time, paired by process in the finals."""

    @property
    def ratio(self) -> float | None:
        """Time of the runner-up divided by the pick's time: below 1 if the runner-up is faster."""
        return None if self.runner_up is None else self.ratios[self.runner_up]

    @property
    def needs_more(self) -> bool:
        """True if more processes could change or settle the pick."""
        return self.verdict is Verdict.OPEN and not self.is_unresolvable


@dataclass(frozen=True)
class Rival:
    """A config compared with the pick. The ratio is its time divided by the pick's time in the same stage."""

    config: NamedInts
    stage: Stage
    time_us: float
    ratio: float


@dataclass(frozen=True)
class Study:
    """All comparable results of one problem on one device, the fastest first, with their decision."""

    problem: Problem
    device: Device
    kind: Kind
    version: KernelVersion | None  # None for published rows of another implementation
    results: tuple[Result, ...] = ()  # results with a time; for compiled kernels, all results
    failures: Mapping[NamedInts, Status] = field(default_factory=dict)
    """Configs that were tried without getting a time, each with the status that gives the reason."""
    untimed: tuple[NamedInts, ...] = ()
    """Configs of correct results without a time, such as those that a publication names without one."""
    lookup_key: NamedInts | None = None
    bytes_moved: int | None = None
    flops: int | None = None
    complete: bool = True  # False while a sweep of the problem is unfinished
    planned: int = field(default=0, compare=False)  # configs of its largest finished sweep, kept or not
    has_finals: bool = False  # True if finals ran, even if none of the results has any
    current: NamedInts | None = None
    """Config in the committed table's row for ``lookup_key``. It stays until another config is proven faster."""
    today: Today | None = None
    launched: NamedInts | None = None  # config that the program passes to a kernel which declares none
    decision: Decision | None = None  # None until :func:`fp8tune.stats.decide.decide_study`
    noise: float | None = None  # relative difference between the default and its A/A control
    newest: float = field(default=0.0, compare=False)
    """Time at which the last row of the study was stored, in seconds since the epoch."""

    def __hash__(self) -> int:
        """Hash only the identifying fields, because other fields hold mappings."""
        return hash((self.problem, self.device, self.kind, self.version))

    @property
    def configs(self) -> list[NamedInts]:
        """Named configs of the results, and those without a time."""
        return [*(result.config for result in self.results if result.config is not None), *self.untimed]

    @property
    def default(self) -> NamedInts:
        """The kernel's declared default, or what the program passes instead; empty where no version is known."""
        return self.launched or (self.version.default if self.version else NamedInts())

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
        """True if the study can fill a table row: its sweep is complete, and a result names its config."""
        return self.complete and any(result.config is not None for result in self.results)

    @property
    def choice(self) -> Decision:
        """The decision. Raises ValueError if the study is not decided yet."""
        if self.decision is None:
            raise ValueError(f"the study of {self.problem} is not decided")
        return self.decision

    @cached_property
    def pick(self) -> Result:
        """Result of the picked config; of several, one with finals, else the fastest."""
        config = self.choice.pick
        same = (result for result in self.results if (result.config or NamedInts()) == config)
        return min(same, key=lambda result: (not result.finals, result.value_us, result.source, result.note))

    @cached_property
    def coarse_us(self) -> Mapping[NamedInts, float]:
        """Coarse time of each named config; the best time if several published rows name the same config."""
        results = sorted(self.results, key=lambda result: -result.value_us)
        times = {r.config: r.value_us if r.coarse_us is None else r.coarse_us for r in results if r.config is not None}
        return {config: time_us for config, time_us in times.items() if math.isfinite(time_us)}

    @cached_property
    def finals(self) -> Mapping[NamedInts, tuple[ProcessTimes, ...]]:
        """Finals of each finalist."""
        return {r.config: r.finals for r in self.results if r.finals and r.config is not None}

    @cached_property
    def times_us(self) -> Mapping[NamedInts, float]:
        """Time of each config: from the finals for finalists, from the coarse pass for all other configs."""
        return {**self.coarse_us, **(self.choice.times_us if self.finals else {})}

    @cached_property
    def slowdowns(self) -> Mapping[NamedInts, float]:
        """Time of each config divided by the best time of the same stage, at least 1."""
        ratios: dict[NamedInts, float] = {}
        for times in (self.coarse_us, self.choice.times_us if self.finals else {}):
            best_us = min(times.values(), default=math.nan)
            ratios |= {config: max(1.0, time_us / best_us) for config, time_us in times.items()}
        return ratios

    def rival(self, config: NamedInts) -> Rival | None:
        """Compare a config with the pick in the finals, else in the coarse pass; None if no stage timed both."""
        decision, coarse_us = self.choice, self.coarse_us
        if config in decision.ratios:
            stage = Stage.FINAL if self.finals else Stage.COARSE
            return Rival(config, stage, decision.times_us[config], decision.ratios[config])
        if config not in coarse_us or decision.pick not in coarse_us:
            return None
        return Rival(config, Stage.COARSE, coarse_us[config], coarse_us[config] / coarse_us[decision.pick])

    @cached_property
    def next_best(self) -> Rival | None:
        """The best timed config besides the pick. It may be faster than the pick."""
        rivals = [rival for config in self.times_us if config != self.choice.pick if (rival := self.rival(config))]
        return min(rivals, key=lambda rival: (rival.ratio, rival.config.canonical), default=None)

    @property
    def precedence(self) -> Precedence:
        """Reason why the next best config is not the pick, if it is faster or was timed only in the coarse pass."""
        if self.next_best is None or self.next_best.config == self.choice.runner_up:
            return self.choice.precedence
        return Precedence.UNCONFIRMED if self.finals else Precedence.NONE

    @property
    def speedup(self) -> float | None:
        """Time of today's config divided by the pick's time; 1 if they are the same, None if today's has no time."""
        if self.today is None:
            return None
        return rival.ratio if (rival := self.rival(self.today.config)) else None
