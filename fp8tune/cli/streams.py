"""Standard output is for results alone; whatever else is printed goes to standard error."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from fp8tune.errors import Fp8tuneError, MachineError

_OUTPUT, _ERROR = 1, 2  # file descriptors


class ReaderLeft(Fp8tuneError):  # noqa: N818 - no error of the user's
    """The reader of the output has ended, as ``head`` does. Has no message, and the exit code of a SIGPIPE."""

    exit_code = 141


@contextlib.contextmanager
def own_output() -> Iterator[None]:
    """Results get a descriptor of their own; what specs, kernels in C and child processes print goes to stderr.

    A stdout that tests replaced stays. Raises ReaderLeft or MachineError where the output cannot be written.
    """
    _check_open()
    if sys.stdout is not sys.__stdout__ or sys.stderr is not sys.__stderr__:
        yield
        return
    before = sys.stdout, sys.stderr
    results, notices = _opened(_OUTPUT, sys.stdout, "stdout"), _opened(_ERROR, sys.stderr, "stderr")
    os.dup2(_ERROR, _OUTPUT)
    sys.stdout, sys.stderr = results, notices
    try:
        yield
        results.flush()
    finally:
        sys.stdout, sys.stderr = before
        os.dup2(results.fileno(), _OUTPUT)
        for stream in (results, notices):
            with contextlib.suppress(Fp8tuneError, OSError):  # raised before
                stream.close()


def _check_open() -> None:
    """Open what was closed, because the next file to be opened, such as the database, would take its place."""
    is_closed = sys.stdout is None
    for number, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)):
        if stream is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
    sys.stderr = sys.stderr or open(_ERROR, "w", closefd=False)  # noqa: SIM115 - for the rest of the process
    if is_closed:
        sys.stdout = open(_OUTPUT, "w", closefd=False)  # noqa: SIM115
        raise MachineError("stdout is closed, and results go there: redirect it to a file or to /dev/null")


def _opened(number: int, like: Any, name: str) -> TextIO:
    raw = io.FileIO(os.dup(number), "wb")
    return _Checked(raw, name, like.encoding, is_line_buffered=name == "stderr" or raw.isatty())


class _Checked(io.TextIOWrapper):
    """A stream whose errors differ from those of other files.

    They are caught here and not where bytes are written: a signal that is heard after a Python method wrote them, and
    before it returns, would leave the buffer full, and its closing would write them again.
    """

    def __init__(self, raw: io.FileIO, name: str, encoding: str, *, is_line_buffered: bool) -> None:
        super().__init__(io.BufferedWriter(raw), encoding, "backslashreplace", line_buffering=is_line_buffered)
        self._label = name

    def write(self, text: str, /) -> int:
        """Raises ReaderLeft or MachineError."""
        with self._converted_errors():
            return super().write(text)

    def flush(self) -> None:
        """Raises ReaderLeft or MachineError."""
        with self._converted_errors():
            super().flush()

    @contextlib.contextmanager
    def _converted_errors(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise ReaderLeft from None
        except OSError as error:
            raise MachineError(f"{self._label} cannot be written: {error.strerror}; redirect it elsewhere") from None
