"""Blocks in which the machine stalled are timed again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.measure import timing
from fp8tune.measure.steady import TRIES, first_steady, is_steady, reach
from fp8tune.records import Status

CALM = (52.0, 51.7, 51.9, 51.6, 51.8, 51.7, 55.0, 51.8)
STALLED_FROM_THE_THIRD_ON = (267.0, 268.0, 379.0, 562.0, 442.0, 461.0, 452.0, 442.0, 482.0, 430.0, 461.0, 420.0, 448.0)
"""The first half of a block on an H100, of a config that takes 269 us. Its middle half is narrow, 8 % wide."""
STALLED = (335.1, 144.2, 118.3, 166.0, 190.1, 134.0, 236.8, 150.0)
"""The first three were stored by a sweep on an H100, of a config that takes 51.7 us; the others are made up."""


@pytest.mark.parametrize(
    ("samples", "steady"),
    [
        (CALM, True),
        (STALLED, False),
        (STALLED_FROM_THE_THIRD_ON, False),
        ((80.0, 51.7, 51.9), True),  # a cold first launch
        ((335.1, 144.2, 118.3), False),
        ((79.0, 78.0), True),
        ((2849.3, 171.9), False),
        ((51.7,), True),
        ((5.1, 6.0, 5.2, 6.1, 5.0, 6.2, 5.1, 6.1), True),  # some ticks of a short kernel
    ],
)
def test_a_block_shows_by_its_own_samples(samples: Sequence[float], steady: bool) -> None:
    assert is_steady(samples) == steady


@given(st.lists(st.floats(1.0, 1e6), min_size=1, max_size=60))
def test_the_reach_is_of_the_samples_in_any_order(samples_us: list[float]) -> None:
    fastest, slow = reach(samples_us)
    assert fastest == min(samples_us) <= slow <= max(samples_us)
    assert reach(samples_us[::-1]) == (fastest, slow)
    assert sum(sample > slow for sample in samples_us) <= len(samples_us) // 4 + 1


def test_no_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        reach([])


def test_a_block_is_timed_again_until_it_is_steady() -> None:
    blocks = iter([STALLED, STALLED, CALM, STALLED])
    assert first_steady(lambda: next(blocks)) == (CALM, 2)
    assert next(blocks) == STALLED


def test_a_kernel_that_is_never_steady_has_the_block_that_scatters_least() -> None:
    steps = [5 + number % 3 for number in range(TRIES)]
    blocks = [tuple(50.0 + step * place for place in range(8)) for step in steps]
    waiting = iter(blocks)
    assert first_steady(lambda: next(waiting)) == (tuple(50.0 + 5 * place for place in range(8)), TRIES - 1)
    assert next(waiting, None) is None


@pytest.mark.parametrize(
    ("estimates", "blocks", "wanted"),
    [
        ([(79.0, 78.0), (78.0, 79.0)], (), (79.0, 78.0, 78.0, 79.0)),  # hopeless, and surely so
        ([(2849.3, 171.9), (2849.3, 171.9)], (CALM,), CALM),  # it estimates hopeless because the machine stalled
        ([(124.8, 118.1), (51.9, 51.8)], (CALM,), CALM),  # the first look alone would pass for steady
        ([(52.0, 51.0)], (STALLED, CALM), CALM),
    ],
)
def test_do_bench_is_asked_again(
    estimates: list[tuple[float, ...]],
    blocks: Sequence[tuple[float, ...]],
    wanted: tuple[float, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting, estimated = iter(blocks), iter(estimates)
    monkeypatch.setattr(timing, "_estimate", lambda launch: next(estimated))
    monkeypatch.setattr(timing, "_do_bench", lambda launch, rep_ms: next(waiting))
    found = timing.block(lambda: None, too_slow_us=70.0)
    assert found.samples_us == wanted
    assert found.stalled == max(0, len(blocks) - 1)
    assert next(waiting, None) is next(estimated, None) is None


@pytest.mark.parametrize(("stalled", "said"), [(0, ""), (2, "the first stable of 3 blocks")])
def test_a_row_says_that_its_block_was_not_the_first(stalled: int, said: str) -> None:
    outcome = timing.Samples(CALM, None, stalled).outcome("a process")
    assert (outcome.status, outcome.reason) == (Status.OK, said)


@pytest.mark.gpu
def test_on_a_gpu_a_copy_is_steady() -> None:
    x = torch.ones(1 << 24, device="cuda")
    assert is_steady(timing.block(lambda: x.clone()).samples_us)
