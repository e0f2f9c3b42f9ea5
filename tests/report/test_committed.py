"""The report of the committed database in a real browser: what it draws, how it is used, what it asks for."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from browsing import Opened

VIEWS = ("overview", "problem", "limits", "lookups", "devices")

ALIKE = "tbody tr:nth-child(n+9), .picture g.role-mark > path:nth-child(n+9)"
"""What axe does not get to see: of each table and picture the first rows and marks stand for all. They are made alike,
and a thousand take it ten seconds."""

PHONE, DESK = {"width": 360, "height": 740}, {"width": 1200, "height": 900}


@pytest.fixture(scope="module")
def content(committed: Path) -> Any:
    """What the page holds, unpacked."""
    found = re.search(r'id="data" type="text/plain">([^<]*)<', committed.read_text("utf-8"))
    assert found is not None
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


@pytest.fixture(autouse=True)
def quiet(shared: Opened) -> Iterator[None]:
    """Whatever a test does, the page says nothing on its console and asks for nothing; and is as it was."""
    yield
    shared.page.set_viewport_size(DESK)
    shared.page.emulate_media(media="screen", color_scheme="light")
    assert shared.said == []
    assert shared.asked == []


def test_the_file_is_small(committed: Path) -> None:
    assert committed.stat().st_size < 3e6


def test_no_address_of_the_network_is_in_its_markup(committed: Path) -> None:
    text = re.sub(r"<script.*?</script>", "", committed.read_text("utf-8"), flags=re.DOTALL)
    assert "http" not in text.replace("http-equiv", "")


@pytest.mark.parametrize("view", VIEWS)
def test_every_picture_of_a_view_is_drawn_and_a_phone_scrolls_down_alone(
    shared: Opened, content: Any, view: str
) -> None:
    shared.show(address(view, content))
    boxes = shared.page.locator(".picture")
    assert boxes.count() > 0
    for number in range(boxes.count()):
        assert boxes.nth(number).locator("svg").count() == 1
        assert boxes.nth(number).locator("g.role-mark path, g.role-mark text").count() > 0
    shared.page.set_viewport_size(PHONE)
    assert shared.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_every_link_of_a_row_leads_to_its_problem(content: Any) -> None:
    known = {f"#problem/{problem['id']}" for problem in content["problems"]}
    linked = set()
    for view in content["views"]:
        for part in view["parts"]:
            columns = content["templates"][part["template"]]["columns"]
            for column, values in zip(columns, part["columns"], strict=True):
                if column["name"] == "href":
                    linked |= set(values["names"])
    assert linked == known
    assert len(known) == len(content["problems"])


def test_filters_leave_the_rows_of_one_kernel(shared: Opened) -> None:
    shared.show("overview")
    everything = shared.rows("overview-picks")
    shared.page.get_by_label("kernel", exact=True).select_option("colwise")
    shared.until("document.querySelector('#tabs a')?.hash.includes('kernel=colwise')")
    shared.drawn()
    assert 0 < shared.rows("overview-picks") < everything
    names = set(shared.page.locator("#overview-picks tbody th").all_inner_texts())
    assert names == {"colwise"}
    shared.page.get_by_role("link", name="Limits").click()  # the filter stays
    shared.until("document.querySelector('h2')?.textContent == 'Limits'")
    shared.drawn()
    assert shared.marks("limits-memory", "symbol") == shared.rows("limits-memory")


def test_the_keyboard_suffices(shared: Opened) -> None:
    shared.show("overview")
    shared.page.reload()
    shared.drawn()
    shared.page.keyboard.press("Tab")
    assert shared.page.evaluate("document.activeElement.textContent") == "Skip to the content"
    for _ in range(4):
        shared.page.keyboard.press("Tab")
    assert shared.page.evaluate("document.activeElement.textContent") == "Lookups"
    shared.page.keyboard.press("Enter")
    shared.until("document.querySelector('h2')?.textContent == 'Lookups'")
    shared.drawn()


@pytest.mark.parametrize("view", VIEWS)
def test_contrast_roles_and_names(shared: Opened, content: Any, view: str) -> None:
    shared.show(f"{address(view, content)}?kernel=colwise")
    for summary in shared.page.locator("summary").all():
        summary.click()
    shared.page.evaluate("(alike) => document.querySelectorAll(alike).forEach((each) => each.remove())", ALIKE)
    assert faults(shared) == []
    shared.page.emulate_media(color_scheme="dark")
    assert faults(shared, ["color-contrast"]) == []  # nothing else differs: no script knows the theme


def faults(found: Opened, rules: Sequence[str] = ()) -> list[tuple[str, list[str]]]:
    """What axe finds by these rules, or by all: the rule and the elements."""
    from axe_playwright_python.base import AXE_SCRIPT

    wanted = {"resultTypes": ["violations"], **({"runOnly": list(rules)} if rules else {})}
    if found.page.evaluate("!window.axe"):
        found.page.evaluate(AXE_SCRIPT)
    # Axe.run itself hands over what is right too, half a megabyte, which takes as long as looking for faults
    run = "(wanted) => axe.run(wanted).then((found) => found.violations)"
    violations = found.page.evaluate(run, wanted)
    return [(fault["id"], [node["html"][:120] for node in fault["nodes"]][:3]) for fault in violations]


def address(view: str, content: Any) -> str:
    """Where a view is; that of a problem, of one that is shown config by config: not all are."""
    return f"problem/{with_finals(content)['id']}" if view == "problem" else view


def with_finals(content: Any) -> Any:
    """The first problem with dozens of configs and finals, of measured rows."""
    return next(
        problem
        for problem in content["problems"]
        if length(content, problem, "configs") > 30 and length(content, problem, "finals") > 30
    )


def length(content: Any, problem: Any, part: str) -> int:
    """Rows of a problem's part; 0 where it has none."""
    lengths = {content["templates"][each["template"]]["id"]: each["length"] for each in problem["parts"]}
    return lengths.get(part, 0)
