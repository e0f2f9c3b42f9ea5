"""What changed between two git revisions, from recorded rows alone; timing both now is :mod:`fp8tune.compare.live`.

A row belongs to a revision when the kernel's source hash there is the row's own, so that an unrelated commit orphans
nothing. Two rows are compared only if they come from one device under one driver, torch and Triton. Each side's time is
that of its own best config: what users of that revision get. A verdict needs several processes on both sides: one says
nothing of the noise.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from fp8tune import errors
from fp8tune.choose import ranking
from fp8tune.compare import verdicts
from fp8tune.compare.comparison import ComparedRow, Comparison, Revision
from fp8tune.compare.verdicts import ChangeVerdict
from fp8tune.records import ComparableRows, Device, Evidence, Kind, Problem
from fp8tune.revisions import git, source
from fp8tune.revisions.walk import Read
from fp8tune.store.results import Store
from fp8tune_kernels import catalog

__all__ = ["WORKTREE", "Comparison", "compare", "compare_stored", "declared_hashes", "parse_range"]

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
    return _compared(evidence, _sides(repository, range_text, kernels))


def compare_stored(store: Store, repository: Path, range_text: str, kernels: Sequence[str] | None = None) -> Comparison:
    """The same of a database, of which only what the two revisions timed is read."""
    sides = _sides(repository, range_text, kernels)
    versions = {(name, source_hash) for name, hashes in sides.kernels for source_hash in hashes if source_hash}

    def keep(pools: Sequence[ComparableRows]) -> list[ComparableRows]:
        by_version: dict[tuple[str, str], list[ComparableRows]] = {version: [] for version in versions}
        for pool in pools:
            if pool.version and (pool.version.kernel, pool.version.source_hash) in by_version:
                by_version[pool.version.kernel, pool.version.source_hash].append(pool)
        return [pool for same in by_version.values() for pool in ranking.competing(same)]

    return _compared(store.evidence(kinds=TIMED_KINDS, keep=keep, finalists_only=True), sides)


@dataclass(frozen=True)
class _Sides:
    """Two revisions, and each kernel that one of them declares with its source hash at both."""

    before: Revision
    after: Revision
    kernels: tuple[tuple[str, tuple[str | None, str | None]], ...]


def _sides(repository: Path, range_text: str, kernels: Sequence[str] | None) -> _Sides:
    root = git.toplevel(repository)
    before, after = parse_range(root, range_text)
    declared = [
        declared_hashes(kernel, root, before, after, required=bool(kernels)) for kernel in kernels or catalog.KERNELS
    ]
    return _Sides(before, after, tuple(each for each in declared if each[1] != (None, None)))


def _compared(evidence: Iterable[Evidence], sides: _Sides) -> Comparison:
    timed = [row for row in evidence if row.kind in TIMED_KINDS and row.version is not None]
    rows: list[ComparedRow] = []
    for name, hashes in sides.kernels:
        rows += _kernel_rows(name, hashes, timed, sides.before, sides.after)
    return Comparison(sides.before, sides.after, tuple(_judged(rows)))


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


def declared_hashes(
    kernel: str, root: Path, before: Revision, after: Revision, *, required: bool
) -> tuple[str, tuple[str | None, str | None]]:
    """The kernel's name and its source hash at each revision, None where it is not declared.

    Raises UsageError where it is ``required`` and declared at neither.
    """
    readers = [_reader(kernel, root, revision) for revision in (before, after)]
    hashes = [_unless_missing(source.source_hash, kernel, read) for read in readers]
    if required and hashes == [None, None]:
        raise errors.UsageError(f"kernel {kernel} is declared neither at {before} nor at {after}: check --repo")
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


Best = Mapping[tuple[Problem, Device], Evidence]


def _kernel_rows(
    kernel: str,
    hashes: tuple[str | None, str | None],
    evidence: Sequence[Evidence],
    before: Revision,
    after: Revision,
) -> list[ComparedRow]:
    old, new = (_best(kernel, source_hash, evidence) for source_hash in hashes)
    keys = sorted({*old, *new}, key=_order)
    verdict = _verdict(hashes)
    if not keys:
        reason = "" if verdict else f"no rows at either revision: run fp8tune sweep --kernel {kernel} at both"
        return [ComparedRow(kernel, verdict or ChangeVerdict.NO_ROWS, reason=reason)]
    rows = []
    for problem, device in keys:
        row = _paired(ComparedRow(kernel, verdict or ChangeVerdict.NO_ROWS, problem, device), old, new)
        if verdict is None and row.ratio is None:
            row = replace(row, reason=_why_unpaired(problem, device, old, new, before, after))
        elif verdict is None:
            row = replace(row, verdict=ChangeVerdict.INCONCLUSIVE)
        rows.append(row)
    return rows


def _best(kernel: str, source_hash: str | None, evidence: Sequence[Evidence]) -> Best:
    """The best config of each problem on each device, for one version of a kernel."""
    rows = [
        row
        for row in evidence
        if row.problem.kernel == kernel and row.version is not None and row.version.source_hash == source_hash
    ]
    picks = {(winner.problem, winner.device, winner.config) for winner in ranking.winners(rows)}
    finals_last = sorted(rows, key=lambda row: row.stage == "final")
    return {
        (row.problem, row.device): row
        for row in finals_last
        if row.times_us and (row.problem, row.device, row.config) in picks
    }


def _paired(row: ComparedRow, old: Best, new: Best) -> ComparedRow:
    """The row with what each side has of it, and with the change's error where both have several processes."""
    assert row.problem is not None
    assert row.device is not None
    before, after = old.get((row.problem, row.device)), new.get((row.problem, row.device))
    row = replace(
        row,
        before_us=ranking.value_us(before) if before else None,
        after_us=ranking.value_us(after) if after else None,
        before_config=before.config if before else None,
        after_config=after.config if after else None,
    )
    if before is None or after is None:
        return row
    n = min(len(before.times_us), len(after.times_us))
    effect = verdicts.unpaired(before.times_us, after.times_us) if n > 1 and before is not after else None
    return replace(row, n=n, effect=effect)


def _judged(rows: Sequence[ComparedRow]) -> list[ComparedRow]:
    """Rows whose code changed with their verdicts; all are decided together."""
    open_rows = [row for row in rows if row.verdict is ChangeVerdict.INCONCLUSIVE]
    tested = sum(row.effect is not None for row in open_rows)
    return [_judge(row, tested) if row.verdict is ChangeVerdict.INCONCLUSIVE else row for row in rows]


def _judge(row: ComparedRow, tested: int) -> ComparedRow:
    if row.effect is None:
        return replace(row, reason="one process a side says nothing of the noise: compare on a GPU, or sweep again")
    return replace(row, verdict=verdicts.judge(row.effect, tested), tested=tested)


def _verdict(hashes: tuple[str | None, str | None]) -> ChangeVerdict | None:
    match hashes:
        case (None, _):
            return ChangeVerdict.NEW
        case (_, None):
            return ChangeVerdict.REMOVED
    return ChangeVerdict.SAME_CODE if hashes[0] == hashes[1] else None


def _why_unpaired(problem: Problem, device: Device, old: Best, new: Best, before: Revision, after: Revision) -> str:
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
