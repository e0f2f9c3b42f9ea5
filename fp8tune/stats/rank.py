"""Choice of the studies that answer a question. Two kernel versions, GPUs or drivers are never mixed."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from operator import attrgetter
from typing import TypeVar

from fp8tune.records import ComparableRows, Device, Kind, Problem
from fp8tune.stats.means import grouped
from fp8tune.stats.study import Study

TIMED_KINDS = (Kind.MEASURED, Kind.SIMULATED, Kind.PUBLISHED)  # the most trusted first
Pool = TypeVar("Pool", Study, ComparableRows)  # rows that compare with each other

_REST = attrgetter("routing", "input_layout", "in_dtype", "fp8_dtype", "scale_mode", "seed")


def competing(pools: Iterable[Pool]) -> list[Pool]:
    """Return the pool that answers each question, and all pools that hold no times."""
    with_times: list[Pool] = []
    rest: list[Pool] = []
    for pool in pools:
        (with_times if pool.kind in TIMED_KINDS and pool.newest else rest).append(pool)
    return _answers(with_times) + rest


def answering(pools: Iterable[Pool]) -> list[Pool]:
    """Return one pool for each question, sorted for display.

    The newest complete kernel version answers, by the device that ran finals if there is one: a coarse pass on another
    machine does not replace finals. A publication answers only where nothing was measured.
    """
    answers = _answers(pool for pool in pools if pool.kind in TIMED_KINDS)
    measured = {_subject(pool) for pool in answers if pool.kind is not Kind.PUBLISHED}
    rest = [pool for pool in answers if pool.kind is not Kind.PUBLISHED or _subject(pool) not in measured]
    return sorted(rest, key=lambda pool: display_order(pool.problem, pool.device))


def _answers(pools: Iterable[Pool]) -> list[Pool]:
    questions = grouped(pools, lambda pool: (pool.problem, pool.device.arch, pool.device.name))
    return list(map(_best, questions.values()))


def _best(rivals: Sequence[Pool]) -> Pool:
    newest = min(rivals, key=_rank)
    same = _hash(newest), newest.complete
    peers = [pool for pool in rivals if (_hash(pool), pool.complete) == same]
    return min(peers, key=lambda pool: (not pool.has_finals, _rank(pool)))


def _rank(pool: Study | ComparableRows) -> tuple[object, ...]:
    """Rank measured before published and complete before begun, then the newest; names decide between equals."""
    return TIMED_KINDS.index(pool.kind), not pool.complete, -pool.newest, _hash(pool), pool.device.fingerprint


def _hash(pool: Study | ComparableRows) -> str:
    return pool.version.source_hash if pool.version else ""


def _subject(pool: Study | ComparableRows) -> Hashable:
    """Return what a publication and a measurement have in common: publications name no routing or scales."""
    problem = pool.problem
    return pool.device.arch, problem.kernel, problem.shape, problem.input_layout


def display_order(problem: Problem, device: Device) -> tuple[object, ...]:
    """Return the sort key of picks: kernel, arch, device, shape, then the rest of the problem."""
    return problem.kernel, device.arch, device.name, sorted(problem.shape.items()), _REST(problem)
