from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.choose.covering import coverings
from fp8tune.choose.pairs import canonical_order
from fp8tune.records import NamedInts

AXES = (("BLOCK", (16, 32, 64, 128)),)
A, B, C, D = (NamedInts(BLOCK=block, num_warps=4, num_stages=2) for block in AXES[0][1])


def test_the_fewest_configs_within_the_bound():
    problems = [{A: 1.0, C: 1.015}, {B: 1.0, C: 1.01}, {D: 1.0, C: 1.3, A: 1.05}]
    strict, loose, looser = coverings(problems, [0.0, 0.02, 0.3], axes=AXES)
    assert strict.configs == (A, B, D)
    assert strict.worst == 0
    assert loose.configs == (C, D)
    assert loose.chosen == (C, C, D)
    assert loose.worst == pytest.approx(0.015)
    assert 0 < loose.mean < loose.worst
    assert looser.configs == (C,)


def test_of_the_smallest_sets_the_one_of_least_worst_loss_then_the_canonical_first():
    assert coverings([{A: 1.02, B: 1.0}, {A: 1.0, B: 1.01}], [0.02])[0].configs == (B,)
    assert coverings([{A: 1.01, B: 1.0}, {A: 1.0, B: 1.01}], [0.02])[0].configs == (A,)
    fewer_warps = NamedInts(BLOCK=128, num_warps=2, num_stages=2)
    assert coverings([{A: 1.0, fewer_warps: 1.0}], [0.02])[0].configs == (fewer_warps,)


def test_a_config_is_used_only_where_it_is_right():
    (found,) = coverings([{A: 1.0}, {A: 1.0, B: 1.0}, {B: 1.0}], [0.5], failed=[{B}, set(), {A}])
    assert found.configs == (A, B)
    assert not found.incomplete


def test_problems_whose_times_are_incomplete_are_named():
    (found,) = coverings([{A: 1.0, B: 1.1}, {A: 1.0}, {A: 1.0}], [0.02], failed=[(), (), {B}])
    assert found.incomplete == {1: 1}


@pytest.mark.parametrize(("problems", "within"), [([], 0.02), ([{}], 0.02), ([{A: 1.0}], -0.1)])
def test_nothing_to_cover_and_bounds_below_zero_are_refused(problems, within):
    with pytest.raises(ValueError, match=r"problem|below 0"):
        coverings(problems, [within])


def test_a_set_that_takes_too_long_is_a_greedy_one_that_says_so():
    random = np.random.default_rng(0)
    configs = [NamedInts(BLOCK=block, num_warps=4) for block in range(300)]
    problems = [dict(zip(configs, 1 + random.random(300), strict=True)) for _ in range(150)]
    problems = [{config: time / min(of.values()) for config, time in of.items()} for of in problems]
    began = time.monotonic()
    found, again, loosest = coverings(problems, [0.02, 0.02, 2.0], seconds=0.3)
    assert time.monotonic() - began < 5
    assert found.is_smallest is False
    assert found.worst <= 0.02
    assert again == found == coverings(problems, [0.02], seconds=0)[0]
    assert len(loosest.configs) == 1


losses = st.dictionaries(st.sampled_from((A, B, C, D)), st.sampled_from((1.0, 1.01, 1.02, 1.05)), min_size=1)


@given(st.lists(losses, min_size=1, max_size=6), st.sampled_from((0.0, 0.01, 0.02, 0.1)), st.randoms())
def test_the_set_is_the_one_that_trying_all_finds(problems, within, random):
    problems = [{config: time / min(of.values()) for config, time in of.items()} for of in problems]

    def worst(configs) -> float:
        return max(min(of.get(config, np.inf) for config in configs) for of in problems)

    known = sorted({config for of in problems for config in of}, key=canonical_order(AXES))
    sets = [each for size in range(1, 5) for each in itertools.combinations(known, size)]
    covering = [each for each in sets if worst(each) <= 1 + within + 1e-9]
    smallest = [each for each in covering if len(each) == len(covering[0])]
    least = min(map(worst, smallest))
    (found,) = coverings(problems, [within], axes=AXES)
    assert len(found.configs) == len(covering[0])
    assert found.worst == pytest.approx(least - 1)
    assert found.configs in smallest
    shuffled = [dict(random.sample(list(of.items()), len(of))) for of in problems]
    assert coverings(shuffled, [within], axes=AXES) == [found]


def test_five_hundred_configs_and_two_hundred_problems_take_less_than_two_seconds():
    random = np.random.default_rng(0)
    blocks = list(itertools.product((16, 32, 64, 128, 256), (16, 32, 64, 128, 256), (2, 4, 8, 16), range(1, 6)))
    configs = [NamedInts(BLOCK_M=m, BLOCK_N=n, num_warps=warps, num_stages=stages) for m, n, warps, stages in blocks]
    places = np.log2([list(config.values()) for config in configs])
    shapes = random.uniform(-2, 2, size=(200, 2)) @ random.normal(size=(2, 4)) / 2
    distance = ((places - places.mean(axis=0))[:, None] - shapes) ** 2 @ [0.05, 0.04, 0.06, 0.03]
    times = np.exp(distance + 0.01 * random.normal(size=distance.shape))
    problems = [dict(zip(configs, column / column.min(), strict=True)) for column in times.T]
    coverings(problems[:2], [0.02])  # imports scipy
    began = time.process_time()
    (found,) = coverings(problems, [0.02])
    assert time.process_time() - began < 2
    assert len(configs) == 500
    assert found.worst <= 0.02
