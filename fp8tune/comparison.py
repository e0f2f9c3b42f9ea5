"""The outcome of comparing two revisions, and its forms for machines and for pull requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import geometric_mean

from fp8tune.records import Device, NamedInts, Problem

SAME_CODE, NEW, REMOVED, NO_ROWS = "SAME-CODE", "NEW", "REMOVED", "no rows"
"""The kernel's source is the same at both revisions, is declared at one only, or one side was never timed here."""

_COLUMNS = ("Kernel", "Shape", "Before (us)", "After (us)", "Speedup")
_RULE = ("---", "---", "---:", "---:", "---:")


@dataclass(frozen=True)
class Revision:
    """One side: the name the user gave and the commit it stands for, ``+`` appended for uncommitted changes."""

    name: str
    commit: str

    def __str__(self) -> str:
        changed = "+" if self.commit.endswith("+") else ""
        return f"{self.name} ({self.commit[:12]}{changed})"


@dataclass(frozen=True)
class ComparedRow:
    """One kernel on one problem and device at both revisions. Without a problem: the kernel has no rows at all."""

    kernel: str
    verdict: str | None
    """``SAME-CODE``, ``NEW``, ``REMOVED``, ``no rows``; None where both sides are timed and differ."""
    problem: Problem | None = None
    device: Device | None = None
    before_us: float | None = None
    after_us: float | None = None
    reason: str = ""

    @property
    def arch(self) -> str:
        """Empty where there are no rows."""
        return self.device.arch if self.device else ""

    @property
    def shape(self) -> NamedInts:
        """Empty where there are no rows."""
        return self.problem.shape if self.problem else NamedInts()

    @property
    def ratio(self) -> float | None:
        """After / before: above 1 the kernel became slower."""
        return self.after_us / self.before_us if self.before_us and self.after_us else None

    def as_json(self) -> Mapping[str, object]:
        """The contract's fields, then those that tell rows of one shape apart."""
        return {
            "kernel": self.kernel,
            "arch": self.arch,
            "shape": dict(self.shape),
            "before_us": self.before_us,
            "after_us": self.after_us,
            "ratio": self.ratio,
            "verdict": self.verdict,
            "routing": self.problem.routing if self.problem else None,
            "input_layout": self.problem.input_layout if self.problem else None,
            "scale_mode": self.problem.scale_mode if self.problem else None,
            "device": self.device.name if self.device else None,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Comparison:
    """All rows of two revisions."""

    before: Revision
    after: Revision
    rows: tuple[ComparedRow, ...]

    @property
    def geomean(self) -> float | None:
        """Of the ratios of rows whose code changed; 1 where none did; None where nothing could be compared."""
        ratios = [row.ratio for row in self.rows if row.ratio and row.verdict != SAME_CODE]
        if ratios:
            return geometric_mean(ratios)
        return 1.0 if any(row.verdict == SAME_CODE for row in self.rows) else None

    @property
    def exit_code(self) -> int:
        """3 where nothing could be compared, else 0."""
        return 3 if self.geomean is None else 0

    @property
    def notices(self) -> tuple[str, ...]:
        """Why rows could not be compared, each reason once."""
        reasons = dict.fromkeys(f"{row.kernel}: {row.reason}" for row in self.rows if row.reason)
        return tuple(reasons) if self.rows else ("no kernel is declared at either revision: name some with --kernel",)

    def as_json(self) -> Mapping[str, object]:
        """``fp8tune compare --format json``."""
        return {"rows": [row.as_json() for row in self.rows], "geomean": self.geomean}

    def markdown(self) -> str:
        """Tables to paste under a pull request, one a device, each with the line that says where it comes from."""
        devices = dict.fromkeys(row.device for row in self.rows)
        return "\n\n".join(self._table(device) for device in devices)

    def _table(self, device: Device | None) -> str:
        rows = [row for row in self.rows if row.device == device]
        lines = [_line(cells) for cells in (_COLUMNS, _RULE, *map(_cells, rows))]
        return "\n".join([*lines, "", self._provenance(device)])

    def _provenance(self, device: Device | None) -> str:
        where = "No rows on any device" if device is None else _describe(device)
        return f"{_cell(where)}. Before: {self.before}, after: {self.after}. Recorded rows, matched by kernel source."


def _cells(row: ComparedRow) -> tuple[str, ...]:
    speedup = f"{1 / row.ratio:.2f}x" if row.ratio and row.verdict is None else row.verdict or ""
    return row.kernel, _problem_text(row.problem), _microseconds(row.before_us), _microseconds(row.after_us), speedup


def _problem_text(problem: Problem | None) -> str:
    """The shape, and of the rest what is not as usual."""
    if problem is None:
        return ""
    usual = Problem(problem.kernel, problem.shape)
    named = ("routing", "input_layout", "in_dtype", "fp8_dtype", "scale_mode")
    unusual = [getattr(problem, name) for name in named if getattr(problem, name) != getattr(usual, name)]
    return ", ".join([str(problem.shape), *unusual])


def _microseconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.{1 if value >= 100 else 2}f}"


def _describe(device: Device) -> str:
    versions = {"driver": device.driver, "": device.runtime, "torch": device.torch, "triton": device.triton}
    said = [f"{name} {version}".strip() for name, version in versions.items() if version]
    return ", ".join([f"{device.name or 'unnamed device'} ({device.arch})", *said])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    """Stored names end neither the cell nor the line."""
    return " ".join(text.split()).replace("|", "\\|")
