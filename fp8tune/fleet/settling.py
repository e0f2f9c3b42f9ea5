"""Problems on which GPUs of one name disagree are measured anew, with every pick among the finalists."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import replace

from fp8tune.choose.disagreements import Disagreement, disagreements
from fp8tune.choose.incumbents import COMMITTED
from fp8tune.fleet import units
from fp8tune.fleet.units import Added
from fp8tune.records import Problem
from fp8tune.store.results import Store
from fp8tune.sweep.planning import Plan


def disagreeing(store: Store, problems: Collection[Problem] | None = None) -> list[Disagreement]:
    """What GPUs of one name disagree on, of some problems or of all that several of them timed."""
    from fp8tune.fleet.trust import shared_problems

    several = shared_problems(store)
    wanted = several if problems is None else several & set(problems)
    return disagreements(store.evidence(problems=wanted), COMMITTED) if wanted else []


def add(store: Store, plan: Plan) -> Added | None:
    """Queue what settles the disagreements on a plan's problems; None where there are none, or no finals are wanted.

    Whichever GPU takes such a unit, best a third one, screens the problem and times every pick in its finals. Its rows
    are the newest then, and rank.
    """
    if plan.options.quick:
        return None
    here = plan.backend.device.name
    found = [
        each
        for each in disagreeing(store, [of.problem for of in plan.problems])
        if any(device.name == here for device, _ in each.picks)
    ]
    open_ = {(each.problem, each.version.source_hash) for each in found}
    problems = tuple(of for of in plan.problems if (of.problem, of.version.source_hash) in open_)
    if not problems:
        return None
    anew = replace(plan, problems=problems, options=replace(plan.options, again=True))
    said = [(device.uuid_hash, config.canonical) for each in found for device, config in each.picks]
    key = hashlib.sha256(f"{units.queued(plan).key} settle {sorted(said)}".encode()).hexdigest()[:16]
    sweep = replace(units.queued(anew), key=key)
    waiting = list(units.units_of(anew, key))
    new = store.add_units(sweep, waiting)
    return Added(sweep, new, len(waiting) - new, len(problems), 0)


def with_rivals(store: Store, plan: Plan) -> Plan:
    """A plan that measures anew, with what other GPUs of the name picked among the finalists of each problem."""
    if not plan.options.again or plan.options.quick:
        return plan
    rivals = {
        (each.problem, each.version.source_hash): each.configs
        for each in disagreeing(store, [of.problem for of in plan.problems])
    }
    problems = tuple(replace(of, rivals=rivals.get((of.problem, of.version.source_hash), ())) for of in plan.problems)
    return replace(plan, problems=problems)
