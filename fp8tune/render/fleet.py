"""Progress of workers, and the table of the queue."""

from __future__ import annotations

import time
from collections.abc import Callable

from fp8tune.fleet.worker import QueueEvent, WorkerEvent
from fp8tune.render import contracts
from fp8tune.render.progress import Display, duration
from fp8tune.render.report import Column, Report, left, print_parts, right
from fp8tune.render.terminal import counted, kernel_name, print_json
from fp8tune.store.schema import UnitState
from fp8tune.store.units import Queue, QueuedSweep, Unit, UnitStatus
from fp8tune.sweeping.events import TrialDone

MOST_ROWS = 20
"""Units in one table; JSON has all."""
MOST_WORKERS = 8
"""Workers with a line of their own."""


class WorkerProgress(Display):
    """Shows a worker's events: a line for each unit, and the trials of the current one."""

    def __init__(self, label: str, clock: Callable[[], float] = time.monotonic, *, ticks: bool = True) -> None:
        """Take what messages call the database."""
        super().__init__(clock, ticks=ticks)
        self._label, self._unit, self._trials = label, "", 0

    def show(self, event: WorkerEvent) -> None:
        """Show an event."""
        if isinstance(event, TrialDone) and not event.from_database:
            self._trials += 1
            self.update("trials", self._trials, detail=self._unit)
        if not isinstance(event, QueueEvent):
            return
        name = unit_name(event.unit) if event.unit else ""
        match event.event:
            case "started":
                self.line(f"{event.worker} works on the queue in {self._label}")
            case "taken":
                self._unit, self._trials = f"{name}{f', attempt {event.attempt}' if event.attempt != 1 else ''}", 0
                self.update("trials", detail=self._unit)
            case "done":
                self.line(f"done: {name}, {event.trials or 0:,} trials in {event.seconds or 0:.1f} s")
                if event.reason and event.unit:
                    self.line(f"{kernel_name(event.unit.kernel)}: {event.reason}")
            case "failed" | "given back" | "refused":
                self.line(f"{event.event}: {name}: {event.reason}")
            case "waiting":
                self.update("waiting", detail=f"{counted(event.running or 0, 'unit')} of others")
            case "ended":
                failed = f", {event.failed} failed" if event.failed else ""
                waiting = f"; {counted(event.waiting, 'unit')} left" if event.waiting else ""
                reason = f": {event.reason}" if event.reason else ""
                self.line(f"{counted(event.done or 0, 'unit')} done{failed}{reason}{waiting}")


class FleetProgress(Display):
    """Shows how far all workers are with a sweep."""

    def __init__(self) -> None:
        super().__init__()
        self._states: dict[str, UnitState] = {}

    def show(self, queue: Queue) -> None:
        """Show the queue as it is."""
        for status in queue.units:
            if status.state is not self._states.get(status.unit.key) and status.reason:
                if status.state is UnitState.FAILED:
                    self.line(f"failed: {unit_name(status.unit)}: {status.reason}")
                elif status.is_finding:
                    self.line(f"{kernel_name(status.unit.kernel)}: {status.reason}")
            self._states[status.unit.key] = status.state
        done = [status for status in queue.units if status.state in (UnitState.DONE, UnitState.FAILED)]
        running = queue.of(UnitState.RUNNING)
        lines = [f"{status.worker}  {unit_name(status.unit)}" for status in running[:MOST_WORKERS]]
        lines += [f"and {len(running) - MOST_WORKERS} more"] if len(running) > MOST_WORKERS else []
        seconds, all_s = (sum(status.unit.expected_s for status in units) for units in (done, queue.units))
        count = f"{len(done):,}/{len(queue.units):,}"
        self.update("units", seconds, all_s, count=count, detail=counted(len(running), "worker"), lines=lines)


def findings_line(units: int) -> str:
    """Say that some problem sizes of so many units have no right config."""
    return f"no config is right on some problems of {counted(units, 'unit')}: fp8tune show --failed has the reasons"


def unit_name(unit: Unit) -> str:
    """``colwise, 3 problems (M=16640 K=2048 ...)``."""
    first = unit.shapes[0] if unit.shapes else ""
    more = f" and {len(unit.problems) - 1} more" if len(unit.problems) > 1 else ""
    return f"{kernel_name(unit.kernel)} {first}{more}"


def print_queue(queue: Queue, label: str, output_format: str) -> None:
    """Print all units as JSON, or tables: of each sweep, of running, waiting and failed units."""
    if output_format == "json":
        print_json(contracts.queue(queue))
        return
    if not queue.sweeps:
        print(f"no work is queued in {label}: fp8tune sweep --on queue puts some there")
        return
    by_sweep: dict[str, list[UnitStatus]] = {sweep.key: [] for sweep in queue.sweeps}
    for of in queue.units:
        by_sweep.setdefault(of.unit.sweep_key, []).append(of)

    def number(state: UnitState) -> Callable[[QueuedSweep], str]:
        return lambda sweep: f"{sum(of.state is state for of in by_sweep[sweep.key]):,}"

    sweeps: list[Column[QueuedSweep]] = [
        left("sweep", lambda sweep: sweep.key),
        left("for", lambda sweep: sweep.device),
        *(right(str(state), number(state)) for state in (UnitState.DONE, *_NOT_DONE)),
        right("queued", lambda sweep: _ago(queue.now - sweep.created_at)),
    ]
    parts: list[Report[QueuedSweep] | Report[UnitStatus] | str] = [Report(f"units in {label}", sweeps, queue.sweeps)]
    shown = {str(state): (columns, queue.of(state)) for state, columns in _NOT_DONE.items()}
    shown["done, but no config is right on some problems"] = _WITH_REASON, [of for of in queue.units if of.is_finding]
    for title, (columns, found) in shown.items():
        if found:
            more = f", the first {MOST_ROWS} of {len(found):,}" if len(found) > MOST_ROWS else ""
            parts.append(Report(f"{title}{more}", columns, found[:MOST_ROWS]))
    print_parts(parts, output_format)


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{duration(seconds)} ago" if seconds < 7200 else f"{seconds / 3600:.0f} h ago"


_UNIT: list[Column[UnitStatus]] = [
    left("kernel", lambda of: kernel_name(of.unit.kernel, 20)),
    right("problems", lambda of: str(len(of.unit.problems))),
]
_WITH_REASON: list[Column[UnitStatus]] = [*_UNIT, left("reason", lambda of: of.reason)]
_NOT_DONE: dict[UnitState, list[Column[UnitStatus]]] = {
    UnitState.RUNNING: [
        *_UNIT,
        left("worker", lambda of: of.worker),
        right("since", lambda of: _ago(of.since_s)),
        right("attempt", lambda of: str(of.attempts)),
    ],
    UnitState.WAITING: [
        *_UNIT,
        left("first", lambda of: of.unit.shapes[0] if of.unit.shapes else ""),
        left("came back", lambda of: of.reason),
    ],
    UnitState.FAILED: _WITH_REASON,
}
"""State -> the columns of its table."""
