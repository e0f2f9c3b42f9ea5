"""The two sides of a comparison: their revisions, and the kernels they declare, each with its source hash."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8tune import errors
from fp8tune.comparing.comparison import Revision
from fp8tune.comparing.verdicts import ChangeVerdict
from fp8tune.revisions import git, source
from fp8tune.revisions.walk import Read
from fp8tune_kernels import catalog

WORKTREE = "WORKTREE"
"""Name of the uncommitted state of the repository, in place of a revision."""

_RANGE = re.compile(r"(?P<before>.*?[^.])(?P<dots>\.{2,3})(?P<after>[^.].*)")


@dataclass(frozen=True)
class Kernel:
    """A kernel that at least one side declares."""

    name: str
    reference: str
    """Text of the user: the name, ``module:ATTRIBUTE`` or ``path.py:ATTRIBUTE``."""
    hashes: tuple[str | None, str | None]
    """Source hash at either side; None if it is not declared there."""

    @property
    def verdict(self) -> ChangeVerdict | None:
        """Verdict that its source alone gives all its rows; None if it changed."""
        if None in self.hashes:
            return ChangeVerdict.NEW if self.hashes[0] is None else ChangeVerdict.REMOVED
        return ChangeVerdict.SAME_CODE if self.hashes[0] == self.hashes[1] else None


@dataclass(frozen=True)
class Sides:
    """Two revisions of a repository and the kernels of both."""

    root: Path
    before: Revision
    after: Revision
    kernels: tuple[Kernel, ...]


def sides(repository: Path, range_text: str, kernels: Sequence[str] = ()) -> Sides:
    """Return the sides of ``A..B`` (``A...B``: from the merge base). ``kernels``: names or references; by default all.

    Raises UsageError for a malformed range, an unknown revision and a named kernel that neither side declares,
    MachineError without git or a repository.
    """
    root = git.toplevel(repository)
    revisions = _revisions(root, range_text)
    reader = functools.cache(functools.partial(_reader, root))  # what kernels share is read once
    every = [_declared(kernel, root, revisions, reader) for kernel in dict.fromkeys(kernels or catalog.KERNELS)]
    declared = tuple(kernel for kernel in every if kernel.hashes != (None, None))
    if kernels and len(declared) < len(every):
        missing = next(kernel.reference for kernel in every if kernel not in declared)
        neither = "neither at {} nor at {}".format(*revisions)
        raise errors.UsageError(f"kernel {missing} is declared {neither}: check --repo")
    return Sides(root, *revisions, declared)


def _revisions(repository: Path, text: str) -> tuple[Revision, Revision]:
    match = _RANGE.fullmatch(text)
    if match is None or ".." in match["before"] or ".." in match["after"]:
        raise errors.UsageError(f"{text!r} is no range of revisions: write A..B, or A...B to start at their merge base")
    before, after = (
        Revision(name, git.head(repository) if name == WORKTREE else git.resolve(repository, name))
        for name in (match["before"], match["after"])
    )
    if match["dots"] == "...":
        base = git.merge_base(repository, *(side.commit.rstrip("+") for side in (before, after)))
        before = Revision(f"merge base of {before.name} and {after.name}", base)
    return before, after


def _declared(
    kernel: str, root: Path, revisions: tuple[Revision, Revision], reader: Callable[[Revision, tuple[str, ...]], Read]
) -> Kernel:
    roots = _roots(kernel, root)
    name, hashes = kernel, list[str | None]()
    for revision in revisions:
        read = reader(revision, roots)
        try:
            hashes.append(source.source_hash(kernel, read))
            name = source.kernel_name(kernel, read) if ":" in kernel else kernel
        except source.NoSuchKernel:
            hashes.append(None)
    before, after = hashes
    return Kernel(name, kernel, (before, after))


def _roots(kernel: str, root: Path) -> tuple[str, ...]:
    """Return the folders of the repository that the kernel's imports start from."""
    folder = source.parse_reference(kernel).root
    if folder is None:
        return source.SOURCE_ROOTS
    if not folder.resolve().is_relative_to(root.resolve()):
        raise errors.UsageError(f"{kernel} lies outside {root}: name its repository with --repo")
    return (os.path.relpath(folder.resolve(), root.resolve()),)


def _reader(root: Path, revision: Revision, roots: tuple[str, ...]) -> Read:
    if revision.name == WORKTREE:
        return source.in_folder(root, roots)
    return source.at_commit(root, revision.commit, roots)
