"""Check of lookup keys: by planted times, and on the simulated GPU."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import Ended, fp8tune
from database_rows import config, problem

from fp8tune.check import keys
from fp8tune.check.keys import KeyVerdict, VariedSize, decide
from fp8tune.measure.simulated import SimulatedBackend
from fp8tune.plan.variations import Variation, key_faults, variations
from fp8tune.records import NamedInts, Outcome, Status
from fp8tune.replay.loading import load_spec
from fp8tune.stats.pairs import Block

PICK, RIVAL, OTHER = config(64), config(32), config(128)
SIZE = VariedSize(
    problem(), NamedInts(K=5120), Variation("routing", problem(routing="zipf")), PICK, (RIVAL, OTHER), allowed=1.01
)


def blocks(loss: float, noise: float, processes: int) -> list[Block]:
    """Times of three configs: the pick is slower than the first rival by ``loss``, give or take the noise."""
    result = []
    for process in range(processes):
        for round in range(3):
            times = {PICK: 100 * (1 + loss) * (1 + noise * (-1) ** process), RIVAL: 100.0, OTHER: 130.0}
            result += [Block(str(process), round, timed, time_us) for timed, time_us in times.items()]
    return result


@pytest.mark.parametrize(
    ("loss", "noise", "processes", "verdict"),
    [
        (0.0, 0.001, 6, KeyVerdict.HOLDS),
        (-0.05, 0.001, 6, KeyVerdict.HOLDS),
        (0.009, 0.001, 6, KeyVerdict.HOLDS),
        (0.05, 0.001, 6, KeyVerdict.MOVES),
        (0.05, 0.08, 6, KeyVerdict.OPEN),
        (0.05, 0.001, 1, KeyVerdict.OPEN),
        (0.05, 0.001, 0, KeyVerdict.OPEN),
    ],
)
def test_a_verdict_needs_proof(loss: float, noise: float, processes: int, verdict: KeyVerdict) -> None:
    result = decide(SIZE, blocks(loss, noise, processes), alpha=0.025)
    assert result.verdict is verdict
    if processes > 1:
        assert result.best == RIVAL
        assert result.slowdown == pytest.approx(max(1.0, 1 + loss), rel=max(noise, 0.01))


def test_a_pick_that_does_not_run_moves_and_its_own_loss_is_allowed() -> None:
    result = decide(SIZE, [], 0.025, failure="out of shared memory")
    assert (result.verdict, result.slowdown) == (KeyVerdict.MOVES, None)
    assert decide(replace(SIZE, allowed=1.06), blocks(0.05, 0.001, 6), 0.025).verdict is KeyVerdict.HOLDS


def test_a_variation_has_the_same_key_and_one_other_argument() -> None:
    spec = load_spec("colwise")
    size = problem()
    varied = variations(spec, size)
    assert {"M", "routing", "seed"} <= {variation.argument for variation in varied}
    assert {spec.lookup_key(variation.problem) for variation in varied} == {spec.lookup_key(size)}
    assert key_faults(spec, size) == []
    faults = key_faults(replace(spec, key=("M", "Q")), size)
    assert ["M_bucket" in faults[0], "Q is in the key" in faults[1]] == [True, True]


# The command, on a simulated GPU


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a database of one size of colwise."""
    folder = tmp_path_factory.mktemp("keys")
    (folder / "one.toml").write_text("[[rows]]\nM = 16640\nK = 2048\nE = 16\n")
    grid = [f"--grid={axis}" for axis in ("num_warps=4", "BLOCK_SIZE=64,128", "LEAD=0", "BLOCK_SIZE_ITER=64,128")]
    options = "--kernel", "colwise", "--shapes", "one.toml", "--timer", "simulated:1", "--db", "a.db"
    result = fp8tune("sweep", *options, *grid, cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture
def doctor(swept: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("FP8TUNE_TIMER", "simulated:1")
    return lambda *arguments: fp8tune("doctor", *arguments, "--db", "a.db", cwd=swept)


def verdicts(result: Ended) -> set[str]:
    return {item["verdict"] for item in json.loads(result.stdout)["variations"]}


def test_the_key_of_colwise_holds(doctor: Any) -> None:
    """The simulated winner depends on kernel and key alone."""
    result = doctor("colwise", "--format", "json")
    assert result.returncode == 0
    assert verdicts(result) == {"holds"}
    document = json.loads(result.stdout)
    assert {item["processes"] for item in document["variations"]} == {keys.PROCESSES}
    assert any("holds on" in item["text"] for item in document["findings"])


def test_no_time_leaves_the_key_open(doctor: Any) -> None:
    result = doctor("colwise", "--budget", "0", "--format", "json")
    assert (result.returncode, verdicts(result)) == (3, {"open"})


def test_a_pick_that_loses_on_another_routing_names_the_argument(doctor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pick, which is the first candidate of each group, takes twice as long on zipf."""
    block, pick = SimulatedBackend.block, list[NamedInts]()

    def slower(self: SimulatedBackend, arm: Any, place: Any) -> Outcome:
        outcome = block(self, arm, place)
        pick.append(arm.config)
        is_slow = arm.config == pick[0] and arm.problem.routing == "zipf"
        return replace(outcome, time_us=2 * (outcome.time_us or math.nan)) if is_slow else outcome

    monkeypatch.setattr(SimulatedBackend, "checked_block", slower)
    result = doctor("colwise", "--format", "json")
    assert result.returncode == 1
    document = json.loads(result.stdout)
    assert {item["argument"] for item in document["variations"] if item["verdict"] == "moves"} == {"routing"}
    (error,) = (item for item in document["findings"] if item["level"] == "error")
    assert "lacks routing" in error["text"]
    assert "routing=zipf" in error["text"]


def test_a_pick_that_is_wrong_on_a_variation_moves(doctor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check = SimulatedBackend.check

    def wrong(self: SimulatedBackend, arm: Any) -> Outcome:
        is_wrong = arm.problem.routing == "empty"
        return Outcome(Status.WRONG, reason="output 0 differs") if is_wrong else check(self, arm)

    monkeypatch.setattr(SimulatedBackend, "check", wrong)
    result = doctor("colwise")
    assert result.returncode == 1
    assert "does not run (output 0 differs)" in " ".join(result.stdout.split())


def test_a_kernel_without_picks_here_is_refused_in_one_line(doctor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    result = doctor("rowwise-2d")
    assert result.returncode == 2
    assert "has no confirmed picks for simulated: run fp8tune sweep --kernel rowwise-2d" in result.stderr
    monkeypatch.delenv("FP8TUNE_TIMER")
    assert "doctor colwise needs a GPU" in doctor("colwise").stderr
