"""Every command with its help, as a terminal of 80 columns prints it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

from fp8tune.cli.program import command_line
from fp8tune_reference.markdown import code, sections, table


def part() -> str:
    """Return a section for each command."""
    return sections(*(f"## {code(path)}\n\n```text\n{text}\n```" for path, text in helps()))


def overview() -> str:
    """Return a table with a line for each command."""
    return table(["command", "what it does"], [(code(path), _summary(command)) for path, command, _ in _commands()])


def helps() -> list[tuple[str, str]]:
    """Return each command's name and its help."""
    with mock.patch.dict(os.environ, COLUMNS="80"):
        return [(path, command.get_help(context).rstrip()) for path, command, context in _commands()]


def _commands() -> Iterator[tuple[str, Any, Any]]:
    program = command_line()
    root = program.make_context("fp8tune", ["db"], resilient_parsing=True)
    for name in program.list_commands(root):
        command = program.commands[name]
        context = type(root)(command, info_name=name, parent=root)
        yield context.command_path, command, context
        for child, below in getattr(command, "commands", {}).items():
            inner = type(root)(below, info_name=child, parent=context)
            yield inner.command_path, below, inner


def _summary(command: Any) -> str:
    return str(command.help).strip().split("\n\n")[0].replace("\n", " ")
