"""Git repositories that tests make."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder, with an author."""
    command = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@t", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, files: Mapping[str, str | None], message: str = "files") -> None:
    """Write files, or delete those without a text, and commit all of the folder."""
    for name, text in files.items():
        file = folder / name
        if text is None:
            file.unlink()
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", message)
