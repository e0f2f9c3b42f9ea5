"""``docs/your-kernel.md`` shows the examples as they are, and they can be swept."""

from __future__ import annotations

import re

import pytest
from places import ROOT

EXAMPLES = ROOT / "docs" / "examples"
TEXT = (ROOT / "docs" / "your-kernel.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["add_spec.py", "add.toml"])
def test_the_document_shows_the_example(name: str) -> None:
    blocks = re.findall(r"```(?:python|toml)\n(.*?)```", TEXT, re.DOTALL)
    assert (EXAMPLES / name).read_text(encoding="utf-8") in blocks
