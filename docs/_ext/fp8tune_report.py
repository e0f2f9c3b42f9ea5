"""The report of the committed database, written beside the pages that show it.

``-D fp8tune_report_kernel=NAME`` writes one kernel's: where the tests read the whole page anyway, that saves a half of
the time of building these pages.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

DATABASE = Path(__file__).resolve().parents[2] / "results.db"

PAGE = Path("results") / "report-page.html"
"""Within the site; :file:`docs/results/report.md` frames it."""


def _write(app: Any, error: Exception | None) -> None:
    from fp8tune.cli.report import report
    from fp8tune.options import ReportOptions

    if error is None and app.builder.format == "html":
        kernels = tuple(filter(None, [app.config.fp8tune_report_kernel]))
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            report(ReportOptions(kernel=kernels, db=str(DATABASE), output=str(Path(app.outdir) / PAGE)))


def setup(app: Any) -> dict[str, Any]:
    """What Sphinx calls."""
    app.add_config_value("fp8tune_report_kernel", "", rebuild="")
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True}
