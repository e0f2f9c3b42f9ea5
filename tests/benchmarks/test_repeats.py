"""Whether picks hold from sweep to sweep, on the simulated GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import repeats
from benchmarks.repeats import Outcome
from fp8tune.cli import app
from fp8tune.records import NamedInts, Problem
from fp8tune_kernels.tables import Table

TIMER = "simulated:4"


@pytest.fixture
def shapes(tmp_path: Path) -> str:
    path = tmp_path / "shapes.toml"
    path.write_text("[[rows]]\nM = 16640\nK = 5120\nN = 5120\nE = 4\n")
    return str(path)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> str:
    database = str(tmp_path_factory.mktemp("calibrated") / "calibrated.db")
    assert CliRunner().invoke(app, ["calibrate", "--timer", TIMER, "--db", database]).exit_code == 0
    return database


@pytest.mark.slow
def test_ten_of_ten_sweeps_give_the_table_again(shapes: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each with noise of its own; the first one's table is in the place of the committed one."""
    asked = ["--kernel", "mxfp8-dim0", "--shapes", shapes, "--scratch", "1", "--resweeps", "10"]
    assert repeats.main([*asked, "--timer", TIMER]) == 0
    assert "re-sweeps with the same table, byte for byte: 10 of 10" in capsys.readouterr().out


def test_what_changed_in_a_table_is_named() -> None:
    before = 'NEAREST = ()\nROWS = (\n    ("colwise", 1),\n    ("rowwise", 2),\n)\n'
    assert repeats.changed(before, before.replace("2", "3")) == ['-    ("rowwise", 2),', '+    ("rowwise", 3),']
    other_rule = before.replace("()", '("rowwise",)')
    assert repeats.changed(before, other_rule) == ["-NEAREST = ()", '+NEAREST = ("rowwise",)']
    assert repeats.changed(before, before) == []


SMALL, LARGE = NamedInts(BLOCK_SIZE=64), NamedInts(BLOCK_SIZE=128)
PROBLEMS = [Problem("colwise", NamedInts(M=1000 * n, K=512, G=4), "jagged") for n in (1, 2, 3)]


@dataclass
class Swept:
    """As much of a problem's candidates as the comparison reads."""

    config: NamedInts
    slowdowns: Mapping[NamedInts, float] = field(default_factory=dict)

    @property
    def pick(self) -> Swept:
        return self

    def slowdown(self, config: NamedInts) -> float:
        return self.slowdowns[config]


def test_where_two_sweeps_differ_the_larger_loss_counts() -> None:
    one = {PROBLEMS[0]: Swept(SMALL, {SMALL: 1.0, LARGE: 1.01}), PROBLEMS[1]: Swept(SMALL)}
    other = {PROBLEMS[0]: Swept(LARGE, {SMALL: 1.2, LARGE: 1.1}), PROBLEMS[1]: Swept(SMALL), PROBLEMS[2]: Swept(LARGE)}
    outcomes = [Outcome("", Table(), found) for found in (one, other)]
    differ, agree = repeats.between(*outcomes)
    assert differ == pytest.approx(1.2 / 1.1)  # SMALL by the other's times; LARGE loses 1 % by the first's
    assert agree is None
    assert list(repeats.between(*outcomes[::-1])) == [differ, None]
