"""Progress on stderr: a bar in a terminal, elsewhere one line every ten seconds."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fp8tune.measure.engine import CompileProgress
from fp8tune.output.tables import notice
from fp8tune.output.text import counted, duration, mean, microseconds, pairs, ratio
from fp8tune.records import Kind, NamedInts, Problem, Row
from fp8tune.sweeping import events
from fp8tune.sweeping.planning import Plan
from fp8tune.text import visible

REFRESH_S = 0.1
LINE_EVERY_S = 10.0


class Display:
    """Shows a phase, the share of it that is done, and the time left at the speed of the phase so far.

    Work with a time budget is at least as far as its time, and has no more left. No error of the display reaches the
    work that it is about: after the first one the display ends, with a warning.
    """

    def __init__(
        self,
        out: Console | None = None,
        now: Callable[[], float] = time.monotonic,
        budget_s: float | None = None,
    ) -> None:
        self._out, self._now, self._budget_s, self._entered_s = out, now, budget_s, now()
        self._bar: Live | None = None
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._phase, self._count, self._note = "", "", ""
        self._share: float | None = None
        self._began_s = self._share_before = 0.0

    def __enter__(self) -> Self:
        self._guard(self._start)
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar:
            self._guard(self._bar.stop)
        self._ended.set()

    def _start(self) -> None:
        out = self._out or Console(stderr=True, no_color=bool(os.environ.get("NO_COLOR")), highlight=False)
        if out.is_terminal and not out.is_dumb_terminal:
            is_terminal = sys.stdout.isatty()  # else Rich would print JSON that goes to a pipe above the bar
            # An error in a thread of Rich would print a traceback, so this class has its own.
            self._bar = Live(console=out, auto_refresh=False, transient=True, redirect_stdout=is_terminal)
            self._bar.start()
        threading.Thread(target=self._tick, daemon=True).start()

    def update(self, phase: str, share: float | None = None, *, count: str = "", note: str = "") -> None:
        """Show a phase with the share of it that is done, from 0 to 1, if it is known. Never raises."""
        with self._lock:
            self._share = share
            if phase != self._phase:
                self._phase, self._began_s, self._share_before = phase, self._now(), share or 0.0
            self._count, self._note = visible(count), visible(note)

    def show(self, event: Any) -> None:
        """Show an event. Never raises."""
        self._guard(self._event, event)

    def _event(self, event: Any) -> None:
        """Show an event of the work. May raise."""

    def _notes(self) -> str:
        """Return the line below the bar. May raise."""
        return self._note

    def _tick(self) -> None:
        while not self._ended.wait(REFRESH_S if self._bar else LINE_EVERY_S):
            self._guard(self._draw)

    def _draw(self) -> None:
        phase = "  ".join(filter(None, (self._phase, self._count)))
        share, now, note = self._share or 0.0, self._now(), self._notes()
        done = share - self._share_before
        left_s = (now - self._began_s) * (1 - share) / done if done > 0 else math.inf
        if self._budget_s:
            budget_left_s = max(0.0, self._entered_s + self._budget_s - now)
            left_s, share = min(left_s, budget_left_s), max(share, 1 - budget_left_s / self._budget_s)
        left = f"{duration(left_s)} left" if left_s < math.inf else ""
        percent = "" if self._share is None else f"{100 * share:.0f} %"
        if self._bar:
            table = Table.grid(padding=(0, 2, 0, 0), expand=True)
            for ratio in (None, 1, None, None):
                table.add_column(ratio=ratio, no_wrap=True)
            table.add_row(phase or "starting", ProgressBar(1.0, share), percent, left)
            self._bar.update(Group(table, Text(note, no_wrap=True, overflow="ellipsis")), refresh=True)
        elif phase:
            notice("  ".join(filter(None, (phase, percent, left, note))))

    def _guard(self, action: Callable[..., object], *arguments: object) -> None:
        if self._ended.is_set():
            return
        try:
            with self._lock:
                action(*arguments)
        except Exception as error:
            self._ended.set()
            # These may fail for the same reason as the display, such as a closed stderr.
            with contextlib.suppress(Exception):
                if self._bar:
                    self._bar.stop()
            with contextlib.suppress(Exception):
                failure = f"the progress display failed ({type(error).__name__})"
                notice(f"fp8tune: warning: {failure}; the work goes on")


class SweepProgress(Display):
    """Shows the events of a sweep, with the speedup so far over today's configs."""

    def __init__(
        self,
        today: Mapping[Problem, NamedInts] | None = None,
        out: Console | None = None,
        now: Callable[[], float] = time.monotonic,
        budget_s: float | None = None,
    ) -> None:
        """Take the config that a launch uses now, for each problem size."""
        super().__init__(out, now, budget_s)
        self.stored = 0
        """New trials."""
        self.phase = self._coarse = "coarse pass"
        self._today, self._sizes = today or {}, 0
        self._rounds: dict[Problem, tuple[events.RoundStarted, int]] = {}
        """Newest round of the coarse pass of each size, with its trials so far: several GPUs work beside each other."""
        self._decision = self._confirmed = self._trials = self._all_trials = 0
        self._times_us: dict[Problem, dict[tuple[str, NamedInts], list[float]]] = {}
        self._gains: dict[Problem, tuple[float | None, float]] = {}
        self._last: Problem | None = None

    @classmethod
    def of_plan(cls, plan: Plan) -> SweepProgress:
        """Return the progress of a sweep as planned."""
        today = {size.problem: size.today.config for size in plan.problems if size.today}
        return cls(today, budget_s=plan.options.budget_s)

    def stored_note(self, database: str) -> str:
        """Return what is kept if the sweep ends now."""
        where = f"{counted(self.stored, 'new result')} in {database}, the last of the {self.phase}"
        return f"{where}: run the same command to resume"

    def show(self, event: events.Event) -> None:
        """Show an event of a sweep. Never raises."""
        self.stored += isinstance(event, events.TrialDone) and not event.from_database
        super().show(event)

    def _event(self, event: events.Event) -> None:
        match event:
            case events.Started(_, kind, problems):
                words = {Kind.STATIC: "compiling", Kind.INTERPRETER: "checking"}
                self.phase = self._coarse = words.get(kind, "coarse pass")
                self._sizes = problems
                self._rounds, self._decision = {}, 0
                self.update(self.phase)
            case events.RoundStarted():
                self._rounds[event.problem] = event, 0
                self._count_trials()
            case events.ConfirmationStarted():
                if event.decision > self._decision:
                    self._decision, self._confirmed, self._trials, self._all_trials = event.decision, 0, 0, 0
                self._confirmed, self._all_trials = self._confirmed + event.problems, self._all_trials + event.trials
                self._count_trials()
            case events.ConfirmationSkipped(problem, reason):
                notice(f"{problem.kernel} {pairs(problem.shape)} is not confirmed: {reason}")
            case events.ChildDied(gpu, reason, sizes, is_replaced):
                end = "starts again" if is_replaced else "is not used any more"
                notice(f"GPU {gpu} {end}: its process {reason} with {counted(sizes, 'size')}, which wait again")
            case CompileProgress(problem, done, total) if done < total and not any(
                trials for _, trials in self._rounds.values()
            ):
                self.update("compiling", done / total, count=f"{problem.kernel} {pairs(problem.shape)}")
            case events.TrialDone(row):
                if row.stage == "screen" and row.problem in self._rounds:
                    started, trials = self._rounds[row.problem]
                    self._rounds[row.problem] = started, trials + 1
                else:
                    self._trials += 1
                self._add(row)
                self._count_trials()

    def _count_trials(self) -> None:
        # A problem size counts by its rounds, a round by its trials.
        done = [
            (started.round + min(1.0, trials / started.trials if started.trials else 1.0)) / started.rounds
            for started, trials in self._rounds.values()
        ]
        if self._decision and sum(share == 1.0 for share in done) == self._sizes:
            self.phase = "confirmation" if self._decision == 1 else f"confirmation, round {self._decision}"
            share = min(1.0, self._trials / self._all_trials) if self._all_trials else 0.0
            self.update(self.phase, share, count=counted(self._confirmed, "size"))
        elif self._sizes:
            self.phase, whole = self._coarse, sum(share == 1.0 for share in done)
            self.update(self.phase, sum(done) / self._sizes, count=f"{whole} of {counted(self._sizes, 'size')}")

    def _add(self, row: Row) -> None:
        problem, time_us = row.problem, row.outcome.time_us
        if time_us is None or row.config is None or row.stage == "duplicate":
            return
        self._times_us.setdefault(problem, {}).setdefault((row.stage, row.config), []).append(time_us)
        self._gains.pop(problem, None)
        self._last = problem

    def _notes(self) -> str:
        for problem in self._times_us.keys() - self._gains.keys():
            times_us = self._times_us[problem]
            last, _ = next(reversed(times_us))  # stages are not compared
            means = {config: fmean(values) for (stage, config), values in times_us.items() if stage == last}
            best_us, today = min(means.values()), self._today.get(problem)
            self._gains[problem] = means[today] / best_us if today in means else None, best_us
        if self._last is None:
            return ""
        gain, best_us = self._gains[self._last]
        all_gains = mean(gain for gain, _ in self._gains.values())
        so_far = f"so far {ratio(all_gains)} over today's configs; " if all_gains else ""
        newest = f"{ratio(gain)}, " if gain else ""
        return f"{so_far}{pairs(self._last.shape)}: {newest}{microseconds(best_us)} us"
