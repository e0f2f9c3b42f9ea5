"""What people see of workers and of the queue."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self

from fp8tune.fleet import events
from fp8tune.fleet.ray_actor import WorkerState
from fp8tune.fleet.run import FleetProgress
from fp8tune.fleet.units import Added
from fp8tune.render import contracts
from fp8tune.render.progress import Display, duration
from fp8tune.render.report import Column, Report, left, print_parts, right
from fp8tune.render.terminal import counted, kernel_name, print_json
from fp8tune.store.exclusions import Exclusion
from fp8tune.store.units import Queue, QueuedSweep, Unit, UnitState, UnitStatus
from fp8tune.sweep.events import TrialDone

MOST_ROWS = 20
"""Units in one table; JSON has all."""


class WorkerProgress(Display):
    """Shows a worker's events: a line a unit, and the trials of the one at hand."""

    def __init__(self, label: str, clock: Callable[[], float] = time.monotonic, *, ticks: bool = True) -> None:
        """``label``: what messages call the database."""
        super().__init__(clock, ticks=ticks)
        self._label, self._unit, self._trials = label, "", 0

    def show(self, event: events.WorkerEvent) -> None:
        """Take one event of :func:`fp8tune.fleet.worker.work`."""
        match event:
            case events.WorkerStarted(worker, device):
                self.line(f"{worker} works on {device.name or device.arch}, with the queue in {self._label}")
            case events.Preparing():
                self.update("preparing this GPU")
            case events.Notice(text):
                self.line(text)
            case events.UnitTaken(unit, attempt):
                again = f", attempt {attempt}" if attempt > 1 else ""
                self._unit, self._trials = f"{unit_name(unit)}{again}", 0
                self.update("trials", detail=self._unit)
            case TrialDone(from_database=False):
                self._trials += 1
                self.update("trials", self._trials, detail=self._unit)
            case events.UnitDone(unit, seconds, trials, finding):
                self.line(f"done: {unit_name(unit)}, {trials:,} trials in {seconds:.1f} s")
                if finding:
                    self.line(f"{kernel_name(unit.kernel)}: {finding}")
            case events.UnitFailed(unit, reason, is_final):
                rest = "nobody tries it again" if is_final else "another worker may try it"
                self.line(f"failed: {unit_name(unit)}: {reason}; {rest}")
            case events.UnitReturned(unit, reason):
                self.line(f"given back: {unit_name(unit)}: {reason}")
            case events.SweepRefused(key, reason):
                self.line(f"left alone: sweep {key}: {reason}")
            case events.Waiting(running):
                self.update(
                    "waiting", detail=f"{counted(running, 'unit')} of others" if running else "the queue is empty"
                )

    def end(self, event: events.WorkerEnded) -> Iterator[str]:
        """What is said at the end."""
        failed = f", {event.failed} failed" if event.failed else ""
        why = f": {event.reason}" if event.reason and not event.is_in_vain else ""
        yield f"{counted(event.done, 'unit')} done{failed}{why}"
        if event.findings:
            yield findings_line(event.findings)
        if event.waiting:
            yield f"{counted(event.waiting, 'unit')} wait{'s' if event.waiting == 1 else ''}{lasting(event.left_s, 1)}"


class FleetDisplay(Display):
    """Shows how far all workers are together."""

    def __enter__(self) -> Self:
        super().__enter__()
        self._states: dict[str, UnitState] = {}
        return self

    def show(self, progress: FleetProgress) -> None:
        """Take what :func:`fp8tune.fleet.run.watch` gives."""
        for of in progress.queue.units:
            if of.state is not self._states.get(of.unit.key):
                if of.state is UnitState.FAILED:
                    self.line(f"failed: {unit_name(of.unit)}: {of.reason}")
                elif of.is_finding:
                    self.line(f"{kernel_name(of.unit.kernel)}: {of.reason}")
            self._states[of.unit.key] = of.state
        self._told(progress, ())

    def _told(self, progress: FleetProgress, lines: Sequence[str]) -> None:
        counts = progress.counts
        at_it = sorted({kernel_name(of.unit.kernel) for of in progress.running})
        detail = f"{counted(len(progress.running), 'worker')}: {', '.join(at_it)}" if at_it else "no worker yet"
        done = counts[UnitState.DONE] + counts[UnitState.FAILED]
        self.update("units", done, len(progress.queue.units), progress.left_s, detail=detail, lines=lines)


