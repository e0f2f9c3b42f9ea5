"""Choice among configs whose outputs have the same bits at every size: they sum in the same order.

Studies that differ in one size (``M``, the rows of a batch) form a family. Configs are compared by hashes of their
outputs on one batch: the largest size has all of it, the others its beginning. Configs with equal hashes at the largest
size are a *class*. A config of another size belongs to a class if its output is the beginning of that of the class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from fp8tune.records import RECORDED, NamedInts, Problem, is_recorded
from fp8tune.stats.decide import decide_study
from fp8tune.stats.study import Study

Item = TypeVar("Item")

Bits = Mapping[NamedInts, Mapping[int, str]]
"""Config -> hash of its output up to each size; without configs whose launches differ from each other."""


@dataclass(frozen=True)
class SameBits:
    """The pick of a study among the configs of the family's class."""

    study: Study  # decided among these configs
    slowdown: float | None  # its time over that of the pick without the constraint; None if no stage timed both


def families(
    items: Iterable[Item], axis: str, problem_of: Callable[[Item], Problem], place_of: Callable[[Item], Hashable]
) -> list[dict[int, Item]]:
    """Group items of one place whose problems differ in one size alone, by that size; without those that lack it.

    Recorded launches are told apart by their sizes; of two with the same sizes, each has a family of its own.
    """
    groups: dict[Hashable, list[dict[int, Item]]] = {}
    for item in items:
        problem = problem_of(item)
        if axis in problem.shape:
            shape = NamedInts({name: size for name, size in problem.shape.items() if name != axis})
            layout = RECORDED if is_recorded(problem) else problem.input_layout
            alike = groups.setdefault((replace(problem, shape=shape, input_layout=layout), place_of(item)), [])
            size = problem.shape[axis]
            family = next((family for family in alike if size not in family), None)
            if family is None:
                alike.append(family := {})
            family[size] = item
    return [family for alike in groups.values() for family in alike]


def allowed(
    times_us: Mapping[int, Mapping[NamedInts, float]], bits: Mapping[int, Bits]
) -> Mapping[int, frozenset[NamedInts]]:
    """Return the configs of the class with the least geometric mean time over all sizes; empty if there is none.

    Args:
        times_us: Size -> config -> time, or its ratio to the best. A class has a config with a time at each size.
        bits: Size -> hashes. A size has its own, the largest also those of all smaller ones.
    """
    largest = max(times_us)
    classes: dict[tuple[str, ...], set[NamedInts]] = {}
    class_of: dict[NamedInts, tuple[str, ...]] = {}
    for config, hashes in bits[largest].items():
        if all(size in hashes for size in times_us):
            class_of[config] = tuple(hashes[size] for size in sorted(times_us))
            classes.setdefault(class_of[config], set()).add(config)
    best: tuple[float, tuple[str, ...], Mapping[int, frozenset[NamedInts]]] = math.inf, (), {}
    for identity in classes:
        members = {
            size: frozenset(
                config
                for config, hashes in bits[size].items()
                if hashes.get(size) == expected and class_of.get(config, identity) == identity
            )
            for size, expected in zip(sorted(times_us), identity, strict=True)
        }
        times = [[time for config, time in times_us[size].items() if config in members[size]] for size in members]
        if all(times):
            score = sum(math.log(min(of_size)) for of_size in times)
            best = min(best, (score, identity, members), key=lambda item: item[:2])
    return best[2]


def constrain(
    studies: Iterable[Study], axis: str, bits_of: Callable[[Study], Bits]
) -> tuple[list[SameBits], list[str]]:
    """Choose again among configs with the same bits at every size, and say of which families that is impossible.

    ``studies`` are decided. Those without the size are left out.
    """
    chosen, notices = list[SameBits](), list[str]()
    for family in families(studies, axis, lambda study: study.problem, lambda study: (study.device, study.version)):
        bits = {size: bits_of(study) for size, study in family.items()}
        members = allowed({size: _confirmed(study) for size, study in family.items()}, bits)
        if not members:
            kernel, sizes = family[max(family)].problem.kernel, f"{axis}={_range(family)}"
            fix = "see that its outputs at one size do not depend on another"
            if not all(bits.values()):
                fix = f"run fp8tune sweep --same-bits {axis} on all of these sizes"
            notices.append(f"no config of {kernel} is known to give the same bits at {sizes}: {fix}")
        chosen += [_constrained(study, members[size]) for size, study in family.items() if members]
    return chosen, notices


def _confirmed(study: Study) -> Mapping[NamedInts, float]:
    """Return the slowdowns of the configs that were confirmed; of all if none was."""
    slowdowns = study.slowdowns
    return {config: slowdowns[config] for config in study.finals} or slowdowns


def _range(sizes: Iterable[int]) -> str:
    ordered = sorted(sizes)
    return f"{ordered[0]} to {ordered[-1]}" if len(ordered) > 1 else str(ordered[0])


def _constrained(study: Study, configs: frozenset[NamedInts]) -> SameBits:
    results = tuple(result for result in study.results if result.config in configs)
    current = study.current if study.current in configs else None
    pick = decide_study(replace(study, results=results, current=current, decision=None))
    rival = study.rival(pick.choice.pick)
    return SameBits(pick, rival.ratio if rival else None)
