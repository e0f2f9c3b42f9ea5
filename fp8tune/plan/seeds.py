"""A problem's text in seeds."""

from __future__ import annotations

from fp8tune.records import Problem


def seed_text(problem: Problem) -> str:
    """What every permutation and every simulated time of a problem depends on: this text must never change.

    It is what ``repr`` gave at first. A field added to Problem enters it only with another value than its default.
    """
    return (
        f"Problem(kernel={problem.kernel!r}, shape=NamedInts({problem.shape}), routing={problem.routing!r}, "
        f"input_layout={problem.input_layout!r}, in_dtype={problem.in_dtype!r}, fp8_dtype={problem.fp8_dtype!r}, "
        f"scale_mode={problem.scale_mode!r}, seed={problem.seed})"
    )
