"""``--help`` and shell completion, as a user and a shell meet them."""

from __future__ import annotations

import os
import shlex
from unittest import mock

import pytest
from command_line import fp8tune

from fp8tune import cli
from fp8tune.options import Example
from fp8tune.plan.shapes import list_sets
from fp8tune.render.help import Commands
from fp8tune_kernels.catalog import KERNELS

PROGRAM = cli.program()
COMMANDS = PROGRAM.commands  # type: ignore[attr-defined]
EXAMPLES: list[Example] = [*Commands.examples, *(one for command in COMMANDS.values() for one in command.examples)]


@pytest.mark.parametrize("width", [60, 80, 100, 140])
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_the_terminal_and_uses_it(name: str, width: int) -> None:
    with mock.patch.dict(os.environ, {"COLUMNS": str(width)}):
        shown = fp8tune(*([name] if name else []), "-h")
    assert shown.returncode == 0
    assert shown.stdout == shown.stdout.replace("\x1b", "")  # plain where it is no terminal
    lines = shown.stdout.splitlines()
    assert max(map(len, lines)) <= width
    if name not in ("", "completion"):  # all of them is short
        assert any(len(line) > width * 0.75 for line in lines[1:])


def test_each_command_is_said_in_one_line_of_80_columns() -> None:
    with mock.patch.dict(os.environ, {"COLUMNS": "80"}):
        shown = fp8tune("-h").stdout
    listed = shown.partition("Options:")[0].splitlines()
    assert {line.split()[0] for line in listed if line.startswith("  ")} == set(COMMANDS)


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_examples_can_be_copied_from_a_narrow_terminal(name: str) -> None:
    with mock.patch.dict(os.environ, {"COLUMNS": "50"}):
        shown = fp8tune(*([name] if name else []), "-h").stdout
    lines = shown.partition("Examples:")[2].replace("\\\n", "").splitlines()
    copied = [shlex.join(shlex.split(line)) for line in lines if line.startswith("    ")]
    given = Commands.examples if not name else COMMANDS[name].examples
    assert {shlex.join(shlex.split(one.command)) for one in given} <= set(copied)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: one.command)
def test_every_example_parses(example: Example) -> None:
    arguments = shlex.split(example.command)
    if arguments[0] == "eval":
        arguments = shlex.split(arguments[1].strip("$()"))
    assert arguments.pop(0) == "fp8tune"
    command = COMMANDS[arguments[0]]
    if "-h" not in arguments:
        command.make_context(arguments[0], arguments[1:], help_option_names=["-h", "--help"]).close()


def test_every_command_has_examples_and_a_format() -> None:
    for name, command in COMMANDS.items():
        assert command.examples, name
        flags = {flag for parameter in command.params for flag in parameter.opts}
        assert "--format" in flags or name == "completion", name  # which prints what a shell runs


def test_json_is_accepted_and_not_named() -> None:
    for name, command in COMMANDS.items():
        parameters = {flag: one for one in command.params for flag in one.opts}
        assert "--format" not in parameters or parameters["--json"].hidden, name
        assert "--json" not in fp8tune(name, "--help").stdout


def test_kernels_are_listed_once() -> None:
    assert all(kernel in fp8tune("sweep", "--help").stdout for kernel in KERNELS)
    assert "rowwise-2d" not in fp8tune("show", "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["swep"], "No such command 'swep'. Did you mean 'sweep'? (see fp8tune -h)"),
        (["sweep", "--shapes"], "Option '--shapes' requires an argument (see fp8tune sweep -h)"),
        (["lint"], "Missing argument 'KERNEL' (see fp8tune lint -h)"),
        (["show", "--format", "xml"], "(see fp8tune show -h)"),
    ],
)
def test_a_misuse_names_the_help_that_says_more(arguments: list[str], said: str) -> None:
    ended = fp8tune(*arguments)
    assert ended.returncode == 2
    assert ended.stderr.endswith(f"{said}\n")
    assert "Value error" not in ended.stderr


def asked(shell: str, line: str, **more: str) -> tuple[int, list[str]]:
    """The exit code, and the lines that a shell is answered for what is typed, ending where the cursor is."""
    words = line.split(" ")
    given = {
        "_FP8TUNE_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        **more,
    }
    with mock.patch.dict(os.environ, given):
        ended = fp8tune()
    assert ended.stderr == ""
    return ended.returncode, ended.stdout.replace('"', " ").split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("fp8tune sweep --kernel ", KERNELS),
        ("fp8tune lint mxfp8-dim", ["mxfp8-dim0", "mxfp8-dim1"]),
        ("fp8tune export --arch gfx", ["gfx90a", "gfx942", "gfx950"]),
        ("fp8tune sweep --shapes ", list_sets()),
        ("fp8tune sweep --time", ["--timer", "--time-budget"]),
        ("fp8tune show --format ", ["table", "json", "csv"]),
        ("fp8tune exp", ["export"]),
    ],
)
def test_shells_complete_names(shell: str, line: str, names: list[str]) -> None:
    _, answered = asked(shell, line)
    assert set(names) <= set(answered)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "nonesuch"])
@pytest.mark.parametrize(
    "line", ["fp8tune sweep --kernel 'unclosed", "fp8tune nonesuch --x ", "fp8tune sweep --seed x "]
)
def test_completion_never_fails_loudly(shell: str, line: str) -> None:
    asked(shell, line, COMP_CWORD="x")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_each_shell(shell: str) -> None:
    printed = fp8tune("completion", shell)
    assert (printed.returncode, printed.stderr) == (0, "")
    assert "_FP8TUNE_COMPLETE=complete_" + shell in printed.stdout
