"""The program: its commands, and errors as one line with an exit code."""

from __future__ import annotations

import contextlib
import difflib
import functools
import gc
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NoReturn, cast

import typer

from fp8tune.cli import streams
from fp8tune.cli.adapter import build, print_help
from fp8tune.errors import Fp8tuneError, MachineError, UsageError
from fp8tune.redaction import command_line as command_text
from fp8tune.redaction import redacted
from fp8tune.stopping import Stopped, stopping_cleanly
from fp8tune.text import visible

# UsageError and ClickException of the click inside Typer
COMMAND_LINE_ERRORS: tuple[type[Exception], ...] = cast(Any, typer.BadParameter.__mro__[1:3])

LONGEST = 300  # characters of a message
RESUMES = "results are kept, and the same command resumes"


def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("-V", "--version", help="Print the versions of fp8tune, torch and Triton.")
    ] = False,
) -> None:
    if version:
        from importlib import metadata

        print(", ".join(f"{name} {metadata.version(name)}" for name in ("fp8tune", "torch", "triton")))
    else:
        print_help(context)


def main() -> None:
    """Run the command line of this process."""
    if "_FP8TUNE_COMPLETE" in os.environ:
        command_line()(prog_name="fp8tune")
    gc.set_threshold(100_000)  # at Python's own threshold, a tenth of a short command's time is garbage collection
    try:
        with stopping_cleanly(), streams.own_output():
            code = _run(sys.argv[1:])
    except Fp8tuneError as error:
        _fail(str(error), error.exit_code)
    except COMMAND_LINE_ERRORS as error:
        _fail(_usage_message(error), UsageError.exit_code)
    except (KeyboardInterrupt, typer.Abort) as stopped:
        _fail(f"stopped{_notes(stopped)}", 130)
    except Stopped as stopped:
        _fail(f"stopped by {stopped.name}{_notes(stopped)}", stopped.exit_code)
    except OSError as error:  # a path that is too long, a folder in place of a file, no more processes
        file = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        _fail(f"{file}{error.strerror or error}: check the path, its permissions and the disk", MachineError.exit_code)
    sys.exit(code)


@functools.cache  # Typer takes 20 ms to build it
def command_line() -> Any:
    """Return the whole command line."""
    return build(_root)


def _run(arguments: list[str]) -> int:
    """Run one command. Typer's ``main`` would end at Ctrl-C and at a broken pipe without a message."""
    program = command_line()
    try:
        with program.make_context("fp8tune", arguments) as context:
            return program.invoke(context) or 0
    except typer.Exit as ended:  # --help
        return ended.exit_code


@contextlib.contextmanager
def end_note(note: Callable[[], str]) -> Iterator[None]:
    """Let the message of a signal that ends the block say what is kept."""
    try:
        yield
    except (KeyboardInterrupt, Stopped) as stopped:
        stopped.add_note(note())
        raise


def this_command() -> str:
    """Return the command line of this process as the database keeps it."""
    return command_text(map(shlex.quote, sys.argv[1:]))


def _notes(stopped: BaseException) -> str:
    default = [RESUMES] if {*sys.argv[1:2]} & {"sweep", "recheck", "tune"} else []  # others store nothing
    return "".join(f"; {note}" for note in getattr(stopped, "__notes__", default))


def _usage_message(error: Any) -> str:
    """Return Typer's error as thing, problem and fix."""
    path = getattr(getattr(error, "ctx", None), "command_path", "")
    path = path or " ".join(["fp8tune", *(word for word in sys.argv[1:2] if word in command_line().commands)])
    message = " ".join(error.format_message().split()).rstrip(".")
    option = getattr(error, "option_name", "")
    near = " or ".join(difflib.get_close_matches(option, getattr(error, "possibilities", None) or (), n=2))
    fix = f"did you mean {near}?" if near else f"see {path} --help"
    if match := re.match("No such command '(.*?)'", message):
        name = match[1]
        close = difflib.get_close_matches(name, error.ctx.command.list_commands(error.ctx))
        return f"unknown command {name!r:.80}: " + (f"did you mean {' or '.join(close)}?" if close else fix)
    if option:
        problem = "is unknown" if hasattr(error, "possibilities") else "needs a value"
        return f"option {option:.80} of {path} {problem}: {fix}"
    if parameter := getattr(error, "param", None):
        return f"{parameter.opts[-1]}: {error.message.removeprefix('Value error, ').rstrip('.')} (see {path} --help)"
    return f"{path}: {message} (see {path} --help)"


def _fail(message: str, code: int) -> NoReturn:
    if message:
        text = f"fp8tune: {visible(redacted(message))}"
        text = re.sub(r"(\S{30})\S{60,}(\S{30})", r"\1...\2", text)  # names and paths that somebody made long
        text = text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
        with contextlib.suppress(OSError):  # stderr may be broken, or a terminal that was closed
            print(text, file=sys.stderr, flush=True)
    sys.exit(code)
