"""One progress display: a live bar on a terminal, plain lines elsewhere, on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from fp8tune import records
from fp8tune.measure.engine import CompileProgress
from fp8tune.render.terminal import kernel_name, microseconds
from fp8tune.sweep import events
from fp8tune.text import visible

PLAIN_INTERVAL_S = 10.0
"""Without a terminal, a line within one phase at most this often."""


class Display:
    """What is being done, how much of it is done, and how long the rest takes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar: Progress | None = None
        self._task: Any = None
        self._clock, self._phase = clock, ""
        self._begun = self._last_line = clock()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            # the text comes last and is cut, so that a long one leaves the bar and the ETA in 80 columns
            self._bar = Progress(
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[eta]}"),
                TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
                console=self._console,
                expand=True,
                redirect_stdout=sys.stdout.isatty(),  # rich would print JSON that goes to a pipe above the bar
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=None, eta="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, text: str, done: int = 0, total: int = 0, left_s: float | None = None, phase: str = "") -> None:
        """``total`` is 0 for one thing, ``left_s`` None if nobody knows yet.

        Without a terminal a line is printed when ``phase`` changes, at its end, and now and then in between.
        """
        eta = "" if left_s is None else f"ETA {duration(left_s)}"
        if self._bar is not None:
            said = escape(visible(text))
            self._bar.update(self._task, description=said, completed=done, total=total or None, eta=eta)
            return
        is_new = bool(phase) and (phase != self._phase or (total > 0 and done == total))
        if is_new or self._clock() - self._last_line > PLAIN_INTERVAL_S:
            self._phase = phase
            self.line(f"[{done}/{total}{eta and ', '}{eta}] {text}" if total else text)

    def line(self, text: str) -> None:
        """A line that stays, above the bar."""
        self._last_line, text = self._clock(), visible(text)
        if self._bar is not None:
            self._console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """``90 s``, ``3 min``."""
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


class SweepProgress(Display):
    """Shows a sweep's events, with the best time so far of the problem that is swept."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._total = self._done = self._failed = self._timed = 0
        self._first_timed = 0.0
        self._best: dict[object, tuple[float, str]] = {}
        self._problems: set[object] = set()

    def show(self, event: events.Event) -> None:
        """Take one event of :func:`fp8tune.sweep.loop.sweep`."""
        match event:
            case events.Started(device, planned, stored):
                self._total += planned
                kept = f", {stored} already in the database" if stored else ""
                self.line(f"{device.name or device.arch} ({device.arch}): {planned} trials{kept}")
            case events.Added(trials):
                self._total += trials
            case events.FinalsStarted(problems, processes, trials, plan, is_calibrated):
                self._total += trials
                origin = "calibrated" if is_calibrated else "defaults, fp8tune calibrate measures this device"
                self.line(f"finals of {problems} problems: {processes} processes, {plan.rounds} rounds ({origin})")
            case events.NoFinals(problem, reason):
                self.line(f"  no finals: {kernel_name(problem.kernel)} {problem.shape}: {reason}")
            case CompileProgress(problem, done, total):
                text = f"{kernel_name(problem.kernel)} {problem.shape}: compiling {done}/{total}"
                self._update(text, f"compiled {problem}" if done == total else "")
            case events.TrialDone(row, from_database):
                self._trial(row, from_database)
            case events.Finished(trials, seconds, left_out):
                rest = f", {left_out} left out by the time budget: run it again to continue" if left_out else ""
                bad = f", {self._failed} not ok" if self._failed else ""
                self.line(f"{trials} trials in {seconds:.1f} s{bad}{rest}")

    def _trial(self, row: records.Row, from_database: bool) -> None:
        self._done += 1
        problem, outcome = row.problem, row.outcome
        failed = outcome.status not in ("ok", "pruned")
        self._failed += failed
        if not from_database and outcome.status != "pruned":
            self._timed += 1
            self._first_timed = self._first_timed or self._clock()
        best = self._best.get(problem)
        if outcome.time_us is not None and (best is None or outcome.time_us < best[0]):
            self._best[problem] = best = (outcome.time_us, str(row.config))
        if failed and not from_database:
            self.line(f"  {outcome.status}: {kernel_name(problem.kernel)} {row.config}: {outcome.reason}")
        said = f"  best {microseconds(best[0])} us  {best[1]}" if best else ""
        is_first = not from_database and problem not in self._problems
        if is_first:
            self._problems.add(problem)
        self._update(f"{kernel_name(problem.kernel)} {problem.shape}{said}", str(problem) if is_first else "")

    def _update(self, text: str, phase: str) -> None:
        """The pace is that of trials run so far: compiling and stored rows tell nothing of what is left."""
        left_s = None
        if self._timed >= 2:
            spent_s = self._clock() - self._first_timed
            left_s = spent_s / (self._timed - 1) * (self._total - self._done)
        self.update(text, self._done, self._total, left_s, phase)
