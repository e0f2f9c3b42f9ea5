"""Files on network file systems: recognised by /proc/self/mountinfo, read where nobody writes, never written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from command_line import fp8tune
from database_rows import config, finished_sweep, problem

from fp8tune.errors import DatabaseError
from fp8tune.store import network_files
from fp8tune.store.results import Store

LINE = "36 27 0:33 / {} rw,relatime shared:1 - {} server:/export rw,vers=4.2"
LOCAL = "27 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw"


def escaped(path: str) -> str:
    """As the kernel writes it."""
    for character in "\\ \t\n":
        path = path.replace(character, f"\\{ord(character):03o}")
    return path


def test_the_longest_place_counts_and_of_two_at_one_place_the_last() -> None:
    mounts = "\n".join(
        [LOCAL, LINE.format("/data", "nfs4"), LINE.format("/data/local", "xfs"), LINE.format("/data/local", "lustre")]
    )
    found = {
        "/": "ext4",
        "/data": "nfs4",
        "/data/a.db": "nfs4",
        "/database/a.db": "ext4",
        "/data/local/a.db": "lustre",
        "/data/locale": "nfs4",
        "/data/local": "lustre",
    }
    assert {path: network_files.mounted_type(path, mounts) for path in found} == found


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that counts as mounted by NFS, named with a blank."""
    folder = tmp_path / "shared home"
    folder.mkdir()
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"{LOCAL}\n{LINE.format(escaped(os.path.realpath(folder)), 'nfs4')}\n")
    monkeypatch.setattr(network_files, "_MOUNTS", mounts)
    monkeypatch.delenv(network_files.VARIABLE, raising=False)
    return folder


def test_a_file_there_is_read_and_never_written(shared: Path, tmp_path: Path) -> None:
    local = tmp_path / "local.db"
    with Store.open(str(local), create=True) as store:
        finished_sweep(store, {problem(): {config(): 100.0}})
    path = shared / "results.db"
    with pytest.raises(DatabaseError, match=r"network file system \(nfs4\).*fp8tune import it, or use PostgreSQL"):
        Store.open(str(path), create=True)
    assert list(shared.iterdir()) == []
    path.write_bytes(local.read_bytes())
    with pytest.raises(DatabaseError, match="network file system"):
        Store.open(str(path))
    with Store.open(str(path), writable=False) as store:
        assert len(list(store.rows())) == 1
    assert list(shared.iterdir()) == [path]
    link = tmp_path / "link.db"
    link.symlink_to(path)
    with pytest.raises(DatabaseError, match="network file system"):
        Store.open(str(link))
    Store.open(str(link), writable=False).close()


def test_a_command_ends_with_one_line(shared: Path) -> None:
    db = str(shared / "results.db")
    sweep = ("sweep", "--kernel", "colwise", "--shapes", "tiny", "--timer", "simulated:1")
    for command in (sweep, ("import", "missing.db"), ("calibrate",), ("forget", "trials:1")):
        done = fp8tune(*command, "--db", db, cwd=shared)
        assert done.returncode == 2
        assert done.stderr.count("\n") <= 2
    assert "is on a network file system (nfs4)" in fp8tune(*sweep, "--db", db).stderr
