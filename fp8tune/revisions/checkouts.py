"""Copies of a repository's revisions, in a folder of :mod:`fp8tune.scratch` that is removed however the program ends.

Git keeps no record of them and runs no hook. Uncommitted work is copied too, so that editing can go on.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from fp8tune import scratch
from fp8tune.revisions import git


@contextlib.contextmanager
def checkouts(repository: Path, commits: Sequence[str | None]) -> Iterator[tuple[Path, ...]]:
    """A folder for each commit; for None, a copy of the working tree with what is tracked or could be added.

    Raises MachineError if git refuses. The folders are removed at the end, or by the next run after a ``kill -9``.
    """
    with scratch.folder("compare") as whole:
        folders = tuple(whole / str(number) for number in range(len(commits)))
        for folder, commit in zip(folders, commits, strict=True):
            if commit is None:
                _copy_working_tree(repository, folder)
            else:
                git.check_out(repository, commit, folder)
        yield folders


def _copy_working_tree(repository: Path, folder: Path) -> None:
    for name in git.working_files(repository):
        file = repository / name
        if file.is_file():  # neither deleted and still tracked, nor a submodule's folder
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, folder / name)
