"""Failures of the machine, as opposed to those of a config: a full disk, a read-only folder, no compiler.

They say nothing about the config, so nothing is stored: a MachineError ends the command.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import tempfile
from pathlib import Path

from fp8tune.errors import MachineError
from fp8tune.replay.lazy import triton

# What the operating system refuses whatever is compiled.
_ERRNOS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EIO),
}
_TOOLS = ("Failed to find C compiler", "Cannot find ptxas", "Cannot find ld.lld")
_SIGNS = re.compile("|".join(map(re.escape, (*_TOOLS, *map(os.strerror, sorted(_ERRNOS))))))


def raise_if_machine(error: BaseException) -> None:
    """Raise MachineError if a failed trial's exception, or one behind it, is the machine's."""
    cause: BaseException | None = error
    while cause is not None:
        reason = ""
        if isinstance(cause, OSError) and cause.errno in _ERRNOS:
            reason = " ".join(f"{cause.strerror} {cause.filename or ''}".split())
        elif isinstance(cause, triton.runtime.errors.PTXASError | RuntimeError) and (sign := _SIGNS.search(str(cause))):
            reason = sign[0]
        elif isinstance(cause, subprocess.CalledProcessError) and "ptxas" not in str(cause.cmd):
            # Triton compiles its own launcher with the C compiler, which depends on nothing of the config.
            program = cause.cmd[0] if isinstance(cause.cmd, list) else cause.cmd
            reason = f"{program} ended with code {cause.returncode}"
        if reason:
            raise MachineError(
                f"{reason}: no config is to blame, and nothing of it is stored; mend the machine and run this again"
            ) from error
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def check_folders() -> None:
    """Write and remove a file in each folder that compiling writes to. Raises MachineError if that fails."""
    try:
        temporary = tempfile.gettempdir()
    except OSError as error:
        raise MachineError(f"{error.strerror}: set TMPDIR to a folder that can be written") from None
    for folder in (cache_folder(), Path(temporary)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(1 << 16))
                file.flush()
        except OSError as error:
            raise MachineError(
                f"nothing can be compiled, {folder} cannot be written ({error.strerror}): make room or set "
                "TRITON_CACHE_DIR and TMPDIR to folders that can"
            ) from None


def cache_folder() -> Path:
    """Return the folder of Triton's cache."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~/")
    return Path(os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache"))
