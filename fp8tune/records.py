"""The frozen values that cross layers: devices, trials, outcomes, stored rows. No torch, no database, no terminal."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from fp8tune.text import visible
from fp8tune_kernels.spec import NamedInts as NamedInts
from fp8tune_kernels.spec import Problem as Problem

GRAPH = "graph"
"""Timing of a device whose launches are replayed in CUDA graphs."""

RECORDED = "recorded-"
"""Begins the layout of a problem that was recorded; the launch's id follows."""


def is_recorded(problem: Problem) -> bool:
    """Return True for a recorded launch: it moves at most its tensors, and may address a part of them."""
    return problem.input_layout.startswith(RECORDED)


class Kind(StrEnum):
    """Source of a row's knowledge."""

    MEASURED = "measured"
    """Timed here, or on the machine that the database came from."""
    PUBLISHED = "published"
    """Printed by others. Ranks below any measured row, and is never mixed with one."""
    STATIC = "static"
    """Compiled for an arch and not run: no time."""
    INTERPRETER = "interpreter"
    """Checked without a GPU: no time, never exported."""
    SIMULATED = "simulated"
    """Drawn from the simulated clock, for tests and demonstrations."""


class Status(StrEnum):
    """Outcome of a trial. Everything but ``ok`` carries a reason."""

    OK = "ok"
    """Right by the kernel's check, and timed where the kind has times. Simulated or only compiled, nothing is checked.
    """
    WRONG = "wrong"
    """Wrong outputs, on the problem or on an edge, or bytes written where none may be. Without a reference, outputs
    other than the first config's."""
    COMPILE_ERROR = "compile_error"
    """The compiler refused it."""
    OUT_OF_RESOURCES = "out_of_resources"
    """It asks for more registers, threads or shared memory than a block may have."""
    OUT_OF_MEMORY = "out_of_memory"
    """The device's memory did not suffice."""
    CRASHED = "crashed"
    """It took its worker process down; not tried again until ``--again``."""
    TIMEOUT = "timeout"
    """It did not end in time; not tried again until ``--again``."""
    UNTIMED = "untimed"
    """Right by the kernel's check, but its inputs are nothing that a GPU may be timed on."""
    PRUNED = "pruned"
    """Not tried, for the hardware reason that its kernel declares."""


AGREES = "agrees with the first config, which leaves"
"""Begins the reason of an ``ok`` outcome where no reference says what the elements are that nothing writes."""

TO_FIRST = "to the first config"
"""Ends the check of a kernel whose configs are compared with the first of them, because it has no reference."""


def shortfall(status: Status) -> str:
    """Say what a problem lacks whose configs ended so, none of them ``ok``."""
    if status is Status.UNTIMED:
        return "no config can be timed"
    return "every config is pruned" if status is Status.PRUNED else "no config is right"


@dataclass(frozen=True)
class Device:
    """A GPU (or its stand-in) with the software that drove it and the way it was timed.

    Two rows may be compared only where all of these agree.
    """

    arch: str
    """``sm_90``, ``gfx942``, ``interpreter``, ``simulated``: the lookup key."""
    name: str = ""
    uuid_hash: str = ""
    """First 16 hex digits of the SHA-256 of the device's UUID: tells devices apart without naming them."""
    multiprocessors: int = 0
    driver: str = ""
    runtime: str = ""
    """``cuda 13.0`` or ``rocm 6.3``."""
    torch: str = ""
    triton: str = ""
    timing: str = ""
    """How launches are timed: ``gated``, each queued before the GPU comes to it; ``graph``, in CUDA graphs; ``events``
    until fp8tune 0.2, where a busy host could add its own time. Empty where nothing is timed on a GPU."""
    codegen: str = ""
    """What changes machine code besides the versions, as :func:`fp8tune.measure.codegen.settings` lists it."""

    @property
    def fingerprint(self) -> str:
        """All fields as one canonical text."""
        return "|".join(str(getattr(self, name)) for name in self.__dataclass_fields__)


