"""``fp8tune report``."""

from __future__ import annotations

import enum
import importlib.util
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fp8tune import __version__
from fp8tune.commands.options import opened_to_read
from fp8tune.errors import MachineError, UsageError
from fp8tune.options import Arch, Group, Kernels, Option, ReadDatabase, examples
from fp8tune.redaction import redacted
from fp8tune.render.terminal import path_here

if TYPE_CHECKING:
    from fp8tune.render.progress import Display
    from fp8tune.report.contents import Contents
    from fp8tune.report.figures import Figure
    from fp8tune.report.page import Page

PAGE, FIGURES = Path("fp8tune-report.html"), Path("fp8tune-figures")
"""What is written where ``-o`` names nothing."""

NAMED = 3
"""So many kernels stand in the title."""


class ReportFormat(enum.StrEnum):
    """What ``report`` writes."""

    HTML = "html"
    SVG = "svg"


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The options of ``report``."""

    kernels: Kernels = ()
    compare: Annotated[
        str | None,
        Option(
            "--compare",
            "What changed between two revisions, instead: A..B by recorded rows, or the file that fp8tune compare "
            "--format json wrote.",
            placeholder="A..B|FILE",
        ),
    ] = None
    repository: Annotated[
        Path, Option("--repo", "With --compare: the git repository of both revisions.", placeholder="FOLDER")
    ] = Path(".")
    arch: Arch = None
    device: Annotated[
        str, Option("--device", "Only GPUs whose name has this text.", "all", group=Group.WHERE, placeholder="TEXT")
    ] = ""
    db: ReadDatabase = None
    output: Annotated[
        Path | None,
        Option(
            "-o, --output",
            "The file; with --format svg the folder.",
            f"{PAGE}; {FIGURES}",
            group=Group.OUTPUT,
            placeholder="PATH",
        ),
    ] = None
    format: Annotated[
        ReportFormat,
        Option(
            "--format",
            "html: one file for all. svg: a file a picture; problems only with --kernel.",
            group=Group.OUTPUT,
        ),
    ] = ReportFormat.HTML


@examples(
    ("All that comes with fp8tune, in one file", "fp8tune report -o report.html"),
    ("One arch of your own database", "fp8tune report --db mine.db --arch sm_90 -o report.html"),
    ("What a branch changed, to attach to its pull request", "fp8tune report --compare main..branch -o change.html"),
    ("Pictures for a paper", "fp8tune report --kernel colwise --format svg -o figures"),
)
def report(options: ReportOptions) -> None:
    """One HTML file with pictures and tables of what was measured.

    Opens by double-click, works offline, and holds a link for every row. Needs no GPU and no network.

    It shows each kernel's share of the ceiling, every config of every problem, and what limits them. It shows what a
    lookup loses on shapes that were not measured, the training step, and picks on other devices.
    """
    from fp8tune.render.progress import Display

    output = options.output or (PAGE if options.format is ReportFormat.HTML else FIGURES)
    _check(options, output)
    with Display() as display:
        said = _changed(options, output, display) if options.compare else _measured(options, output, display)
    print(f"{path_here(output)}: {said}")


def _check(options: ReportOptions, output: Path) -> None:
    """Before anything is read. Raises UsageError, MachineError without what draws."""
    for module, package in (("altair", "altair"), ("vl_convert", "vl-convert-python")):
        if importlib.util.find_spec(module) is None:
            raise MachineError(f"report draws with {package}, which is not installed: pip install {package}")
    if options.format is ReportFormat.HTML and output.is_dir():
        raise UsageError(f"{output} is a folder: name the file to write, such as {output / PAGE.name}")
    if options.format is ReportFormat.SVG and output.exists() and not output.is_dir():
        raise UsageError(f"{output} is a file: name a folder for the pictures")
    if options.compare is not None and (options.arch or options.device):
        raise UsageError("--compare shows all rows of two revisions: leave out --arch and --device")


def _measured(options: ReportOptions, output: Path, display: Display) -> str:
    """Write what a database holds; the line to print."""
    from fp8tune import names
    from fp8tune.report import contents, figures
    from fp8tune.report.page import Page
    from fp8tune.report.views import problem_views, views

    with opened_to_read(options.db) as (reader, label):
        if options.arch is not None:
            names.check_arch(options.arch, reader)
        kernels = tuple(names.stored_kernels(options.kernels, reader)) if options.kernels else ()
        found = contents.read(reader, label, contents.Wanted(kernels, options.arch, options.device), display.update)
    if options.device and not found.rows:
        raise UsageError(
            f"no GPU whose name has {options.device!r:.80} has timed rows in {label}: fp8tune doctor lists them"
        )
    if options.format is ReportFormat.SVG:
        problems = [view for view, _ in problem_views(found)] if options.kernels else []
        return _drawn(list(figures.figures(views(found), problems)), output, display)
    display.update("writing the page")
    title = "fp8tune report" + (f": {', '.join(kernels[:NAMED])}" if 0 < len(kernels) <= NAMED else "")
    page = Page(title, _about(label), list(views(found)), [(view, dict(read)) for view, read in problem_views(found)])
    return f"{_written(page, output)}, {_counted(found)}"


def _changed(options: ReportOptions, output: Path, display: Display) -> str:
    """Write what changed between two revisions; the line to print."""
    from fp8tune.report import changes, figures
    from fp8tune.report.page import Page

    display.update("comparing")
    view = changes.view(_comparison(options))
    if options.format is ReportFormat.SVG:
        return _drawn(list(figures.figures([view], [])), output, display)
    return _written(Page("fp8tune compare", _about(options.compare or ""), [view]), output)


def _comparison(options: ReportOptions) -> Mapping[str, Any]:
    """The comparison as the document of ``compare --format json``."""
    from fp8tune.compare import recorded
    from fp8tune.compare.sides import sides
    from fp8tune.render import contracts
    from fp8tune.report import changes

    assert options.compare is not None
    if options.compare.endswith(".json"):
        return changes.read(Path(options.compare))
    with opened_to_read(options.db) as (reader, _):
        both = sides(options.repository, options.compare, options.kernels)
        return contracts.comparison(recorded.compare(recorded.stored(reader, both), both))


def _drawn(found: list[Figure], folder: Path, display: Display) -> str:
    """Write pictures; the line to print."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, figure in enumerate(found):
        display.update("drawing", number, len(found))
        figure.write(folder)
    return f"{len(found)} pictures"


def _written(page: Page, output: Path) -> str:
    """Write the page whole; its size."""
    from fp8tune.report.page import written

    text = written(page)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, "utf-8")
    return f"{len(text.encode()) / 1e6:.1f} MB"


def _counted(found: Contents) -> str:
    devices, kernels = {row.device for row in found.rows}, {row.kernel for row in found.rows}
    return f"{len(found.rows):,} picks of {len(kernels)} kernels on {len(devices)} devices"


def _about(label: str) -> str:
    """Where rows are from, and when the report was made. Of a path only the name: a report is sent to others."""
    label = redacted(label) if "://" in label else " over ".join(Path(part).name for part in label.split(" over "))
    return f"{label}, read by fp8tune {__version__} on {time.strftime('%Y-%m-%d', time.gmtime())}"
