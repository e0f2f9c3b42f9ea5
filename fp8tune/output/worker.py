"""Documents, screens and progress of workers and of their queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from fp8tune.fleet.worker import QueueEvent, WorkerEvent
from fp8tune.output.documents import Document, value
from fp8tune.output.progress import Display
from fp8tune.output.tables import Column, Screen, notice, number
from fp8tune.output.text import counted, duration, ratio
from fp8tune.store.schema import UnitState
from fp8tune.store.units import Queue
from fp8tune.sweeping.events import TrialDone

WORKERS = 8
"""Workers that the status lists."""


class WorkerStep(Document, printed_by="worker"):
    """One step of a worker; what does not apply is null."""

    event: str = value("started, taken, done, failed, given back, refused, waiting or ended.")
    worker: str = value("Worker: host, process and the first digits of the GPU.")
    unit: str | None = value("Key of the unit.", source="unit.key")
    sweep: str | None = value("Key of the sweep of the unit.", source="unit.sweep_key")
    kernel: str | None = value("Kernel of the unit.", source="unit.kernel")
    sizes: list[str] | None = value("Sizes of the unit.", source="unit.shapes")
    reason: str = value("Reason why it failed, went back or ended; if done, a size without right config.")
    attempt: int | None = value("Number of the attempt, from 1.")
    seconds: float | None = value("Time that the unit took.", "s")
    trials: int | None = value("New results of the unit.")
    done: int | None = value("Units that this worker did.")
    failed: int | None = value("Units that failed here.")
    running: int | None = value("Units that other workers have.")
    waiting: int | None = value("Units that wait for this GPU name.")


class QueuedUnit(Document):
    """One part of a queued sweep."""

    sweep: str = value("Key of its sweep.", source="unit.sweep_key")
    device: str = value("Name of the GPU that it is for.")
    unit: str = value("Key of the unit.", source="unit.key")
    kernel: str = value("Name of the kernel.", source="unit.kernel")
    sizes: list[str] = value("Sizes of the unit.", source="unit.shapes")
    state: Literal["waiting", "running", "done", "failed", "lost"] = value("State; lost if its worker does not answer.")
    worker: str = value("Worker that has it or had it last; empty if it was never taken.")
    attempts: int = value("Number of attempts, without those that gave it back in order.")
    since_s: float | None = value("Time since it was taken; null while it waits.", "s")
    seconds: float | None = value("Time that it took; null unless done.", "s")
    reason: str = value("Reason why it failed or came back, or that a size has no right config; empty otherwise.")
    expected_s: float = value("Time that it is expected to take.", "s", "unit.expected_s")

    @property
    def name(self) -> str:
        """Kernel and sizes for a screen."""
        return unit_name(self.kernel, self.sizes)


class QueueStatus(Document, printed_by="worker --status"):
    """All queued sweeps with their units."""

    database: str = value("Database with the queue.")
    commands: dict[str, str] = value("Command that queued each sweep, by key.")
    speedups: dict[str, float] = value("Mean speedup over today's configs so far, by key of the sweep.", "x")
    units: list[QueuedUnit] = value("Units, the oldest sweep first.")


def make_status(queue: Queue, database: str, speedups: Mapping[str, float]) -> QueueStatus:
    """Return the queue as a document."""
    sweeps, units = {sweep.key: sweep for sweep in queue.sweeps}, []
    for status in queue.units:
        is_lost = status.state is UnitState.RUNNING and (status.lease_left_s or 0.0) < 0
        sweep = sweeps.get(status.unit.sweep_key)
        state = "lost" if is_lost else status.state
        units.append(QueuedUnit.from_records(status, device=sweep.device if sweep else "", state=state))
    commands = {key: sweep.command for key, sweep in sweeps.items()}
    known = {key: speedup for key, speedup in speedups.items() if key in commands}
    return QueueStatus(database=database, commands=commands, speedups=known, units=units)


def status(document: QueueStatus) -> Iterator[Screen]:
    """Yield the screen of each queued sweep: its workers, lost ones first, and failed units."""
    if not document.commands:
        yield Screen([f"no work is queued in {document.database}: fp8tune sweep --on queue puts some there"])
    for sweep in document.commands:
        units = [unit for unit in document.units if unit.sweep == sweep]
        states, done = Counter(unit.state for unit in units), Counter(u.worker for u in units if u.state == "done")
        left_s = sum(unit.expected_s for unit in units if unit.state in ("waiting", "running", "lost"))
        gain = f"  {ratio(document.speedups[sweep])} so far" if sweep in document.speedups else ""
        parts = [f"sweep:{sweep}{gain}  {states['done']} of {counted(len(units), 'unit')} done"]
        parts += [f"{states['failed']} failed"] if states["failed"] else []
        parts += [f"about {duration(left_s / states['running'])} left"] if states["running"] else []
        working = [unit for state in ("lost", "running") for unit in units if unit.state == state]
        rows, more = working[:WORKERS], len(working) - WORKERS
        columns = [
            Column("worker", lambda unit: unit.worker, loses="start"),
            Column("GPU", lambda unit: unit.device, loses="end"),
            Column("unit", lambda unit: unit.name, loses="end"),
            number("since", lambda unit: duration(unit.since_s or 0.0)),
            number("done", [str(done[unit.worker]) for unit in rows]),
            Column("state", lambda unit: "lost" if unit.state == "lost" else "working"),
        ]
        below = [f"({counted(more, 'more worker')})"] if more > 0 else []
        for unit in units:
            if unit.state == "failed":
                retry = "to retry, queue the sweep again"
                below.append(f"failed: {unit.name} on {unit.worker}: {unit.reason}; {retry}")
            elif unit.state == "done" and unit.reason:
                below.append(f"{unit.kernel}: {unit.reason}")
        yield Screen([", ".join(parts)], columns, below, rows)


def unit_name(kernel: str, sizes: Sequence[str]) -> str:
    """Return the name of a unit: ``ops:softmax M=512 N=8193 and 2 more``."""
    more = f" and {len(sizes) - 1} more" if len(sizes) > 1 else ""
    return f"{kernel} {sizes[0] if sizes else ''}{more}"


def findings_line(units: int) -> str:
    """Return the message about units that have a size without a right config."""
    return f"some sizes of {counted(units, 'unit')} have no right config: fp8tune show --failed"


class WorkerProgress(Display):
    """Shows a worker's events: one line for each unit, and the results of the current one."""

    def __init__(self, database: str) -> None:
        """Take the name of the database for messages."""
        super().__init__()
        self._database, self._unit, self._trials = database, "", 0

    def _event(self, event: WorkerEvent) -> None:
        if isinstance(event, TrialDone) and not event.from_database:
            self._trials += 1
            self.update("working", count=counted(self._trials, "result"), note=self._unit)
        if not isinstance(event, QueueEvent):
            return
        name = unit_name(event.unit.kernel, event.unit.shapes) if event.unit else ""
        reason = f": {event.reason}" if event.reason else ""
        match event.event:
            case "started":
                notice(f"{event.worker} works on the queue in {self._database}")
            case "taken":
                self._unit, self._trials = name, 0
                self.update("working", note=name)
            case "done":
                work = f"{counted(event.trials or 0, 'result')} in {duration(event.seconds or 0.0)}"
                notice(f"done: {name}, {work}{reason}")
            case "failed" | "given back" | "refused":
                notice(f"{event.event}: {name}{reason}")
            case "waiting":
                self.update("waiting", note=f"other workers have {counted(event.running or 0, 'unit')}")
            case "ended":
                failed = f", {event.failed} failed" if event.failed else ""
                left = f"; {counted(event.waiting, 'unit')} left" if event.waiting else ""
                notice(f"{counted(event.done or 0, 'unit')} done{failed}{reason}{left}")


def show_queue(display: Display, queue: Queue) -> None:
    """Show how far all workers are with a sweep."""
    ended = [status for status in queue.units if status.state in (UnitState.DONE, UnitState.FAILED)]
    done_s, total_s = (sum(status.unit.expected_s for status in units) for units in (ended, queue.units))
    failed, workers = queue.counts[UnitState.FAILED], queue.counts[UnitState.RUNNING]
    note = counted(workers, "worker") + (f", {failed} failed" if failed else "")
    count = f"{len(ended):,} of {counted(len(queue.units), 'unit')}"
    display.update("units", done_s / total_s if total_s else 0.0, count=count, note=note)
