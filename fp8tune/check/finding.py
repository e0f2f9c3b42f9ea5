"""One thing that doctor looked at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fp8tune.errors import Fp8tuneError


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    """Nothing to do."""
    WARNING = "warning"
    """Works, and could be better."""
    ERROR = "error"
    """Something that fp8tune needs is broken: exit code 1."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; ``fix`` says what to do, empty where nothing is to be done."""

    level: Level
    what: str
    fix: str = ""

    @classmethod
    def of(cls, error: Fp8tuneError, fix: str = "") -> Finding:
        """An error's line says what happened and, after its last colon, what to do."""
        what, colon, advice = str(error).rpartition(": ")
        return cls(Level.ERROR, what if colon else advice, fix or (advice if colon else ""))
