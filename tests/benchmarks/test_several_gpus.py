"""The comparison of one GPU with several, on simulated ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import several_gpus

SWEEP = ("--kernel=rowwise-2d", "--shapes=tiny", "--grid", "BLOCK_SIZE=2", "num_warps=4,8", "num_stages=1")


def measured(out: Path, *arguments: str) -> int:
    return several_gpus.main(["--gpus", "2", "--out", str(out), *SWEEP, *arguments])


@pytest.mark.slow
def test_a_killed_child_changes_no_pick(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8TUNE_TIMER", "simulated:1")
    assert measured(tmp_path, "--kill-at", "0") == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["one", "1"], ["all", "2"], ["killed", "2"]]
    blocks = [[int(count.replace(",", "")) for count in row[4].split(" + ")] for row in rows]
    assert len({sum(counts) for counts in blocks}) == 1
    assert [row[3] for row in rows] == [f"{blocks[0][0] / max(counts):.2f}x" for counts in blocks]
    assert all(row[6:] == ["4 of 4", "0.0%", "equal", "0", "0"] for row in rows)
    assert "was killed by SIGKILL" in (tmp_path / "killed.log").read_text()
    with pytest.raises(SystemExit):  # a resumed sweep would have no time of its own
        measured(tmp_path)
    alone, killed = (several_gpus.Results.read(tmp_path / f"{run}.db") for run in ("one", "killed"))
    killed.chosen.popitem()
    killed.trials.clear()
    assert len(alone.losses(killed)) == 1
    assert alone.lost(killed) == 32


def test_a_killed_run_needs_that_of_one_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        measured(tmp_path, "--parts", "killed")
    assert "has no one.db to compare" in capsys.readouterr().err
