"""Sweep of a program's launches within a time budget: those that take the most GPU time come first."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fp8tune.records import Problem
from fp8tune.store.results import Store
from fp8tune.sweeping import children, session
from fp8tune.sweeping.events import Event
from fp8tune.sweeping.planning import Plan, ProblemPlan

COARSE_SHARE = 0.6
"""Share of the budget that the coarse pass may take at most."""


def run(store: Store, plan: Plan, first: int, budget_s: float) -> Iterator[Event]:
    """Sweep a plan: the coarse pass of all launches, then the confirmation of the first ones, then that of the rest."""
    begun = time.monotonic()

    def swept(sizes: Sequence[ProblemPlan], until_s: float, *, quick: bool) -> Iterator[Event]:
        options = replace(plan.options, budget_s=until_s, quick=quick)
        return children.run(store, replace(plan, options=options, problems=tuple(sizes)), begun=begun)

    if not plan.backend.times:
        yield from swept(plan.problems, budget_s, quick=False)
        return
    yield from swept(plan.problems, COARSE_SHARE * budget_s, quick=True)
    timed = timed_sizes(store, plan)
    for sizes in (plan.problems[:first], plan.problems[first:]):
        confirmed = [size for size in sizes if size.problem in timed]
        if confirmed and time.monotonic() < begun + budget_s:
            yield from swept(confirmed, budget_s, quick=False)


def timed_sizes(store: Store, plan: Plan) -> set[Problem]:
    """Return the problem sizes of a plan that have a usable time."""
    return {study.problem for study in session.studies(store, plan) if study.is_usable}
