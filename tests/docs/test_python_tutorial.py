"""The tutorial's Python runs from top to bottom, and prints what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
from places import ROOT

PAGE = ROOT / "docs" / "tutorial" / "python.md"
CELL = re.compile(r"```python\n(?P<code>.*?)```\n\n```text\n(?P<printed>.*?)```", re.DOTALL)


def run(page: str) -> str:
    """The page with what its cells print today."""
    names: dict[str, object] = {"__name__": "tutorial"}

    def ran(cell: re.Match[str]) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(cell["code"], names)
        text = "\n".join(line.rstrip() for line in printed.getvalue().splitlines())
        return f"```python\n{cell['code']}```\n\n```text\n{text.rstrip()}\n```"

    return CELL.sub(ran, page)


def test_every_cell_prints_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FP8TUNE_DB", str(tmp_path / "none.db"))
    monkeypatch.setenv("FP8TUNE_BASE", str(ROOT / "results.db"))
    monkeypatch.delenv("FP8TUNE_TABLES", raising=False)
    page = PAGE.read_text(encoding="utf-8")
    assert page.count("```python") == len(CELL.findall(page))
    assert run(page) == page
