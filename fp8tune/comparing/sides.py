"""Two sides of a comparison: their revisions and the kernels that they declare, each with its source hash."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8tune import errors, registry
from fp8tune.comparing.verdicts import Revision
from fp8tune.revisions import git, source
from fp8tune.revisions.walk import Read

WORKTREE = "WORKTREE"  # names the uncommitted state of the repository in place of a revision

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
    def is_changed(self) -> bool:
        """True if both sides declare it with different code."""
        return None not in self.hashes and self.hashes[0] != self.hashes[1]


@dataclass(frozen=True)
class Sides:
    """Two revisions of a repository and the kernels of both."""

    root: Path
    before: Revision
    after: Revision
    kernels: tuple[Kernel, ...]

    @property
    def are_same(self) -> bool:
        """True for ``A..A``, which shows the noise of this machine."""
        return self.before.commit == self.after.commit and WORKTREE not in (self.before.name, self.after.name)


def sides(range_text: str, kernels: Sequence[str] = (), folder: Path = Path()) -> Sides:
    """Return the sides of ``A..B`` (``A...B``: from the merge base) in the repository of a folder.

    Raises UsageError for a malformed range, an unknown revision and a named kernel that neither side declares,
    MachineError without git or a repository.
    """
    root = git.toplevel(_repository(kernels, folder))
    revisions = _revisions(root, range_text)

    @functools.cache  # what kernels share is read once
    def reader(revision: Revision, roots: tuple[str, ...]) -> Read:
        if revision.name == WORKTREE:
            return source.in_folder(root, roots)
        return source.at_commit(root, revision.commit, roots)

    result = []
    for reference in dict.fromkeys(kernels or registry.kernels()):
        roots, name, hashes = _roots(reference, root), reference, list[str | None]()
        for revision in revisions:
            try:
                hashes.append(source.source_hash(reference, reader(revision, roots)))
                name = source.kernel_name(reference, reader(revision, roots)) if ":" in reference else reference
            except source.NoSuchKernel:
                hashes.append(None)
        if hashes != [None, None]:
            result.append(Kernel(name, reference, (hashes[0], hashes[1])))
        elif kernels:
            raise errors.UsageError(f"kernel {reference} is declared neither at {revisions[0]} nor at {revisions[1]}")
    return Sides(root, *revisions, tuple(result))


def _repository(kernels: Sequence[str], folder: Path) -> Path:
    """Return the folder of a kernel file, which may lie in another repository than this one; else ``folder``."""
    files = (source.parse_reference(kernel).root for kernel in kernels if ".py:" in kernel)
    return next((root for root in files if root is not None and root.is_dir()), folder)


def _revisions(repository: Path, text: str) -> tuple[Revision, Revision]:
    match = _RANGE.fullmatch(text)
    if match is None or ".." in match["before"] or ".." in match["after"]:
        raise errors.UsageError(f"compare needs two revisions, got {text!r:.80}: write main..branch, or main..WORKTREE")
    before, after = (
        Revision(name, git.head(repository) if name == WORKTREE else git.resolve(repository, name))
        for name in (match["before"], match["after"])
    )
    if match["dots"] == "...":
        base = git.merge_base(repository, *(side.commit.rstrip("+") for side in (before, after)))
        before = Revision("merge base", base)
    return before, after


def _roots(kernel: str, root: Path) -> tuple[str, ...]:
    """Return the folders of the repository that the kernel's imports start from."""
    folder = source.parse_reference(kernel).root
    if folder is None:
        return source.SOURCE_ROOTS
    if not folder.resolve().is_relative_to(root.resolve()):
        raise errors.UsageError(f"{kernel} lies outside {root}: compare kernels of one repository at a time")
    return (os.path.relpath(folder.resolve(), root.resolve()),)
