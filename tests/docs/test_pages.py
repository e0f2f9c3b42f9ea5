"""Links, sentence lengths and paths in the README and the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from markdown_it import MarkdownIt
from places import ROOT

from benchmarks.printed import BLOCK

DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
FOR_USERS = [page for page in PAGES if page.name == "README.md" or DOCS in page.parents]
LONGEST_SENTENCE = 25
"""Words."""

MARKDOWN = MarkdownIt("commonmark").enable("table")
SENTENCE_END = re.compile(r"(?<!\be\.g\.)(?<!\bi\.e\.)(?<!\bvs\.)(?<=[.!?])[\"')\]]*\s+")
ABSOLUTE_PATH = re.compile(r"(?<![\w.~/:$<-])/[a-z][\w.-]*/")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def sentences(markdown: str) -> Iterator[str]:
    """Sentences outside of code, tables and generated parts; inline code counts as one word."""
    replacements = {"code_inline": "code", "softbreak": " ", "hardbreak": " "}
    in_table = False
    for token in MARKDOWN.parse(BLOCK.sub("", markdown)):
        in_table = token.type == "table_open" or (in_table and token.type != "table_close")
        if token.type == "inline" and not in_table:
            parts = (
                part.content if part.type == "text" else replacements.get(part.type, "")
                for part in token.children or ()
            )
            yield from SENTENCE_END.split("".join(parts))


def long_sentences(markdown: str) -> list[str]:
    """Sentences with too many words."""
    return [text for text in sentences(markdown) if len(re.findall(r"\S*\w\S*", text)) > LONGEST_SENTENCE]


def links(markdown: str) -> Iterator[str]:
    """Targets of links and images, in Markdown and in HTML."""
    for token in MARKDOWN.parse(markdown):
        for part in (token, *(token.children or ())):
            yield from (str(part.attrs[key]) for key in ("href", "src") if key in part.attrs)
            if part.type in ("html_block", "html_inline"):
                yield from re.findall(r'(?:href|src|srcset)="([^"]+)"', part.content)


def anchors(markdown: str) -> set[str]:
    """Anchors of headings, as code hosts make them."""
    headings = [text.content for token, text in pairwise(MARKDOWN.parse(markdown)) if token.type == "heading_open"]
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def is_broken(page: Path, link: str) -> bool:
    """Return True if a link leads to no file, heading or public host."""
    parts = urlsplit(link)
    if parts.scheme:
        host = parts.hostname or ""
        return parts.scheme not in ("http", "https") or "." not in host or host.startswith("example.")
    target = (page.parent / parts.path).resolve() if parts.path else page
    if not target.exists() or ROOT not in target.parents:
        return True
    return bool(parts.fragment) and parts.fragment not in anchors(target.read_text(encoding="utf-8"))


def test_links_lead_somewhere_and_paths_are_not_of_one_machine() -> None:
    problems = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        problems += [f"{name(page)}: {link}" for link in links(text) if is_broken(page, link)]
        paths = {*ABSOLUTE_PATH.findall(text)} - {"/usr/", "/dev/", "/proc/", "/path/"}
        problems += [f"{name(page)}: {path}" for path in sorted(paths)]
    assert problems == []


def test_sentences_are_short() -> None:
    assert {name(page): text for page in FOR_USERS for text in long_sentences(page.read_text(encoding="utf-8"))} == {}


def test_readme_and_pages_are_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
    pages = [*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 19_500


@pytest.mark.parametrize("page", [page for page in PAGES if DOCS in page.parents], ids=name)
def test_a_page_reads_as_markdown_on_a_code_host(page: Path) -> None:
    """No directives, roles or labels of a site generator, and pictures that exist once."""
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"^(```|:::)\{|^\([\w-]+\)=$|\{\w+\}`|<!-- reference:|<picture>", text, re.MULTILINE)
    assert text.startswith("# ")


def test_broken_links_and_long_sentences_are_reported() -> None:
    page, long = ROOT / "README.md", " ".join(["word"] * 26)
    broken = [
        "no-such.md",
        "README.md#no-such",
        "#no-such",
        "../../outside.md",
        "https://example.com",
        "http://localhost",
    ]
    assert [link for link in broken if not is_broken(page, link)] == []
    assert [*links('| a |\n|---|\n| [x](y.md) |\n\n[fine](CHANGELOG.md)\n\n<img src="z.svg">\n')] == [
        "y.md",
        "CHANGELOG.md",
        "z.svg",
    ]
    markdown = f"Short. {long}!\n\n```text\n{long}\n```\n\n| {long} |\n|---|\n\n<!-- {long} -->\n"
    assert long_sentences(markdown) == [f"{long}!"]
