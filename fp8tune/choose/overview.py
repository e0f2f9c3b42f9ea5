"""What is known of each kernel, in a line: pure functions over winners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from fp8tune.choose.candidates import Winner
from fp8tune.choose.ranking import grouped
from fp8tune.choose.verdict import PickVerdict
from fp8tune.choose.wanted import word

SETTLED = (PickVerdict.CERTIFIED, PickVerdict.NEAR_TIE, PickVerdict.KEPT_INCUMBENT)
"""Verdicts that leave nothing to measure."""

OPEN = (PickVerdict.AMBIGUOUS, PickVerdict.UNRESOLVABLE)
"""Verdicts after finals that could not tell."""


@dataclass(frozen=True)
class KernelOverview:
    """All picks of one kernel."""

    kernel: str
    picks: int
    """Problems, each counted once a device."""
    devices: tuple[str, ...]
    """Names of the GPUs, or arches where they have none; sorted."""
    ceiling_share: float | None
    """The median over its picks; None where none is known."""
    verdicts: Mapping[str, int]
    """How many picks have which verdict; ``published`` stands for none."""
    newest: float
    """When its newest row was stored, seconds since the epoch."""

    @property
    def settled(self) -> int:
        """Picks that need no more measuring."""
        return sum(self.verdicts.get(verdict, 0) for verdict in SETTLED)

    @property
    def open(self) -> int:
        """Picks that finals could not settle."""
        return sum(self.verdicts.get(verdict, 0) for verdict in OPEN)

    @property
    def quick(self) -> int:
        """Picks of a screen."""
        return self.verdicts.get(PickVerdict.QUICK, 0)


def overview(winners: Iterable[Winner]) -> list[KernelOverview]:
    """A line a kernel, by name."""
    by_kernel = grouped(winners, lambda winner: winner.problem.kernel)
    return [_of_kernel(kernel, by_kernel[kernel]) for kernel in sorted(by_kernel)]


def _of_kernel(kernel: str, found: list[Winner]) -> KernelOverview:
    shares = [winner.ceiling_share for winner in found if winner.ceiling_share is not None]
    return KernelOverview(
        kernel=kernel,
        picks=len(found),
        devices=tuple(sorted({winner.device.name or winner.device.arch for winner in found})),
        ceiling_share=median(shares) if shares else None,
        verdicts=dict(Counter(map(word, found)).most_common()),
        newest=max(winner.evidence.newest for winner in found),
    )
