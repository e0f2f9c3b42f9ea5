"""A headless Chromium that keeps what a page did: errors, warnings, and every request that it made."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # a second, and every worker collects what imports this
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@dataclass
class Opened:
    """A page of a report in the browser."""

    page: Page
    path: Path
    said: list[str] = field(default_factory=list)
    """Errors and warnings of its console, and exceptions."""
    asked: list[str] = field(default_factory=list)
    """Addresses that it asked for, but for the file itself."""

    def show(self, view: str) -> None:
        """Go to a view by its address, and wait until its pictures are drawn."""
        self.page.goto(f"file://{self.path}#{view}")
        self.page.wait_for_selector("body[data-ready]", state="attached")
        self.drawn()

    def until(self, expression: str) -> None:
        """Wait until an expression is true. Playwright's own waiting evaluates it in the page, which forbids that.

        Raises AssertionError after half a minute.
        """
        ends = time.monotonic() + 30
        while not self.page.evaluate(expression):
            assert time.monotonic() < ends, f"{expression} is not so after 30 s"
            time.sleep(0.02)

    def drawn(self) -> None:
        """Wait until every picture that is there is drawn."""
        self.until("[...document.querySelectorAll('.picture')].every((box) => box.dataset.drawn)")

    def marks(self, part: str, kind: str) -> int:
        """Marks of a kind (``symbol``, ``rect``, ``rule``) that a part's picture holds."""
        return self.page.locator(f"#{part} .picture g.mark-{kind}.role-mark > path").count()

    def rows(self, part: str) -> int:
        """Rows of a part's table; those of all, where it shows the first ones alone."""
        section = self.page.locator(f"#{part}")
        summary = section.locator("summary")
        if summary.count() and not section.locator("table").count():
            summary.click()
        section.locator("table").wait_for()
        more = section.get_by_role("button", name="Show all")
        if more.count() and more.is_visible():
            more.click()
        return section.locator("tbody tr").count()


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """The system's browser; a test without one is skipped."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium: apt-get install chromium, or tests of the page are left out")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(
    browser: Browser, path: Path, view: str = "overview", width: int = 1200, height: int = 900, *, dark: bool = False
) -> Opened:
    """A new page of the file, at a view."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light")
    context.set_default_timeout(30_000)
    found = Opened(context.new_page(), path)
    found.page.on("console", lambda message: found.said.append(f"{message.type}: {message.text}"))
    found.page.on("pageerror", lambda error: found.said.append(f"exception: {error}"))
    found.page.on("dialog", lambda dialog: (found.said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    own = f"file://{path}", "data:"
    found.page.on("request", lambda request: request.url.startswith(own) or found.asked.append(request.url))
    found.show(view)
    return found
