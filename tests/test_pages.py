"""What README and documentation say is short, and their links lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from places import ROOT

from benchmarks.printed import BLOCK

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PLAIN = [
    ROOT / "README.md",
    *(ROOT / "docs" / page for page in ("index.md", "faq.md", "limits.md", "results/index.md")),
] + [
    page
    for folder in ("tutorial", "howto", "concepts", "reference")
    for page in sorted((ROOT / "docs" / folder).rglob("*.md"))
]
"""Pages for those who begin: no sentence of over 25 words."""

LONGEST = 25

_END = re.compile(r"(?<!\be\.g\.)(?<!\bi\.e\.)(?<!\bvs\.)(?<=[.!?])[\"')\]]*\s+")
_OUTSIDE = re.compile(r"(?<![\w.~/:$<-])/[a-z][\w.-]*/")
_MARKDOWN = MarkdownIt("commonmark").enable("table")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def texts(markdown: str) -> Iterator[list[Token]]:
    """The inline tokens of each paragraph, list item and heading: no code block, no table, no comment."""
    in_table = False
    for token in _MARKDOWN.parse(markdown):
        in_table = token.type == "table_open" or (in_table and token.type != "table_close")
        if token.type == "inline" and not in_table:
            yield token.children or []


def sentences(markdown: str) -> Iterator[str]:
    """The sentences of a page. Code within a line is one word; of a link its text counts.

    What commands print is none.
    """
    words = {"code_inline": "code", "softbreak": " ", "hardbreak": " "}
    for children in texts(BLOCK.sub("", markdown)):
        said = "".join(token.content if token.type == "text" else words.get(token.type, "") for token in children)
        yield from (sentence for sentence in _END.split(said) if sentence.strip())


def too_long(markdown: str) -> list[str]:
    return [sentence for sentence in sentences(markdown) if len(re.findall(r"\S*\w\S*", sentence)) > LONGEST]


def links(markdown: str) -> Iterator[str]:
    """Where links and pictures lead, those of HTML and of tables too."""
    for token in _MARKDOWN.parse(markdown):
        html = [token] if token.type == "html_block" else []
        for child in token.children or []:
            html += [child] if child.type == "html_inline" else []
            yield from (str(child.attrs[key]) for key in ("href", "src") if key in child.attrs)
        for tag in html:
            yield from re.findall(r'(?:href|src|srcset)="([^"]+)"', tag.content)


def anchors(markdown: str) -> set[str]:
    """The anchors of headings, as GitHub and the site make them."""
    tokens = _MARKDOWN.parse(markdown)
    headings = [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain} | set(
        re.findall(r"^\(([\w-]+)\)=$", markdown, re.MULTILINE)
    )


def broken(page: Path) -> list[str]:
    """Links of a page that lead nowhere: a file, a heading or a host that is none."""
    found = []
    for link in links(page.read_text(encoding="utf-8")):
        parts = urlsplit(link)
        if parts.scheme:
            host = parts.hostname or ""
            is_right = parts.scheme in ("http", "https") and "." in host and not host.startswith("example.")
        else:
            target = (page.parent / parts.path).resolve() if parts.path else page
            is_right = target.exists() and ROOT in target.parents
            if is_right and parts.fragment:
                is_right = target.suffix == ".md" and parts.fragment in anchors(target.read_text(encoding="utf-8"))
        found += [] if is_right else [link]
    return found


def test_the_readme_has_150_lines_at_most() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("page", PLAIN, ids=name)
def test_no_sentence_has_more_than_25_words(page: Path) -> None:
    assert too_long(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_path_is_of_one_machine_alone(page: Path) -> None:
    roots = {found.group() for found in _OUTSIDE.finditer(page.read_text(encoding="utf-8"))}
    assert roots <= {"/usr/", "/dev/", "/proc/", "/path/"}


LONG = " ".join(["word"] * 26)


@pytest.mark.parametrize(
    "text",
    [
        f"{LONG}.",
        f"Short. {LONG}! Short.",
        f"- short\n- {LONG}\n",
        f"One of {'`a b c` ' * 24}.",
        f"[{LONG}](README.md)",
        f"Of version 3.6 {'it ' * 12}\n**{'is ' * 12}**.",
        f"> {LONG}",
    ],
)
def test_a_planted_long_sentence_is_found(text: str) -> None:
    assert len(too_long(f"# Heading\n\n{text}\n")) == 1


@pytest.mark.parametrize(
    "text",
    [
        f"    {LONG}",
        f"```console\n{LONG}\n```",
        f"| a | b |\n|---|---|\n| {LONG} | c |",
        f"<!-- {LONG} -->",
        f"<!-- begin: fp8tune compare -->\n{LONG}\n<!-- end -->",
        "Ten words are in each of these two sentences. " * 3,
        f"- {'word ' * 20}\n- {'word ' * 20}\n",
        f"{'word ' * 24}`two words`.",
        f"[{'word ' * 20}](a-link-{'long' * 30})",
    ],
)
def test_what_is_no_long_sentence_is_let_pass(text: str) -> None:
    assert too_long(f"# Heading\n\n{text}\n") == []


@pytest.mark.parametrize(
    "link", ["no-such.md", "README.md#no-such", "#no-such", "../outside.md", "https://example.com", "http://localhost"]
)
def test_a_planted_broken_link_is_found(link: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = tmp_path / "README.md"
    page.write_text(f"# A heading: `one`\n\n[fine](#a-heading-one) [fine](README.md#a-heading-one) [not]({link})\n")
    assert broken(page) == [link]
    page.write_text(f"# A heading\n\n| a |\n|---|\n| [x]({link}) |\n\n<img src='no'>\n<img src=\"{link}\">\n")
    assert broken(page) == [link, link]
