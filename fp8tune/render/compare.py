"""How a comparison is shown: a table, markdown for a pull request, a page of HTML, JSON; and its progress."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

from fp8tune.compare.comparison import ComparedRow, Comparison
from fp8tune.compare.live import Event
from fp8tune.compare.rows import Step
from fp8tune.compare.verdicts import ChangeVerdict
from fp8tune.records import Device, Problem
from fp8tune.render import terminal as render
from fp8tune.stats import Estimate

COLUMNS = (
    ("Kernel", "left"),
    ("Shape", "left"),
    ("Before (us)", "right"),
    ("After (us)", "right"),
    ("Speedup", "right"),
    ("Change", "right"),
    ("95 % interval", "right"),
    ("Detectable", "right"),
    ("Control", "right"),
    ("Verdict", "left"),
)
LEGEND = (
    "Change: after/before - 1, above 0 is slower. Detectable: the least slowdown found in 95 % of such runs. "
    "Control: the same of the first side's code against itself."
)


def print_comparison(comparison: Comparison, output_format: str) -> None:
    """Two revisions side by side: ``table``, ``markdown``, ``json`` or ``html``."""
    match output_format:
        case "json":
            render.print_json(comparison.as_json())
        case "markdown":
            print(markdown(comparison))
        case "html":
            print(page(comparison))
        case _:
            for device in _devices(comparison):
                rows = [cells(row) for row in comparison.rows if row.device == device]
                render.table(_described(device), [(name.lower(), side) for name, side in COLUMNS], rows)
                print()
            print(render.visible(summary(comparison)))
            print(render.visible(f"Before: {comparison.before}, after: {comparison.after}. {comparison.origin}."))


# What every form says


def cells(row: ComparedRow) -> tuple[str, ...]:
    """One row's texts, in the order of :data:`COLUMNS`."""
    before, after = (_microseconds(value) for value in (row.before_us, row.after_us))
    speedup = f"{1 / row.ratio:.2f}x" if row.ratio else ""
    low_high = " to ".join(map(_change, row.effect.interval)) if row.effect else ""
    detectable = _change(row.smallest_detectable)
    control = "" if row.control is None else _change(row.control.ratio) + ("" if row.is_stable else " (drifted)")
    said = (before, after, speedup, _change(row.ratio), low_high, detectable, control, str(row.verdict))
    return row.kernel, _problem(row.problem), *said


def summary(comparison: Comparison) -> str:
    """The verdicts counted, the geometric means, and how many blocks the machine disturbed."""
    counts = {verdict: sum(row.verdict is verdict for row in comparison.rows) for verdict in ChangeVerdict}
    said = [", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) or "no rows"]
    if comparison.geomean is not None:
        said.append(f"geometric mean of the change {_mean(comparison.geomean, comparison.overall)}")
    if comparison.control is not None:
        state = "stable" if comparison.is_stable else "drifted"
        said.append(f"of the control arm {_mean(comparison.control.ratio, comparison.control)}, {state}")
    for disturbed, why in (
        (sum(row.throttled for row in comparison.rows), "timed while the GPU was slowed down"),
        (sum(row.stalled for row in comparison.rows), "timed again because the machine stalled"),
    ):
        if disturbed:
            said.append(f"{disturbed} of {sum(row.blocks for row in comparison.rows)} blocks were {why}")
    return "; ".join(said) + "."


def _mean(ratio: float, effect: Estimate | None) -> str:
    return _change(ratio) + (f" ({' to '.join(map(_change, effect.interval))})" if effect else "")


def _provenance(comparison: Comparison, device: Device | None) -> str:
    return (
        f"{_described(device)}. Before: {comparison.before}, after: {comparison.after}. {comparison.origin}. "
        f"{summary(comparison)}"
    )


def _devices(comparison: Comparison) -> list[Device | None]:
    """Each once, in order; rows without any (a kernel that is new as a whole) last."""
    found = dict.fromkeys(row.device for row in comparison.rows)
    return sorted(found, key=lambda device: device is None) or [None]


def _described(device: Device | None) -> str:
    if device is None:
        return "No rows on any device"
    versions = {"driver": device.driver, "": device.runtime, "torch": device.torch, "triton": device.triton}
    said = [f"{name} {version}".strip() for name, version in versions.items() if version]
    return ", ".join([f"{device.name or 'unnamed device'} ({device.arch})", *said])


def _problem(problem: Problem | None) -> str:
    """The shape, and of the rest what is not as usual."""
    if problem is None:
        return ""
    usual = Problem(problem.kernel, problem.shape)
    named = ("routing", "input_layout", "in_dtype", "fp8_dtype", "scale_mode")
    unusual = [getattr(problem, name) for name in named if getattr(problem, name) != getattr(usual, name)]
    return ", ".join([str(problem.shape), *unusual])


def _microseconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.{1 if value >= 100 else 2}f}"


