"""Progress on stderr: a bar and what it is about on a terminal, elsewhere a plain line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Self

from rich.cells import cell_len
from rich.console import Console, Group
from rich.constrain import Constrain
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from fp8tune import records
from fp8tune.measure.engine import CompileProgress
from fp8tune.records import Kind
from fp8tune.render.terminal import kernel_name, microseconds
from fp8tune.sweeping import events
from fp8tune.text import visible

PLAIN_INTERVAL_S = 10.0
WIDEST = 77
"""Columns at most: no terminal of 80 or more breaks the lines, even before it says that it was resized."""
MARGIN = 3
"""Columns left free: a terminal writes ``^C`` there, and must not begin a new row for it."""


class Display:
    """Shows a phase, the share of it that is done, and the time that the rest of the phase takes at this pace."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, console: Console | None = None, *, ticks: bool = True
    ) -> None:
        """With ``ticks`` it is redrawn between updates, by a thread."""
        self._console, self._clock, self._ticks = console or Console(stderr=True), clock, ticks
        self._begun = self._last_line_s = clock()
        self._phase, self._done, self._total, self._count = "", 0.0, 0.0, ""
        self._phase_begun, self._done_before = self._begun, 0.0
        self._detail, self._config, self._lines = "", "", list[str]()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console,
                get_renderable=self._frame,
                auto_refresh=self._ticks,
                transient=True,
                vertical_overflow="crop",
                redirect_stdout=sys.stdout.isatty(),  # rich would print JSON that goes to a pipe above the bar
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(
        self,
        phase: str,
        done: float = 0,
        total: float = 0,
        *,
        count: str | None = None,
        detail: str = "",
        config: str = "",
        lines: Sequence[str] = (),
    ) -> None:
        """Show a phase. ``count`` is shown in place of ``done`` and ``total``, ``config`` without its first axes."""
        if phase != self._phase:
            self._phase_begun, self._done_before = self._clock(), done
        plain = f"{done:,.0f}/{total:,.0f}" if total else f"{done:,.0f}" if done else ""
        self._phase, self._done, self._total, self._count = phase, done, total, plain if count is None else count
        self._detail, self._config, self._lines = visible(detail), visible(config), [*map(visible, lines)]
        if self._live is None:
            self._print_if_due()
        elif not self._ticks:
            self._live.refresh()

    def line(self, text: str) -> None:
        """Print a line that stays, above the bar."""
        text = visible(text)
        if self._live is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self._console.print(text, markup=False, highlight=False)

    def note(self, text: str) -> None:
        """Print a line that stays, on a terminal only."""
        if self._live is not None:
            self.line(text)

    def left_s(self) -> float | None:
        """Return the seconds until the phase ends; None before something of it is done."""
        done = self._done - self._done_before
        passed_s = self._clock() - self._phase_begun
        return passed_s * (self._total - self._done) / done if done > 0 and self._total else None

    def _times(self) -> list[str]:
        minutes, seconds = divmod(int(self._clock() - self._begun), 60)
        left_s = self.left_s()
        return [f"{minutes}:{seconds:02}", "" if left_s is None else f"ETA {duration(left_s)}"]

    def _print_if_due(self) -> None:
        if self._phase and self._clock() - self._last_line_s >= PLAIN_INTERVAL_S:
            self._last_line_s = self._clock()
            facts = [": ".join(filter(None, (self._phase, self._count))), *self._times()]
            facts.append(f"{self._detail} {self._config}".strip())
            print(", ".join(filter(None, facts)), file=sys.stderr, flush=True)

    def _frame(self) -> Group:
        width = max(10, min(self._console.width - MARGIN, WIDEST))
        columns = [TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))]
        texts = [self._count, *self._times()]
        columns += [TextColumn(text, markup=False, table_column=Column(no_wrap=True)) for text in texts]
        bar = BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=8))
        progress = Progress(columns[0], bar, *columns[1:], console=self._console, expand=True, auto_refresh=False)
        progress.add_task(self._phase, total=1000, completed=int(1000 * self._done / self._total) if self._total else 0)
        rest = [text for text in (fitted(self._detail, self._config, width), *self._lines) if text]
        lines = [Text(text, no_wrap=True, overflow="ellipsis") for text in rest]
        return Group(Constrain(progress, width), *(Constrain(line, width) for line in lines))


def fitted(detail: str, config: str, width: int) -> str:
    """Join both in so many columns, the config without its first axes if it does not fit.

    >>> fitted("best 7 us", "LEAD=192 num_warps=4", 24)
    'best 7 us  … num_warps=4'
    """
    axes = config.split()
    room = width - cell_len(detail) - 2
    while axes and cell_len(shown := " ".join(axes if len(axes) == len(config.split()) else ["…", *axes])) > room:
        axes = axes[1:]
    return f"{detail}  {shown}" if axes else detail


