"""The frozen values that cross layers: devices, trials, outcomes, stored rows. No torch, no database, no terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from fp8tune_kernels.spec import NamedInts, Problem

__all__ = [
    "Device",
    "Evidence",
    "Facts",
    "KernelVersion",
    "Kind",
    "NamedInts",
    "Outcome",
    "Pool",
    "Problem",
    "Row",
    "Status",
    "Telemetry",
]


class Kind(StrEnum):
    """Where a row's knowledge comes from."""

    MEASURED = "measured"
    PUBLISHED = "published"
    STATIC = "static"
    INTERPRETER = "interpreter"
    SIMULATED = "simulated"


class Status(StrEnum):
    """How a trial ended. Everything but ``ok`` carries a reason."""

    OK = "ok"
    WRONG = "wrong"
    COMPILE_ERROR = "compile_error"
    OUT_OF_RESOURCES = "out_of_resources"
    OUT_OF_MEMORY = "out_of_memory"
    CRASHED = "crashed"
    TIMEOUT = "timeout"
    PRUNED = "pruned"


@dataclass(frozen=True)
class Device:
    """A GPU (or its stand-in) with the software that drove it. Two rows may be compared only where these agree."""

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

    @property
    def fingerprint(self) -> str:
        """All fields as one canonical text."""
        return "|".join(str(getattr(self, name)) for name in self.__dataclass_fields__)


@dataclass(frozen=True)
class KernelVersion:
    """A kernel as it stood when a row was made, with what ranking and export need to know of its declaration."""

    kernel: str
    source_hash: str
    """Hash of the code on the timed path; see :mod:`fp8tune.source`."""
    default: NamedInts = field(default_factory=NamedInts)
    axes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """The declared grid in declaration order: breaks ties canonically."""
    key: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What the compiler says of one config. None where it was not asked."""

    registers: int | None = None
    """Per thread; VGPRs on AMD."""
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    compile_s: float | None = None


@dataclass(frozen=True)
class Telemetry:
    """The device around one timed block, where it can be read: differences over the block for counters."""

    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    throttle_reasons: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of one trial."""

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


@dataclass(frozen=True)
class Row:
    """One trial as the database keeps it and as ``--json`` prints it."""

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
    """``screen`` or ``final``."""
    round: int = 0
    process: str = ""
    """Identifies the worker process: the unit of replication."""
    position: int = 0
    """The trial's place in the order of its round."""

    def as_json(self) -> Mapping[str, object]:
        """The machine-readable contract of ``fp8tune sweep --json``."""
        return {
            "kernel": self.problem.kernel,
            "arch": self.device.arch,
            "device": self.device.name,
            "kind": str(self.kind),
            "shape": dict(self.problem.shape),
            "routing": self.problem.routing,
            "input_layout": self.problem.input_layout,
            "in_dtype": self.problem.in_dtype,
            "fp8_dtype": self.problem.fp8_dtype,
            "scale_mode": self.problem.scale_mode,
            "config": None if self.config is None else dict(self.config),
            "status": str(self.outcome.status),
            "time_us": self.outcome.time_us,
            "reason": self.outcome.reason,
        }


@dataclass(frozen=True)
class Pool:
    """Rows that may be compared with each other: of one problem, kernel version, device and kind."""

    problem: Problem
    device: Device
    kind: Kind
    version: KernelVersion | None
    complete: bool
    newest: float
    """When its last time was stored, seconds since the epoch; 0 where it has none."""


@dataclass(frozen=True)
class Evidence:
    """All that is stored of one config on one problem and device, from one kernel version: what ranking compares."""

    problem: Problem
    config: NamedInts | None
    device: Device
    kind: Kind
    status: Status
    times_us: tuple[float, ...] = ()
    """One value a worker process: the mean of its blocks but the fastest and slowest. Empty unless ok and timed."""
    version: KernelVersion | None = None
    lookup_key: NamedInts | None = None
    bytes_moved: int | None = None
    source: str = ""
    note: str = ""
    facts: Facts = Facts()
    complete: bool = True
    """False while a sweep of this problem was begun and not finished: its best so far is no pick."""
    ceiling_gb_per_s: float | None = None
    """The device's copy ceiling, measured in the sweep the row comes from; GB/s, read plus written."""
    stage: str = "screen"
    """``final`` where ``times_us`` come from finals: screening times are not compared with those."""
    newest: float = 0.0
    """When the last of the rows was stored, seconds since the epoch: the newest kernel version wins."""
