"""What others see of this process: everybody on the machine can list its arguments (``ps``)."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

from fp8tune.redaction import passwords

_ARGUMENTS_BEGIN, _ARGUMENTS_END = 45, 46
"""Of the fields of ``/proc/self/stat`` after the program's name: the addresses of the arguments."""


def hide_passwords() -> None:
    """Write stars over the passwords of URLs among the arguments. Linux; elsewhere they stay.

    They can be seen until the program has come so far: ``PGPASSWORD`` and ``~/.pgpass`` are never seen.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
        begin, end = int(fields[_ARGUMENTS_BEGIN]), int(fields[_ARGUMENTS_END])
        if not 0 < begin < end:
            return
        arguments = ctypes.string_at(begin, end - begin)
        hidden = b"\0".join(map(_hidden, arguments.split(b"\0")))
        if hidden != arguments and len(hidden) == len(arguments):
            ctypes.memmove(begin, hidden, len(hidden))


def _hidden(argument: bytes) -> bytes:
    """The same number of bytes without passwords."""
    text = argument.decode(errors="surrogateescape")
    if ":/" not in text:
        return argument
    for secret in sorted(passwords(text), key=len, reverse=True):
        spelled = secret.encode(errors="surrogateescape")
        argument = argument.replace(spelled, b"*" * len(spelled))
    return argument
