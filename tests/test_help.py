"""``--help``: its options, its width and its speed. Its examples run with those of the pages."""

from __future__ import annotations

import inspect
import os
import re
import resource
import subprocess
import sys
from unittest import mock

import pytest
import typer
from command_line import fp8tune

from fp8tune.cli.program import command_line
from fp8tune.plan.shapes import list_sets


def commands() -> dict[str, typer.core.TyperCommand]:
    """Return each command by its full name."""
    result = {}
    for name, command in command_line().commands.items():
        children = getattr(command, "commands", None)
        result |= {name: command} if children is None else {f"{name} {child}": sub for child, sub in children.items()}
    return result


@pytest.mark.parametrize("name", ["", *commands(), "db"])
def test_help_fits_80_columns(name: str) -> None:
    with mock.patch.dict(os.environ, COLUMNS="80"):
        done = fp8tune(*name.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert done.stdout.startswith(f"Usage: {' '.join(['fp8tune', *name.split()])} ")
    assert "..." not in done.stdout.partition("Commands:")[2]  # no summary is cut


def test_there_are_at_most_85_options_and_each_has_a_text() -> None:
    options = [
        parameter
        for command in commands().values()
        for parameter in command.params
        if parameter.param_type_name == "option" and not parameter.hidden
    ]
    assert len(options) <= 85
    assert all(option.help for option in options)


def test_sweep_names_every_shape_set() -> None:
    text = " ".join(fp8tune("sweep", "--help").stdout.split())
    assert all(name in text for name in list_sets())


def test_help_takes_little_cpu_time() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-X", "importtime", "-m", "fp8tune", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    for module in ("torch", "triton", "pandas", "numpy", "sqlalchemy", "pydantic", "rich.console"):
        assert not re.search(rf"\| +{re.escape(module)}$", done.stderr, re.MULTILINE), module
    assert after.ru_utime - before.ru_utime < 1.0  # 0.2 s on an idle machine


def test_the_api_does_not_import_typer() -> None:
    text = "import sys, fp8tune.api; print('typer' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout == "False\n"


def test_signatures_of_the_api_are_plain() -> None:
    import fp8tune as package

    for name in ("open", "sweep", "compare", "lookup", "export", "pin", "unpin"):
        assert inspect.isfunction(getattr(package, name)), name
        assert len(inspect.signature(getattr(package, name)).parameters) <= 8
