"""Hooks of mkdocs: the pages are plain Markdown for a code host, and the site has what they link to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"
REPOSITORY = "https://github.com/fp8tune/fp8tune"
ORDER = ("Tutorial", "How-to", "Concepts", "Reference", "Results")
"""Tabs of the site, after its first page and before the other single pages."""

LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Let links to what is no page of the site lead to the repository."""
    folder = (DOCS / page.file.src_uri).parent

    def target(link: re.Match[str]) -> str:
        path = (folder / link[1]).resolve()
        if DOCS in path.parents and path.suffix in (".md", ".svg", ".png"):
            return link[1]
        kind = "tree" if path.is_dir() else "blob"
        return f"{REPOSITORY}/{kind}/main/{path.relative_to(DOCS.parent)}"

    return LINK.sub(target, markdown)


def on_nav(nav: Any, **_: Any) -> Any:
    """Put the folders in the order in which a reader needs them."""
    for item in nav.items:
        if item.is_section and item.title == "Howto":
            item.title = "How-to"
    nav.homepage.title = "Home"
    places = {title: place for place, title in enumerate(ORDER)}
    nav.items.sort(key=lambda item: places[item.title] if item.is_section else len(ORDER))
    nav.items.sort(key=lambda item: item is not nav.homepage)
    return nav
