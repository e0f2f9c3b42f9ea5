"""Comparison of two revisions by recorded results; :mod:`fp8tune.comparing.live` times both now.

A result belongs to a revision if the kernel has the result's source hash there, so an unrelated commit changes nothing.
Results are compared within one device, driver, torch and Triton, each side's at its own best config. A verdict needs
several processes on both sides, because one says nothing about the noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace

from fp8tune.comparing import verdicts
from fp8tune.comparing.sides import Kernel, Sides
from fp8tune.comparing.verdicts import ChangeVerdict, ComparedRow, Comparison
from fp8tune.records import Device, Kind, Problem
from fp8tune.stats.means import median
from fp8tune.stats.rank import competing
from fp8tune.stats.study import Result, Study
from fp8tune.store.layers import Reader
from fp8tune.studies import decided

TIMED_KINDS = (Kind.MEASURED, Kind.SIMULATED)

Picks = Mapping[tuple[Problem, Device], Result]  # best config of each problem on each device

ONE_PROCESS = "one process per side says nothing about the noise: compare on a GPU, or sweep again"


def stored(store: Reader, both: Sides) -> list[Study]:
    """Read the studies of the two revisions' code, and nothing else."""
    versions = {(kernel.name, source_hash) for kernel in both.kernels for source_hash in kernel.hashes if source_hash}

    def keep(studies: Sequence[Study]) -> list[Study]:
        by_version: dict[tuple[str, str], list[Study]] = {version: [] for version in versions}
        for study in studies:
            if study.version and (study.version.kernel, study.version.source_hash) in by_version:
                by_version[study.version.kernel, study.version.source_hash].append(study)
        return [study for same in by_version.values() for study in competing(same)]

    return store.studies(kinds=TIMED_KINDS, keep=keep)


def compare(studies: Iterable[Study], both: Sides) -> Comparison:
    """Compare two revisions on stored studies."""
    timed = [study for study in studies if study.kind in TIMED_KINDS and study.version is not None]
    rows = [row for kernel in both.kernels if None not in kernel.hashes for row in _rows(kernel, timed, both)]
    tested = sum(row.effect is not None for row in rows)
    rows = [
        replace(row, verdict=verdicts.decide(row.effect, tested), tested=tested, reason="") if row.effect else row
        for row in rows
    ]
    added = sum(kernel.hashes[0] is None for kernel in both.kernels)
    removed = sum(kernel.hashes[1] is None for kernel in both.kernels)
    return Comparison(both.before, both.after, tuple(rows), added, removed)


def _rows(kernel: Kernel, studies: Sequence[Study], both: Sides) -> Iterator[ComparedRow]:
    """Yield a row for each problem and device; those with an effect still need their verdict."""
    before, after = (_picks(kernel.name, source_hash, studies) for source_hash in kernel.hashes)
    keys = sorted({*before, *after}, key=lambda key: (key[1].fingerprint, list(key[0].shape.items()), repr(key[0])))
    if not keys:
        reason = f"no results at either revision: run fp8tune sweep --kernel {kernel.name} at both"
        verdict = ChangeVerdict.OPEN if kernel.is_changed else ChangeVerdict.SAME_CODE
        yield ComparedRow(kernel.name, verdict, reason=reason if kernel.is_changed else "")
    for key in keys:
        row = _paired(ComparedRow(kernel.name, ChangeVerdict.OPEN, *key), before.get(key), after.get(key))
        if not kernel.is_changed:
            row = replace(row, verdict=ChangeVerdict.SAME_CODE, effect=None, reason="")
        elif row.ratio is None:
            row = replace(row, reason=_why_unpaired(*key, before, after, both))
        yield row


def _picks(kernel: str, source_hash: str | None, studies: Sequence[Study]) -> Picks:
    """Decide the studies of one version of a kernel."""
    of_version = [study for study in studies if study.problem.kernel == kernel and study.source_hash == source_hash]
    return {(study.problem, study.device): study.pick for study in decided(of_version)}


def _paired(row: ComparedRow, before: Result | None, after: Result | None) -> ComparedRow:
    """Return the row with the times of each side, and the change's error if both have several processes."""
    row = replace(
        row,
        before_us=median(before.times_us) if before else None,
        after_us=median(after.times_us) if after else None,
        before_config=before.config if before else None,
        after_config=after.config if after else None,
        reason=ONE_PROCESS,
    )
    if before is None or after is None:
        return row
    n = min(len(before.times_us), len(after.times_us))
    return replace(row, n=n, effect=verdicts.unpaired(before.times_us, after.times_us) if n > 1 else None)


def _why_unpaired(problem: Problem, device: Device, before: Picks, after: Picks, both: Sides) -> str:
    """Explain why one side lacks a problem on a device; results of other devices are never compared."""
    missing, picks = (both.after, after) if (problem, device) in before else (both.before, before)
    elsewhere = [_differences(device, other) for of, other in picks if of == problem]
    if not elsewhere:
        return f"no results of {missing} for this size: run fp8tune sweep there"
    nearest = min(elsewhere, key=len)
    return f"results of {missing} are never compared with these: {'; '.join(nearest)}"


def _differences(one: Device, other: Device) -> list[str]:
    pairs = [(field.name, getattr(one, field.name), getattr(other, field.name)) for field in fields(Device)]
    return [f"{name} {a or 'unknown'} against {b or 'unknown'}" for name, a, b in pairs if a != b]
