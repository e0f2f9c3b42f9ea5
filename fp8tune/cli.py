"""The program: its commands, and the one place where errors become a line and an exit code."""

from __future__ import annotations

import contextlib
import gc
import sys
from typing import Annotated, Any, cast

import typer

from fp8tune import __version__
from fp8tune.commands import (
    bench,
    calibrate,
    compare,
    doctor,
    export,
    forget,
    import_,
    lint,
    show,
    static_report,
    sweep,
)
from fp8tune.errors import Fp8tuneError, UsageError
from fp8tune.redaction import redacted
from fp8tune.stopping import Stopped, stopping_cleanly

app = typer.Typer(
    name="fp8tune",
    help="Sweep launch configs of FP8 mixture-of-experts Triton kernels, keep every result, export the best.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

COMMAND_LINE_ERRORS: tuple[type[Exception], ...] = cast(Any, typer.BadParameter.__mro__[1:3])
"""UsageError and ClickException, of the click that this typer uses: newer ones bring their own."""

GOES_ON = "what a sweep has finished is stored, and the same command goes on from there"
"""What to know after a command was stopped."""


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"fp8tune {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


app.command()(sweep.sweep)
app.command()(bench.bench)
app.command()(calibrate.calibrate)
app.command()(show.show)
app.command(name="static-report")(static_report.static_report)
app.command()(export.export)
app.command()(lint.lint)
app.command(name="import")(import_.import_)
app.command()(forget.forget)
app.command()(compare.compare)
app.command()(doctor.doctor)


def main() -> None:
    """The console script: one place where errors become a line and an exit code."""
    gc.set_threshold(100_000)  # at Python's own, a short command spends a tenth of its time looking for garbage
    try:
        with stopping_cleanly():
            code = app(standalone_mode=False)
    except Fp8tuneError as error:
        _fail(str(error), error.exit_code)
    except COMMAND_LINE_ERRORS as error:
        _fail(f"{' '.join(str(error).split())} (see fp8tune --help)", UsageError.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _fail(f"stopped; {GOES_ON}", 130)
    except Stopped as stopped:
        _fail(f"stopped by {stopped.name}; {GOES_ON}", stopped.exit_code)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has left; nothing more to say
        sys.exit(0)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> None:
    line = redacted(message if message.isprintable() else ascii(message)[1:-1])
    with contextlib.suppress(OSError):  # a terminal that was closed takes no more lines
        print(f"fp8tune: {line}", file=sys.stderr, flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
