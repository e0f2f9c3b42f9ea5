"""The rounds of a comparison, when a launch breaks its process: only its own row is blamed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from places import PLANTED

from fp8tune.compare import duel
from fp8tune.compare.duel import Arm, Contest, Score
from fp8tune.compare.retuning import retune
from fp8tune.compare.side import Side
from fp8tune.measure.laboratory import Laboratory
from fp8tune.records import Device, Kind, NamedInts, Outcome, Problem, Status, Telemetry

CONFIG = NamedInts(BLOCK_SIZE=64, num_warps=4)
BROKEN = "crashed: RuntimeError: CUDA error: an illegal memory access was encountered"
HERE = Laboratory(Kind.MEASURED, Device("sm_90"), "do_bench", "cpu", False)
"""A GPU's clock, which the planted kernels replace."""


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Side, Side]:
    """Two sides; launches of the second break."""
    text = (PLANTED / "breaking.py").read_text()
    made = []
    for name, said in (("one", text), ("two", text.replace("BREAKS = False", "BREAKS = True"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "breaking.py").write_text(said)
        made.append(Side(name, tmp_path / name, tmp_path / f"{name}-cache"))
    return made[0], made[1]


def contests(sides: tuple[Side, Side], *sizes: int) -> list[Contest]:
    """A row for each K, which says how it breaks."""
    before, after = (Arm(f"{side.folder}/breaking.py:SPEC", CONFIG) for side in sides)
    return [Contest(Problem("breaking", NamedInts(M=2, K=K)), before, after) for K in sizes]


def played(sides: tuple[Side, Side], *sizes: int) -> list[Score]:
    rows = contests(sides, *sizes)
    scores = [Score() for _ in rows]
    assert len(list(duel.play(rows, scores, sides, HERE, range(2)))) == 2 * len(rows)
    return scores


@pytest.mark.parametrize("broken", [128, 256])
def test_a_launch_that_breaks_its_process_is_its_own_rows_matter(sides: tuple[Side, Side], broken: int) -> None:
    """At its first launch, or later, inside a block. Every later launch in that process would fail."""
    first, bad, last = played(sides, 64, broken, 64)
    assert bad.failure == f"after: {BROKEN}"
    assert bad.changes == []
    for neighbour in (first, last):
        assert neighbour.failure == ""
        assert neighbour.changes == neighbour.controls == [0.0, 0.0]
        assert neighbour.blocks == 12


def test_a_worker_that_hangs_is_replaced(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = contests(sides, 64, 512, 64)
    scores = [Score() for _ in rows]
    steps = duel.play(rows, scores, sides, HERE, range(1))
    for limit_s in (120.0, 4.0, 120.0):  # the first and the last row start processes
        monkeypatch.setattr(duel, "TIMEOUT_S", limit_s)
        next(steps)
    steps.close()
    assert [score.failure for score in scores] == ["", "after: timeout: no answer in 4 s", ""]
    assert [score.blocks for score in scores] == [6, 0, 6]


def test_a_config_that_breaks_its_process_is_not_the_tuned_one(sides: tuple[Side, Side]) -> None:
    (row,) = contests(sides, 128)
    listed = [CONFIG, NamedInts(BLOCK_SIZE=128, num_warps=4), NamedInts(BLOCK_SIZE=32, num_warps=4)]
    assert retune(sides[1], row.after.reference, row.problem, listed, HERE) == listed[2]


def test_blocks_of_a_slow_device_are_counted() -> None:
    good = Outcome(Status.OK, time_us=100.0, telemetry=Telemetry(throttle_reasons=0x4))  # a power cap is normal
    hot = dataclasses.replace(good, telemetry=Telemetry(throttle_reasons=0x24))
    again = dataclasses.replace(good, reason="the steadiest of 2 blocks")
    score = Score()
    score.add([[good, hot], [good, again], [good, good]], "sm_90")
    assert (score.blocks, score.stalled, score.throttled, score.slowdowns) == (6, 1, 1, {"software thermal"})
    score.add([[hot, hot]] * 3, "gfx942")  # whose bits say something else
    assert score.throttled == 1
