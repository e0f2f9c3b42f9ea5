"""A sweep beside its database: run it, or answer it from the rows of a finished one; then its winners and tallies."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator

from fp8tune import adapter
from fp8tune.measure import machine
from fp8tune.measure.engine import Backend
from fp8tune.records import Kind, Problem, Row, Status, Subject
from fp8tune.stats.study import Study
from fp8tune.store import database
from fp8tune.store.results import Store, Tally
from fp8tune.sweep import picks
from fp8tune.sweep.events import Event, TrialDone
from fp8tune.sweep.loop import replay, sweep
from fp8tune.sweep.planning import Plan
from fp8tune.sweep.published import compile_published, is_any_untimed, with_published


def is_stored(db: str, plan: Plan) -> bool:
    """Whether a database has all rows of a plan, so that nothing needs to be planned. Makes no database."""
    if plan.options.again or plan.options.retry_failed or not database.exists(db):
        return False
    try:
        with Store.open(db, writable=False) as store:
            problems = finished_problems(store, plan)
            found = tallies(store, plan)
            failures = [outcome for tally in found for outcome in tally.failures.values()]
            if not problems or any(machine.is_machines(outcome.reason) for outcome in failures):
                return False
            return not (plan.backend.times and is_any_untimed(store, [tally.subject for tally in found]))
    except database.EmptyDatabaseError:
        return False


def run(
    store: Store, plan: Plan, clock: Callable[[], float] = time.monotonic, *, begun: float | None = None
) -> Iterator[Event]:
    """The events of a sweep: from its rows where its problems are not planned (:func:`is_stored`), else by running it.

    What others published for its problems is timed too; where nothing runs, it is compiled. A sweep that ran to its
    end keeps the picks (:mod:`fp8tune.sweep.picks`). ``begun``: when the time budget began, if not now.
    """
    if not plan.problems:
        yield from replay(store, plan, store.finished_sweep(plan.key, plan.backend.device) or [])
        return
    yield from sweep(store, with_published(store, plan) if plan.backend.times else plan, clock, begun=begun)
    if plan.backend.kind is Kind.STATIC:
        options = plan.options
        yield from compile_published(store, plan.backend.device.arch, options.kernels, command=options.command)
    picks.keep_current(store)


def row_of(event: Event) -> Row | None:
    """The row an event brings, if it brings one."""
    return event.row if isinstance(event, TrialDone) else None


def finished_problems(store: Store, plan: Plan) -> list[Problem]:
    """The problems of a plan whose rows are all there."""
    return [problem for _, problem in store.finished_sweep(plan.key, plan.backend.device) or []]


def tallies(store: Store, plan: Plan) -> list[Tally]:
    """Return the outcomes of each problem of a plan, in this sweep and before."""
    backend = plan.backend
    pairs = [(of.version, of.problem) for of in plan.problems] or store.finished_sweep(plan.key, backend.device) or []
    subjects = [Subject(version, backend.device, backend.kind, problem) for version, problem in pairs]
    found = [tally for subject in subjects if (tally := store.tally(subject)).outcomes]
    # pruned rows come first: where they are all that a time budget left room for, nothing is known of the problem
    to_try = {of.problem for of in plan.problems if not all(of.configs.values())}
    return [of for of in found if of.subject.problem not in to_try or set(of.counts) != {Status.PRUNED}]


def studies(store: Store, backend: Backend, problems: Collection[Problem]) -> list[Study]:
    """Return the decided studies of some problems on the back end's device."""
    return adapter.read_studies(store, problems=set(problems), device=backend.device)
