"""Git by its command line: commits, their files and checkouts, and the state of the working tree."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fp8tune import errors, scratch

DATABASES = ":(exclude,glob)**/*.db*"
"""A sweep writes its own database: that alone does not count as a changed working tree."""


def toplevel(folder: Path) -> Path:
    """Return the root of the working tree that ``folder`` lies in. Raises MachineError if there is none, or no git."""
    return Path(_output(folder, "rev-parse", "--show-toplevel"))


def resolve(repository: Path, revision: str) -> str:
    """Return the full commit id of a revision. Raises UsageError, which names near branches and tags, if unknown."""
    answer = _git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if answer.returncode or answer.stdout.startswith("^"):  # git takes ^A for what A does not reach
        names = _output(repository, "for-each-ref", "--format=%(refname:short)").split()
        raise errors.unknown("revision", revision, [*names, "HEAD"])
    return str(answer.stdout.strip())


def merge_base(repository: Path, one: str, other: str) -> str:
    """Return the commit two revisions forked at. Raises UsageError if their histories share none."""
    answer = _git(repository, "merge-base", resolve(repository, one), resolve(repository, other))
    if answer.returncode:
        raise errors.UsageError(f"{one!r} and {other!r} share no history: compare them with {one}..{other}")
    return str(answer.stdout.strip())


def files(repository: Path, commit: str) -> frozenset[str]:
    """Return the paths, from the repository's root, of all files of a commit; none where there is no such commit."""
    answer = _git(repository, "ls-tree", "-r", "-z", "--name-only", "--full-tree", "--end-of-options", commit)
    return frozenset() if answer.returncode else frozenset(answer.stdout.split("\0"))


def show(repository: Path, commit: str, path: str) -> str | None:
    """Return the text of a file (path from the repository's root) in a commit; None if it has no such file."""
    answer = _git(repository, "cat-file", "blob", f"{commit}:{path}")
    return None if answer.returncode else answer.stdout


def head(folder: Path) -> str:
    """Return the commit checked out here, ``+`` appended if tracked files have changed since.

    Empty outside a repository, before its first commit, and if git is not installed: a sweep needs none of them.
    """
    try:
        commit = _git(folder, "rev-parse", "--verify", "--quiet", "HEAD")
        changes = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ":/", DATABASES)
    except errors.MachineError:
        return ""
    return "" if commit.returncode else commit.stdout.strip() + ("+" if changes.stdout else "")


def tracks(path: Path) -> bool:
    """Return True if a file is committed or about to be; False without git."""
    try:
        answer = _git(path.absolute().parent, "ls-files", "--error-unmatch", "--", path.name)
    except errors.MachineError:
        return False
    return bool(answer.returncode == 0)


@contextlib.contextmanager
def checkouts(repository: Path, commits: Sequence[str | None]) -> Iterator[tuple[Path, ...]]:
    """Yield a folder for each commit; for None, a copy of the working tree with what is tracked or could be added.

    Git keeps no record of them and runs no hook: each is written through an index of its own. The folders are removed
    at the end, or by the next run after a ``kill -9``. Raises MachineError if git refuses.
    """
    with scratch.folder("compare") as whole:
        folders = tuple(whole / str(number) for number in range(len(commits)))
        for folder, commit in zip(folders, commits, strict=True):
            if commit is None:
                _copy_working_tree(repository, folder)
            else:
                folder.mkdir()
                index = {"GIT_INDEX_FILE": f"{folder}.index"}
                _output(repository, "read-tree", commit, variables=index)
                _output(repository, "checkout-index", "--all", f"--prefix={folder}/", variables=index)
        yield folders


def _copy_working_tree(repository: Path, folder: Path) -> None:
    listed = _output(repository, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate")
    for name in filter(None, listed.split("\0")):
        file = repository / name
        if file.is_file():  # neither deleted and still tracked, nor a submodule's folder
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, folder / name)


def _output(folder: Path, *arguments: str, variables: dict[str, str] | None = None) -> str:
    answer = _git(folder, *arguments, variables=variables)
    if answer.returncode:
        reason = (answer.stderr.strip().splitlines() or ["no reason given"])[0].removeprefix("fatal: ")
        raise errors.MachineError(f"git cannot read {folder}: {reason}: run fp8tune in a git checkout")
    return str(answer.stdout.strip())


def _git(folder: Path, *arguments: str, variables: dict[str, str] | None = None) -> Any:
    if not folder.is_dir():
        raise errors.UsageError(f"{folder} is not a folder: run fp8tune in a git checkout")
    try:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            # Without optional locks: a killed `git status` would leave its lock in the user's repository.
            env={**os.environ, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", **(variables or {})},
            encoding="utf-8",
            errors="replace",
        )
    except FileNotFoundError:
        raise errors.MachineError("git is not installed: install it to compare revisions") from None
