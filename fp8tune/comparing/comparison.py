"""Outcome of comparing two revisions; :mod:`fp8tune.render.compare` shows it."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import geometric_mean

from fp8tune.comparing import verdicts
from fp8tune.comparing.verdicts import ChangeVerdict
from fp8tune.records import Device, NamedInts, Problem
from fp8tune.stats.estimate import Estimate


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
    verdict: ChangeVerdict
    problem: Problem | None = None
    device: Device | None = None
    before_us: float | None = None
    after_us: float | None = None
    reason: str = ""
    before_config: NamedInts | None = None
    after_config: NamedInts | None = None
    effect: Estimate | None = None
    """The change (a log ratio) with its error, from the data that gave the verdict; None if nothing shows the noise."""
    control: Estimate | None = None
    """Change of the control arm, which ran the first side's code once more."""
    is_stable: bool | None = None
    """True if the control arm moved by no more than chance; None without one."""
    tested: int = 1
    """Rows that were decided together."""
    n: int = 0
    """Rounds behind the verdict; of recorded rows, processes on the side with fewer."""
    blocks: int = 0
    """Blocks timed in those rounds, on all three arms."""
    ungated: int = 0
    """Blocks that include the host's time, because the launch waits for the GPU."""
    throttled: int = 0
    """Blocks timed while the device ran slower than it should, because of ``slowdowns``."""
    slowdowns: tuple[str, ...] = ()

    @property
    def arch(self) -> str:
        """Arch of the device; empty without rows."""
        return self.device.arch if self.device else ""

    @property
    def shape(self) -> NamedInts:
        """Sizes of the problem; empty without rows."""
        return self.problem.shape if self.problem else NamedInts()

    @property
    def ratio(self) -> float | None:
        """Time after / before: above 1 the kernel became slower."""
        if self.effect:
            return self.effect.ratio
        return self.after_us / self.before_us if self.before_us and self.after_us else None

    @property
    def smallest_detectable(self) -> float | None:
        """Return the least ratio that such data call a REGRESSION in 95 % of runs."""
        return verdicts.smallest_detectable(self.effect, self.tested) if self.effect else None


@dataclass(frozen=True)
class Comparison:
    """All rows of two revisions."""

    before: Revision
    after: Revision
    rows: tuple[ComparedRow, ...]
    overall: Estimate | None = None
    """The geometric mean over the rows that were timed against each other; None from recorded rows."""
    control: Estimate | None = None
    """Geometric mean of the control arm."""
    origin: str = "Recorded rows, matched by kernel source"
    """Source of the times: the end of a sentence."""

    @property
    def geomean(self) -> float | None:
        """Geometric mean of rows whose code changed; 1 if none did; None if nothing could be compared."""
        if self.overall:
            return self.overall.ratio
        changed = [row for row in self.rows if row.verdict != ChangeVerdict.SAME_CODE]
        if ratios := [row.ratio for row in changed if row.ratio]:
            return geometric_mean(ratios)
        return 1.0 if len(changed) < len(self.rows) else None

    @property
    def is_stable(self) -> bool | None:
        """True if each control arm, and all together, moved by no more than chance; None without any."""
        if self.control is None:
            return None
        return verdicts.is_stable(self.control) and all(row.is_stable is not False for row in self.rows)

    @property
    def exit_code(self) -> int:
        """1 for a regression or newly wrong bytes; 3 if a row is open, there are none, or a control arm drifted."""
        words = {row.verdict for row in self.rows}
        if words & {ChangeVerdict.REGRESSION, ChangeVerdict.NEWLY_WRONG}:
            return 1
        is_open = not words or bool(words & {ChangeVerdict.INCONCLUSIVE, ChangeVerdict.NO_ROWS})
        return 3 if is_open or self.is_stable is False else 0

    @property
    def notices(self) -> tuple[str, ...]:
        """Reasons why rows could not be compared, each once; and a control arm that drifted."""
        if not self.rows:
            return ("no kernel is declared at either revision: name some with --kernel",)
        reasons = dict.fromkeys(f"{row.kernel}: {row.reason}" for row in self.rows if row.reason)
        slowed = "blocks were timed while the GPU was slowed down"
        throttled = [
            f"{row.kernel} {row.shape}: {row.throttled} of {row.blocks} {slowed} ({', '.join(row.slowdowns)})"
            for row in self.rows
            if row.throttled
        ]
        drifted = ["the control arm moved by over 0.5 %: something else uses this GPU, or its clocks are not steady"]
        return (*reasons, *throttled, *(drifted if self.is_stable is False else []))
