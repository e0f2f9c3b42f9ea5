"""A link within the built site that leads nowhere ends its build."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "docs" / "_ext"))

from fp8tune_links import broken


@pytest.mark.parametrize(
    ("link", "is_broken"),
    [
        ("other.html", False),
        ("other.html#there", False),
        ("folder/../other.html?x=1", False),
        ("#here", False),
        ("#", False),
        ("https://pypi.org/nowhere", False),
        ("mailto:a@b.org", False),
        ("no.html", True),
        ("other.html#no", True),
        ("#no", True),
    ],
)
def test_links_of_pages(link: str, is_broken: bool, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "other.html").write_text('<h1 id="there">x</h1>')
    (tmp_path / "page.html").write_text(f'<p id="here"><a href="{link}">x</a><img src="other.html"></p>')
    assert list(broken(tmp_path)) == ([f"page.html: {link} leads nowhere"] if is_broken else [])
