"""Picks in the formats that others read: one module a format."""

from __future__ import annotations

from dataclasses import dataclass

from fp8tune.recording import Config, Value


@dataclass(frozen=True)
class PublishedPick:
    """One pick as somebody else's file has it: to be measured, not believed."""

    kernel: str
    """``module:attribute`` where the file says it, else the name it has for the kernel."""
    key: tuple[Value, ...]
    """What its reader looks the config up by."""
    config: Config
    time_us: float | None
    """As the file claims; None where it claims none."""
    source: str
    """The file, for the row that is made of it."""
