"""Blocks of README and documentation hold what their commands print."""

from __future__ import annotations

import pytest
from places import ROOT

from benchmarks import printed


def block(commands: str, body: str = "") -> str:
    return f"before\n<!-- generated: {commands} -->\n{body}<!-- end -->\nafter\n"


@pytest.mark.parametrize("page", printed.pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_holds_what_its_commands_print(page):
    """Run ``python -m benchmarks.printed`` to write them anew."""
    text = page.read_text(encoding="utf-8")
    assert "".join(printed.difference(text, printed.updated(text), page.name)) == ""


def test_a_block_becomes_a_console_with_the_command_and_its_output():
    expected = block("fp8tune --version", "```console\n$ fp8tune --version\nfp8tune X\n```\n")
    version = printed.run("fp8tune --version").text
    assert printed.updated(block("fp8tune --version", "old\n")) == expected.replace("fp8tune X", version)


def test_a_stale_page_is_named_with_a_diff_and_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(printed, "ROOT", tmp_path)
    for shared in printed.SHARED:
        (tmp_path / shared).touch()
    page = tmp_path / "page.md"
    page.write_text(block("fp8tune --version", "old\n"))
    assert printed.main(["--check", str(page)]) == 1
    output = capsys.readouterr().out
    assert "-old\n" in output
    assert "page.md: stale" in output
    assert printed.main([str(page)]) == 0
    assert printed.main(["--check", str(page)]) == 0
    assert capsys.readouterr().out == "page.md: written\npage.md: unchanged\n"
