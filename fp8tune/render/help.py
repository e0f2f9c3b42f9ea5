"""``--help``: options under headings, as wide as the terminal, with examples at the end. Plain text when piped."""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from fp8tune.options import Example, Group

WIDEST_FIRST_COLUMN = 30
NARROWEST = 40
OTHERS = "Options"


class Command(TyperCommand):
    """A command whose help is :func:`command_help`."""

    examples: Sequence[Example] = ()
    lists: Sequence[tuple[str, str]] = ()
    """Headings with a paragraph, after the options: names that several commands take."""

    def get_help(self, ctx: Any) -> str:
        """The text of ``--help``."""
        return command_help(self, ctx, self.examples, self.lists)


class Commands(TyperGroup):
    """The program, whose help names each command under its heading."""

    examples: Sequence[Example] = ()
    headings: dict[str, str] = {}  # noqa: RUF012 - set once, by the program
    """The heading of each command's name."""

    def get_help(self, ctx: Any) -> str:
        """The text of ``--help``."""
        return command_help(self, ctx, self.examples)


def command_help(
    command: Any, context: Any, examples: Sequence[Example] = (), lists: Sequence[tuple[str, str]] = ()
) -> str:
    """The help of a command, as wide as the terminal (``COLUMNS`` overrides it)."""
    width = max(NARROWEST, shutil.get_terminal_size().columns)
    lines = [f"{_heading('Usage')} {_usage(command, context)}"]
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        lines += ["", *textwrap.wrap(" ".join(paragraph.split()), width, break_on_hyphens=False)]
    if isinstance(command, TyperGroup):
        named = {name: command.get_command(context, name) for name in command.list_commands(context)}
        headings = getattr(command, "headings", {})
        rows = [(headings.get(name, "Commands"), name, _first_sentence(one)) for name, one in named.items() if one]
        lines += _sections(rows, dict.fromkeys(heading for heading, *_ in rows), width)
    parameters = [one for one in command.get_params(context) if not getattr(one, "hidden", False)]
    rows = [(getattr(one, "rich_help_panel", None) or OTHERS, _name(one), one.help or "") for one in parameters]
    lines += _sections(rows, [*map(str, Group), OTHERS], width)
    for heading, text in lists:
        lines += ["", _heading(heading)]
        lines += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    if examples:
        lines += ["", _heading("Examples")]
        for one in examples:
            lines += [*textwrap.wrap(f"{one.what}:", width, initial_indent="  ", subsequent_indent="  ")]
            lines += _command_line(one.command, width)
    return "\n".join(lines)


def _command_line(command: str, width: int) -> list[str]:
    """A command line that can be copied, over several lines where it is long; options keep their values."""
    kept = re.sub(" (?!-)", "\0", command)
    lines = textwrap.wrap(kept, width - len("    ") - len(" \\"), break_on_hyphens=False, break_long_words=False)
    begins = ["    ", *["      "] * (len(lines) - 1)]
    ends = [*[" \\"] * (len(lines) - 1), ""]
    return [begin + line.replace("\0", " ") + end for begin, line, end in zip(begins, lines, ends, strict=True)]


def _heading(text: str) -> str:
    return typer.style(f"{text}:", bold=True)  # the printer removes it where the output is no terminal


def _usage(command: Any, context: Any) -> str:
    if isinstance(command, TyperGroup):
        return f"{context.command_path} COMMAND [OPTIONS]"
    arguments = [_name(one) for one in command.get_params(context) if one.param_type_name == "argument"]
    return " ".join((context.command_path, "[OPTIONS]", *arguments))


def _first_sentence(command: Any) -> str:
    first = " ".join(inspect.cleandoc(command.help or "").split("\n\n")[0].split())
    return first.partition(". ")[0].removesuffix(".")


def _name(one: Any) -> str:
    """``-o, --output FILE``, or an argument's placeholder."""
    if one.param_type_name == "argument":
        return str(one.metavar or one.name.upper())
    names = ", ".join(sorted(one.opts, key=len))
    return names if getattr(one, "is_flag", False) or not one.metavar else f"{names} {one.metavar}"


def _sections(rows: Sequence[tuple[str, str, str]], order: Iterable[str], width: int) -> list[str]:
    """Each heading that has rows, with all names in one column."""
    short = [len(name) for _, name, _ in rows if len(name) <= WIDEST_FIRST_COLUMN]
    column = max(short, default=0) + 4
    lines: list[str] = []
    for heading in order:
        if found := [(name, text) for where, name, text in rows if where == heading]:
            lines += ["", _heading(heading)]
            for name, text in found:
                lines += _row(name, text, column, width)
    return lines


def _row(name: str, text: str, column: int, width: int) -> list[str]:
    wrapped = textwrap.wrap(text, width - column, break_on_hyphens=False, break_long_words=False) or [""]
    fits = len(name) + 4 <= column
    first = [] if fits else [f"  {name}"]
    begun = f"  {name}".ljust(column) if fits else " " * column
    return [*first, (begun + wrapped[0]).rstrip(), *(" " * column + line for line in wrapped[1:])]
