"""One config for several problems that a format cannot tell apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fp8tune.export.given import Tuned
from fp8tune.records import NamedInts


def least_worst(tuned: Sequence[Tuned]) -> tuple[NamedInts, float]:
    """The config whose largest slowdown is least, and that slowdown (1.0: it is everywhere the fastest).

    Of the configs that are right and timed on the most problems; the first pick of equals. One problem has its pick.
    """
    if len(tuned) == 1:
        return tuned[0].config, 1.0
    slowdowns: dict[NamedInts, list[float]] = {}
    for one in tuned:
        for config, slowdown in _slowdowns(one).items():
            slowdowns.setdefault(config, []).append(slowdown)
    picks = [one.config for one in tuned]

    def preference(config: NamedInts) -> tuple[object, ...]:
        place = picks.index(config) if config in picks else len(picks)
        return -len(slowdowns[config]), max(slowdowns[config]), place, config.canonical

    least = min(slowdowns, key=preference)
    return least, max(slowdowns[least])


def _slowdowns(one: Tuned) -> Mapping[NamedInts, float]:
    """Config -> its time over the best one's; the pick alone where nothing was timed."""
    times_us = one.times_us or {one.config: 1.0}
    return one.slowdowns or {config: time_us / min(times_us.values()) for config, time_us in times_us.items()}
