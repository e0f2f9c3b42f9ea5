"""Repeated sweeps and the exhaustive oracle, small and on the simulated clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import exhaustive, repeats
from benchmarks.repeats import Repeats

SHAPES = "[[rows]]\nM = 16640\nK = 5120\nN = 5120\nE = 4\n"
GRID = ("--kernel", "mxfp8-dim0", "--timer", "simulated:4")


@pytest.fixture
def shapes(tmp_path: Path) -> str:
    path = tmp_path / "shapes.toml"
    path.write_text(SHAPES)
    return str(path)


def test_sweeps_repeat_themselves(shapes: str, capsys: pytest.CaptureFixture[str]) -> None:
    tables = {path: path.read_bytes() for path in Path(repeats.fp8tune_kernels.__file__).parent.glob("tables/*.py")}
    assert repeats.main([*GRID, "--shapes", shapes, "--scratch", "2", "--resweeps", "1"]) == 0
    out = capsys.readouterr().out
    assert "re-sweeps with the same table, byte for byte: 1 of 1" in out
    assert "the same pick from scratch: 1 of 1" in out
    assert {path: path.read_bytes() for path in tables} == tables  # ours are left alone


def test_what_changed_in_a_table_is_named() -> None:
    before, after = b'ROWS = (("colwise", 1), ("rowwise", 2))', b'ROWS = (("colwise", 1), ("rowwise", 3))'
    assert repeats.changed(before, after) == ["- ('rowwise', 2)", "+ ('rowwise', 3)"]
    assert repeats.changed(before, before) == []


@pytest.mark.parametrize(
    ("told", "code"),
    [
        (Repeats(20, 20, 90, 85, 1.01), 0),
        (Repeats(19, 20, 90, 85, 1.01), 1),
        (Repeats(20, 20, 90, 80, 1.01), 1),
        (Repeats(20, 20, 90, 85, 1.02), 1),
        (Repeats(0, 0, 0, 0, 1.0), 3),
    ],
)
def test_the_exit_code_says_whether_picks_held(told: Repeats, code: int) -> None:
    assert told.exit_code == code


def test_the_oracle_finds_what_a_pick_loses(
    shapes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from typer.testing import CliRunner

    from fp8tune.cli import app

    database = str(tmp_path / "picks.db")
    swept = CliRunner().invoke(app, ["sweep", "--quick", *GRID, "--shapes", shapes, "--db", database])
    assert swept.exit_code == 0, swept.output
    monkeypatch.setattr(exhaustive, "NEAR", 5)
    assert exhaustive.main([*GRID, "--shapes", shapes, "--db", database]) in (0, 1)
    printed = capsys.readouterr()
    assert "5 processes" in printed.out
    assert "regret: mean" in printed.out
    assert "process 5 of 5" in printed.err
    assert exhaustive.main([*GRID, "--shapes", shapes, "--db", database, "--deadline", "0"]) == 3
