"""Git by its command line: commits, their files and checkouts, and the state of the working tree."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import DEVNULL

from fp8tune import errors, scratch

DATABASES = ":(exclude,glob)**/*.db*"  # a sweep writes its own database, which is not a change of the code


def toplevel(folder: Path) -> Path:
    """Return the root of the working tree that holds ``folder``. Raises MachineError if there is none, or no git."""
    return Path(_output(folder, "rev-parse", "--show-toplevel"))


def resolve(repository: Path, revision: str) -> str:
    """Return the full commit id of a revision. Raises UsageError, which names near branches and tags, if unknown."""
    answer = _git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if answer.returncode or answer.stdout.startswith("^"):  # git takes ^A for what A does not reach
        names = _output(repository, "for-each-ref", "--format=%(refname:short)").split()
        raise errors.unknown("revision", revision, [*names, "HEAD"])
    return answer.stdout.strip()


def merge_base(repository: Path, before: str, after: str) -> str:
    """Return the commit where two revisions forked. Raises UsageError if they share none."""
    answer = _git(repository, "merge-base", resolve(repository, before), resolve(repository, after))
    if answer.returncode:
        raise errors.UsageError(f"{before!r} and {after!r} share no history: compare them with {before}..{after}")
    return answer.stdout.strip()


def head(folder: Path) -> str:
    """Return the commit checked out here, with ``+`` appended if tracked files have changed since.

    Empty outside a repository, before its first commit and without git: a sweep needs none of them.
    """
    options = ("--porcelain=v2", "--branch", "--no-ahead-behind", "--untracked-files=no")
    try:
        status = _git(folder, "status", *options, "--", ":/", DATABASES)
    except errors.MachineError:
        return ""
    lines = status.stdout.splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), "(initial)")
    has_changes = any(not line.startswith("# ") for line in lines)
    return "" if commit == "(initial)" else commit + ("+" if has_changes else "")


def tracks(path: Path) -> bool:
    """Return True if a file is committed or staged; False without git."""
    try:
        return _git(path.absolute().parent, "ls-files", "--error-unmatch", "--", path.name).returncode == 0
    except errors.MachineError:
        return False


@contextlib.contextmanager
def checkouts(repository: Path, commits: Sequence[str | None]) -> Iterator[tuple[Path, ...]]:
    """Yield a folder for each commit; for None, a copy of the working tree with all files that git does not ignore.

    Git keeps no record of them and runs no hook, because each is written through an index of its own. The folders are
    removed at the end, or by the next run after a ``kill -9``. Raises MachineError if git refuses.
    """
    with scratch.folder("compare") as parent:
        folders = tuple(parent / str(number) for number in range(len(commits)))
        for folder, commit in zip(folders, commits, strict=True):
            folder.mkdir()
            if commit is not None:
                index = {"GIT_INDEX_FILE": f"{folder}.index"}
                _output(repository, "read-tree", commit, variables=index)
                _output(repository, "checkout-index", "--all", f"--prefix={folder}/", variables=index)
                continue
            listed = ("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate")
            for name in filter(None, _output(repository, *listed).split("\0")):
                if (repository / name).is_file():  # neither deleted and still tracked, nor a submodule's folder
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(repository / name, folder / name)
        yield folders


def _output(folder: Path, *arguments: str, variables: dict[str, str] | None = None) -> str:
    answer = _git(folder, *arguments, variables=variables)
    if answer.returncode:
        reason = (answer.stderr.strip().splitlines() or ["no reason given"])[0].removeprefix("fatal: ")
        raise errors.MachineError(f"git cannot read {folder}: {reason}: run fp8tune in a git checkout")
    return answer.stdout.strip()


def _git(folder: Path, *arguments: str, variables: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    if not folder.is_dir():
        raise errors.UsageError(f"{folder} is not a folder: run fp8tune in a git checkout")
    # Without optional locks: a killed `git status` would leave its lock in the user's repository.
    env = {**os.environ, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", **(variables or {})}
    command = ["git", "-C", str(folder), *arguments]
    try:
        return subprocess.run(
            command, stdin=DEVNULL, capture_output=True, env=env, encoding="utf-8", errors="replace", check=False
        )
    except FileNotFoundError:
        raise errors.MachineError("git is not installed: install it to compare revisions") from None
