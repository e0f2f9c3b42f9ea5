"""Reports of other databases, and how files are written: empty, failed, hostile and large databases, full disks."""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from xml.etree import ElementTree

import pytest
from browsing import open_page
from command_line import fp8tune
from database_rows import H100, H200, KERNEL, begin, config, finished_sweep, problem, row, studies_of, study_of, subject
from forked import Forked
from servers import PASSWORD, on_both
from test_report_pages import content_of, rows_of

from fp8tune import cli
from fp8tune.records import Device, Kind, NamedInts, Problem, Status
from fp8tune.redaction import redacted
from fp8tune.report import contents, files
from fp8tune.report.contents import Contents, Row
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


def written(tmp_path: Path, db: Path | str) -> Any:
    """Write a report; return its content."""
    ended = fp8tune("report", "--db", db, "-o", tmp_path / "report.html")
    assert ended.returncode == 0, ended.stderr
    return content_of(tmp_path / "report.html")


def test_an_empty_database_has_one_page(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "empty.db"), create=True):
        pass
    content = written(tmp_path, tmp_path / "empty.db")
    assert [view["id"] for view in content["views"]] == ["overview"]
    assert "No timed results: fp8tune sweep fills the database." in {part["empty"] for part in content["templates"]}


def test_compiled_and_simulated_results_are_what_they_are(tmp_path: Path) -> None:
    simulated = Device("simulated", "simulated GPU")
    with Store.open(str(tmp_path / "rows.db"), create=True) as store:
        store.add(begin(store, Device("gfx942")), row(None, device=Device("gfx942"), kind=Kind.STATIC))
        sweep = begin(store, simulated)
        for block in (32, 64):
            store.add(sweep, row(100.0 + block, config=config(block), device=simulated, kind=Kind.SIMULATED))
        store.finish_sweep(sweep)
    content = written(tmp_path, tmp_path / "rows.db")
    assert [pick["kind"] for pick in rows_of(content, "overview", "picks")] == ["simulated"]


def test_failed_configs_have_their_reason(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "failed.db"), create=True) as store:
        sweep = begin(store)
        store.add(sweep, row(100.0))
        store.add(sweep, row(None, config=config(64), status=Status.WRONG))
        store.add(sweep, row(None, config=config(128), status=Status.PRUNED))
        store.mark_complete(sweep, subject(), 3)
        store.finish_sweep(sweep)
    content = written(tmp_path, tmp_path / "failed.db")
    rows = rows_of({**content, "views": content["sizes"]}, content["sizes"][0]["id"], "untimed")
    assert {(failed["status"], failed["configs"]) for failed in rows} == {("wrong", 1), ("pruned", 1)}


def test_lookups_and_other_devices_lose(tmp_path: Path) -> None:
    problems = [problem(K=K) for K in (1024, 2048, 5120)]
    with Store.open(str(tmp_path / "two.db"), create=True) as store:
        for device, best in ((H100, 32), (H200, 64)):
            times = {size: {config(block): 100.0 + abs(block - best) for block in (32, 64, 128)} for size in problems}
            finished_sweep(store, times, device)
    losses = rows_of(written(tmp_path, tmp_path / "two.db"), "lookups", "losses")
    by_rule = {rule: [loss["loss"] for loss in losses if loss["rule"] == rule] for rule in ("pick", "other device")}
    assert by_rule == {"pick": [0.0] * 6, "other device": [32.0] * 6}  # 132 over 100
    assert len(losses) == 6 * 5


