"""``fp8tune report``."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fp8tune.commands.options import opened_to_read
from fp8tune.errors import MachineError, UsageError
from fp8tune.options import Group, Kernels, Option, ReadDatabase, examples
from fp8tune.render.terminal import path_here


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The options of ``report``."""

    kernels: Kernels = ()
    device: Annotated[
        str, Option("--device", "GPU name or arch: H200, sm_90.", "all", group=Group.WHERE, placeholder="TEXT")
    ] = ""
    output: Annotated[
        str, Option("-o, --output", "HTML file, or FOLDER/ of SVGs.", group=Group.OUTPUT, placeholder="PATH")
    ] = "report.html"
    db: ReadDatabase = None


@examples(("Charts of one kernel", "fp8tune report --kernel colwise -o colwise.html"))
def report(options: ReportOptions) -> None:
    """Write one HTML file with charts of all results.

    Works offline. Needs pip install 'fp8tune[report]'.
    """
    from fp8tune.render.progress import Display

    for module in ("altair", "vl_convert"):
        if importlib.util.find_spec(module) is None:
            raise MachineError("report needs packages that are not installed: pip install 'fp8tune[report]'")
    output = Path(options.output)
    is_folder = options.output.endswith("/")
    if output.is_dir() and not is_folder:
        raise UsageError(f"{output} is a folder: write {output}/ for SVG files, or name an HTML file")
    if output.exists() and not output.is_dir() and is_folder:
        raise UsageError(f"{output} is a file: name a folder for the SVG files")
    with Display() as display:
        from fp8tune import names
        from fp8tune.report import contents, report

        with opened_to_read(options.db) as (reader, label):
            kernels = tuple(names.stored_kernels(options.kernels, reader)) if options.kernels else ()
            found = contents.read(reader, label, kernels, options.device, display.update)
        if options.device and not found.rows:
            raise UsageError(f"no GPU {options.device!r:.80} has timed rows in {label}: fp8tune show lists them")
        if is_folder:
            number = report.write_figures(found, bool(options.kernels), output, display.update)
            size = f"{number} charts"
        else:
            display.update("writing the page")
            size = f"{report.write_html(found, kernels, output) / 1e6:.1f} MB"
    devices, kernels_shown = {row.device for row in found.rows}, {row.kernel for row in found.rows}
    counted = f"{len(found.rows):,} picks of {len(kernels_shown)} kernels on {len(devices)} devices"
    print(f"{path_here(output)}: {size}, {counted}")
