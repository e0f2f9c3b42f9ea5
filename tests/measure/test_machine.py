"""A failure of the machine ends the command and does not become a row, as a compiler's failure does."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest
from triton.runtime.errors import PTXASError

from fp8tune.errors import MachineError
from fp8tune.measure import compiling, machine
from fp8tune.measure.trial import failure
from fp8tune.records import NamedInts, Problem, Status


def refused(number: int) -> OSError:
    return OSError(number, os.strerror(number), "/cache/x")


def behind(cause: Exception) -> Exception:
    try:
        raise ValueError("while compiling") from cause
    except ValueError as error:
        return error


MACHINES = [
    *map(refused, (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EMFILE, errno.ENOMEM, errno.EAGAIN)),
    behind(refused(errno.EDQUOT)),
    RuntimeError("Failed to find C compiler. Please specify via CC environment variable"),
    RuntimeError("Cannot find ptxas"),
    PTXASError("`ptxas` stderr: ptxas fatal: No space left on device"),
    subprocess.CalledProcessError(1, ["gcc", "launcher.c"]),
]
CONFIGS = [
    ValueError("shape mismatch"),
    FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/no/such"),
    PTXASError("`ptxas` failed with error code 255: Registers are full"),
    RuntimeError("PassManager::run failed"),
]


def test_a_machines_failure_is_no_outcome_and_a_configs_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in MACHINES:

        def compile_it(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(compiling, "record_launches", compile_it)
        with pytest.raises(MachineError, match="no config is to blame"):
            compiling.compile_config("colwise", Problem("colwise", NamedInts(M=1)), NamedInts(), "sm_90", 1)
        with pytest.raises(MachineError):
            failure(error)
    assert {failure(error).status for error in CONFIGS} == {Status.COMPILE_ERROR}


@pytest.mark.parametrize("name", ["TRITON_CACHE_DIR", "TRITON_HOME"])
def test_a_cache_that_cannot_be_written_is_said_before_anything_is_compiled(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv(name, str(tmp_path / "new"))
    machine.check_folders()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(name, str(tmp_path / "file" / "below"))
    with pytest.raises(MachineError, match=r"cannot be written .*: make room or set TRITON_CACHE_DIR"):
        machine.check_folders()
