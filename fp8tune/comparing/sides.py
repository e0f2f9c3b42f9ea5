"""Two sides of a comparison: checkouts of both revisions and the kernels that they declare, with their hashes."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8tune import errors, registry, scratch
from fp8tune.comparing.verdicts import Revision
from fp8tune.measure.trees import Tree
from fp8tune.replay.loading import recorded_kernel
from fp8tune.revisions import git, source
from fp8tune.revisions.reference import KernelReference, locate

WORKTREE = "WORKTREE"  # names the uncommitted state of the repository in place of a revision

_RANGE = re.compile(r"(?P<before>.*?[^.])(?P<dots>\.{2,3})(?P<after>[^.].*)")


@dataclass(frozen=True)
class Kernel:
    """A kernel that at least one side declares."""

    name: str
    references: tuple[str, str]  # text by which a process loads each side's version
    hashes: tuple[str | None, str | None]  # source hash at either side; None if it is not declared there

    @property
    def is_changed(self) -> bool:
        """True if both sides declare it with different code."""
        return None not in self.hashes and self.hashes[0] != self.hashes[1]


@dataclass(frozen=True)
class Sides:
    """Checkouts of two revisions and the kernels of both."""

    before: Revision
    after: Revision
    folders: tuple[Path, Path]
    kernels: tuple[Kernel, ...]

    @property
    def are_same(self) -> bool:
        """True for ``A..A``, which shows the noise of this machine."""
        return self.before.commit == self.after.commit and WORKTREE not in (self.before.name, self.after.name)


@contextlib.contextmanager
def checked_out(range_text: str, kernels: Sequence[str] = (), folder: Path = Path()) -> Iterator[Sides]:
    """Check out ``A..B`` (``A...B``: from the merge base) of a folder's repository until the context ends.

    Raises UsageError for a malformed range, an unknown revision, a named kernel that neither side declares and, without
    names, sides that declare none. Raises MachineError without git or a repository.
    """
    roots = [locate(kernel).root for kernel in kernels]
    # a kernel file may lie in another repository than this one
    root = git.toplevel(next((path for path in roots if path is not None and path.is_dir()), folder))
    revisions = _revisions(root, range_text)
    commits = [None if revision.name == WORKTREE else revision.commit for revision in revisions]
    with git.checkouts(root, commits) as folders:
        sides = (folders[0], folders[1])
        declared = [_kernel(reference, root, sides) for reference in dict.fromkeys(kernels or registry.kernels())]
        for kernel in declared if kernels else ():
            if kernel.hashes == (None, None):
                raise errors.UsageError(
                    f"kernel {kernel.name} is declared neither at {revisions[0]} nor {revisions[1]}"
                )
        present = tuple(kernel for kernel in declared if kernel.hashes != (None, None))
        if not present:
            raise errors.UsageError(
                f"neither {revisions[0]} nor {revisions[1]} has a kernel that comes with fp8tune: "
                "name yours with --kernel ops:NAME@run.json or --kernel ops.py:SPEC"
            )
        yield Sides(*revisions, sides, present)


@contextlib.contextmanager
def trees(sides: Sides) -> Iterator[tuple[Tree, Tree]]:
    """Yield what a worker needs to take the kernels of each side, with a cache for binaries until the context ends."""
    with scratch.folder("cache") as cache:
        before, after = (
            Tree(str(revision), folder, cache / folder.name, source.SOURCE_ROOTS)
            for revision, folder in zip((sides.before, sides.after), sides.folders, strict=True)
        )
        yield before, after


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


def _kernel(text: str, root: Path, folders: tuple[Path, Path]) -> Kernel:
    """Return a kernel with its hash in each checkout."""
    path, _, attribute = text.rpartition(":")
    roots: tuple[str, ...] = source.SOURCE_ROOTS
    name, references, hashes = text, (text, text), list[str | None]()
    if (start := locate(text).root) is not None:
        start, root = start.resolve(), root.resolve()
        if not start.is_relative_to(root):
            raise errors.UsageError(f"{text} lies outside {root}: compare kernels of one repository at a time")
        roots, file = (os.path.relpath(start, root),), Path(path).resolve().relative_to(root)
        references = f"{folders[0] / file}:{attribute}", f"{folders[1] / file}:{attribute}"
    for folder in folders:
        places = [folder / root for root in roots]
        try:
            hashes.append(source.source_hash(text, places))
            name = source.kernel_name(text, places) if ":" in text else text
        except source.NoSuchKernel:
            hashes.append(None)
    if (named := KernelReference.parse(text)).recording:
        name = recorded_kernel(named).name
    return Kernel(name, references, (hashes[0], hashes[1]))
