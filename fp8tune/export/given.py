"""What a format is written from: the picks of one kernel on one device, with their evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from fp8tune.recording import Config, Kernel, Launch
from fp8tune.records import Device, NamedInts, Problem


@dataclass(frozen=True)
class Tuned:
    """One problem, decided."""

    problem: Problem
    lookup_key: NamedInts
    config: NamedInts
    """The pick, as rows hold it."""
    launch_config: Config
    """The pick as Triton takes it."""
    time_us: float | None
    times_us: Mapping[NamedInts, float]
    """Every right config that was timed (finals where there are any, else the screen) -> microseconds."""
    evidence: str
    """One line: verdict, microseconds, device, driver, triton, commit."""
    verdict: str = ""
    launch: Launch | None = None
    """As recorded; None for a kernel with a spec of its own."""
    failures: Mapping[NamedInts, tuple[str, str]] = field(default_factory=dict)
    """Config -> (status, reason)."""
    is_published: bool = False
    check: str = "exact"


@dataclass(frozen=True)
class Given:
    """One kernel on one device."""

    kernel: str
    device: Device
    tuned: tuple[Tuned, ...]
    """In the order of the recording, or of the shape sets."""
    configs: Mapping[NamedInts, Config]
    """Each config that any row holds, as Triton takes it."""
    recorded: Kernel | None = None
    """The kernel without launches, where it was recorded."""


@dataclass(frozen=True)
class File:
    """One file that a format consists of."""

    path: PurePosixPath
    """Below the folder that the user names."""
    text: str
