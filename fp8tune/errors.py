"""What can go wrong for a user, as one tree. Every message is one line: what happened, and what to do about it.

    Fp8tuneError            exit code 2; printed without a traceback
    ├── UsageError          an argument, name, file or grid that cannot be used as given
    ├── DatabaseError       a results database that cannot be opened, read or written
    └── MachineError        something missing from this machine (a GPU, a compiler, git)

Foreign exceptions become these where they arise (store, plan, device, git). A failed trial is a row with a status.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

EXIT_CODES: Mapping[int, str] = {
    0: "done, and nothing was found wrong",
    1: "a finding: a problem without a right config, a stale table, a regression, a key that misses something, wrong "
    "output of our own, or something broken",
    2: "a wrong command, or something that this machine or the database lacks; one line on stderr says what to do",
    3: "measured, but open: `compare` or `doctor KERNEL` could not decide",
    129: "ended by SIGHUP: the terminal was closed",
    130: "ended by Ctrl-C; what a sweep has finished is stored",
    141: "the reader of the output has left, as `head` does",
    143: "ended by SIGTERM, as by a time limit; what a sweep has finished is stored",
}
"""How commands end. ``record`` ends with the code of the program that it ran."""


class Fp8tuneError(Exception):
    """Root of everything fp8tune raises on purpose; ``str()`` is the line the user sees."""

    exit_code = 2


class UsageError(Fp8tuneError):
    """The user asked for something that does not exist or does not parse."""


class DatabaseError(Fp8tuneError):
    """The results database cannot be used."""


class MachineError(Fp8tuneError):
    """This machine lacks what the command needs."""


def unknown(what: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a name that does not exist: ``unknown kernel 'colwse': did you mean colwise?``."""
    names = sorted(set(known))
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names) or 'none'}"
    return UsageError(f"unknown {what} {name!r}: {hint}")


def in_spec(kernel: str, name: str, function: Callable[..., Any], error: BaseException) -> UsageError:
    """The error for what a function of somebody's spec raised: ``kernel.py:12: problems of my-kernel raised ...``.

    The place is the last line of the function itself that was reached, or else the last line of all.
    """
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    frame = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1] if frames else None)
    where = f"{frame.filename}:{frame.lineno}: " if frame else ""
    return UsageError(f"{where}{name} of {kernel} raised {one_line(error)}: mend the spec")


def one_line(error: BaseException, longest: int = 300) -> str:
    """Return type and message of an exception's innermost cause: compilers wrap theirs in source listings."""
    while error.__cause__ is not None:
        error = error.__cause__
    message = getattr(error, "error_message", None) or str(error)  # Triton's message without its source listing
    return f"{type(error).__name__}: {' '.join(str(message).split()) or type(error).__name__}"[:longest]