def _change(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * (ratio - 1):+.2f} %"


# Markdown and HTML


def markdown(comparison: Comparison) -> str:
    """Tables to paste under a pull request, one a device, each with the line that says where it comes from."""
    rules = ["---:" if side == "right" else "---" for _, side in COLUMNS]
    tables = []
    for device in _devices(comparison):
        rows = [cells(row) for row in comparison.rows if row.device == device]
        lines = [_line(line) for line in ([name for name, _ in COLUMNS], rules, *rows)]
        tables.append("\n".join([*lines, "", _cell(_provenance(comparison, device))]))
    return "\n\n".join(tables)


def _line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(map(_cell, texts))} |"


def _cell(text: str) -> str:
    """Stored names end neither the cell nor the line."""
    return " ".join(render.visible(text).split()).replace("|", "\\|").replace("<", "&lt;")


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 2em; color-scheme: light dark }}
table {{ border-collapse: collapse }}
th, td {{ padding: .2em .7em; border-bottom: 1px solid #8884; text-align: left; white-space: nowrap }}
.right {{ text-align: right; font-variant-numeric: tabular-nums }}
.REGRESSION, .NEWLY-WRONG {{ color: #c22 }}
.IMPROVEMENT {{ color: #292 }}
.INCONCLUSIVE {{ color: #b70 }}
</style>
<h1>{title}</h1>
{tables}
<p>{legend}</p>
</html>"""


def page(comparison: Comparison) -> str:
    """One self-contained page: a table a device, each with the line that says where it comes from."""
    tables = []
    for device in _devices(comparison):
        rows = [row for row in comparison.rows if row.device == device]
        head = _html_row("th", [name for name, _ in COLUMNS])
        body = "\n".join(_html_row("td", cells(row), str(row.verdict)) for row in rows)
        tables.append(f"<table>\n{head}\n{body}\n</table>\n<p>{_text(_provenance(comparison, device))}</p>")
    title = _text(f"{comparison.before} .. {comparison.after}")
    return PAGE.format(title=title, tables="\n".join(tables), legend=_text(LEGEND))


def _html_row(tag: str, texts: Sequence[str], style: str = "") -> str:
    sides = [side for _, side in COLUMNS]
    said = [f'<{tag} class="{side}">{_text(text)}</{tag}>' for text, side in zip(texts, sides, strict=True)]
    return f'<tr class="{_text(style)}">{"".join(said)}</tr>'


def _text(text: str) -> str:
    return html.escape(render.visible(text))


# Progress


class CompareProgress:
    """What a live comparison is doing and when it ends: a bar on a terminal, plain lines elsewhere, on stderr."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._task: Any = None
        self._clock = clock
        self._shown = ""
        self._last_line = -render.PLAIN_INTERVAL_S

    def __enter__(self) -> CompareProgress:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                console=self._console,
                redirect_stdout=sys.stdout.isatty(),
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, event: Event) -> None:
        """Take one event of :func:`fp8tune.compare.live.compare`."""
        match event:
            case Step(text, done, total, None):
                counted = f"{text} {done}/{total}" if total else text
                self._line(text, counted, done, total)
            case Step(text, done, total, float(left_s)):
                left = f"{left_s / 60:.0f} min" if left_s >= 120 else f"{left_s:.0f} s"
                self._line(f"{text} {total}", f"{text} {done}/{total}, ETA of this stage {left}", done, total)

    def _line(self, phase: str, text: str, done: int, total: int) -> None:
        """The first and last of a phase, and in between now and then."""
        text = render.visible(text)
        if self._bar is not None:
            self._bar.update(self._task, description=escape(text), completed=done, total=total or None)
            return
        due = self._clock() - self._last_line > render.PLAIN_INTERVAL_S
        if due or phase != self._shown or (total and done == total):
            print(text, file=sys.stderr, flush=True)
            self._shown, self._last_line = phase, self._clock()
