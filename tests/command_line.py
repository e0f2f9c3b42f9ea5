"""The command line in this process: what a command prints and how it ends, without the seconds that a start takes.

Commands that compile kernels need a process of their own: here Triton is on its interpreter.
"""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from fp8tune import cli


class Ended(NamedTuple):
    """A command that has ended, in the words of :class:`subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str


def environment() -> dict[str, str]:
    """This one's, without the interpreter: each command decides for itself."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def fp8tune(*arguments: object, cwd: Path | None = None) -> Ended:
    """Run one command to its end."""
    out, error, code = io.StringIO(), io.StringIO(), 0
    with contextlib.ExitStack() as around:
        around.enter_context(mock.patch("sys.argv", ["fp8tune", *map(str, arguments)]))
        around.enter_context(contextlib.chdir(cwd or "."))
        around.enter_context(contextlib.redirect_stdout(out))
        around.enter_context(contextlib.redirect_stderr(error))
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Ended(code, out.getvalue(), error.getvalue())
