"""What changed between two git revisions, from recorded rows alone.

A row belongs to a revision when the kernel's source hash there is the row's own, so that an unrelated commit orphans
nothing. Two rows are compared only if they come from one device under one driver, torch and Triton. Each side's time is
that of its own best config: what users of that revision get.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from fp8tune import errors, git, ranking, source
from fp8tune.codewalk import Read
from fp8tune.comparison import NEW, NO_ROWS, REMOVED, SAME_CODE, ComparedRow, Comparison, Revision
from fp8tune.records import Device, Evidence, Kind, Problem
from fp8tune_kernels import catalog

__all__ = ["WORKTREE", "Comparison", "compare", "parse_range"]

WORKTREE = "WORKTREE"
"""Names the uncommitted state of the repository where a revision is expected."""

TIMED_KINDS = (Kind.MEASURED, Kind.SIMULATED)
"""Kinds of rows whose times say something of a kernel's code."""

_RANGE = re.compile(r"(?P<before>.*?[^.])(?P<dots>\.{2,3})(?P<after>[^.].*)")


def compare(
    evidence: Iterable[Evidence], repository: Path, range_text: str, kernels: Sequence[str] | None = None
) -> Comparison:
    """Compare ``A..B`` (or ``A...B``, from the merge base) of a git repository on stored evidence.

    ``kernels`` are names or references (``module:ATTRIBUTE``, ``path.py:ATTRIBUTE``); by default all that this package
    knows. Raises UsageError for a malformed range, an unknown revision and a kernel declared at neither side,
    MachineError where there is no git or no repository.
    """
    root = git.toplevel(repository)
    before, after = parse_range(root, range_text)
    timed = [row for row in evidence if row.kind in TIMED_KINDS and row.version is not None]
    rows: list[ComparedRow] = []
    for kernel in kernels or catalog.KERNELS:
        name, hashes = _hashes(kernel, root, before, after)
        if hashes == (None, None) and kernels:
            raise errors.UsageError(f"kernel {kernel} is declared neither at {before} nor at {after}: check --repo")
        if hashes != (None, None):
            rows += _kernel_rows(name, hashes, timed, before, after)
    return Comparison(before, after, tuple(rows))


def parse_range(repository: Path, text: str) -> tuple[Revision, Revision]:
    """The two sides of ``A..B`` or ``A...B``. Raises UsageError for any other text and for unknown revisions."""
    match = _RANGE.fullmatch(text)
    if match is None or ".." in match["before"] or ".." in match["after"]:
        raise errors.UsageError(f"{text!r} is no range of revisions: write A..B, or A...B to start at their merge base")
    before, after = _revision(repository, match["before"]), _revision(repository, match["after"])
    if match["dots"] == "...":
        base = git.merge_base(repository, *(side.commit.rstrip("+") for side in (before, after)))
        before = Revision(f"merge base of {before.name} and {after.name}", base)
    return before, after


def _revision(repository: Path, name: str) -> Revision:
    if name == WORKTREE:
        return Revision(name, git.head(repository))
    return Revision(name, git.resolve(repository, name))


def _hashes(kernel: str, root: Path, before: Revision, after: Revision) -> tuple[str, tuple[str | None, str | None]]:
    """The kernel's name and its source hash at each revision, None where it is not declared."""
    readers = [_reader(kernel, root, revision) for revision in (before, after)]
    hashes = [_unless_missing(source.source_hash, kernel, read) for read in readers]
    if ":" not in kernel:
        return kernel, (hashes[0], hashes[1])
    names = [_unless_missing(source.kernel_name, kernel, read) for read in reversed(readers)]
    return next(filter(None, names), kernel), (hashes[0], hashes[1])


def _reader(kernel: str, root: Path, revision: Revision) -> Read:
    folder = source.parse_reference(kernel).root
    if folder is not None and not folder.resolve().is_relative_to(root.resolve()):
        raise errors.UsageError(f"{kernel} lies outside {root}: name its repository with --repo")
    roots = source.SOURCE_ROOTS if folder is None else (os.path.relpath(folder.resolve(), root.resolve()),)
    if revision.name == WORKTREE:
        return source.in_folder(root, roots)
    return source.at_commit(root, revision.commit, roots)


def _unless_missing(read_text: Callable[[str, Read], str], kernel: str, read: Read) -> str | None:
    try:
        return read_text(kernel, read)
    except source.NoSuchKernel:
        return None


Times = Mapping[tuple[Problem, Device], float]


def _kernel_rows(
    kernel: str,
    hashes: tuple[str | None, str | None],
    evidence: Sequence[Evidence],
    before: Revision,
    after: Revision,
) -> list[ComparedRow]:
    old, new = (_best_times(kernel, source_hash, evidence) for source_hash in hashes)
    keys = sorted({*old, *new}, key=_order)
    verdict = _verdict(hashes)
    if not keys:
        reason = "" if verdict else f"no rows at either revision: run fp8tune sweep --kernel {kernel} at both"
        return [ComparedRow(kernel, verdict or NO_ROWS, reason=reason)]
    rows = []
    for problem, device in keys:
        times = old.get((problem, device)), new.get((problem, device))
        reason = "" if verdict or None not in times else _why_unpaired(problem, device, old, new, before, after)
        rows.append(ComparedRow(kernel, NO_ROWS if reason else verdict, problem, device, *times, reason))
    return rows


def _best_times(kernel: str, source_hash: str | None, evidence: Sequence[Evidence]) -> Times:
    """The time of the best config of each problem on each device, for one version of a kernel."""
    rows = [
        row
        for row in evidence
        if row.problem.kernel == kernel and row.version is not None and row.version.source_hash == source_hash
    ]
    return {(winner.problem, winner.device): winner.time_us for winner in ranking.winners(rows)}


def _verdict(hashes: tuple[str | None, str | None]) -> str | None:
    match hashes:
        case (None, _):
            return NEW
        case (_, None):
            return REMOVED
    return SAME_CODE if hashes[0] == hashes[1] else None


def _why_unpaired(problem: Problem, device: Device, old: Times, new: Times, before: Revision, after: Revision) -> str:
    """One side lacks a problem on a device: say whether it has it elsewhere, which is never compared."""
    missing, there = (after, new) if (problem, device) in old else (before, old)
    elsewhere = [other for of, other in there if of == problem]
    if not elsewhere:
        return f"no rows of {missing} for this problem: run fp8tune sweep there"
    nearest = min(elsewhere, key=lambda other: len(_differences(device, other)))
    return f"rows of {missing} are never paired with these: {'; '.join(_differences(device, nearest))}"


def _differences(one: Device, other: Device) -> list[str]:
    pairs = [(field.name, getattr(one, field.name), getattr(other, field.name)) for field in fields(Device)]
    return [f"{name} {a or 'unknown'} against {b or 'unknown'}" for name, a, b in pairs if a != b]


def _order(key: tuple[Problem, Device]) -> tuple[str, list[tuple[str, int]], str]:
    """Devices together, shapes by their sizes."""
    problem, device = key
    return device.fingerprint, list(problem.shape.items()), repr(problem)
