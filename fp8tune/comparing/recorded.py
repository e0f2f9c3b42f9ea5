"""Compare two git revisions by recorded rows alone; :mod:`fp8tune.comparing.live` times both now.

A row belongs to a revision if the kernel has the row's source hash there: an unrelated commit orphans nothing. Rows are
compared within one device, driver, torch and Triton, each side's at its own best config: what its users get. A verdict
needs several processes on both sides: one says nothing of the noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace

from fp8tune.comparing import verdicts
from fp8tune.comparing.comparison import ComparedRow, Comparison
from fp8tune.comparing.sides import Kernel, Sides
from fp8tune.comparing.verdicts import ChangeVerdict
from fp8tune.records import Device, Kind, Problem
from fp8tune.stats.means import median
from fp8tune.stats.rank import competing
from fp8tune.stats.study import Result, Study
from fp8tune.store.layers import Reader
from fp8tune.studies import decided

TIMED_KINDS = (Kind.MEASURED, Kind.SIMULATED)

Best = Mapping[tuple[Problem, Device], Result]
"""The best config of each problem on each device."""


def stored(store: Reader, both: Sides) -> list[Study]:
    """Return the studies of the two revisions' code; nothing else is read."""
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
    rows = [row for kernel in both.kernels for row in _kernel_rows(kernel, timed, both)]
    tested = sum(row.verdict is ChangeVerdict.INCONCLUSIVE and row.effect is not None for row in rows)
    return Comparison(both.before, both.after, tuple(_decided(row, tested) for row in rows))


def _kernel_rows(kernel: Kernel, studies: Sequence[Study], both: Sides) -> list[ComparedRow]:
    """Return a row for each problem and device; INCONCLUSIVE if the code changed and both sides have times."""
    old, new = (_best(kernel.name, source_hash, studies) for source_hash in kernel.hashes)
    verdict = kernel.verdict or ChangeVerdict.NO_ROWS
    rows = []
    for key in sorted({*old, *new}, key=_order):
        row = _paired(ComparedRow(kernel.name, verdict, *key), old.get(key), new.get(key))
        if kernel.verdict is None and row.ratio is None:
            row = replace(row, reason=_why_unpaired(*key, old, new, both))
        elif kernel.verdict is None:
            row = replace(row, verdict=ChangeVerdict.INCONCLUSIVE)
        rows.append(row)
    missing = f"no rows at either revision: run fp8tune sweep --kernel {kernel.name} at both"
    return rows or [ComparedRow(kernel.name, verdict, reason="" if kernel.verdict else missing)]


def _best(kernel: str, source_hash: str | None, studies: Sequence[Study]) -> Best:
    """Return the picks of one version of a kernel."""
    of_kernel = [study for study in studies if study.problem.kernel == kernel]
    of_version = [study for study in of_kernel if study.source_hash == source_hash]
    return {(study.problem, study.device): study.pick for study in decided(of_version)}


def _paired(row: ComparedRow, before: Result | None, after: Result | None) -> ComparedRow:
    """Return the row with the times of each side, and with the change's error if both have several processes."""
    row = replace(
        row,
        before_us=median(before.times_us) if before else None,
        after_us=median(after.times_us) if after else None,
        before_config=before.config if before else None,
        after_config=after.config if after else None,
    )
    if before is None or after is None:
        return row
    n = min(len(before.times_us), len(after.times_us))
    effect = verdicts.unpaired(before.times_us, after.times_us) if n > 1 and before is not after else None
    return replace(row, n=n, effect=effect)


def _decided(row: ComparedRow, tested: int) -> ComparedRow:
    """Return a row whose code changed with its verdict; ``tested`` rows are decided together."""
    if row.verdict is not ChangeVerdict.INCONCLUSIVE:
        return row
    if row.effect is None:
        return replace(row, reason="one process a side says nothing of the noise: compare on a GPU, or sweep again")
    return replace(row, verdict=verdicts.decide(row.effect, tested), tested=tested)


def _why_unpaired(problem: Problem, device: Device, old: Best, new: Best, both: Sides) -> str:
    """Explain why one side lacks a problem on a device; rows of other devices are never compared."""
    missing, there = (both.after, new) if (problem, device) in old else (both.before, old)
    elsewhere = [_differences(device, other) for of, other in there if of == problem]
    if not elsewhere:
        return f"no rows of {missing} for this problem: run fp8tune sweep there"
    nearest = min(elsewhere, key=lambda differences: len(differences))
    return f"rows of {missing} are never paired with these: {'; '.join(nearest)}"


def _differences(one: Device, other: Device) -> list[str]:
    pairs = [(field.name, getattr(one, field.name), getattr(other, field.name)) for field in fields(Device)]
    return [f"{name} {a or 'unknown'} against {b or 'unknown'}" for name, a, b in pairs if a != b]


def _order(key: tuple[Problem, Device]) -> tuple[str, list[tuple[str, int]], str]:
    """Sort key: devices together, shapes by their sizes."""
    problem, device = key
    return device.fingerprint, list(problem.shape.items()), repr(problem)
