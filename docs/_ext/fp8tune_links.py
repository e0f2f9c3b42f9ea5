"""Links within the built pages lead somewhere: checked when the site is built, generated parts included."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """The links and anchors of one page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the links and the anchor of a tag."""
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name == "id" and value:
                self.anchors.add(value)


def broken(folder: Path) -> Iterator[str]:
    """A line for each link below a folder that leads to no file or anchor of it. Links to the network are not asked."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(folder.resolve().rglob("*.html"))}
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            named = unquote(parts.fragment)
            is_there = target.exists() and (not named or target not in pages or named in pages[target].anchors)
            if not is_there:
                yield f"{path.relative_to(folder.resolve())}: {link} leads nowhere"


def _check(app: Any, error: Exception | None) -> None:
    from sphinx.errors import SphinxError

    if error is None and app.builder.format == "html" and (found := list(broken(Path(app.outdir)))):
        raise SphinxError("\n".join(found))


def setup(app: Any) -> dict[str, Any]:
    """What Sphinx calls."""
    app.connect("build-finished", _check)
    return {"parallel_read_safe": True}
