"""The recorded terminal session of the README: an SVG of real commands and what they print.

python -m benchmarks.terminal_session        # writes docs/images/session.svg, from results.db and the simulated clock
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from benchmarks import printed

TARGET = printed.ROOT / "docs" / "images" / "session.svg"
SESSION = (
    "fp8tune show --kernel rowwise-2d --arch sm_90 | head -7",
    "fp8tune export --arch sm_90 --check --db results.db",
)
"""Commands that need no GPU, and print the same on each machine."""

WIDTH = 132


def lines() -> list[str]:
    """The session as text: each command after a prompt, then its output."""
    said: list[str] = []
    with printed.folder():
        for command in SESSION:
            said += [f"$ {command}", *printed.run(f"{command}").text.splitlines(), ""]
    return said[:-1]


def svg(lines: Sequence[str]) -> str:
    """A terminal window with these lines."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for line in lines:
        console.print(Text(line, style="bold green" if line.startswith("$") else ""), no_wrap=True, crop=True)
    return console.export_svg(title="fp8tune", unique_id="session")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=TARGET)
    parser.parse_args(arguments).output.write_text(svg(lines()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
