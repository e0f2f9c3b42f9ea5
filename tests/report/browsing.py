"""Headless Chromium that records the errors, warnings and requests of a page."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # importing takes a second
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@dataclass
class Opened:
    """A page of a report in the browser."""

    page: Page
    path: Path
    messages: list[str] = field(default_factory=list)
    """Console messages and exceptions."""
    requests: list[str] = field(default_factory=list)
    """Addresses that it requested, without the file itself."""

    def show(self, view: str) -> None:
        """Go to a page by its address, and wait until its charts are drawn."""
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
        """Wait until every chart is drawn."""
        self.until("[...document.querySelectorAll('.picture')].every((box) => box.dataset.drawn)")

    def rows(self, part: str) -> int:
        """Return the number of rows of a part's table, of all if it shows only the first."""
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
    """Start the system's browser, or skip the test."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium: install it to test pages in a browser")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


def open_page(
    browser: Browser, path: Path, view: str = "overview", width: int = 1200, height: int = 900, *, dark: bool = False
) -> Opened:
    """Open the file in a new page."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light")
    context.set_default_timeout(30_000)
    opened = Opened(context.new_page(), path)
    opened.page.on("console", lambda message: opened.messages.append(f"{message.type}: {message.text}"))
    opened.page.on("pageerror", lambda error: opened.messages.append(f"exception: {error}"))
    opened.page.on("dialog", lambda dialog: (opened.messages.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    own = f"file://{path}", "data:"
    opened.page.on("request", lambda request: request.url.startswith(own) or opened.requests.append(request.url))
    opened.show(view)
    return opened
