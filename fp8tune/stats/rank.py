"""Choice of one study per problem and GPU model. Kernel versions, GPUs and drivers are never mixed."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from operator import attrgetter

from fp8tune.records import Device, Kind, Pick, Problem
from fp8tune.stats.means import group_by
from fp8tune.stats.study import Study

TIMED_KINDS = (Kind.MEASURED, Kind.SIMULATED, Kind.PUBLISHED)  # the most trusted first

_OTHER_FIELDS = attrgetter("routing", "input_layout", "in_dtype", "fp8_dtype", "scale_mode", "seed")


def competing(pools: Iterable[Study]) -> list[Study]:
    """Return the best group with times for each problem and GPU model, and all groups without times."""
    with_times: list[Study] = []
    rest: list[Study] = []
    for pool in pools:
        (with_times if pool.kind in TIMED_KINDS and pool.newest else rest).append(pool)
    return _best_groups(with_times) + rest


def answering(pools: Iterable[Study]) -> list[Study]:
    """Return the best group for each problem and GPU model, sorted for display.

    The best group has the newest complete kernel version. Among several devices, one that ran finals is preferred, so
    that a coarse pass on another machine never replaces finals. Publications count only where nothing was measured.
    """
    answers = _best_groups(pool for pool in pools if pool.kind in TIMED_KINDS)
    measured = {_subject(pool) for pool in answers if pool.kind is not Kind.PUBLISHED}
    rest = [pool for pool in answers if pool.kind is not Kind.PUBLISHED or _subject(pool) not in measured]
    return sorted(rest, key=lambda pool: display_order(pool.problem, pool.device))


def joined(own: Iterable[Pick], shipped: Iterable[Pick]) -> list[Pick]:
    """Return the picks of two databases as :func:`answering` chooses among studies; own ones win among equals."""
    picks = sorted([*own, *shipped], key=lambda pick: (TIMED_KINDS.index(pick.kind), not pick.is_complete))
    best = {(pick.problem, pick.device.arch, pick.device.name): pick for pick in reversed(picks)}.values()
    measured = {_subject(pick) for pick in best if pick.kind is not Kind.PUBLISHED}
    return [pick for pick in best if pick.kind is not Kind.PUBLISHED or _subject(pick) not in measured]


def _best_groups(pools: Iterable[Study]) -> list[Study]:
    groups = group_by(pools, lambda pool: (pool.problem, pool.device.arch, pool.device.name))
    return list(map(_best, groups.values()))


def _best(rivals: Sequence[Study]) -> Study:
    first = min(rivals, key=_rank)
    version = _source_hash(first), first.complete
    peers = [pool for pool in rivals if (_source_hash(pool), pool.complete) == version]
    return min(peers, key=lambda pool: (not pool.has_finals, _rank(pool)))


def _rank(pool: Study) -> tuple[object, ...]:
    """Return a sort key: measured before published, complete before incomplete, then newest first; names break ties."""
    return TIMED_KINDS.index(pool.kind), not pool.complete, -pool.newest, _source_hash(pool), pool.device.fingerprint


def _source_hash(pool: Study) -> str:
    return pool.version.source_hash if pool.version else ""


def _subject(pool: Study | Pick) -> Hashable:
    """Return the fields on which a published result and a measurement are compared; routing and scales are left out."""
    problem = pool.problem
    return pool.device.arch, problem.kernel, problem.shape, problem.input_layout


def display_order(problem: Problem, device: Device) -> tuple[object, ...]:
    """Return a sort key for picks: kernel, arch, device, shape, then the remaining fields of the problem."""
    return problem.kernel, device.arch, device.name, sorted(problem.shape.items()), _OTHER_FIELDS(problem)
