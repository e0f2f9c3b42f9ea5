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
BESIDE = "cp docs/examples/swiglu.py docs/examples/swiglu.json ."
SESSION = (
    "fp8tune sweep --kernel swiglu:kernel --recording swiglu.json --timer simulated:5 --db swiglu.db",
    "fp8tune show --kernel swiglu:kernel --db swiglu.db | tail -7",
    "fp8tune export --for diff --arch simulated --kernel swiglu:kernel --db swiglu.db | head -14",
)
"""Commands that need no GPU, and print the same on each machine."""

WIDTH = 100


def lines() -> list[str]:
    """The session as text: each command after a prompt, then what it prints."""
    said: list[str] = []
    with printed.folder():
        printed.run(BESIDE)
        for command in SESSION:
            first, *filters = command.split(" | ")
            says = " 2>&1" if "sweep" in first else ""  # its progress
            text = printed.run(" | ".join([f"{first}{says}", *filters])).text
            said += [f"$ {command}", *text.splitlines(), ""]
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
