from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path, PurePosixPath

import pytest

from fp8tune.errors import UsageError
from fp8tune.tables.files import File, update, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "table.py").write_text("before")
    return tmp_path / "table.py"


def test_what_a_killed_writer_left_is_taken_over(path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=update, args=(path, lambda before: time.sleep(60)))
    process.start()
    while not (draft := path.parent / ".table.py.draft").exists():
        time.sleep(0.01)
    draft.write_text("half a tab")
    os.kill(process.pid or 0, signal.SIGKILL)
    assert update(path, lambda before: f"{before} and after")
    process.join()
    assert [(file.name, file.read_text()) for file in path.parent.iterdir()] == [("table.py", "before and after")]


def test_a_change_that_fails_leaves_the_file_and_nothing_beside_it(path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        update(path, lambda before: str(1 / 0))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))  # as on a full disk
    try:
        with pytest.raises(UsageError, match=r"table\.py cannot be written"):
            update(path, "after " * 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [file.read_text() for file in path.parent.iterdir()] == ["before"]


def test_only_a_changed_text_is_written_with_the_modes_of_the_file(path: Path) -> None:
    path.chmod(0o640)
    assert not update(path, "before")
    assert update(path, "after")
    assert path.stat().st_mode & 0o777 == 0o640


def test_files_stay_below_their_folder(tmp_path: Path) -> None:
    for path in ("../out", "/out", "a/../../out"):
        with pytest.raises(UsageError, match="is outside of"):
            write([File(PurePosixPath("a/first"), ""), File(PurePosixPath(path), "")], tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_which_files_would_change(tmp_path: Path) -> None:
    files = [File(PurePosixPath("a/b"), "text"), File(PurePosixPath("c"), "")]
    assert write(files[1:], tmp_path) == {tmp_path / "c": True}
    assert write(files, tmp_path, is_dry=True) == {tmp_path / "a" / "b": True, tmp_path / "c": False}
    assert not (tmp_path / "a").exists()