def duration(seconds: float) -> str:
    """Return ``90 s`` or ``3 min``."""
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


WORDS = {Kind.STATIC: "compiling", Kind.INTERPRETER: "checking"}
"""Names of the coarse pass if nothing is timed."""


class SweepProgress(Display):
    """Shows a sweep's events, with the best time so far of the current problem size."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, console: Console | None = None, *, ticks: bool = True
    ) -> None:
        super().__init__(clock, console, ticks=ticks)
        self.stored = 0
        """New trials."""
        self.phase = ""
        self.is_complete = False
        """True at the end of a sweep that has nothing left to do."""
        self._word, self._problems, self._failed = "coarse pass", 0, 0
        self._round = events.RoundStarted(records.Problem("", records.NamedInts()), 0, 0, 1, 0)
        self._trials = self._all_trials = 0
        self._best: dict[records.Problem, tuple[float, str]] = {}

    def show(self, event: events.Event) -> None:
        """Show an event of a sweep."""
        match event:
            case events.Started(device, kind, problems, configs):
                self._word, self._problems = WORDS.get(kind, "coarse pass"), problems
                counts = f"{configs:,} configs on {problems:,} problem size{'s' if problems != 1 else ''}"
                self.note(f"{device.name or device.arch} ({device.arch}): {counts}")
                self._say(self._word)
            case events.RoundStarted(problem):
                self._round, self._trials, self._all_trials = event, 0, event.trials
                self._say(self._word, problem)
            case events.ConfirmationStarted():
                self._trials, self._all_trials = 0, event.trials
                phase = f"confirmation {event.decision} of at most {event.decisions}"
                hint = "" if event.is_calibrated else "; fp8tune calibrate fits this to the device"
                sizes = "1 problem size" if event.problems == 1 else f"{event.problems} problem sizes"
                is_open = " still open" if event.decision > 1 else ""
                processes = f"{event.processes} fresh processes in all, {event.trials:,} trials"
                self.note(f"{phase}: {sizes}{is_open}, {processes}{hint}")
                self._say(phase)
            case events.ConfirmationSkipped(problem, reason):
                self.line(f"  not confirmed: {kernel_name(problem.kernel)} {problem.shape}: {reason}")
            case CompileProgress(problem, done, total):
                if not self._trials and done < total:
                    self.phase = "compiling"
                    self.update("compiling", done, total, detail=_name(problem))
            case events.TrialDone(row, from_database):
                self._trial(row, from_database)
            case events.Finished(trials, seconds, left_out, is_whole):
                self.is_complete = is_whole
                more = "run it again to continue" if self.stored else "none ended in that time, give more"
                rest = f", {left_out:,} left out by the time budget: {more}" if left_out else ""
                bad = f", {self._failed:,} not ok" if self._failed else ""
                self.line(f"{trials:,} trials in {seconds:.1f} s{bad}{rest}")

    def _trial(self, row: records.Row, from_database: bool) -> None:
        problem, outcome = row.problem, row.outcome
        self.stored += not from_database
        self._trials += 1
        is_failure = outcome.status not in ("ok", "pruned")
        self._failed += is_failure
        best = self._best.get(problem)
        if outcome.time_us is not None and (best is None or outcome.time_us < best[0]):
            self._best[problem] = (outcome.time_us, str(row.config))
        if is_failure and not from_database:
            self.line(f"  {outcome.status}: {kernel_name(problem.kernel)} {row.config}: {outcome.reason}")
        self._say(self._word if self.phase == "compiling" else self.phase, problem, str(row.config))

    def _say(self, phase: str, problem: records.Problem | None = None, config: str = "") -> None:
        self.phase = phase
        detail = "" if problem is None else _name(problem)
        if problem is not None and (best := self._best.get(problem)):
            detail, config = f"best {microseconds(best[0])} us  {detail}", best[1]
        if phase != self._word:
            self.update(phase, self._trials, self._all_trials, detail=detail, config=config)
            return
        # a problem size counts by its rounds, a round by its trials
        in_round = self._trials / self._all_trials if self._all_trials else 0.0
        done = self._round.index + (self._round.round + in_round) / self._round.rounds
        name = f"size {self._round.index + 1}/{self._problems}"
        self.update(phase, done, self._problems, count=name, detail=detail, config=config)


def _name(problem: records.Problem) -> str:
    return f"{kernel_name(problem.kernel)} {problem.shape}"
