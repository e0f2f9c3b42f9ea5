"""Proposals of a search: better than chance, never twice, and with what other sizes showed."""

from __future__ import annotations

import itertools
import math
import random

from fp8tune.records import NamedInts, Problem
from fp8tune.stats import search

GRID = [
    NamedInts(block=block, tile=tile, lead=lead, num_warps=warps)
    for block, tile, lead, warps in itertools.product(
        (16, 32, 64, 128), (64, 128, 256, 512), (0, 64, 192), (1, 2, 4, 8)
    )
]
BEST = NamedInts(block=64, tile=256, lead=64, num_warps=4)


def time_us(config: NamedInts) -> float:
    steps = {axis: abs(math.log2((config[axis] + 1) / (BEST[axis] + 1))) for axis in config}
    return 100.0 * math.exp(0.2 * sum(steps.values()) + 0.1 * steps["block"] * steps["num_warps"])


def size(M: int) -> search.Times:
    return search.Times(Problem("toy", NamedInts(M=M)), "H100")


def slowdown(tried: dict[NamedInts, float]) -> float:
    return min(tried.values()) / time_us(BEST) - 1


def test_a_tenth_of_a_grid_is_enough() -> None:
    by_chance = list[float]()
    for seed in range(4):
        order, own = random.Random(seed).sample(GRID, len(GRID)), size(4096)
        for _ in range(len(GRID) // 40):
            batch = search.proposals(4, [config for config in order if config not in own.times_us], own)
            assert len({*batch}) == 4
            assert not {*batch} & own.times_us.keys()
            own.times_us.update({config: time_us(config) for config in batch})
        assert slowdown(own.times_us) <= 0.005
        by_chance.append(slowdown({config: time_us(config) for config in order[: len(GRID) // 10]}))
    assert sum(by_chance) > 4 * 0.1


def test_the_best_of_another_size_comes_first() -> None:
    larger = search.Times(size(8192).problem, "H200", {config: 2 * time_us(config) for config in GRID})
    assert search.proposals(1, GRID, size(4096), [larger]) == [BEST]


def test_without_times_the_order_stays_and_everything_is_proposed_in_the_end() -> None:
    assert search.proposals(3, GRID, size(4096)) == GRID[:3]
    own = search.Times(size(1).problem, "H100", {config: time_us(config) for config in GRID[2:]})
    assert {*search.proposals(8, GRID[:2], own)} == {*GRID[:2]}
    assert search.proposals(8, [], own) == []


def test_regret_falls_with_the_share() -> None:
    shares = [search.regret_at(share) for share in (0.05, 0.07, 0.1, 0.15, 0.2, 0.9)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == search.REGRET[0][1:]


def test_what_is_pending_is_not_proposed_again_nor_what_is_like_it() -> None:
    own = size(4096)
    own.times_us.update({config: time_us(config) for config in GRID[:20]})
    both = search.proposals(8, GRID[20:], own)
    later = [config for config in GRID[20:] if config not in both[:4]]
    assert search.proposals(4, later, own, pending=both[:4]) == both[4:]
    assert search.proposals(0, later, own, pending=both[:4]) == []
