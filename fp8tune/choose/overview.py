"""What is known of each kernel, in a line: pure functions over picks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from fp8tune.choose.ranking import grouped
from fp8tune.choose.verdict import PUBLISHED, PickVerdict
from fp8tune.records import Device, Problem

SETTLED = (PickVerdict.CERTIFIED, PickVerdict.NEAR_TIE, PickVerdict.KEPT_INCUMBENT, PickVerdict.ONLY)
"""Verdicts that leave nothing to measure, of the configs that were asked for."""

OPEN = (PickVerdict.AMBIGUOUS, PickVerdict.UNRESOLVABLE)
"""Verdicts after finals that could not tell."""


class Picked(Protocol):
    """What is asked of a pick, decided now or kept."""

    @property
    def problem(self) -> Problem:
        """What it is the best of."""

    @property
    def device(self) -> Device:
        """What it ran on."""

    @property
    def verdict(self) -> str | None:
        """None for published rows."""

    @property
    def ceiling_share(self) -> float | None:
        """None where it is not known."""

    @property
    def newest(self) -> float:
        """When its last row was stored, seconds since the epoch."""


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


def overview(picks: Iterable[Picked]) -> list[KernelOverview]:
    """A line a kernel, by name."""
    by_kernel = grouped(picks, lambda pick: pick.problem.kernel)
    return [_of_kernel(kernel, by_kernel[kernel]) for kernel in sorted(by_kernel)]


def _of_kernel(kernel: str, found: list[Picked]) -> KernelOverview:
    shares = [pick.ceiling_share for pick in found if pick.ceiling_share is not None]
    return KernelOverview(
        kernel=kernel,
        picks=len(found),
        devices=tuple(sorted({pick.device.name or pick.device.arch for pick in found})),
        ceiling_share=median(shares) if shares else None,
        verdicts=dict(Counter(str(pick.verdict or PUBLISHED) for pick in found).most_common()),
        newest=max(pick.newest for pick in found),
    )
