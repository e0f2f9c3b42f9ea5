"""A sweep beside its database: run it, then read the outcomes and the decided problem sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from fp8tune.records import Kind, Status
from fp8tune.stats.study import Study
from fp8tune.store.results import Store, Tally
from fp8tune.studies import read_studies
from fp8tune.sweeping import picks
from fp8tune.sweeping.events import Event
from fp8tune.sweeping.loop import sweep
from fp8tune.sweeping.planning import Plan
from fp8tune.sweeping.published import compile_published, with_published


def run(
    store: Store, plan: Plan, clock: Callable[[], float] = time.monotonic, *, begun: float | None = None
) -> Iterator[Event]:
    """Run a sweep with the configs that others published for its problem sizes, and keep the picks up to date.

    ``begun`` is when the time budget began, if not now.
    """
    yield from sweep(store, with_published(store, plan) if plan.backend.times else plan, clock, begun=begun)
    if plan.backend.kind is Kind.STATIC:
        yield from compile_published(store, plan.backend.device.arch, plan.options.kernel, command=plan.command)
    picks.keep_current(store)


def tallies(store: Store, plan: Plan) -> list[Tally]:
    """Return the outcomes of each problem size of a plan, in this sweep and before."""
    found = [(problem, store.tally(plan.subject(problem))) for problem in plan.problems]
    # Pruned rows come first: if a time budget left no room for others, nothing is known of the problem size.
    return [
        tally
        for problem, tally in found
        if tally.outcomes and (set(tally.counts) != {Status.PRUNED} or all(problem.configs.values()))
    ]


def studies(store: Store, plan: Plan) -> list[Study]:
    """Return the decided problem sizes of a plan on its device."""
    problems = {problem.problem for problem in plan.problems}
    return read_studies(store, problems=problems, device=plan.backend.device)