@dataclass(frozen=True)
class KernelVersion:
    """A kernel as it stood when a row was made, with what ranking and export need to know of its declaration."""

    kernel: str
    source_hash: str
    """Hash of the code on the timed path; see :mod:`fp8tune.revisions.source`."""
    default: NamedInts = field(default_factory=NamedInts)
    axes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """The declared grid in declaration order: breaks ties canonically."""
    key: tuple[str, ...] = ()

    def complete(self, published: NamedInts) -> NamedInts:
        """A published config with the first value, which is off, of each axis that it leaves out."""
        return NamedInts({**{name: values[0] for name, values in self.axes if values}, **published})


@dataclass(frozen=True)
class Subject:
    """One problem as one kernel version was run on it, on one device; ``kind`` says how."""

    version: KernelVersion
    device: Device
    kind: Kind
    problem: Problem


@dataclass(frozen=True)
class Compiler:
    """Version and settings that decide the machine code of a kernel, besides its source, config and arguments."""

    arch: str
    triton: str
    codegen: str = ""
    """As in :class:`Device`."""
    ptxas: str = ""
    """Version of NVIDIA's assembler, which comes with Triton: ``12.8.93``. Empty for AMD."""


Program = tuple[Problem, str, NamedInts]
"""Problem, source hash of the kernel and config: with a compiler, all that decides the machine code of a launch."""


@dataclass(frozen=True)
class Facts:
    """Facts that the compiler gives of one config. None where it was not asked."""

    registers: int | None = None
    """Per thread; VGPRs on AMD."""
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    compile_s: float | None = None
    code_hash: str = ""
    """Hash of the machine code of the launch; see :func:`fp8tune.compiled.facts.code_hash`."""
    compiler: Compiler | None = None
    """Compiler that made the machine code; stored with its hash."""


@dataclass(frozen=True)
class Telemetry:
    """The device around one timed block, where it can be read: differences over the block for counters."""

    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    throttle_reasons: int | None = None


@dataclass(frozen=True)
class ClockLimits:
    """Clocks and power limit that a GPU was set to while a block was timed; None where that cannot be read.

    Two blocks may be compared only if these agree where both are known.
    """

    sm_clock_limit_mhz: int | None = None
    memory_clock_mhz: int | None = None
    power_limit_w: float | None = None

    def difference(self, later: ClockLimits, text: str = "{} was {} and is {}") -> str:
        """Describe the first limit that is known and differs later, such as ``power limit was 700 W and is 500 W``."""
        names = (("SM clock limit", "MHz"), ("memory clock", "MHz"), ("power limit", "W"))
        for (name, unit), before, after in zip(names, vars(self).values(), vars(later).values(), strict=True):
            if before is not None and after is not None and before != after:
                return text.format(name, f"{before:g} {unit}", f"{after:g} {unit}")
        return ""

    def merged(self, later: ClockLimits) -> ClockLimits:
        """Return these limits, with later ones where these are unknown."""
        pairs = zip(vars(self).values(), vars(later).values(), strict=True)
        return ClockLimits(*(after if before is None else before for before, after in pairs))


@dataclass(frozen=True)
class Outcome:
    """Result of one trial."""

    status: Status
    time_us: float | None = None
    """The block's value: the 25 % trimmed mean of ``samples_us``. None unless timed and ok."""
    reason: str = ""
    samples_us: tuple[float, ...] = ()
    tick_us: float | None = None
    facts: Facts = Facts()
    telemetry: Telemetry = Telemetry()
    process: str = ""
    """The worker process it ran in: the unit of replication."""
    limits: ClockLimits = ClockLimits()

    def __post_init__(self) -> None:
        """Make the reason, which may quote a compiler, one line that can be stored and shown."""
        object.__setattr__(self, "reason", visible(self.reason))


@dataclass(frozen=True)
class Row:
    """One trial as the database keeps it and as ``--format json`` prints it."""

    problem: Problem
    config: NamedInts | None
    """None for a published row whose source does not say."""
    device: Device
    kind: Kind
    outcome: Outcome
    version: KernelVersion | None = None
    """None for published rows: they timed another implementation."""
    lookup_key: NamedInts | None = None
    bytes_moved: int | None = None
    commit: str = ""
    """Git commit of the working tree, ``+`` appended where it had changes; empty outside git."""
    source: str = ""
    """The publication; empty for our own rows."""
    note: str = ""
    stage: str = "screen"
    """``screen``, ``final``, or ``duplicate``: the declared default under its second name in the finals."""
    round: int = 0
    """Counted from 0 in the screen, and from 0 in each process of the finals."""
    process: str = ""
    """The worker process, the unit of replication; in finals ``final 03``, unique in its sweep."""
    position: int = 0
    """The trial's place in the order of its round."""


