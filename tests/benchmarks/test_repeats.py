"""Measure whether picks hold from sweep to sweep, on the simulated GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import repeats

TIMER = "simulated:4"


@pytest.fixture
def shapes(tmp_path: Path) -> str:
    path = tmp_path / "shapes.toml"
    path.write_text("[[rows]]\nM = 16640\nK = 5120\nN = 5120\nE = 4\n")
    return str(path)


@pytest.mark.slow
def test_four_of_four_sweeps_give_the_table_again(shapes: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each with noise of its own; the first one's table is in the place of the committed one."""
    calls = ["--kernel", "mxfp8-dim0", "--shapes", shapes, "--scratch", "1", "--resweeps", "4"]
    assert repeats.main([*calls, "--timer", TIMER]) == 0
    assert "re-sweeps with the same table, byte for byte: 4 of 4" in capsys.readouterr().out
