"""The closing lines of a sweep."""

from __future__ import annotations

import pytest
from database_rows import subject

from fp8tune.records import NamedInts, Outcome, Status
from fp8tune.render.tallies import failure_lines
from fp8tune.store.results import Tally

OK, PRUNED = Outcome(Status.OK), Outcome(Status.PRUNED, reason="too large")


def disagreeing(fingerprint: int) -> Outcome:
    wrong = (
        f"output 0 disagrees with the first config: 9 of 9 elements differ on its problem; fingerprint {fingerprint}"
    )
    return Outcome(Status.WRONG, reason=wrong)


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        ([OK, OK, disagreeing(1), disagreeing(1), PRUNED], ""),
        (
            [OK, *map(disagreeing, (1, 2, 2, 2))],
            "4 of 5 configs disagree with the first, and 3 of them agree with each",
        ),
        ([OK, *map(disagreeing, (1, 2, 3)), PRUNED], "3 of 4 configs disagree with the first on"),
    ],
)
def test_a_first_config_that_most_disagree_with_is_doubted(outcomes: list[Outcome], said: str) -> None:
    tally = Tally(subject(), {NamedInts(BLOCK=n): outcome for n, outcome in enumerate(outcomes)})
    *doubts, failures = failure_lines([tally])
    assert f"{len([each for each in outcomes if each.status is Status.WRONG])} of {len(outcomes)} configs" in failures
    assert len(doubts) == bool(said)
    assert said in " ".join(doubts)
    assert all(doubt.endswith(": name a --reference") for doubt in doubts)
