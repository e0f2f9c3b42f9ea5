"""All terminal output: tables with units, progress with an ETA, JSON and CSV where a machine reads.

Results go to stdout, progress and notices to stderr. Colour only on a terminal (rich decides, and honours
``NO_COLOR``).
"""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fp8tune.redaction import redacted
from fp8tune.text import quoted_formula
from fp8tune.text import visible as visible

if TYPE_CHECKING:
    from fp8tune.check.doctor import Finding
    from fp8tune.sweep.loop import Event

PLAIN_INTERVAL_S = 10.0
"""Without a terminal, a progress line at most this often."""


def notice(text: str) -> None:
    """A line for the user that is not the result."""
    print(visible(redacted(text)), file=sys.stderr)


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2))


def print_json_line(value: object) -> None:
    """One JSON object on one line of stdout, written at once."""
    print(json.dumps(value), flush=True)


def microseconds(value: float | None) -> str:
    """``12.34``, ``148.2``, ``9,014``: four significant digits at most, no unit (the column has it)."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def share(value: float | None) -> str:
    """``58 %`` of a ceiling."""
    return "" if value is None else f"{100 * value:.0f} %"


def table(title: str, columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> None:
    """A table on stdout; ``columns`` are (header, ``left`` or ``right``)."""
    if not sys.stdout.isatty():
        print("\n".join([visible(title), *_plain(columns, rows)]))
        return
    heading = Text(visible(title), "table.title")  # a table's own title would fold at the table's width
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for header, side in columns:
        grid.add_column(header, justify="right" if side == "right" else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(visible(cell)) for cell in row))
    Console().print(heading, grid, sep="\n", markup=False)


def _plain(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a table that goes to a file or pipe: never folded, and a million rows' in no time."""
    lines = [[header for header, _ in columns], *([visible(cell) for cell in row] for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = []
        for (_, side), cell, width in zip(columns, line, widths, strict=True):
            blanks = " " * (width - cell_len(cell))
            cells.append(blanks + cell if side == "right" else cell + blanks)
        yield "  ".join(cells).rstrip()


def print_csv(rows: Sequence[Mapping[str, object]]) -> None:
    """Rows of the same names with a header; a mapping in a cell as name=value pairs."""
    if not rows:
        return
    writer = csv.DictWriter(sys.stdout, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _csv_cell(value) for name, value in row.items()})


def _csv_cell(value: object) -> object:
    if isinstance(value, dict):
        return _pairs(value)
    return quoted_formula(value) if isinstance(value, str) else value


def _pairs(value: Mapping[str, object]) -> str:
    return " ".join(f"{name}={item}" for name, item in value.items())


def print_findings(findings: Sequence[Finding], output_format: str) -> None:
    """Doctor's findings with what to do about each."""
    if output_format == "json":
        print_json([{"level": str(f.level), "what": redacted(f.what), "fix": redacted(f.fix)} for f in findings])
        return
    console = Console(highlight=False)
    style = {"ok": "green", "warning": "yellow", "error": "red"}
    for finding in findings:
        console.print(f"{finding.level:<8}", style=style[str(finding.level)], end="")
        console.print(visible(redacted(finding.what)), markup=False, soft_wrap=True)
        if finding.fix:
            console.print(f"        -> {visible(redacted(finding.fix))}", markup=False, soft_wrap=True)


class CountProgress:
    """Says on stderr how many of a number of things are done, at most every few seconds."""

    def __init__(self, what: str) -> None:
        self._what, self._last_line = what, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Take how many are done and how many there are."""
        if time.monotonic() - self._last_line > PLAIN_INTERVAL_S / 2:
            self._last_line = time.monotonic()
            notice(f"{done:,} of {total:,} {self._what}")


class SweepProgress:
    """Shows a sweep's events: a live bar with the best so far on a terminal, plain lines elsewhere, on stderr."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._task: Any = None
        self._total = self._done = self._failed = 0
        self._best: dict[object, tuple[float, str]] = {}
        self._problem: object = None
        self._first_trial: float | None = None
        self._run = 0
        self._last_line = time.monotonic()

    def __enter__(self) -> SweepProgress:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                console=self._console,
                redirect_stdout=sys.stdout.isatty(),  # rich would print JSON that goes to a pipe above the bar
            )
            self._bar.start()
            self._task = self._bar.add_task("planning", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, event: Event) -> None:
        """Take one event of :func:`fp8tune.sweep.loop.sweep`."""
        from fp8tune.measure.engine import CompileProgress
        from fp8tune.sweep import loop as sweep

        match event:
            case sweep.Started(device, planned, stored):
                self._total += planned
                kept = f", {stored} already in the database" if stored else ""
                self._line(f"{device.name or device.arch} ({device.arch}): {planned} trials{kept}", always=True)
            case sweep.Added(trials):
                self._total += trials
            case sweep.FinalsStarted(problems, processes, trials, protocol, is_calibrated):
                self._total += trials
                origin = "calibrated" if is_calibrated else "defaults, fp8tune calibrate measures this device"
                text = f"finals of {problems} problems: {processes} processes, {protocol.rounds} rounds ({origin})"
                self._line(text, always=True)
            case sweep.NoFinals(problem, reason):
                self._line(f"  no finals: {problem.kernel} {problem.shape}: {reason}", always=True)
            case CompileProgress(problem, done, total):
                self._describe(f"{problem.kernel} {problem.shape}: compiling {done}/{total}", done == total)
            case sweep.TrialDone(row, from_database):
                self._count(row, from_database)
            case sweep.Finished(trials, seconds, left_out):
                rest = f", {left_out} left out by the time budget: run it again to continue" if left_out else ""
                bad = f", {self._failed} not ok" if self._failed else ""
                self._line(f"{trials} trials in {seconds:.1f} s{bad}{rest}", always=True)

    def _count(self, row: Any, from_database: bool) -> None:
        self._done += 1
        outcome = row.outcome
        if not from_database and outcome.status != "pruned":
            self._run += 1
            self._first_trial = self._first_trial or time.monotonic()
        self._failed += outcome.status not in ("ok", "pruned")
        best = self._best.get(row.problem)
        if outcome.time_us is not None and (best is None or outcome.time_us < best[0]):
            self._best[row.problem] = best = (outcome.time_us, str(row.config))
        if not from_database and outcome.status not in ("ok", "pruned"):
            self._line(f"  {outcome.status}: {row.problem.kernel} {row.config}: {outcome.reason}", always=True)
        text = f"{row.problem.kernel} {row.problem.shape}"
        if best is not None:
            text += f"  best {microseconds(best[0])} us  {best[1]}"
        self._describe(text, row.problem != self._problem and not from_database)
        self._problem = row.problem

    def _describe(self, text: str, milestone: bool) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=escape(visible(text)), completed=self._done, total=self._total)
        elif milestone or time.monotonic() - self._last_line > PLAIN_INTERVAL_S:
            self._line(f"[{self._done}/{self._total}, ETA {self._eta()}] {text}", always=True)

    def _eta(self) -> str:
        """From the trials run so far: compiling and rows that were there already tell nothing of what is left."""
        if self._first_trial is None or self._run < 2:
            return "unknown"
        left = (time.monotonic() - self._first_trial) / (self._run - 1) * (self._total - self._done)
        return f"{left / 60:.0f} min" if left >= 120 else f"{left:.0f} s"

    def _line(self, text: str, *, always: bool = False) -> None:
        self._last_line, text = time.monotonic(), visible(text)
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        elif always:
            print(text, file=sys.stderr, flush=True)