@on_both
def test_no_path_and_no_password_is_in_the_file(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(database, create=True) as store:
        finished_sweep(store, {problem(): {config(): 100.0}})
    monkeypatch.setenv("FP8TUNE_DB", database)
    assert fp8tune("report", "-o", tmp_path / "report.html").returncode == 0
    text = (tmp_path / "report.html").read_text() + json.dumps(content_of(tmp_path / "report.html"))
    assert redacted(database).rpartition("/")[2] in text
    assert not [secret for secret in (str(tmp_path), PASSWORD, quote(PASSWORD, safe="")) if secret in text]


def hostile_contents(texts: list[str]) -> Contents:
    """Return rows whose every text is hostile, measured and published."""
    rows = []
    for number, text in enumerate(texts):
        size = Problem(text, NamedInts(M=number + 1, K=64), text, text, text, text, text)
        device = Device(text, text, text, 1, text, text, text, text)
        for kind, version in ((Kind.MEASURED, KERNEL), (Kind.PUBLISHED, None)):
            values = {"bytes_moved": 1000, "source": text, "note": text, "ceiling_gb_per_s": 3e3, "copy_gb_per_s": 3e3}
            studies = [
                study_of(size, config(block), device, kind, Status.OK, (100.0,), version, NamedInts(K=64), **values)
                for block in (32, 64)
            ]
            (study,) = studies_of(studies)
            rows.append(Row(study, text, contents.Explanation(study)))
    return Contents(texts[0], rows, texts[0])


def test_hostile_names_are_text_wherever_they_stand(tmp_path: Path, browser: Browser) -> None:
    path = tmp_path / "report.html"
    files.write_html(hostile_contents(HOSTILE), HOSTILE[:1], path)
    opened = open_page(browser, path)
    pages = [view["id"] for view in content_of(path)["views"]]
    for address in [*pages, *(f"size/{size['id']}" for size in content_of(path)["sizes"][:6])]:
        opened.show(address)
        for summary in opened.page.locator("summary").all():
            summary.click()
        opened.page.locator("g.role-mark > path").first.hover(force=True)  # a tooltip
        assert opened.page.evaluate("window.pwned") is None
        assert opened.page.locator("main img, main script, main iframe, main [onload], main [onerror]").count() == 0
        assert opened.page.locator("#vg-tooltip-element img, #vg-tooltip-element script").count() == 0
    assert all((link.get_attribute("href") or "").startswith("#") for link in opened.page.locator("a").all())
    opened.page.get_by_label("kernel", exact=True).select_option(index=2)  # in an address
    opened.drawn()
    opened.page.evaluate(  # the content policy, if markup came in
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.pwned = 1'}))"
    )
    assert opened.page.evaluate("window.pwned") is None
    assert opened.requests == []
    opened.page.context.close()


def test_texts_of_a_database_are_not_in_the_markup(tmp_path: Path) -> None:
    files.write_html(hostile_contents(HOSTILE), HOSTILE[:1], tmp_path / "hostile.html")
    files.write_html(hostile_contents(["x"]), ["x"], tmp_path / "plain.html")
    parts = []
    for name in ("hostile", "plain"):
        text = (tmp_path / f"{name}.html").read_text("utf-8")
        text = re.sub(r'(<script id="data" type="text/plain">)[A-Za-z0-9+/=]*', r"\1", text)
        parts.append(re.sub(r"<title>[^<]*</title>|<h1 id=.title.>[^<]*</h1>|<p id=.about.>[^<]*</p>", "", text))
    assert parts[0] == parts[1]


def test_a_large_database_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "ALL", 2)
    monkeypatch.setattr(contents, "DETAILED", 1)
    with Store.open(str(tmp_path / "large.db"), create=True) as store:
        finished_sweep(store, {problem(K=K): {config(): 100.0} for K in (1024, 2048, 5120)})
    content = written(tmp_path, tmp_path / "large.db")
    assert sorted(len(size["parts"]) > 0 for size in content["sizes"]) == [False, False, True]
    assert "2 of 3 sizes" in json.dumps(content)


def test_a_folder_gets_an_svg_file_per_chart(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "rows.db"), create=True) as store:
        finished_sweep(store, {problem(K=K): {config(32): 100.0, config(64): 110.0} for K in (1024, 2048)})
    assert fp8tune("report", "--db", tmp_path / "rows.db", "-o", f"{tmp_path}/figures/").returncode == 0
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"overview-grid.svg", "overview-verdicts.svg", "lookups-losses.svg"} <= names
    for path in (tmp_path / "figures").iterdir():
        assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_a_full_disk_leaves_the_older_file(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "rows.db"), create=True) as store:
        finished_sweep(store, {problem(): {config(): 100.0}})
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / "report.html"
    path.write_text("an older report")

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))  # a disk that is full after 200 kB
        sys.argv = ["fp8tune", "report", "--db", str(tmp_path / "rows.db"), "-o", str(path)]
        cli.main()

    code, output = Forked(limited).wait()
    assert code == 2
    assert output.splitlines()[-1].startswith(f"fp8tune: {path} cannot be written")
    assert [(file.name, file.read_text()) for file in path.parent.iterdir()] == [("report.html", "an older report")]


def test_without_the_extra_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ended = fp8tune("report", "-o", tmp_path / "report.html")
    assert ended.returncode == 2
    assert ended.stderr == "fp8tune: report needs packages that are not installed: pip install 'fp8tune[report]'\n"
    assert not list(tmp_path.iterdir())
