"""Failures of the machine, told from those of a config: a full disk, a folder that may not be written, no compiler.

They say nothing of what was tried, so that nothing is stored of them: a MachineError ends the command.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fp8tune.errors import MachineError

ERRNOS = {
    number: os.strerror(number)
    for number in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.EAGAIN,
        errno.EIO,
    )
}
"""What the operating system refuses whatever is compiled."""

_TOOLS = ("Failed to find C compiler", "Cannot find ptxas", "Cannot find ld.lld")
_SIGNS = re.compile("|".join([*map(re.escape, _TOOLS), *(re.escape(text) for text in ERRNOS.values())]))
_STORED = re.compile(
    rf"(?:OSError|PermissionError|BlockingIOError): \[Errno (?:{'|'.join(map(str, ERRNOS))})\]"
    rf"|RuntimeError: (?:{'|'.join(_TOOLS)})|CalledProcessError: "
)

_PROBE_BYTES = 1 << 16


def raise_if_machine(error: BaseException) -> None:
    """Raise MachineError where a failed trial's exception, or one behind it, is the machine's."""
    for cause in _chain(error):
        if (said := _said(cause)) is not None:
            raise MachineError(
                f"{said}: no config is to blame, and nothing of it is stored; mend the machine and run this again"
            ) from error


def is_machines(reason: str) -> bool:
    """Whether a stored row's reason is a failure of a machine: older versions stored those as a config's."""
    return _STORED.match(reason) is not None


def check_folders() -> None:
    """Write and remove a file wherever compiling does. Raises MachineError where that fails."""
    for folder in (cache_folder(), Path(_temporary())):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(_PROBE_BYTES))
                file.flush()
        except OSError as error:
            raise MachineError(
                f"nothing can be compiled, {folder} cannot be written ({error.strerror}): make room or set "
                "TRITON_CACHE_DIR and TMPDIR to folders that can"
            ) from None


def cache_folder() -> Path:
    """Where Triton keeps what it compiled."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~/")
    return Path(os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache"))


def _temporary() -> str:
    try:
        return tempfile.gettempdir()
    except OSError as error:
        raise MachineError(f"{error.strerror}: set TMPDIR to a folder that can be written") from None


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _said(error: BaseException) -> str | None:
    from triton.runtime.errors import PTXASError

    if isinstance(error, OSError) and error.errno in ERRNOS:
        return " ".join(f"{error.strerror} {error.filename or ''}".split())
    if isinstance(error, PTXASError | RuntimeError) and (found := _SIGNS.search(str(error))):
        return found[0]
    if isinstance(error, subprocess.CalledProcessError) and "ptxas" not in str(error.cmd):
        # Triton compiles its own launcher: the C compiler is asked for nothing of the config's
        return f"{error.cmd[0] if isinstance(error.cmd, list) else error.cmd} ended with code {error.returncode}"
    return None
