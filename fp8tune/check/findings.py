"""Findings of ``doctor``: one line, with what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fp8tune.errors import Fp8tuneError


class Level(StrEnum):
    """Severity of a finding."""

    ERROR = "error"  # something that fp8tune needs is broken: exit code 1
    WARNING = "warning"  # works, but results or the time they take suffer
    OK = "ok"  # nothing to do


@dataclass(frozen=True)
class Finding:
    """One thing that was checked."""

    level: Level
    text: str
    fix: str = ""

    @classmethod
    def from_error(cls, error: Fp8tuneError, fix: str = "") -> Finding:
        """Return an error as a finding: what is after its last colon is the fix, unless another is known."""
        text, colon, advice = str(error).rpartition(": ")
        return cls(Level.ERROR, text if colon else advice, fix or (advice if colon else ""))
