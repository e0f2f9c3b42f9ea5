"""``fp8tune record``."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from fp8tune.errors import UsageError
from fp8tune.options import Argument, Group, JsonOrTable, Option, TableFormat, examples

KILLED = range(129, 193)
"""Exit codes of a program that a signal ended."""


@examples(
    ("The kernels of a training script", "fp8tune record -o run.json -- python train.py"),
    ("Of all ranks", "fp8tune record -o run.json -- torchrun --nproc-per-node 8 train.py"),
    ("Kernels without an autotuner too", "fp8tune record --jit 'my_kernels:*' -- python train.py"),
)
def record(
    command: Annotated[tuple[str, ...], Argument("The program and its arguments.", "-- COMMAND...")] = (),
    output: Annotated[
        str, Option("-o, --output", "Where the recording goes.", group=Group.OUTPUT, placeholder="FILE")
    ] = "recording.json",
    jit: Annotated[
        tuple[str, ...],
        Option(
            "--jit",
            "Also bare @triton.jit kernels: module:name or name, with wildcards. Repeatable.",
            placeholder="PATTERN",
        ),
    ] = (),
    no_values: Annotated[
        bool, Option("--no-values", "Store integer tensors of at most 64 elements only, larger ones by their range.")
    ] = False,
    format: JsonOrTable = TableFormat.TABLE,
) -> None:
    """Record which autotuned Triton kernels a program launches.

    Writes down what each is launched with, and how often. For any Python program, script or module, with all its
    child processes: fp8tune record -- torchrun train.py. The exit code is the program's, and 2 where nothing was
    recorded.
    """
    from fp8tune.render.recording import print_recording
    from fp8tune.render.terminal import notice
    from fp8tune.replay import program
    from fp8tune.replay.recording import text_of

    if not command:
        raise UsageError("give the program to record: fp8tune record -o run.json -- python train.py")
    path = Path(output)
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"cannot write {output!r}: name a file in a folder that exists")
    if _is_no_recording(path):
        raise UsageError(f"{output!r} is no recording, and is left as it is: name another file")
    sys.stdout.flush()
    ended = program.run(command, jit, None if format is TableFormat.JSON else _descriptor(), not no_values)
    if ended.recording is not None and ended.recording.kernels:  # one without kernels takes no other's place
        path.write_text(text_of(ended.recording), encoding="utf-8")
        print_recording(ended.recording, output, str(format))
        raise typer.Exit(ended.exit_code)
    if ended.recording is None and ended.exit_code in KILLED:
        notice("fp8tune: the program was killed before its recording was first written: nothing is recorded")
        raise typer.Exit(ended.exit_code)
    why = (
        "no process of the program imported Triton: record what launches kernels, with a Python that reads PYTHONPATH"
        if ended.recording is None
        else "no autotuned kernel was launched: name bare @triton.jit kernels with --jit PATTERN"
    )
    if ended.exit_code == 0:
        raise UsageError(why)
    notice(f"fp8tune: {why}")
    raise typer.Exit(ended.exit_code)


def _is_no_recording(path: Path) -> bool:
    """Whether a file holds something else, such as the program itself."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        return b'"fp8tune_recording"' not in file.read(100)


def _descriptor() -> int | None:
    """Of this command's own output; None where tests have replaced it."""
    try:
        return sys.stdout.fileno()
    except (io.UnsupportedOperation, AttributeError):
        return None
