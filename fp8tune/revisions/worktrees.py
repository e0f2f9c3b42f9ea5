"""Checkouts of a repository's revisions for as long as they are needed, whatever ends the program.

Each is a detached ``git worktree`` in a folder of :mod:`fp8tune.scratch`. What a ``kill -9`` left of it, the folder and
git's entry, is removed by the next run. Uncommitted work is copied, so that editing goes on undisturbed.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from fp8tune import scratch
from fp8tune.revisions import git

LOCK = "fp8tune compare"
"""What git's lock of a checkout is there for: ``git worktree prune`` leaves locked ones alone."""


@contextlib.contextmanager
def checkouts(repository: Path, commits: Sequence[str | None]) -> Iterator[tuple[Path, ...]]:
    """A folder for each commit; for None, a copy of the working tree with what is tracked or could be added.

    Raises MachineError where git refuses. All folders are gone afterwards, also after Ctrl-C, and a SIGTERM
    that :mod:`fp8tune.stopping` turns into an exception.
    """
    remove_abandoned(repository)
    with scratch.folder("compare") as whole:
        folders = tuple(whole / str(number) for number in range(len(commits)))
        try:
            for folder, commit in zip(folders, commits, strict=True):
                if commit is None:
                    _copy_working_tree(repository, folder)
                else:
                    git.add_worktree(repository, folder, commit, LOCK)
            yield folders
        finally:
            for folder in folders:
                git.remove_worktree(repository, folder)


def remove_abandoned(repository: Path) -> None:
    """Remove git's entries of checkouts, and what is left of these, of runs that were killed."""
    for folder, reason in git.locked_worktrees(repository).items():
        if reason.startswith(LOCK) and not scratch.is_held(folder.parent):
            git.remove_worktree(repository, folder)
            with contextlib.suppress(OSError):
                folder.parent.rmdir()  # wherever that run had its temporary folders


def _copy_working_tree(repository: Path, folder: Path) -> None:
    for name in git.working_files(repository):
        file = repository / name
        if file.is_file():  # neither deleted and still tracked, nor a submodule's folder
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, folder / name)
