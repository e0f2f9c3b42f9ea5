"""The pictures of the concept pages, each in light and dark: docs/images/NAME-light.svg and NAME-dark.svg.

python -m benchmarks.diagrams            # writes those that differ
python -m benchmarks.diagrams --check    # writes nothing; exit code 1 where one differs
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"

WIDTH = 640

PALETTES: Mapping[str, Mapping[str, str]] = {
    "light": {
        "box": "#f6f8fa",
        "line": "#8c959f",
        "name": "#1f2328",
        "text": "#59636e",
        "strong": "#0969da",
        "good": "#1a7f37",
    },
    "dark": {
        "box": "#1c2128",
        "line": "#6e7681",
        "name": "#e6edf3",
        "text": "#9198a1",
        "strong": "#58a6ff",
        "good": "#3fb950",
    },
}
"""The pages' own ground shows through: nothing is drawn behind."""


@dataclass(frozen=True)
class Picture:
    """What a picture shows; ``title`` is read to those who do not see it."""

    title: str
    height: int
    shapes: Sequence[str]


def svg(picture: Picture, palette: Mapping[str, str]) -> str:
    """The file."""
    title = escape(picture.title)
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {picture.height}" width="{WIDTH}" '
            f'height="{picture.height}" role="img" aria-label="{title}">',
            f"  <title>{title}</title>",
            "  <style>",
            f"    .box {{ fill: {palette['box']}; stroke: {palette['line']} }}",
            f"    .full {{ fill: {palette['strong']} }}",
            f"    .part {{ fill: {palette['good']} }}",
            f"    .arrow {{ stroke: {palette['line']}; stroke-width: 2; fill: none }}",
            f"    .tip {{ fill: {palette['line']} }}",
            f"    text {{ font-family: system-ui, sans-serif; fill: {palette['text']}; font-size: 16px }}",
            f"    .name {{ fill: {palette['name']}; font-size: 19px; font-weight: 600 }}",
            f"    .aside {{ fill: {palette['strong']}; font-size: 15px }}",
            f"    .good {{ fill: {palette['good']}; font-weight: 600 }}",
            "  </style>",
            *(f"  {shape}" for shape in picture.shapes),
            "</svg>\n",
        )
    )


def box(x: int, y: int, width: int, height: int, of: str = "box") -> str:
    """A rectangle."""
    return f'<rect class="{of}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'


def words(x: int, y: int, text: str, of: str = "", anchor: str = "start") -> str:
    """One line of text."""
    named = f' class="{of}"' if of else ""
    placed = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text{named} x="{x}" y="{y}"{placed}>{escape(text)}</text>'


def down(x: int, y: int, end: int) -> Iterator[str]:
    """An arrow downwards."""
    yield f'<path class="arrow" d="M{x} {y} V{end - 9}"/>'
    yield f'<path class="tip" d="M{x} {end} l-6 -10 h12 z"/>'


def right(x: int, y: int, end: int) -> Iterator[str]:
    """An arrow to the right."""
    yield f'<path class="arrow" d="M{x} {y} H{end - 9}"/>'
    yield f'<path class="tip" d="M{end} {y} l-10 -6 v12 z"/>'


def pick() -> Picture:
    """From all configs to one."""
    steps = (
        ("check", "every config, on the problem and its edges", "wrong ones leave"),
        ("screen", "three rounds in one process", "at most 8 stay"),
        ("finals", "fresh processes: 6, then 12, 24 and 48 if open", "one number a process"),
        ("decision", "proven faster, or tied: one config and a verdict", "the pick"),
    )
    shapes = []
    for place, (name, text, aside) in enumerate(steps):
        top = 10 + 100 * place
        shapes += [box(10, top, 620, 66), words(30, top + 41, name, "name"), words(145, top + 41, text)]
        if place + 1 < len(steps):
            shapes += [*down(70, top + 66, top + 100), words(92, top + 90, aside, "aside")]
    return Picture("Every config is checked, screened, timed again in finals, and one is decided on", 400, shapes)


def checked() -> Picture:
    """An output between its guards."""
    shapes = [
        box(10, 40, 150, 60),
        box(160, 40, 320, 60),
        box(480, 40, 150, 60),
        words(85, 76, "guard bytes", anchor="middle"),
        words(320, 76, "one output", "name", "middle"),
        words(555, 76, "guard bytes", anchor="middle"),
        words(320, 24, "before: filled with what cannot be right", "aside", "middle"),
        words(320, 130, "after: the reference's bytes", "good", "middle"),
        words(85, 130, "unchanged", "good", "middle"),
        words(555, 130, "unchanged", "good", "middle"),
    ]
    return Picture("An output lies between guard bytes; after a launch it has the reference's bytes", 145, shapes)


def ceiling() -> Picture:
    """A kernel's time beside the least that its problem can take."""
    shapes = [
        words(10, 24, "time of the kernel", "name"),
        box(10, 36, 620, 34),
        words(10, 104, "least time: its bytes at the ceiling's rate", "name"),
        box(10, 116, 434, 34, "part"),
        words(460, 139, "70 % of ceiling", "good"),
    ]
    return Picture("The share is the least time that the bytes take over the time of the kernel", 165, shapes)


def lookup() -> Picture:
    """The steps of a lookup."""
    steps = (
        ("1", "the row of the key", "this key was measured"),
        ("2", "the row of the nearest key", "the table names the kernel for it, and the row suits"),
        ("3", "the fallback row", "one config that loses least over all keys"),
        ("4", "the declared default", "always there"),
    )
    shapes = []
    for place, (number, name, when) in enumerate(steps):
        top = 10 + 88 * place
        shapes += [box(10, top, 500, 60), words(28, top + 37, number, "name")]
        shapes += [words(58, top + 26, name, "name"), words(58, top + 48, when)]
        shapes += [*right(510, top + 30, 552), words(560, top + 35, "launch", "good")]
        if place + 1 < len(steps):
            shapes += [*down(36, top + 60, top + 88), words(54, top + 80, "else", "aside")]
    return Picture("A lookup tries the key, the nearest key, the fallback row and the default", 344, shapes)


PICTURES = {"pick": pick, "checked": checked, "ceiling": ceiling, "lookup": lookup}


def files() -> dict[Path, str]:
    """Path -> text of every picture."""
    return {
        IMAGES / f"{name}-{theme}.svg": svg(draw(), palette)
        for name, draw in PICTURES.items()
        for theme, palette in PALETTES.items()
    }


def main() -> None:
    """Write or check the files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a picture differs")
    check = parser.parse_args().check
    stale = [path for path, text in files().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if not check:
            path.write_text(files()[path], encoding="utf-8")
        print(f"{path.name}: {'stale: run python -m benchmarks.diagrams' if check else 'written'}")
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
