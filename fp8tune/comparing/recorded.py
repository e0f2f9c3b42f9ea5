"""Comparison of two revisions by recorded results; :mod:`fp8tune.comparing.live` times both now.

A result belongs to a revision if the kernel has the result's source hash there, so an unrelated commit changes nothing.
Results are compared within one device, driver, torch and Triton, each side's at its own best config. Those of another
Triton count where it is known to make the same machine code. A verdict needs several processes on both sides, because
one says nothing about the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace

from fp8tune.comparing import checkout, verdicts
from fp8tune.comparing.calls import Call, answers, call
from fp8tune.comparing.sides import Kernel, Sides, trees
from fp8tune.comparing.verdicts import ChangeVerdict, ComparedRow, Comparison
from fp8tune.plan.shapes import Selection, common_settings
from fp8tune.records import Device, Kind, NamedInts, Problem
from fp8tune.stats.means import group_by, median
from fp8tune.stats.rank import competing
from fp8tune.stats.same_code import Programs, is_same_gpu
from fp8tune.stats.study import Study
from fp8tune.store.layers import Reader
from fp8tune.studies import decided

TIMED_KINDS = (Kind.MEASURED, Kind.SIMULATED)

Picks = dict[tuple[Problem, Device], Study]  # decided study of each problem on each device

ONE_PROCESS = "one process per side says nothing about the noise: compare on a GPU, or sweep again"


def stored(store: Reader, both: Sides) -> list[Study]:
    """Read the studies of the two revisions' code, and nothing else."""
    versions = {(kernel.name, source_hash) for kernel in both.kernels for source_hash in kernel.hashes if source_hash}

    def keep(studies: Sequence[Study]) -> list[Study]:
        groups = group_by(studies, lambda study: study.version and (study.version.kernel, study.version.source_hash))
        return [study for version in versions & groups.keys() for study in competing(groups[version])]

    return store.studies(kinds=TIMED_KINDS, keep=keep)


def selected(studies: Iterable[Study], both: Sides, selections: Sequence[Selection]) -> list[Study]:
    """Return the studies of the sizes that either side's kernels have in the selections, with their settings.

    Raises UsageError if a kernel has none.
    """
    shapes: dict[str, set[NamedInts]] = {}
    with trees(both) as sides:
        calls: list[Call] = [
            (tree, kernel.name, (reference, selections))
            for kernel in both.kernels
            for tree, reference, source_hash in zip(sides, kernel.references, kernel.hashes, strict=True)
            if source_hash
        ]
        results = answers(call(sides, calls, checkout.shapes))
    for (_, kernel_name, _), result in zip(calls, results, strict=True):
        shapes.setdefault(kernel_name, set()).update(result)
    settings = common_settings(selections)
    facts = {"routing": "routing", "dtype": "in_dtype", "layout": "input_layout", "scale": "scale_mode"}
    named = {field: value for name, field in facts.items() if (value := getattr(settings, name))}
    return [
        study
        for study in studies
        if study.problem.shape in shapes.get(study.problem.kernel, ())
        and all(getattr(study.problem, field) == value for field, value in named.items())
    ]


def compare(studies: Iterable[Study], both: Sides, programs: Callable[[], Programs] = Programs) -> Comparison:
    """Compare two revisions on stored studies, across compilers where ``programs`` says that code is the same."""
    timed = [study for study in studies if study.kind in TIMED_KINDS and study.version is not None]
    rows = [row for kernel in both.kernels if None not in kernel.hashes for row in _rows(kernel, timed, both, programs)]
    tested = sum(row.effect is not None for row in rows)
    rows = [
        replace(row, verdict=verdicts.decide(row.effect, tested), tested=tested, reason="") if row.effect else row
        for row in rows
    ]
    rows = [row.of_kind(row.kind) for row in rows]
    added, removed = (sum(kernel.hashes[side] is None for kernel in both.kernels) for side in (0, 1))
    return Comparison(both.before, both.after, tuple(rows), added, removed)


def _rows(
    kernel: Kernel, studies: Sequence[Study], both: Sides, programs: Callable[[], Programs]
) -> Iterator[ComparedRow]:
    """Yield a row for each problem and device; those with an effect still need their verdict."""
    sides = []
    for source_hash in kernel.hashes:
        version = [item for item in studies if (item.problem.kernel, item.source_hash) == (kernel.name, source_hash)]
        sides.append({(study.problem, study.device): study for study in decided(version)})
    _move_to_same_code(sides[1], sides[0], programs)
    _move_to_same_code(sides[0], sides[1], programs)
    verdict = ChangeVerdict.OPEN if kernel.is_changed else ChangeVerdict.SAME_CODE
    if not any(sides):
        reason = f"no results at either revision: run fp8tune sweep --kernel {kernel.name} at both"
        yield ComparedRow(kernel.name, verdict, reason=reason if kernel.is_changed else "")

    def order(key: tuple[Problem, Device]) -> tuple[object, ...]:
        return key[1].fingerprint, list(key[0].shape.items()), repr(key[0])

    for key in sorted({*sides[0], *sides[1]}, key=order):
        before, after = (picks[key].pick if key in picks else None for picks in sides)
        row = ComparedRow(
            kernel.name,
            verdict,
            *key,
            kind=(sides[0].get(key) or sides[1][key]).kind,
            before_us=median(before.times_us) if before else None,
            after_us=median(after.times_us) if after else None,
            before_config=before.config if before else None,
            after_config=after.config if after else None,
            n=min(len(before.times_us), len(after.times_us)) if before and after else 0,
        )
        if kernel.is_changed and before and after:
            effect = verdicts.unpaired(before.times_us, after.times_us) if row.n > 1 else None
            row = replace(row, effect=effect, reason=ONE_PROCESS)
        elif kernel.is_changed:
            missing, picks = (both.before, sides[0]) if before is None else (both.after, sides[1])
            row = replace(row, reason=_why_missing(missing, picks, *key))
        yield row


def _move_to_same_code(there: Picks, here: Picks, programs: Callable[[], Programs]) -> None:
    """Move what ``here`` has of another Triton to the device of ``there``, if the machine code is the same."""
    for problem, device in sorted(there.keys() - here.keys(), key=repr):
        for key in sorted(here.keys() - there.keys(), key=repr):
            is_candidate = key[0] == problem and is_same_gpu(key[1], device)
            if is_candidate and programs().is_unchanged(here[key], device):
                here[problem, device] = here.pop(key)
                break


def _why_missing(revision: object, picks: Picks, problem: Problem, device: Device) -> str:
    """Explain why a side lacks a problem on a device; results of other devices are never compared."""
    differences = []
    for candidate in (candidate for size, candidate in picks if size == problem):
        values = [(field.name, getattr(device, field.name), getattr(candidate, field.name)) for field in fields(Device)]
        differences.append([f"{name} {a or 'unknown'} against {b or 'unknown'}" for name, a, b in values if a != b])
    if not differences:
        return f"no results of {revision} for this size: run fp8tune sweep there"
    nearest = min(differences, key=len)
    return f"results of {revision} are never compared with these: {'; '.join(nearest)}"
