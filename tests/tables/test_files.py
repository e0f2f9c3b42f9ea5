from __future__ import annotations

import fcntl
import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path, PurePosixPath

import pytest

from fp8tune.errors import UsageError
from fp8tune.tables.files import File, update, write


def count_up(path: Path, count: int) -> None:
    for _ in range(count):
        update(path, lambda before: str(int(before or 0) + 1))


def test_reading_and_writing_are_one_step(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "count"
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=count_up, args=(path, 60)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert path.read_text() == "180"
    assert [file.name for file in path.parent.iterdir()] == ["count"]


def test_what_a_killed_writer_left_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "sm_90.py"
    path.write_text("before")
    process = multiprocessing.get_context("fork").Process(target=update, args=(path, lambda before: time.sleep(60)))
    process.start()
    while not (draft := tmp_path / ".sm_90.py.draft").exists():
        time.sleep(0.01)
    draft.write_text("half a tab")
    os.kill(process.pid or 0, signal.SIGKILL)
    assert update(path, lambda before: f"{before} and after")
    assert path.read_text() == "before and after"
    assert [file.name for file in tmp_path.iterdir()] == ["sm_90.py"]
    process.join()


def test_a_change_that_fails_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "table.py"
    path.write_text("before")
    with pytest.raises(ZeroDivisionError):
        update(path, lambda before: str(1 / 0))
    assert [file.read_text() for file in tmp_path.iterdir()] == ["before"]
    assert not update(path, "before")
    path.chmod(0o640)
    assert update(path, "after")
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_full_disk_leaves_the_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "table.py"
    path.write_text("before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(UsageError, match=r"table\.py cannot be written"):
            update(path, "after " * 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["before"]


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


def test_a_locked_draft_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "table.py"
    with (tmp_path / ".table.py.draft").open("w") as draft:
        fcntl.flock(draft, fcntl.LOCK_EX)
        writer = multiprocessing.get_context("fork").Process(target=update, args=(path, "after"))
        writer.start()
        writer.join(0.3)
        assert not path.exists()
        fcntl.flock(draft, fcntl.LOCK_UN)
        writer.join(10)
    assert path.read_text() == "after"
