"""``fp8tune record``."""

from __future__ import annotations

import io
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from fp8tune.errors import UsageError
from fp8tune.options import RecordOptions
from fp8tune.output import record as screens
from fp8tune.output.tables import notice
from fp8tune.replay import program
from fp8tune.replay.recording import text_of

KILLED = range(129, 193)  # exit codes of a program that a signal ended


def record(options: RecordOptions) -> int:
    """Run the program, and write what it launched. Returns its exit code; with ``--strict`` 1 if it tuned."""
    if not options.command:
        raise UsageError("the program to record is missing: fp8tune record -o run.json -- python train.py")
    path = check_output(options.output)
    ended = program.run(options.command, options.kernel, descriptor())
    if ended.exit_code and ended.recording is not None and not ended.recording.device and needs_interpreter():
        notice("fp8tune: no GPU is visible here: put TRITON_INTERPRET=1 in front to record on Triton's interpreter")
    if ended.recording is not None and ended.recording.kernels:  # an empty one does not replace another
        path.write_text(text_of(ended.recording), encoding="utf-8")
        summary = screens.make_summary(ended.recording, options.output)
        screens.recording(summary, is_strict=options.strict).print()
        return ended.exit_code or int(options.strict and any(kernel.tuned_keys for kernel in summary.kernels))
    reason = f"nothing recorded: {nothing_recorded(ended, options.command, options.kernel)}"
    if ended.exit_code == 0:
        raise UsageError(reason)
    notice(f"fp8tune: {reason}")
    return ended.exit_code


def nothing_recorded(ended: program.Ended, command: Sequence[str], patterns: Sequence[str]) -> str:
    """Return the reason why a program left no recording."""
    if ended.exit_code in KILLED and ended.recording is None:
        return "the program was killed before its recording was first written"
    if ended.exit_code:
        return f"the program failed with exit code {ended.exit_code}, see above"
    if ended.recording is None:
        return "no process imported Triton: record what launches kernels, with a Python that reads PYTHONPATH"
    text = shlex.join(command)[:80]
    if patterns:
        return f"{text} launched no kernel that --kernel {' '.join(map(shlex.quote, patterns))[:80]} names"
    return f"{text} launched no autotuned kernel; for @triton.jit kernels add --kernel 'module:*'"


def needs_interpreter() -> bool:
    """Return True if kernels can run neither on a GPU nor, as it is not switched on, on Triton's interpreter."""
    from fp8tune.measure.device import probe

    return os.environ.get("TRITON_INTERPRET") != "1" and probe() is None


def check_output(name: str) -> Path:
    """Return the path of a recording to write. Raises UsageError if it cannot be, or is something else."""
    path = Path(name)
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"{name!r} cannot be written: name a file in a folder that exists")
    if path.is_file():
        with path.open("rb") as file:
            if (start := file.read(100)) and b'"fp8tune_recording"' not in start:  # such as the program itself
                raise UsageError(f"{name!r} is not a recording, and stays as it is: name another file")
    return path


def descriptor() -> int | None:
    """Return that of this command's output, which is the program's too; None where a notebook has replaced it."""
    sys.stdout.flush()
    try:
        return sys.stdout.fileno()
    except io.UnsupportedOperation:
        return None
