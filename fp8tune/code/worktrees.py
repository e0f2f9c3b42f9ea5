"""Checkouts of a repository's revisions for as long as they are needed, whatever ends the program.

Each is a detached ``git worktree`` in a temporary folder, locked with the id of this process: what a ``kill -9`` left
behind is found by that and removed by the next run. Uncommitted work is copied, so that editing goes on undisturbed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from fp8tune.code import git

LOCK = "fp8tune compare, process"


@contextlib.contextmanager
def checkouts(repository: Path, commits: Sequence[str | None]) -> Iterator[tuple[Path, ...]]:
    """A folder for each commit; for None, a copy of the working tree with what is tracked or could be added.

    Raises MachineError where git refuses. All folders are gone afterwards, also after Ctrl-C, and a SIGTERM
    that :mod:`fp8tune.stopping` turns into an exception.
    """
    remove_abandoned(repository)
    with tempfile.TemporaryDirectory(prefix="fp8tune-compare-") as scratch:
        folders = tuple(Path(scratch) / str(number) for number in range(len(commits)))
        try:
            for folder, commit in zip(folders, commits, strict=True):
                if commit is None:
                    _copy_working_tree(repository, folder)
                else:
                    git.add_worktree(repository, folder, commit, f"{LOCK} {os.getpid()}")
            yield folders
        finally:
            for folder in folders:
                git.remove_worktree(repository, folder)


def remove_abandoned(repository: Path) -> None:
    """Remove the checkouts of runs that were killed."""
    for folder, reason in git.locked_worktrees(repository).items():
        process = reason.removeprefix(LOCK).strip()
        if reason.startswith(LOCK) and process.isdecimal() and not _is_alive(int(process)):
            git.remove_worktree(repository, folder)
            if folder.parent.name.startswith("fp8tune-compare-"):
                shutil.rmtree(folder.parent, ignore_errors=True)


def _copy_working_tree(repository: Path, folder: Path) -> None:
    for name in git.working_files(repository):
        file = repository / name
        if file.is_file():  # neither deleted and still tracked, nor a submodule's folder
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, folder / name)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
