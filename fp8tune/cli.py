"""The program: its commands, and where errors become a line and an exit code."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
from typing import Annotated, Any, NoReturn, cast

import typer

from fp8tune import __version__
from fp8tune.commands import (
    bench,
    calibrate,
    compact,
    compare,
    completing,
    completion,
    doctor,
    explain,
    export,
    forget,
    import_,
    lint,
    queue,
    record,
    report,
    show,
    sweep,
    worker,
)
from fp8tune.commands.options import as_command
from fp8tune.errors import Fp8tuneError, MachineError, UsageError
from fp8tune.options import Example
from fp8tune.redaction import redacted
from fp8tune.render import streams
from fp8tune.render.help import Command, Commands
from fp8tune.stopping import Stopped, stopping_cleanly
from fp8tune.sweep.options import LISTS
from fp8tune.text import visible

app = typer.Typer(
    name="fp8tune",
    help="Tune Triton kernels offline: check and time every launch config, keep every result, export the best.",
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

COMMAND_LINE_ERRORS: tuple[type[Exception], ...] = cast(Any, typer.BadParameter.__mro__[1:3])
"""UsageError and ClickException of the click that this typer uses: newer ones bring their own."""

GOES_ON = "what a sweep has finished is stored, and the same command goes on from there"


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("-V", "--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"fp8tune {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


COMMANDS = {
    "Find the best configs": (record, sweep, worker, queue, bench, calibrate),
    "Look at results": (show, explain, report, compare),
    "Use them": (export, lint),
    "Look after the database and this machine": (import_, compact, forget, doctor, completion),
}
"""Each command's module, under its heading in ``--help``."""

Commands.examples = (
    Example("Check and time every config of one kernel, then see the best", "fp8tune sweep --kernel colwise"),
    Example("See what is in the database, without a GPU", "fp8tune show --kernel colwise"),
    Example("The options and examples of a command", "fp8tune sweep -h"),
)

for _heading, _modules in COMMANDS.items():
    for _module in _modules:
        _function = getattr(_module, _module.__name__.rpartition(".")[2])  # named as its module
        _name = _function.__name__.strip("_").replace("_", "-")
        # what follows the recorded program's name is the program's
        _settings = {"allow_interspersed_args": False} if _module is record else {}
        _shown = {"examples": getattr(_function, "examples", ()), "lists": LISTS if _module is sweep else ()}
        _class = type("Command", (Command,), _shown)
        app.command(_name, cls=_class, context_settings=_settings)(as_command(_function))
        Commands.headings[_name] = _heading


def main() -> None:
    """The console script."""
    if completing.VARIABLE in os.environ:
        completing.answer_shell(program())
    gc.set_threshold(100_000)  # at Python's own, a tenth of a short command's time is garbage collection
    try:
        with stopping_cleanly(), streams.own_output():
            code = _run(sys.argv[1:])
    except Fp8tuneError as error:
        _fail(str(error), error.exit_code)
    except COMMAND_LINE_ERRORS as error:
        _fail(_misused(error), UsageError.exit_code)
    except (KeyboardInterrupt, typer.Abort) as stopped:
        _fail(f"stopped{_noted(stopped)}", 130)
    except Stopped as stopped:
        _fail(f"stopped by {stopped.name}{_noted(stopped)}", stopped.exit_code)
    except OSError as error:  # a path that is too long, a folder where a file should be, no more processes
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        _fail(f"{where}{error.strerror or error}: check the path, its rights and the disk", MachineError.exit_code)
    sys.exit(code)


@functools.cache  # of a process that runs several commands, such as one that makes the pages of the documentation
def program() -> Any:
    """The whole command line, which typer takes 20 ms to build."""
    return typer.main.get_command(app)


def _run(arguments: list[str]) -> int:
    """One command, not by typer's ``main``: that ends at Ctrl-C and a broken pipe without a word."""
    command = program()
    try:
        with command.make_context("fp8tune", arguments) as context:
            command.invoke(context)
    except typer.Exit as ended:
        return ended.exit_code
    return 0


def _noted(stopped: BaseException) -> str:
    """What the command noted of its own end, else what is so of all commands."""
    notes: list[str] = getattr(stopped, "__notes__", [])
    return "".join(f"; {note}" for note in notes or [GOES_ON])


def _misused(error: Any) -> str:
    """What is wrong with a command line, and whose help says more."""
    said = " ".join(error.format_message().split()).replace("Value error, ", "")  # str() leaves the option out
    commands = [word for word in sys.argv[1:2] if word in Commands.headings]
    return f"{said.removesuffix('.')} (see {' '.join(['fp8tune', *commands, '-h'])})"


def _fail(message: str, code: int) -> NoReturn:
    if message:
        with contextlib.suppress(OSError):  # stderr may be broken, or a terminal that was closed
            print(f"fp8tune: {visible(redacted(message))}", file=sys.stderr, flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
