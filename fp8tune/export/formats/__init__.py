"""Picks in the formats that others read: one module a format."""

from __future__ import annotations

from dataclasses import dataclass, field

from fp8tune.records import NamedInts
from fp8tune.replay.recording import Config, Value


@dataclass(frozen=True)
class PublishedPick:
    """One pick as somebody else's file has it: to be measured, not believed."""

    kernel: str
    """``module:attribute`` where the file says it, else the name it has for the kernel; empty where it has none."""
    key: tuple[Value, ...]
    """What its reader looks the config up by."""
    config: Config
    time_us: float | None
    """As the file claims; None where it claims none."""
    source: str
    """The file, for the row that is made of it."""
    shape: NamedInts = field(default_factory=NamedInts)
    """The sizes among the key, where the file names them."""
    device: str = ""
    """The device's name as the file has it, often with ``_`` for blanks; empty where it has none."""
    dtype: str = ""
    """As the file calls it, such as ``fp8_w8a8``; empty where it has none."""
