"""``fp8tune report``."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fp8tune import __version__
from fp8tune.cli import databases
from fp8tune.cli.adapter import command
from fp8tune.errors import MachineError, UsageError
from fp8tune.options import ReportOptions
from fp8tune.redaction import redacted
from fp8tune.render.terminal import path_here

if TYPE_CHECKING:
    from fp8tune.render.progress import Display
    from fp8tune.report.contents import Contents

TITLE_KERNELS = 3  # most kernels in the page's title


@command(ReportOptions, epilog="$ fp8tune report --kernel colwise -o colwise.html")
def report(options: ReportOptions) -> None:
    """Write one HTML file with charts of all results.

    Works offline. Needs pip install 'fp8tune[report]'.
    """
    from fp8tune.render.progress import Display

    for module in ("altair", "vl_convert"):
        if importlib.util.find_spec(module) is None:
            raise MachineError("report needs altair and vl-convert-python: pip install 'fp8tune[report]'")
    output, is_folder = Path(options.output), options.output.endswith("/")
    if output.is_dir() and not is_folder:
        raise UsageError(f"{output} is a folder: name a file, such as {output / 'report.html'}, or write {output}/")
    if is_folder and output.exists() and not output.is_dir():
        raise UsageError(f"{output} is a file: name a folder for the figures")
    with Display() as display:
        print(f"{path_here(output)}: {_write(options, output, is_folder, display)}")


def _write(options: ReportOptions, output: Path, is_folder: bool, display: Display) -> str:
    """Write the page or the figures; return a summary."""
    from fp8tune import names
    from fp8tune.report import contents, figures
    from fp8tune.report.page import Page, written
    from fp8tune.report.views import problem_views, views
    from fp8tune_kernels.arches import ARCHES

    with databases.opened(options.db) as (reader, label):
        arch = options.device if options.device in ARCHES else None
        kernels = tuple(names.stored_kernels(options.kernel, reader)) if options.kernel else ()
        request = contents.Wanted(kernels, arch, "" if arch else options.device)
        found = contents.read(reader, label, request, display.update)
    if options.device and not found.rows:
        raise UsageError(f"no timed results of {options.device!r:.80} in {label}: fp8tune show lists the GPUs")
    if is_folder:
        problems = [view for view, _ in problem_views(found)] if options.kernel else []
        drawings = list(figures.figures(views(found), problems))
        output.mkdir(parents=True, exist_ok=True)
        for number, figure in enumerate(drawings):
            display.update("drawing", number, len(drawings))
            figure.write(output)
        return f"{len(drawings)} figures"
    display.update("writing the page")
    title = "fp8tune report" + (f": {', '.join(kernels[:TITLE_KERNELS])}" if 0 < len(kernels) <= TITLE_KERNELS else "")
    page = Page(title, _about(label), list(views(found)), [(view, dict(read)) for view, read in problem_views(found)])
    text = written(page)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, "utf-8")
    return f"{len(text.encode()) / 1e6:.1f} MB, {_counts(found)}"


def _counts(found: Contents) -> str:
    devices, kernels = {row.device for row in found.rows}, {row.kernel for row in found.rows}
    return f"{len(found.rows):,} picks of {len(kernels)} kernels on {len(devices)} devices"


def _about(label: str) -> str:
    """Return where results are from and when. Of a path only the name: a report is sent to others."""
    label = redacted(label) if "://" in label else " over ".join(Path(part).name for part in label.split(" over "))
    return f"{label}, read by fp8tune {__version__} on {time.strftime('%Y-%m-%d', time.gmtime())}"
