from __future__ import annotations

import random
from dataclasses import fields

from fp8tune.plan.problems import seed_text
from fp8tune.records import NamedInts, Problem

PROBLEM = Problem("colwise", NamedInts(M=16640, K=5120, G=8), "jagged", seed=3)


def test_a_problem_in_a_seed_is_the_text_that_sweeps_began_with():
    """Were it another, every permutation and every simulated time of every stored sweep would change."""
    assert seed_text(PROBLEM) == (
        "Problem(kernel='colwise', shape=NamedInts(M=16640 K=5120 G=8), routing='jagged', input_layout='contiguous', "
        "in_dtype='bfloat16', fp8_dtype='float8_e4m3fn', scale_mode='power-of-two', seed=3)"
    )
    shuffled = list(range(8))
    random.Random(f"0 final 0 0 {seed_text(PROBLEM)}").shuffle(shuffled)
    assert shuffled == EXPECTED


EXPECTED = [6, 5, 1, 2, 0, 3, 7, 4]


def test_every_field_of_a_problem_is_in_its_text_or_was_added_later():
    assert {field.name for field in fields(Problem)} == {
        "kernel", "shape", "routing", "input_layout", "in_dtype", "fp8_dtype", "scale_mode", "seed",
    }, "a new field enters seed_text only where it has another value than its default"  # fmt: skip
