"""Temporary folders: gone with their process, or with the next run that needs one."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8tune import scratch

HOLD = """
import time
from fp8tune import scratch
with scratch.folder("planted") as folder:
    (folder / "left").write_text("behind")
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def holder(temporary: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that holds a folder."""
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"TMPDIR": str(temporary)}) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_a_folder_goes_with_its_block(temporary: Path) -> None:
    with scratch.folder("planted") as folder:
        assert folder.is_dir()
        scratch.remove_abandoned("planted")
        assert folder.is_dir()
    assert not list(temporary.iterdir())


def test_what_a_killed_process_left_goes_with_the_next_run(
    holder: tuple[subprocess.Popen[str], Path], temporary: Path
) -> None:
    process, left = holder
    with scratch.folder("planted"):
        assert (left / "left").exists()  # its process is running
    process.kill()
    process.wait()
    with scratch.folder("planted") as own:
        assert list(temporary.iterdir()) == [own]


def test_nothing_else_is_removed(temporary: Path) -> None:
    (temporary / "elsewhere").mkdir()
    (temporary / "elsewhere" / "file").touch()
    (temporary / "fp8tune-planted-link").symlink_to(temporary / "elsewhere")
    (temporary / "fp8tune-planted-file").touch()
    (temporary / "fp8tune-other-folder").mkdir()
    scratch.remove_abandoned("planted")
    assert len(list(temporary.iterdir())) == 4
    assert (temporary / "elsewhere" / "file").exists()
