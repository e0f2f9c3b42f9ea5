"""Choose configs anew for one side of a comparison: as many configs and blocks as the other side gets.

A pick for a comparison, not for a table: two processes, so near-ties fall either way, on both sides alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from fp8tune.measure.arms import KernelArm
from fp8tune.measure.engine import Backend, Group, Schedule, measure
from fp8tune.measure.trees import Tree
from fp8tune.stats import median

CONFIGS = 48
"""Tried on each problem, on either side: the default, what the table has, and a seeded choice of the rest."""
FINALISTS = 6
FINAL_ROUNDS = 2


def retuned(backend: Backend, tree: Tree, listed: Sequence[Sequence[KernelArm]]) -> list[KernelArm]:
    """For each list of one problem's arms the fastest; its first arm if none can be timed.

    All are checked and timed once in one process, the fastest few twice more in another.
    """
    groups: list[Group[KernelArm, dict[KernelArm, list[float]]]] = [Group({}, [*arms]) for arms in listed]
    for processes, rounds in ((range(1), 1), (range(1, 2), FINAL_ROUNDS)):
        for turn in measure(backend, groups, Schedule(processes, rounds, trees=(tree,), is_checked=True)):
            for block in turn.blocks:
                assert block.outcome.time_us is not None
                turn.group.subject.setdefault(block.arm, []).append(block.outcome.time_us)
        for group in groups:
            group.arms = sorted(group.arms, key=lambda arm: median(group.subject.get(arm, [float("inf")])))[:FINALISTS]
    return [(group.arms or arms)[0] for group, arms in zip(groups, listed, strict=True)]
