"""Blocks of README and documentation hold what their commands print."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest
from places import ROOT

from benchmarks import printed

BEGIN = "<!-- begin: x -->\n"


def block(commands: str, body: str = "") -> str:
    return f"before\n<!-- begin: {commands} -->\n{body}<!-- end -->\nafter\n"


def test_there_are_pages_with_blocks():
    assert ROOT / "README.md" in printed.pages()


@pytest.mark.parametrize("page", printed.pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_holds_what_its_commands_print(page):
    """Where it does not: python -m benchmarks.printed"""
    text = page.read_text(encoding="utf-8")
    assert "".join(printed.difference(text, printed.updated(text), page.name)) == ""


def test_a_block_becomes_a_console_with_the_command_and_its_output():
    wanted = block("fp8tune --version", "```console\n$ fp8tune --version\nfp8tune X\n```\n")
    version = printed.run("fp8tune --version").text
    assert printed.updated(block("fp8tune --version", "old\n")) == wanted.replace("fp8tune X", version)


def test_commands_of_a_block_share_a_console_and_afolder():
    lines = "cat sweeps/tiny.toml | head -1\nquiet: cat sweeps/tiny.toml\ncat docs/examples/add.toml | head -1"
    text = printed.updated(block(lines))
    assert text.count("```toml\n") == 2
    both = printed.updated(block("fp8tune --version\nfp8tune --version"))
    assert both.count("```console") == 1
    assert both.count("\n\n$ fp8tune --version\n") == 1


def test_head_and_tail_cut_as_in_a_shell(monkeypatch):
    monkeypatch.chdir(ROOT)
    lines = (ROOT / "sweeps" / "llama4.toml").read_text().splitlines()
    assert printed.run("cat sweeps/llama4.toml | head -7 | tail -2").text.splitlines() == lines[5:7]


def test_a_time_that_differs_is_no_difference(tmp_path, monkeypatch):
    monkeypatch.setattr(printed, "run", lambda command, code: printed.Printed("118 trials in 26.3 s"))
    said = block("fp8tune sweep", "```console\n$ fp8tune sweep\n118 trials in 9 s\n```\n")
    assert printed.updated(said) == said
    other = said.replace("118", "117")
    assert "118 trials in 26.3 s" in printed.updated(other)


def test_a_command_may_end_with_an_exit_code_of_its_own():
    wanted = "exit 1: fp8tune compare HEAD..no-such"
    with pytest.raises(ValueError, match="exit code 2"):
        printed.updated(block(wanted))
    assert "\n$ fp8tune show --kernel no-such\n" in printed.updated(block("exit 2: fp8tune show --kernel no-such"))


def test_a_file_is_copied_beside_the_commands_and_its_module_forgotten():
    copied = "quiet: cp docs/examples/add.toml docs/examples/swiglu.json docs/examples/swiglu.py ."
    assert "tokens = " in printed.updated(block(f"{copied}\ncat add.toml"))
    with printed.folder():
        Path("only_here.py").write_text("")
        sys.path.insert(0, "")
        importlib.import_module("only_here")
        sys.path.remove("")
    assert "only_here" not in sys.modules


@pytest.mark.parametrize(
    "text", ["<!-- begin: x -->", "<!-- end -->", "<!-- begin: x -->\n<!-- begin: y -->\n<!-- end -->"]
)
def test_markers_that_are_no_pairs_are_refused(text):
    with pytest.raises(ValueError, match="wants one"):
        printed.updated(text)


def test_a_command_that_fails_is_an_error_with_its_message():
    with pytest.raises(ValueError, match=r"(?s)exit code 2: .*no-such"):
        printed.updated(block("fp8tune show --kernel no-such-kernel"))


def test_a_stale_page_is_named_with_a_diff_and_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(printed, "ROOT", tmp_path)
    for shared in printed.SHARED:
        (tmp_path / shared).touch()
    page = tmp_path / "page.md"
    page.write_text(block("fp8tune --version", "old\n"))
    assert printed.main(["--check", str(page)]) == 1
    said = capsys.readouterr().out
    assert "-old\n" in said
    assert "page.md: stale" in said
    assert printed.main([str(page)]) == 0
    assert printed.main(["--check", str(page)]) == 0
    assert capsys.readouterr().out == "page.md: written\npage.md: unchanged\n"


def test_nothing_of_the_user_is_read(monkeypatch):
    """A database of one's own would change what a page prints."""
    monkeypatch.setenv("FP8TUNE_DB", "mine.db")
    with printed.folder():
        assert "FP8TUNE_DB" not in os.environ
        assert sorted(path.name for path in Path().iterdir()) == sorted(printed.SHARED)
