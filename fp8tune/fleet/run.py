"""A sweep on many GPUs as whoever starts the workers sees it: units go in, progress of all comes out."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from fp8tune.fleet import units
from fp8tune.store.results import Store
from fp8tune.store.schema import UnitState
from fp8tune.store.units import Queue, UnitStatus

POLL_S = 1.0
"""Seconds between looks at the queue."""


@dataclass(frozen=True)
class FleetProgress:
    """How far all workers are together."""

    queue: Queue
    seconds: float
    """Since watching began."""
    left_s: float | None
    """Until all units are done at the pace so far; None before the first is done or where nobody works."""

    @property
    def counts(self) -> Counter[UnitState]:
        """How many units are in which state."""
        return self.queue.counts

    @property
    def running(self) -> list[UnitStatus]:
        """Units that a worker has."""
        return self.queue.of(UnitState.RUNNING)

    @property
    def is_over(self) -> bool:
        """Whether every unit is done or has failed."""
        return all(of.state in (UnitState.DONE, UnitState.FAILED) for of in self.queue.units)


def watch(
    store: Store,
    sweep_keys: Collection[str],
    *,
    is_over: Callable[[], bool] = lambda: False,
    poll_s: float = POLL_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[FleetProgress]:
    """Progress at each look, until every unit of these sweeps has ended or ``is_over`` says that nobody works any more.

    Leases that have ended are given back on the way. The last one says what is left.
    """
    begun = clock()
    while True:
        asked_to_end = is_over()
        store.return_expired_units()
        queue = store.queue(sweep_keys)
        progress = FleetProgress(queue, clock() - begun, left_s(queue))
        yield progress
        if progress.is_over or asked_to_end:
            return
        sleep(poll_s)


def finals_s(queue: Queue, device: str) -> float:
    """Seconds that the units which wait for a device name take on one device, of sweeps with finals."""
    wanted = {sweep.key for sweep in queue.sweeps if sweep.device == device and units.has_finals(sweep)}
    waiting = [of.unit.expected_s for of in queue.of(UnitState.WAITING) if of.unit.sweep_key in wanted]
    return (_pace(queue) or 1.0) * math.fsum(waiting)


def left_s(queue: Queue, workers: int | None = None) -> float | None:
    """Seconds until all units are done by so many workers (None: as many as are at it now).

    Units that are done tell how long the expected seconds really are.
    """
    waiting, running = queue.of(UnitState.WAITING), queue.of(UnitState.RUNNING)
    if not waiting and not running:
        return 0.0
    pace, hands = _pace(queue), len(running) if workers is None else workers
    if pace is None or not hands:
        return None
    begun = [max(0.0, pace * of.unit.expected_s - (of.since_s or 0.0)) for of in running]
    todo = [pace * of.unit.expected_s for of in waiting]
    return max((math.fsum(todo) + math.fsum(begun)) / hands, *todo, *begun)


def _pace(queue: Queue) -> float | None:
    """Seconds for each that was expected; None before a unit is done."""
    done = [of for of in queue.of(UnitState.DONE) if of.seconds is not None]
    expected_s = math.fsum(of.unit.expected_s for of in done)
    return math.fsum(of.seconds or 0.0 for of in done) / expected_s if expected_s else None