MOST_WORKERS = 8
"""Workers with a line of their own; of the others there are totals."""


class RayProgress(FleetDisplay):
    """The same with what each of the workers does."""

    def tell(self, progress: FleetProgress, workers: Mapping[str, WorkerState]) -> None:
        """``workers``: what those who are at it are doing, by their names."""
        self.show(progress)
        self._told(progress, list(worker_lines(workers)))


def worker_lines(workers: Mapping[str, WorkerState]) -> Iterator[str]:
    """A line a worker, up to :data:`MOST_WORKERS`, then how many do what."""
    named = list(workers.items()) if len(workers) <= MOST_WORKERS else list(workers.items())[: MOST_WORKERS - 1]
    longest = max((len(name) for name, _ in named), default=0)
    for name, state in named:
        at = f", {counted(state.trials, 'trial')}" if state.trials and state.unit else ""
        yield f"{name:<{longest}}  {state.done:>3} done  {' '.join(filter(None, (state.doing, state.unit)))}{at}"
    rest = list(workers.values())[len(named) :]
    if rest:
        doing = Counter(state.doing for state in rest)
        what = ", ".join(f"{number} {name}" for name, number in doing.most_common())
        yield f"and {len(rest)} more: {what}; {sum(state.done for state in rest):,} done"


def added_lines(added: Added) -> Iterator[str]:
    """Say what queueing a sweep left out."""
    if added.settled:
        yield f"already settled: {counted(added.settled, 'problem')}; --again measures anew"


def findings_line(units: int) -> str:
    """Of so many units that are done some problems have no right config."""
    return f"no config is right on some problems of {counted(units, 'unit')}: fp8tune show --failed has the reasons"


def left_line(progress: FleetProgress, workers: int) -> str:
    """What is left at the end, and how long that would take with so many workers; empty where nothing is."""
    from fp8tune.fleet.run import left_s

    counts = progress.counts
    waiting = counts[UnitState.WAITING] + counts[UnitState.RUNNING]
    if not waiting:
        return ""
    return f"{counted(waiting, 'unit')} left{lasting(left_s(progress.queue, workers), workers)}"


def lasting(seconds: float | None, workers: int) -> str:
    """How long that takes; empty where nobody knows."""
    return "" if seconds is None else f", about {duration(seconds)} with {counted(workers, 'worker')}"


def unit_name(unit: Unit) -> str:
    """``colwise, 3 problems (M=16640 K=2048 ...)``."""
    first = unit.shapes[0] if unit.shapes else ""
    more = f" and {len(unit.problems) - 1} more" if len(unit.problems) > 1 else ""
    return f"{kernel_name(unit.kernel)} {first}{more}"


def print_queue(queue: Queue, label: str, output_format: str, excluded: Sequence[Exclusion] = ()) -> None:
    """All units as JSON, or for each sweep how many are in which state, then who runs what, why what failed, and which
    GPUs are left out.
    """
    if output_format == "json":
        print_json(contracts.queue(queue, excluded))
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
    parts: list[Report[QueuedSweep] | Report[UnitStatus] | Report[Exclusion] | str] = [
        Report(f"units in {label}", sweeps, queue.sweeps)
    ]
    shown = {str(state): (columns, queue.of(state)) for state, columns in _NOT_DONE.items()}
    shown["done, but no config is right on some problems"] = _WITH_REASON, [of for of in queue.units if of.is_finding]
    for title, (columns, found) in shown.items():
        if found:
            more = f", the first {MOST_ROWS} of {len(found):,}" if len(found) > MOST_ROWS else ""
            parts.append(Report(f"{title}{more}", columns, found[:MOST_ROWS]))
    if excluded:
        parts.append(Report("GPUs that are left out", _EXCLUDED, excluded))
    print_parts(parts, output_format)


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{duration(seconds)} ago" if seconds < 7200 else f"{seconds / 3600:.0f} h ago"


_EXCLUDED: list[Column[Exclusion]] = [
    left("GPU", lambda out: out.uuid_hash[:4]),
    left("name", lambda out: out.device),
    left("worker", lambda out: out.worker),
    left("reason", lambda out: out.reason),
]
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
        right("worth", lambda of: f"{of.unit.worth:g}"),
        left("came back", lambda of: of.reason),
    ],
    UnitState.FAILED: _WITH_REASON,
}
"""State -> the columns of its table."""
