"""One progress display on stderr: lines that stay within the terminal, or elsewhere a plain line every ten seconds.

The first line has the phase, a bar of the time that is done, a count, the time since the beginning and the time left;
the second what was found so far; where several work there is a line for each. They are redrawn beside whatever runs,
and wiped off at the end.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from rich.cells import cell_len
from rich.console import Console, Group
from rich.constrain import Constrain
from rich.control import Control
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.segment import ControlType
from rich.table import Column
from rich.text import Text

from fp8tune import records
from fp8tune.measure.engine import CompileProgress
from fp8tune.records import Kind
from fp8tune.render.terminal import kernel_name, microseconds
from fp8tune.sweep import events
from fp8tune.sweep.estimate import Estimate
from fp8tune.text import visible

PLAIN_INTERVAL_S = 10.0
"""Without a terminal there is a line this often, and none before."""

DRAWN_EVERY_S = 0.25

WIDEST = 77
"""Columns of both lines at most: no terminal of 80 or more breaks them, even before it says that it was resized."""

MARGIN = 3
"""Columns left free: a terminal writes ``^C`` there, and must not begin a new row for it."""


@dataclass(frozen=True)
class State:
    """What is shown."""

    phase: str = ""
    done: int = 0
    total: int = 0
    """0 for one thing."""
    detail: str = ""
    """What it is about."""
    config: str = ""
    """Shortened from the left where there is no room: what its last axes say is seldom the same for all."""
    lines: tuple[str, ...] = ()
    """What each of several does, below the rest; on a terminal alone."""


class Display:
    """What is being done, how much of it is done, and how long the rest takes."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, console: Console | None = None, *, ticks: bool = True
    ) -> None:
        """``ticks``: whether it is redrawn between updates, by a thread of its own."""
        self._console = console or Console(stderr=True)
        self._clock, self._ticks = clock, ticks
        self._begun = self._last_line = clock()
        self._state, self._told_s = State(), self._begun
        self._left_s: float | None = None
        self._live: Live | None = None
        self._drawn: tuple[int, list[int]] = (0, [])
        """The terminal's columns when it was drawn last, and those of each line."""
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console,
                get_renderable=self._frame,
                auto_refresh=False,
                transient=True,
                vertical_overflow="crop",
                redirect_stdout=sys.stdout.isatty(),  # rich would print JSON that goes to a pipe above the bar
            )
            self._live.start()
        if self._ticks:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(1)
        if self._live is not None:
            with self._lock:
                self._unfold()
                self._live.stop()

    def update(
        self,
        phase: str,
        done: int = 0,
        total: int = 0,
        left_s: float | None = None,
        *,
        detail: str = "",
        config: str = "",
        lines: Sequence[str] = (),
    ) -> None:
        """``left_s`` is None if nobody knows yet. Drawn within a quarter of a second."""
        with self._lock:
            self._state = State(
                visible(phase), done, total, visible(detail), visible(config), tuple(map(visible, lines))
            )
            self._left_s, self._told_s = left_s, self._clock()
            if not self._ticks:
                self.draw()
            elif self._live is None:
                self._print_if_due()

    def line(self, text: str) -> None:
        """A line that stays, above the bar."""
        text = visible(text)
        if self._live is None:
            print(text, file=sys.stderr, flush=True)
            return
        with self._lock:
            self._unfold()
            self._console.print(text, markup=False, highlight=False)

    def note(self, text: str) -> None:
        """The same on a terminal; elsewhere only the lines in between and the end are of use."""
        if self._live is not None:
            self.line(text)

    def left_s(self) -> float | None:
        """Seconds until the end, as told last, less what has gone by since."""
        return None if self._left_s is None else max(0.0, self._left_s - (self._clock() - self._told_s))

    def share(self) -> float:
        """How much of the bar is full, 0 to 1: of the phase."""
        return self._state.done / self._state.total if self._state.total else 0.0

    # Drawing

    def _tick(self) -> None:
        while not self._ended.wait(DRAWN_EVERY_S):
            with self._lock:
                self.draw()

    def draw(self) -> None:
        """Draw what is known now; without a terminal, print it if it is time."""
        if self._live is None:
            self._print_if_due()
            return
        self._unfold()
        self._live.refresh()

    def _print_if_due(self) -> None:
        if self._state.phase and self._clock() - self._last_line >= PLAIN_INTERVAL_S:
            self._last_line = self._clock()
            facts = [
                ": ".join(filter(None, (self._state.phase, self._count()))),
                self._passed(),
                self._eta(),
            ]
            found = f"{self._state.detail} {self._state.config}".strip()
            print(", ".join(filter(None, (*facts, found))), file=sys.stderr, flush=True)

    def _count(self) -> str:
        state = self._state
        return f"{state.done:,}/{state.total:,}" if state.total else f"{state.done:,}" if state.done else ""

    def _passed(self) -> str:
        minutes, seconds = divmod(int(self._clock() - self._begun), 60)
        return f"{minutes}:{seconds:02}"

    def _eta(self) -> str:
        left_s = self.left_s()
        return "" if left_s is None else f"ETA {duration(left_s)}"

    def _frame(self) -> Group:
        """All lines, within the terminal as it is now, less the margin."""
        with self._lock:
            width = max(10, min(self._console.width - MARGIN, WIDEST))
            first = Constrain(self._bar(), width)
            texts = [fitted(self._state.detail, self._state.config, width), *self._state.lines]
            rest = [Text(text, no_wrap=True, overflow="ellipsis") for text in texts if text]
            group = Group(first, *(Constrain(text, width) for text in rest))
            lines = self._console.render_lines(group, pad=False)
            self._drawn = (self._console.width, [sum(cell_len(part.text) for part in line) for line in lines])
            return group

    def _bar(self) -> Progress:
        state, permille = self._state, round(1000 * self.share())
        bar = Progress(
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=8)),
            TextColumn("{task.fields[count]}", markup=False, table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[passed]}", markup=False, table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[eta]}", markup=False, table_column=Column(no_wrap=True)),
            console=self._console,
            expand=True,
            auto_refresh=False,
        )
        count, passed, eta = self._count(), self._passed(), self._eta()
        bar.add_task(state.phase, total=1000, completed=permille, count=count, passed=passed, eta=eta)
        return bar

    def _unfold(self) -> None:
        """After the terminal became narrower: it broke what was drawn into more rows than rich knows of."""
        drawn, lengths = self._drawn
        width = self._console.width
        if width < drawn:
            more = sum(max(1, -(-length // width)) for length in lengths) - len(lengths)
            self._console.control(Control(*[(ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)] * more))
            self._drawn = (width, [])


def fitted(detail: str, config: str, width: int) -> str:
    """Both in so many columns, the config without its first axes where it does not fit.

    >>> fitted("best 7 us", "LEAD=192 num_warps=4", 24)
    'best 7 us  … num_warps=4'
    """
    axes = config.split()
    room = width - cell_len(detail) - 2
    while axes and cell_len(shown := " ".join(axes if len(axes) == len(config.split()) else ["…", *axes])) > room:
        axes = axes[1:]
    return f"{detail}  {shown}" if axes else detail


def duration(seconds: float) -> str:
    """``90 s``, ``3 min``."""
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


WORDS = {Kind.STATIC: "compiling", Kind.INTERPRETER: "checking"}
"""What the first round is where nothing is timed."""


class SweepProgress(Display):
    """Shows a sweep's events, with the best time so far of the problem that is swept."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, console: Console | None = None, *, ticks: bool = True
    ) -> None:
        super().__init__(clock, console, ticks=ticks)
        self.estimate = Estimate()
        self.stored = 0
        """Trials that this sweep has stored."""
        self.phase = ""
        self._word, self._share = "screening", 0.0
        self._planned = self._tried = 0
        """Configs of all problems, and those that have a row."""
        self._done = self._total = 0
        """Of a later round or of the finals until they are judged."""
        self._failed = self._open = 0
        self._is_timed = False
        """Whether the problem that is screened has a trial of its own."""
        self._best: dict[object, tuple[float, str]] = {}

    def show(self, event: events.Event) -> None:
        """Take one event of :func:`fp8tune.sweep.loop.sweep`."""
        with self._lock:
            self.estimate.take(event, self._clock())
            self._take(event)

    def left_s(self) -> float | None:
        """Of all phases."""
        return self.estimate.left_s(self._clock())

    def share(self) -> float:
        """Of the time that all phases take. It stands still where they turn out to take longer."""
        passed_s, left_s = self._clock() - self._begun, self.left_s()
        if left_s is not None and passed_s > 0:
            self._share = max(self._share, passed_s / (passed_s + left_s))
        return self._share

    def _take(self, event: events.Event) -> None:
        match event:
            case events.Started(device=device, planned=planned, stored=stored, ahead=ahead):
                self._planned += planned
                self._word = WORDS.get(ahead.kind, "screening")
                kept = f", {stored:,} already in the database" if stored else ""
                self.note(f"{device.name or device.arch} ({device.arch}): {planned:,} configs to try{kept}")
                self._say(self._word)
            case events.RoundStarted(problem, number, rounds, trials):
                self._done, self._total, self._is_timed = 0, trials, False
                self._say(f"{self._word} round {number + 1} of {rounds}" if number else self._word, problem)
            case events.FinalsStarted():
                self._finals(event)
            case events.NoFinals(problem, reason):
                self.line(f"  no finals: {kernel_name(problem.kernel)} {problem.shape}: {reason}")
            case CompileProgress(problem, done, total):
                if not self._is_timed and done < total:
                    self.update("compiling", done, total, detail=_name(problem))
                    self.phase = "compiling"
            case events.TrialDone(row, from_database):
                self._trial(row, from_database)
            case events.Finished(trials, seconds, left_out):
                more = "run it again to continue" if self.stored else "none ended in that time, give more"
                rest = f", {left_out:,} left out by the time budget: {more}" if left_out else ""
                bad = f", {self._failed:,} not ok" if self._failed else ""
                self.line(f"{trials:,} trials in {seconds:.1f} s{bad}{rest}")

    def _finals(self, event: events.FinalsStarted) -> None:
        self._done, self._total = 0, event.trials
        phase = f"finals {event.decision} of at most {event.decisions}"
        origin = "" if event.is_calibrated else "; fp8tune calibrate fits this to the device"
        problems = "1 problem" if event.problems == 1 else f"{event.problems} problems"
        still = " still open" if event.decision > 1 else ""
        self.note(
            f"{phase}: {problems}{still}, {event.processes} fresh processes in all, {event.trials:,} trials{origin}"
        )
        self._say(phase)

    def _trial(self, row: records.Row, from_database: bool) -> None:
        problem, outcome = row.problem, row.outcome
        if row.stage == "screen" and row.round == 0:
            self._tried += 1
        if not from_database:
            self.stored += 1
            self._done += 1
            self._is_timed = True
        failed = outcome.status not in ("ok", "pruned")
        self._failed += failed
        best = self._best.get(problem)
        if outcome.time_us is not None and (best is None or outcome.time_us < best[0]):
            self._best[problem] = (outcome.time_us, str(row.config))
        if failed and not from_database:
            self.line(f"  {outcome.status}: {kernel_name(problem.kernel)} {row.config}: {outcome.reason}")
        self._say(self._word if self.phase == "compiling" else self.phase, problem, str(row.config))

    def _say(self, phase: str, problem: records.Problem | None = None, config: str = "") -> None:
        self.phase = phase
        done, total = (self._tried, self._planned) if phase == self._word else (self._done, self._total)
        detail = "" if problem is None else _name(problem)
        if best := self._best.get(problem):
            detail, config = f"best {microseconds(best[0])} us  {detail}", best[1]
        self.update(phase, done, total, self._left_s, detail=detail, config=config)


def _name(problem: records.Problem) -> str:
    return f"{kernel_name(problem.kernel)} {problem.shape}"
