"""Reports of other databases: empty, simulated, compiled only, hostile, too large to show whole."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from browsing import Opened, opened
from database_rows import H100, H200, KERNEL, begin, config, finished_sweep, problem, row, studies_of, study_of, subject
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import PASSWORD, on_both

from fp8tune.commands.report import ReportOptions, report
from fp8tune.records import Device, Kind, NamedInts, Problem, Status
from fp8tune.redaction import redacted
from fp8tune.report import contents, page, views
from fp8tune.report.contents import Contents, Row
from fp8tune.report.view import Column, Part, View, table
from fp8tune.store.results import Store

if TYPE_CHECKING:
    from playwright.sync_api import Browser

HOSTILE = [
    "</title></h1></p></script><script>window.pwned=1</script>",
    "<img src=x onerror=window.pwned=1>",
    '"><svg onload=window.pwned=1>',
    "javascript:window.pwned=1",
    "${window.pwned=1}",
    "datum.x; window.pwned=1",
    "{{constructor.constructor('window.pwned=1')()}}",
    "--><!--",
    "&lt;b&gt;",
    "\u202egnitar\u202c",
    "a" * 3000,
]


@pytest.fixture
def made(tmp_path: Path, browser: Browser, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[Path], Opened]]:
    """The report of a database in the browser."""
    pages: list[Opened] = []

    def of(db: Path) -> Opened:
        report(ReportOptions(db=str(db), output=tmp_path / "report.html"))
        pages.append(opened(browser, tmp_path / "report.html"))
        return pages[-1]

    yield of
    for found in pages:
        assert found.said == []
        assert found.asked == []
        found.page.context.close()


def views_of(found: Opened) -> list[str]:
    return [link.get_attribute("href") or "" for link in found.page.locator("nav a").all()]


def test_an_empty_database_says_what_fills_it(tmp_path: Path, made: Callable[[Path], Opened]) -> None:
    with Store.open(str(tmp_path / "empty.db"), create=True):
        pass
    found = made(tmp_path / "empty.db")
    assert "The database is empty: fp8tune sweep fills it." in found.page.locator("main").inner_text()
    assert views_of(found) == ["#overview"]


def test_what_was_only_compiled_is_counted(tmp_path: Path, made: Callable[[Path], Opened]) -> None:
    with Store.open(str(tmp_path / "static.db"), create=True) as store:
        sweep = begin(store, Device("gfx942"))
        store.add(sweep, row(None, device=Device("gfx942"), kind=Kind.STATIC))
    found = made(tmp_path / "static.db")
    text = found.page.locator("main").inner_text()
    assert "No timed rows." in text
    assert found.page.locator("#overview-trials tbody tr").all_inner_texts() == ["gfx942\tstatic\t1"]


def test_simulated_rows_are_shown_as_what_they_are(tmp_path: Path, made: Callable[[Path], Opened]) -> None:
    simulated = Device("simulated", "simulated GPU")
    with Store.open(str(tmp_path / "simulated.db"), create=True) as store:
        sweep = begin(store, simulated)
        for block in (32, 64):
            given = {"config": config(block), "device": simulated, "kind": Kind.SIMULATED}
            store.add(sweep, row(100.0 + block, **given))
        store.finish_sweep(sweep)
    found = made(tmp_path / "simulated.db")
    (line,) = found.page.locator("#overview-picks tbody tr").all_inner_texts()
    assert "simulated" in line.split("\t")


def test_a_problem_shows_failed_and_pruned_configs_with_their_reason(
    tmp_path: Path, made: Callable[[Path], Opened]
) -> None:
    with Store.open(str(tmp_path / "failed.db"), create=True) as store:
        sweep = begin(store)
        store.add(sweep, row(100.0))
        store.add(sweep, row(None, config=config(64), status=Status.WRONG))
        store.add(sweep, row(None, config=config(128), status=Status.PRUNED))
        store.mark_complete(sweep, subject(), 3)
        store.finish_sweep(sweep)
    found = made(tmp_path / "failed.db")
    found.show("problem")
    texts = found.page.locator("section", has_text="Configs without a time").locator("tbody tr").all_inner_texts()
    assert {tuple(text.split("\t")[:3]) for text in texts} == {("wrong", "wrong", "1"), ("pruned", "pruned", "1")}


def test_two_devices_are_compared_and_lookups_lose(tmp_path: Path, made: Callable[[Path], Opened]) -> None:
    problems = [problem(K=K) for K in (1024, 2048, 5120)]
    with Store.open(str(tmp_path / "two.db"), create=True) as store:
        for device, best in ((H100, 32), (H200, 64)):
            times = {of: {config(block): 100.0 + abs(block - best) for block in (32, 64, 128)} for of in problems}
            finished_sweep(store, times, device)
    found = made(tmp_path / "two.db")
    assert "#devices" in views_of(found)
    found.show("devices")
    assert found.marks("devices-moved", "symbol") == found.rows("devices-moved") == 6
    cells = found.page.locator("#devices-moved tbody tr").first.inner_text().split("\t")
    assert cells[-1] == "32.0"  # 132 over 100
    found.show("lookups")
    assert found.rows("lookups-losses") == 3 * 2 * 4
    assert "--shapes" in found.page.locator("#lookups-next tbody").inner_text()


@on_both
def test_no_path_and_no_password_is_in_the_file(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store.open(database, create=True) as store:
        finished_sweep(store, {problem(): {config(): 100.0}})
    report(ReportOptions(db=database, output=tmp_path / "report.html"))
    text = (tmp_path / "report.html").read_text() + json.dumps(content_of(tmp_path / "report.html"))
    assert f"{redacted(database).rpartition('/')[2]}, read by fp8tune" in text
    assert not [secret for secret in (str(tmp_path), PASSWORD, quote(PASSWORD, safe="")) if secret in text]


# Hostile names


def hostile_contents(texts: list[str]) -> Contents:
    """Rows whose every text is hostile, of measured and published kinds."""
    rows = []
    for number, text in enumerate(texts):
        of = Problem(text, NamedInts(M=number + 1, K=64), text, text, text, text, text)
        device = Device(text, text, text, 1, text, text, text, text)
        for kind in (Kind.MEASURED, Kind.PUBLISHED):
            evidence = [
                study_of(
                    of,
                    config(block),
                    device,
                    kind,
                    Status.OK,
                    (100.0 + block,),
                    KERNEL if kind is Kind.MEASURED else None,
                    NamedInts(K=64),
                    bytes_moved=1000,
                    source=text,
                    note=text,
                    ceiling_gb_per_s=3000.0,
                    copy_gb_per_s=3000.0,
                )
                for block in (32, 64)
            ]
            (found,) = studies_of(evidence)
            rows.append(Row(found, text, contents.Explanation(found)))
    return Contents(texts[0], rows, {(text, Kind.STATIC): 1 for text in texts}, left_out=texts[0])


def written(found: Contents, title: str) -> str:
    problems = [(view, dict(read)) for view, read in views.problem_views(found)]
    return page.written(page.Page(title, found.label, list(views.views(found)), problems))


def test_hostile_names_are_text_wherever_they_stand(tmp_path: Path, browser: Browser) -> None:
    path = tmp_path / "report.html"
    path.write_text(written(hostile_contents(HOSTILE), HOSTILE[0]), "utf-8")
    found = opened(browser, path)
    addresses = [address.removeprefix("#") for address in views_of(found)]
    addresses += [f"problem/{one['id']}" for one in content_of(path)["problems"][:8]]
    for address in addresses:
        found.show(address)
        for summary in found.page.locator("summary").all():
            summary.click()
        found.page.locator("g.role-mark > path").first.hover(force=True)  # a tooltip
        assert found.page.evaluate("window.pwned") is None
        assert found.page.locator("main img, main script, main iframe, main [onload], main [onerror]").count() == 0
        assert found.page.locator("#vg-tooltip-element img, #vg-tooltip-element script").count() == 0
    links = found.page.locator("a").all()
    assert all((link.get_attribute("href") or "").startswith("#") for link in links)
    found.page.get_by_label("kernel", exact=True).select_option(index=2)  # in an address
    found.drawn()
    assert found.page.evaluate("window.pwned") is None
    assert not [line for line in found.said if not line.startswith("warning: WARN")]
    assert found.asked == []
    found.page.context.close()


def test_every_picture_is_vega_lite() -> None:
    """By its schema, which a report itself does not ask: that takes half a second."""
    found = hostile_contents(["x"])
    shown = [*views.views(found), *(view for view, _ in views.problem_views(found))]
    charts = [part.chart for view in shown for part in view.parts if part.chart is not None]
    assert len(charts) > 5
    for chart in charts:
        chart.to_dict(validate=True)


def test_a_script_of_others_may_not_run(tmp_path: Path, browser: Browser) -> None:
    """The content policy, were markup ever to come in."""
    path = tmp_path / "report.html"
    path.write_text(written(hostile_contents(["x"]), "x"), "utf-8")
    found = opened(browser, path)
    found.page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.pwned = 1'}),"
        " Object.assign(document.createElement('img'), {src: 'https://example.com/x.png'}))"
    )
    found.page.wait_for_timeout(200)
    assert found.page.evaluate("window.pwned") is None
    assert len([line for line in found.said if "Content Security Policy" in line]) == 2
    found.page.context.close()


@settings(max_examples=40)
@given(st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=40)), min_size=3, max_size=3))
def test_no_text_of_a_database_stands_in_the_markup(texts: list[str]) -> None:
    """Only the title and the line below it do, quoted; all else is compressed and in base64."""
    title, label, cell = texts
    column: Column[str] = Column("name", cell, lambda text: text)
    view = View("v", cell, cell, (Part("p", cell, cell, table([column], [cell])),), ((cell, cell),))
    text = page.written(page.Page(title, label, [view], [(view, {"kernel": cell, "device": cell})]))
    before, data, after = re.split(r'<script id="data" type="text/plain">([A-Za-z0-9+/=]*)</script>', text)
    assert after == page.written(page.Page("", "", [])).partition("</script>")[2]
    expected = page.written(page.Page("", "", [])).partition('<script id="data"')[0]
    assert before.count(html.escape(title)) >= expected.count(html.escape(title))
    assert re.sub(r"<title>.*?</title>|<h1.*?</h1>|<p id.*?</p>", "", before, flags=re.DOTALL) == re.sub(
        r"<title>.*?</title>|<h1.*?</h1>|<p id.*?</p>", "", expected, flags=re.DOTALL
    )
    assert json.loads(gzip.decompress(base64.b64decode(data)))["views"][0]["title"] == cell


# Two revisions


COMPARED: dict[str, Any] = {
    "kernel": "colwise",
    "arch": "sm_90",
    "shape": {"M": 16640, "K": 5120},
    "routing": "jagged",
    "device": "NVIDIA H100",
    "before_us": 100.0,
    "after_us": 103.0,
    "ratio": 1.03,
    "verdict": "REGRESSION",
    "reason": "",
    "interval": [1.02, 1.04],
    "smallest_detectable": 1.008,
    "n": 18,
    "control": 1.001,
}


def comparison(*rows: dict[str, Any]) -> dict[str, Any]:
    sides = {name: {"name": name, "commit": 40 * "a"} for name in ("before", "after")}
    return {**sides, "rows": list(rows), "geomean": 1.01, "control": 1.0}


def test_a_comparison_is_drawn_row_by_row(tmp_path: Path, browser: Browser) -> None:
    document = comparison(
        {**COMPARED, "kernel": "same", "ratio": None, "interval": None, "verdict": "SAME-CODE"},
        {**COMPARED, "kernel": "faster", "ratio": 0.9, "interval": [0.89, 0.91], "verdict": "IMPROVEMENT"},
        COMPARED,
    )
    (tmp_path / "change.json").write_text(json.dumps(document))
    report(ReportOptions(compare=str(tmp_path / "change.json"), output=tmp_path / "change.html"))
    found = opened(browser, tmp_path / "change.html")
    found.show("changes")
    assert found.rows("changes-changes") == 3
    names = found.page.locator("#changes-changes tbody th").all_inner_texts()
    assert [name.split()[0] for name in names] == ["colwise", "faster", "same"]
    first = found.page.locator("#changes-changes tbody tr").first.inner_text().split("\t")
    assert first[1:9] == ["REGRESSION", "100.0", "103.0", "3.00", "2.00", "4.00", "0.10", "0.80"]
    assert found.page.locator("#changes-changes g.mark-symbol.role-mark > path").count() == 4  # two dots, two controls
    assert found.page.locator("#filters select").count() == 1  # of kernels; there is one device
    found.page.get_by_label("kernel", exact=True).select_option("faster")
    found.until("document.querySelectorAll('#changes-changes summary')[0]?.textContent == 'Table of 1 row'")
    assert found.said == []
    found.page.context.close()


# Files


def content_of(path: Path) -> Any:
    found = re.search(r'id="data" type="text/plain">([^<]*)<', path.read_text("utf-8"))
    assert found is not None
    return json.loads(gzip.decompress(base64.b64decode(found[1])))
