"""Write what commands print into README and documentation.

    <!-- generated: fp8tune show colwise --device H100 | head -6 -->
    (what it prints)
    <!-- end -->

python -m benchmarks.printed                 # after rows or output changed: writes the blocks that differ
python -m benchmarks.printed --check         # writes nothing; a diff and exit code 1 if a block differs

A block may hold several commands, one per line: ``quiet: COMMAND`` is not shown, ``exit 1: COMMAND`` ends with that
exit code. The commands of a page share a folder, which has the committed database, the shape sets, ``docs/`` and
``benchmarks/``. ``fp8tune ...`` and ``python FILE`` are shown as a console, ``python -m MODULE`` prints Markdown, ``cat
FILE`` shows a file, and ``cp FILE... FOLDER`` shows nothing. ``| head -N``, ``| tail -N`` and ``2>&1`` work as in a
shell. Times that a command took are no part of the comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import io
import os
import re
import runpy
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from fp8tune import cli

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- generated:", "<!-- end -->"
BLOCK = re.compile(rf"({BEGIN} (?P<commands>.*?) -->\n)(?P<body>.*?){END}", re.DOTALL)
WIDTH = 100
"""Columns of the terminal whose text is shown."""

SHARED = ("results.db", "sweeps", "docs", "benchmarks")
"""Of the checkout, in the folder of a page."""

_DURATION = re.compile(r"\b\d[\d.,]* (s|min|h)\b")
_ENDS = re.compile(r"exit (\d+): (.+)")
_LANGUAGES = {".toml": "toml", ".py": "python", ".yml": "yaml", ".yaml": "yaml", ".json": "json"}


@dataclass(frozen=True)
class Printed:
    """Output of one command; ``is_markdown`` if the page holds it unquoted."""

    text: str
    is_markdown: bool = False
    language: str = "console"


def pages() -> list[Path]:
    """Return the pages that have a block."""
    results = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in results if BEGIN in path.read_text(encoding="utf-8")]


def updated(text: str) -> str:
    """Return a page as it should be. Raises ValueError for unpaired markers, and for a command that fails."""
    if not text.count(BEGIN) == text.count(END) == len(BLOCK.findall(text)):
        raise ValueError(f"each {BEGIN} COMMAND --> needs one {END} after it")
    with folder():
        return BLOCK.sub(_block, text)


def _block(match: re.Match[str]) -> str:
    shown = "".join(_shown(line.strip()) for line in match["commands"].splitlines() if line.strip())
    shown = shown.replace("\n```\n```console\n", "\n\n")  # one console for all commands of a block
    stored, new = (_DURATION.sub("? s", text) for text in (match["body"], shown))
    return f"{match[1]}{match['body'] if stored == new else shown}{END}"


def _shown(command: str) -> str:
    if command.startswith("quiet:"):
        run(command.removeprefix("quiet:").strip())
        return ""
    code, command = match.groups() if (match := _ENDS.fullmatch(command)) else ("0", command)
    printed = run(command, int(code))
    if printed.is_markdown:
        return f"\n{printed.text.strip()}\n\n"  # lists and headings need blank lines around them
    typed = f"$ {command}\n" if printed.language == "console" else ""
    return f"```{printed.language}\n{typed}{printed.text.rstrip()}\n```\n"


def run(command: str, expected: int = 0) -> Printed:
    """Return what a command in a block prints. Raises ValueError for an exit code other than ``expected``."""
    first, *filters = command.split(" | ")
    program, *arguments = shlex.split(first.removesuffix(" 2>&1"))
    if program == "cp":
        for item in arguments[:-1]:
            shutil.copy(item, arguments[-1])
        return Printed("")
    if program == "cat":
        path = Path(arguments[0])
        language = _LANGUAGES.get(path.suffix, "text")
        return Printed(_filtered(path.read_text(encoding="utf-8"), filters), language=language)
    out = io.StringIO()
    error = out if first.endswith(" 2>&1") else io.StringIO()
    is_module, code = program == "python" and arguments[0] == "-m", 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            if is_module:
                importlib.import_module(arguments[1]).main(arguments[2:])
            elif program == "python":
                with mock.patch("sys.argv", arguments):
                    runpy.run_path(arguments[0], run_name="__main__")
            else:
                with mock.patch("sys.argv", ["fp8tune", *arguments]):
                    cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    if code != expected:
        raise ValueError(f"{command} ends with exit code {code}: {error.getvalue().strip()}")
    here = out.getvalue().replace(f"{ROOT}/", "")  # as in any checkout
    return Printed(_filtered(here, filters), is_module or "--format markdown" in first)


def _filtered(text: str, filters: Sequence[str]) -> str:
    lines = [line.rstrip() for line in text.splitlines()]
    for item in filters:
        name, count = item.split(" -")
        lines = lines[: int(count)] if name == "head" else lines[-int(count) :]
    return "\n".join(lines)


@contextlib.contextmanager
def folder() -> Iterator[None]:
    """Change to a new folder without the database and the tables of whoever runs this."""
    with tempfile.TemporaryDirectory() as name:
        for shared in SHARED:
            (Path(name) / shared).symlink_to(ROOT / shared)
        alone = {"COLUMNS": str(WIDTH), "XDG_DATA_HOME": f"{name}/.data", "FP8TUNE_TABLES": "", "NO_COLOR": "1"}
        with mock.patch.dict(os.environ, alone), contextlib.chdir(name):
            for variable in ("FP8TUNE_DB", "FP8TUNE_BASE"):
                os.environ.pop(variable, None)
            try:
                yield
            finally:
                _forget_modules(Path(name).resolve())


def _forget_modules(folder: Path) -> None:
    """Forget modules of a folder: the next one may have others of the same names."""
    for name, module in list(sys.modules.items()):
        path = os.path.abspath(getattr(module, "__file__", None) or "/")  # to resolve a thousand takes half a second
        if f"{folder.name}{os.sep}" in path and folder in Path(path).resolve().parents:
            del sys.modules[name]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check every page. Return 1 if ``--check`` found a difference."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.printed", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a block differs")
    parser.add_argument("pages", nargs="*", type=Path, help="default: every page that has a block")
    options = parser.parse_args(arguments)
    stale = 0
    for page in [path.resolve() for path in options.pages] or pages():
        text = page.read_text(encoding="utf-8")
        expected = updated(text)
        name = str(page.relative_to(ROOT))
        if expected != text and options.check:
            stale = 1
            sys.stdout.writelines(difference(text, expected, name))
        elif expected != text:
            page.write_text(expected, encoding="utf-8")
        print(f"{name}: {'unchanged' if expected == text else 'stale' if options.check else 'written'}")
    return stale


def difference(text: str, expected: str, name: str) -> Iterator[str]:
    """Return a unified diff from a page to what it should be."""
    return difflib.unified_diff(text.splitlines(True), expected.splitlines(True), name, f"{name}, as commands print it")


if __name__ == "__main__":
    sys.exit(main())
