"""``fp8tune report``."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from fp8tune import names
from fp8tune.cli import databases
from fp8tune.errors import MachineError, UsageError
from fp8tune.options import ReportOptions
from fp8tune.output.progress import Display
from fp8tune.output.text import path_here
from fp8tune.report import contents, files


def report(options: ReportOptions) -> None:
    """Write the HTML file, or a folder of charts."""
    if None in map(importlib.util.find_spec, ("altair", "vl_convert")):
        raise MachineError("report needs packages that are not installed: pip install 'fp8tune[report]'")
    output, is_folder = Path(options.output), options.output.endswith("/")
    if output.is_dir() and not is_folder:
        raise UsageError(f"{output} is a folder: name a file, such as {output / 'report.html'}, or write {output}/")
    if is_folder and output.exists() and not output.is_dir():
        raise UsageError(f"{output} is a file: name a folder for the SVG files")
    with Display() as display:
        with databases.opened(options.db) as (reader, label):
            kernels = names.stored_kernels(options.kernel, reader) if options.kernel else []
            shown = contents.read(reader, label, kernels, options.device, display.update)
        if options.device and not shown.rows:
            raise UsageError(f"no timed results of {options.device!r:.80} in {label}: fp8tune show lists the GPUs")
        if is_folder:
            written = f"{files.write_figures(shown, bool(kernels), output, display.update)} charts"
        else:
            display.update("writing the page")
            written = f"{files.write_html(shown, kernels, output) / 1e6:.1f} MB"
    counts = len(shown.rows), len({row.kernel for row in shown.rows}), len({row.device for row in shown.rows})
    print(f"{path_here(output)}: {written}, {{:,}} picks of {{}} kernels on {{}} devices".format(*counts))
