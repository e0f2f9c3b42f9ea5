"""The README as package indexes show it: its links lead to the repository, where there are no files beside it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PAGES = "https://github.com/fp8tune/fp8tune/blob/v{version}/"
IMAGES = "https://raw.githubusercontent.com/fp8tune/fp8tune/v{version}/"

_ELSEWHERE = r"(?![a-z]+:|#|/)"
_IMAGE = re.compile(rf'(!\[[^\]]*\]\(|\bsrc="|\bsrcset="){_ELSEWHERE}')
_LINK = re.compile(rf'((?<!!)\[[^\[\]]*\]\(|\bhref="){_ELSEWHERE}(?=[\w./#-]+[)"])')
_CODE = re.compile(r"(^```.*?^```$|^    .*?$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


class ReadmeHook(MetadataHookInterface):
    """Gives ``readme``, which pyproject.toml declares as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the README of this version."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, metadata["version"])}


def absolute(text: str, version: str) -> str:
    """Markdown whose relative links and images are those of a tagged version. Code stays as it is."""
    return "".join(part if index % 2 else _absolute(part, version) for index, part in enumerate(_CODE.split(text)))


def _absolute(text: str, version: str) -> str:
    images = IMAGES.format(version=version)
    return _LINK.sub(rf"\1{PAGES.format(version=version)}", _IMAGE.sub(rf"\1{images}", text))
