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


def refused(name: str) -> OSError:
    return OSError(getattr(errno, name), os.strerror(getattr(errno, name)), "/cache/x")


def behind(cause: Exception) -> Exception:
    try:
        raise ValueError("while compiling") from cause
    except ValueError as error:
        return error


MACHINES = [
    *map(refused, ("ENOSPC", "EROFS", "EACCES", "EMFILE", "ENOMEM", "EAGAIN")),
    behind(refused("EDQUOT")),
    RuntimeError("Failed to find C compiler. Please specify via CC environment variable"),
    RuntimeError("Cannot find ptxas"),
    PTXASError("`ptxas` stderr: ptxas fatal: No space left on device"),
    subprocess.CalledProcessError(1, ["gcc", "launcher.c"]),
]
CONFIGS = [
    ValueError("shape mismatch"),
    refused("ENOENT"),
    PTXASError("`ptxas` failed with error code 255: Registers are full"),
    RuntimeError("PassManager::run failed"),
]


@pytest.mark.parametrize("error", [*MACHINES, *CONFIGS], ids=repr)
def test_a_failure_of_the_machine_is_no_outcome_and_a_configs_stays_one(error, monkeypatch) -> None:
    def record(*_: object) -> None:
        raise error

    monkeypatch.setattr(compiling, "record_launches", record)
    compiled = ("colwise", Problem("colwise", NamedInts(M=1)), NamedInts(), "sm_90", 1)
    if error in CONFIGS:
        assert failure(error).status is compiling.compile_config(*compiled).status is Status.COMPILE_ERROR
        return
    with pytest.raises(MachineError, match="no config is to blame"):
        compiling.compile_config(*compiled)
    with pytest.raises(MachineError):
        failure(error)


@pytest.mark.parametrize("name", ["TRITON_CACHE_DIR", "TRITON_HOME"])
def test_a_cache_that_cannot_be_written_is_said_before_anything_is_compiled(name, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv(name, str(tmp_path / "new"))
    machine.check_folders()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(name, str(tmp_path / "file" / "below"))
    with pytest.raises(MachineError, match=r"cannot be written .*: make room or set TRITON_CACHE_DIR"):
        machine.check_folders()
