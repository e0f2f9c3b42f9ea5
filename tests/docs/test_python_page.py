"""The code of the page on Python runs from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from places import ROOT


def test_the_code_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FP8TUNE_DB", str(tmp_path / "none.db"))
    monkeypatch.setenv("FP8TUNE_BASE", str(ROOT / "results.db"))
    monkeypatch.delenv("FP8TUNE_TABLES", raising=False)
    page = (ROOT / "docs" / "howto" / "python.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("speedup", "slower_share", "BLOCK_SIZE", "quick"))
