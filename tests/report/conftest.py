"""The report of the committed database, and a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browsing import Opened, chromium, opened
from places import ROOT

from fp8tune.commands.report import ReportOptions, report

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="session")
def committed(once_a_run: Callable[[str, Callable[[], str]], str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the committed database."""
    path = tmp_path_factory.mktemp("report") / "report.html"

    def made() -> str:
        report(ReportOptions(db=str(ROOT / "results.db"), output=path))
        return path.read_text("utf-8")

    path.write_text(once_a_run("report of the committed database", made), "utf-8")
    return path


@pytest.fixture(scope="module")
def shared(browser: Browser, committed: Path) -> Iterator[Opened]:
    """The committed page, opened once for a module: a test goes to the view that it needs."""
    found = opened(browser, committed)
    yield found
    found.page.context.close()
