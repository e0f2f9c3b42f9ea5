"""The report on a host with several GPUs, on simulated ones: every part runs, and its numbers agree."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import several_gpus

SWEEP = (
    "--kernel",
    "rowwise-2d",
    "--shapes",
    "tiny",
    "--each",
    "tiny,K=96",
    "--grid",
    "BLOCK_SIZE=2",
    "num_warps=4,8",
    "num_stages=1",
)


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8TUNE_TIMER", "simulated:1")


def measured(out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the document of a run on two GPUs."""
    code = several_gpus.main(["--gpus", "2", "--out", str(out), *arguments])
    return code, json.loads((out / "several-gpus.json").read_text())


@pytest.mark.slow
def test_a_killed_child_changes_no_pick_and_equal_gpus_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = measured(tmp_path, *SWEEP, "--parts", "sweeps", "gpus", "--kill-at", "0")
    rows = {row["run"]: row for row in document["sweeps"]}
    alone = rows["one"]
    assert (code, document["left_out"]) == (0, [])
    assert [*rows] == ["one", "all", "killed"]
    for row in rows.values():
        assert (row["is_whole"], row["rows"], row["killed"]) == (True, alone["rows"], row["run"] == "killed")
        assert (row["is_same_table"], row["same_picks"], row["worst_loss"]) == (True, 4, 0.0)
        assert row["speedup"] == pytest.approx(alone["busiest"] / row["busiest"])
    assert alone["busiest"] == alone["rows"] > rows["all"]["busiest"] >= alone["rows"] / 2
    (gpus,) = document["gpus"]
    assert sorted(gpus["slowdowns"]) == ["0", "1"]
    assert min(gpus["slowdowns"].values()) == 0.0 < max(gpus["slowdowns"].values())
    assert len(gpus["losses"]) == 1
    assert all(spread >= 0 for spread in gpus["spreads"])
    assert any(f"{max(gpus['slowdowns'].values()):.1%} slower" in line for line in gpus["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines if line.startswith(("one", "all", "killed"))] == [
        ["one", "1"],
        ["all", "2"],
        ["killed", "2"],
    ]


@pytest.mark.slow
def test_the_layer_runs_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = several_gpus.Host.start

    def start(host: several_gpus.Host, log: str, command: Sequence[str], environment: Mapping[str, str]) -> Any:
        assert command[0] == "torch.distributed.run"
        return started(host, log, ["tests.benchmarks.forking_ranks", *command[1:]], environment)

    monkeypatch.setattr(several_gpus.Host, "start", start)
    code, document = measured(tmp_path, "--parts", "experts", "--layers", "tiny", "--tokens", "32")
    rows = document["experts"]
    assert (code, document["left_out"]) == (0, [])
    assert {(row["layer"], row["ranks"], row["tokens"]) for row in rows} == {("tiny", 2, 32)}
    assert {"torch bf16", "fp8tune"} <= {row["contender"] for row in rows}
    assert all(row["median_ms"] > 0 for row in rows)


def test_parts_without_time_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = measured(tmp_path, *SWEEP, "--seconds", "0")
    assert code == 1
    assert document["sweeps"] == document["experts"] == document["gpus"] == []
    layers = [text for text in document["left_out"] if "tokens on each" in text]
    assert len(layers) == 4
    assert len(document["left_out"]) == len(layers) + 4  # three sweeps on several GPUs, and that of every GPU
    assert capsys.readouterr().out.count("LEFT OUT: ") == 2 * len(document["left_out"])
