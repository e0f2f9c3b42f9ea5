"""Output bits of a sweep's configs, for picks with the same bits at every size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fp8tune.records import NamedInts, Problem
from fp8tune.stats.decide import PLAN
from fp8tune.stats.means import median
from fp8tune.stats.same_bits import Bits, allowed, families
from fp8tune.stats.screen import choose_finalists
from fp8tune.store.results import Store
from fp8tune.sweeping.planning import Plan, ProblemPlan

FINALISTS = 4  # configs with equal bits that are confirmed besides those that any sweep confirms

Coarse = tuple[ProblemPlan, Mapping[NamedInts, Sequence[float]]]
"""A problem size with its configs' block values in microseconds, the rounds in order."""


def with_finalists(store: Store, plan: Plan, coarse: Iterable[Coarse], axis: str) -> list[Coarse]:
    """Hash the outputs of all right configs, and return the sizes with those that are to be confirmed for their bits.

    The hashes are stored: :func:`fp8tune.studies.constrained` chooses by them.
    """
    coarse, also = list(coarse), dict[Problem, tuple[NamedInts, ...]]()
    with contextlib.closing(plan.backend.worker()) as worker:
        for family in families(coarse, axis, lambda item: item[0].problem, lambda item: item[0].reference):
            problems, bits = {number: size.problem for number, (size, _) in family.items()}, dict[int, Bits]()
            largest = problems[max(problems)]
            for number, (size, times_us) in family.items():
                parts = problems if size.problem == largest else {number: size.problem}
                hashes = worker.output_bits(size.reference, size.problem, largest, parts, list(times_us))
                bits[number] = hashes or {}
                store.record_output_bits(plan.subject(size), axis, bits[number])
            medians = {
                number: {config: median(blocks) for config, blocks in times_us.items()}
                for number, (_, times_us) in family.items()
            }
            members = allowed(medians, bits)
            for number, (size, times_us) in family.items():
                right = {config: times for config, times in times_us.items() if config in members.get(number, ())}
                also[size.problem] = choose_finalists(right, size.version.axes, (), replace(PLAN, finalists=FINALISTS))
    return [(replace(size, also=also.get(size.problem, ())), times_us) for size, times_us in coarse]
