"""Pages of kernels of the committed database in a browser: charts, tables, filters, and use without a mouse."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browsing import Opened, open_page
from command_line import fp8tune
from places import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser

KERNELS = ("gathered-rows", "transpose-3d-atomic", "mxfp8-dim0")
"""With operations, with published results, and on a single device: all pages, and all kinds of sizes."""

PAGES = ("overview", "size", "limits", "lookups")

# axe sees the first rows and marks: all others are made alike, and a thousand would take it ten seconds
ALIKE = "tbody tr:nth-child(n+4), .picture g.role-mark > path:nth-child(n+4)"

PHONE, DESK = {"width": 360, "height": 740}, {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    kernels = [word for kernel in KERNELS for word in ("--kernel", kernel)]
    written = fp8tune("report", "--db", ROOT / "results.db", *kernels, "-o", path)
    assert written.returncode == 0, written.stderr
    return path


@pytest.fixture(scope="module")
def content(report: Path) -> Any:
    return content_of(report)


@pytest.fixture(scope="module")
def page(browser: Browser, report: Path) -> Iterator[Opened]:
    opened = open_page(browser, report)
    yield opened
    opened.page.context.close()


@pytest.fixture
def quiet(page: Opened) -> Iterator[Opened]:
    """Check that a test leaves no message on the console and makes no request."""
    yield page
    page.page.set_viewport_size(DESK)
    page.page.emulate_media(media="screen", color_scheme="light")
    assert page.messages == []
    assert page.requests == []


def content_of(path: Path) -> Any:
    """Return the unpacked data of a report."""
    match = re.search(r'id="data" type="text/plain">([^<]*)<', path.read_text("utf-8"))
    assert match is not None
    return json.loads(gzip.decompress(base64.b64decode(match[1])))


def rows_of(content: Any, page_id: str, part_id: str) -> list[dict[str, Any]]:
    """Return the rows of one part by the names of its columns."""
    (view,) = [view for view in content["views"] if view["id"] == page_id]
    (part,) = [part for part in view["parts"] if content["templates"][part["template"]]["id"] == part_id]
    names = [column["name"] for column in content["templates"][part["template"]]["columns"]]
    columns = [
        values if isinstance(values, list) else [values["names"][place] for place in values["places"]]
        for values in part["columns"]
    ]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def test_the_file_makes_no_request_and_is_small(report: Path) -> None:
    markup = re.sub(r"<script.*?</script>", "", report.read_text("utf-8"), flags=re.DOTALL)
    assert "http" not in markup.replace("http-equiv", "")
    assert report.stat().st_size < 2e6


def test_every_row_links_to_a_size_with_a_title_of_its_own(content: Any) -> None:
    sizes = {f"#size/{size['id']}" for size in content["sizes"]}
    assert {row["href"] for row in rows_of(content, "overview", "picks")} == sizes
    assert len({size["title"] for size in content["sizes"]}) == len(content["sizes"]) == len(sizes)


def test_published_rows_without_a_config_come_last(content: Any) -> None:
    picks = rows_of(content, "overview", "picks")
    has_config = [bool(row["config"]) for row in picks]
    assert has_config == sorted(has_config, reverse=True)
    assert {row["verdict"] for row in picks} <= {"proven", "open", "quick", "published"}
    assert not [row for row in picks if row["verdict"] == "published" and row["speedup"] != "-"]


def test_disturbed_rows_are_marked(content: Any) -> None:
    picks = rows_of(content, "overview", "picks")
    marked = {row["href"] for row in rows_of(content, "limits", "shares") if row["quality"] == "disturbed"}
    assert marked == {row["href"] for row in picks if row["disturbance"]}


@pytest.mark.parametrize("view", PAGES)
def test_every_chart_is_drawn_as_wide_as_its_column_and_a_phone_scrolls_down_only(
    quiet: Opened, content: Any, view: str
) -> None:
    quiet.show(address(view, content))
    boxes = quiet.page.locator(".picture")
    assert boxes.count() > 0
    for number in range(boxes.count()):
        assert boxes.nth(number).locator("g.role-mark path, g.role-mark text").count() > 0
        svg = boxes.nth(number).locator("svg").bounding_box()
        assert svg is not None
        assert svg["width"] > 0.9 * (DESK["width"] - 60)
    quiet.page.set_viewport_size(PHONE)
    assert quiet.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_time_and_verdict_of_all_picks_are_visible_without_scrolling(quiet: Opened) -> None:
    quiet.show("overview")
    table = quiet.page.locator("#overview-picks table")
    for heading in ("speedup", "time us", "% of peak", "verdict"):
        box = table.get_by_role("columnheader", name=heading, exact=True).bounding_box()
        assert box is not None
        assert box["x"] + box["width"] < DESK["width"]


def test_axes_of_whole_numbers_have_whole_ticks(quiet: Opened, content: Any) -> None:
    quiet.show("overview?kernel=mxfp8-dim0")
    labels = quiet.page.locator("#overview-verdicts g.role-axis-label text").all_text_contents()
    assert labels
    assert not [label for label in labels if "." in label]


def test_clipped_configs_are_triangles(quiet: Opened, content: Any) -> None:
    """A triangle for each config beyond the edge of the chart, a circle for all others."""
    for size in content["sizes"]:
        slowdowns = config_slowdowns(content, size)
        if any(slowdown > 4 for slowdown in slowdowns):
            break
    quiet.show(f"size/{size['id']}")
    marks = quiet.page.locator(f"[id='{size['id']}-configs'] g.mark-symbol.role-mark path").evaluate_all(
        "(marks) => marks.map((mark) => mark.getAttribute('d'))"
    )
    assert sum("A" not in mark for mark in marks) == sum(slowdown > 4 for slowdown in slowdowns)


def config_slowdowns(content: Any, size: Any) -> list[float]:
    for part in size["parts"]:
        template = content["templates"][part["template"]]
        if template["id"] == "configs":
            names = [column["name"] for column in template["columns"]]
            return [slowdown for slowdown in part["columns"][names.index("slowdown")] if slowdown is not None]
    return []


def test_filters_keep_the_rows_of_one_kernel(quiet: Opened) -> None:
    quiet.show("overview")
    everything = quiet.rows("overview-picks")
    quiet.page.get_by_label("kernel", exact=True).select_option("mxfp8-dim0")
    quiet.until("document.querySelector('#tabs a')?.hash.includes('kernel=mxfp8-dim0')")
    assert 0 < quiet.rows("overview-picks") < everything
    assert set(quiet.page.locator("#overview-picks tbody th").all_inner_texts()) == {"mxfp8-dim0"}
    quiet.page.get_by_role("link", name="Limits").click()  # the filter stays
    quiet.until("document.querySelector('h2')?.textContent == 'Limits'")
    quiet.drawn()


def test_the_keyboard_is_enough(quiet: Opened) -> None:
    quiet.show("overview")
    quiet.page.reload()
    quiet.drawn()
    quiet.page.keyboard.press("Tab")
    assert quiet.page.evaluate("document.activeElement.textContent") == "Skip to the content"
    for _ in range(4):
        quiet.page.keyboard.press("Tab")
    quiet.page.keyboard.press("Enter")
    quiet.until("document.querySelector('h2')?.textContent == 'Lookups'")
    quiet.drawn()


@pytest.mark.parametrize("view", PAGES)
def test_pages_are_accessible(quiet: Opened, content: Any, view: str) -> None:
    quiet.show(f"{address(view, content)}?kernel=gathered-rows")
    for summary in quiet.page.locator("summary").all():
        summary.click()
    quiet.page.evaluate("(alike) => document.querySelectorAll(alike).forEach((node) => node.remove())", ALIKE)
    assert violations(quiet) == []
    quiet.page.emulate_media(color_scheme="dark")
    assert violations(quiet, ["color-contrast"]) == []


def violations(opened: Opened, rules: Sequence[str] = ()) -> list[tuple[str, list[str]]]:
    """Return the rules of axe that the page breaks, each with some of its elements."""
    from axe_playwright_python.base import AXE_SCRIPT

    options = {"resultTypes": ["violations"], **({"runOnly": list(rules)} if rules else {})}
    if opened.page.evaluate("!window.axe"):
        opened.page.evaluate(AXE_SCRIPT)
    faults = opened.page.evaluate("(options) => axe.run(options).then((result) => result.violations)", options)
    return [(fault["id"], [node["html"][:120] for node in fault["nodes"]][:3]) for fault in faults]


def address(view: str, content: Any) -> str:
    """Return the address of a page; of a size one with many configs."""
    if view != "size":
        return view
    return f"size/{max(content['sizes'], key=lambda size: len(config_slowdowns(content, size)))['id']}"