@dataclass(frozen=True)
class FinalsRun:
    """The finals of one problem in one sweep, run to their end, with the sweep's limits."""

    sweep: str
    """The sweep's uid: the same in every copy of the database."""
    tie_band: float
    keep_band: float
    floor_us: float = 0.0
    """Times below this cannot be resolved here; see :func:`fp8tune.stats.decide.floor_us`."""


@dataclass(frozen=True)
class ProcessTimes:
    """One config in one worker process of the finals: a block a round."""

    run: FinalsRun
    process: str
    blocks: tuple[tuple[int, float], ...]
    """(round, microseconds), in the order of the rounds."""


@dataclass(frozen=True)
class Pick:
    """The best config of a problem on a device, as it was decided. Times in microseconds, shares of 1."""

    problem: Problem
    config: NamedInts | None
    """None for a published row whose source names none."""
    device: Device
    kind: Kind
    version: KernelVersion | None
    lookup_key: NamedInts | None
    bytes_moved: int | None
    source: str
    note: str
    runner_up: NamedInts | None
    """The next best config that was timed; it may be faster."""
    runner_up_stage: str | None
    """Stage that timed it beside the pick: ``final`` or ``screen``."""
    stage: str
    """What decided: ``final`` or ``screen``."""
    verdict: str
    """How far the pick can be trusted, as :class:`fp8tune.stats.study.Verdict` names it."""
    time_us: float
    """Of finals the geometric mean over processes, of a screen the median."""
    processes: int
    """That the time rests on; printed figures of a publication."""
    ceiling_share: float | None
    """Of what memory or the tensor cores give; None where that is not known."""
    bound: str | None
    """``memory`` or ``compute``: what the share is of."""
    runner_up_us: float | None
    """The runner-up's time."""
    runner_up_ratio: float | None
    """The runner-up's time over the pick's."""
    slowdown_lower_share: float | None
    """At least so much slower than the runner-up; None where nothing bounds it."""
    slowdown_upper_share: float | None
    """At most so much slower than any finalist; None where nothing bounds it."""
    noise_floor_share: float | None
    """How far the default was from itself under a second name."""
    today: NamedInts | None
    """Config that a launch used without the pick when it was decided."""
    today_origin: str | None
    """Its source: ``own table``, ``shipped table``, ``recording`` or ``default``."""
    today_us: float | None
    """Its time; None where it was not timed."""
    speedup_ratio: float | None
    """Its time over the pick's, paired by process in finals; 1 if the pick is in use."""
    default_ratio: float | None
    """The declared default's time over the pick's; None where no stage timed both."""
    is_default: bool
    """Whether it is the declared default."""
    is_incumbent: bool
    """Whether the shipped table holds it."""
    is_complete: bool
    """Whether the sweep ran to its end."""
    checked_by: str
    """The check by which its outputs were right."""
    newest: float
    """When the last of its rows was stored, seconds since the epoch."""

    @property
    def is_in_use(self) -> bool:
        """True if today's config is the pick, and others were compared with it."""
        return self.runner_up is not None and self.today is not None and self.today == self.config


@dataclass(frozen=True)
class Finalist:
    """One config that reached the finals of a problem on a device. Times in microseconds."""

    problem: Problem
    config: NamedInts
    device: Device
    time_us: float
    """The geometric mean over processes."""
    slowdown_ratio: float
    """Its time over the fastest finalist's."""
    processes: int
    """Fresh processes that timed it."""
    fastest_process_us: float
    """In its fastest process."""
    slowest_process_us: float
    """In its slowest process."""
    screen_us: float | None
    """What the screen said."""
    is_pick: bool
    """Whether it is the pick."""
    is_default: bool
    """Whether it is the declared default."""
