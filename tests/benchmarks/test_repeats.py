"""Repeated sweeps, small and on the simulated clock."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from places import PLANTED
from typer.testing import CliRunner

from benchmarks import repeats
from benchmarks.repeats import Outcome, Repeats
from fp8tune.choose.decision import PickVerdict
from fp8tune.cli import app
from fp8tune.errors import UsageError
from fp8tune.measure.backends.simulated import SimulatedBackend
from fp8tune.records import NamedInts, Problem

SHAPES = "[[rows]]\nM = 16640\nK = 5120\nN = 5120\nE = 4\n"
TIMER = "simulated:4"
FAULTS = f"{PLANTED / 'faults.py'}:SPEC"
"""Nine configs, and none runs on the simulated clock."""
GRID = ("--kernel", "mxfp8-dim0", "--timer", TIMER)


@pytest.fixture
def shapes(tmp_path: Path) -> str:
    path = tmp_path / "shapes.toml"
    path.write_text(SHAPES)
    return str(path)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> str:
    database = str(tmp_path_factory.mktemp("calibrated") / "calibrated.db")
    assert CliRunner().invoke(app, ["calibrate", "--timer", TIMER, "--db", database]).exit_code == 0
    return database


def test_sweeps_repeat_themselves(
    shapes: str, calibrated: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = {path: path.read_bytes() for path in Path(repeats.fp8tune_kernels.__file__).parent.glob("tables/*.py")}
    asked = ["--shapes", shapes, "--scratch", "2", "--resweeps", "1", "--calibration", calibrated]
    kept = tmp_path / "kept"
    asked += ["--keep", str(kept)]
    assert repeats.main(["--kernel", FAULTS, "--timer", TIMER, *asked]) == 0
    out = capsys.readouterr().out
    assert "re-sweeps with the same table, byte for byte: 1 of 1" in out
    assert "the same pick from scratch: 1 of 1" in out
    assert {path: path.read_bytes() for path in tables} == tables  # ours are left alone
    assert {path.name for path in kept.glob("*.db")} == {"from-scratch-1.db", "from-scratch-2.db", "re-sweep-1.db"}
    assert (kept / "re-sweep-1.py").read_bytes() == (kept / "from-scratch-1.py").read_bytes()
    with pytest.raises(UsageError, match="exists"):
        repeats.main(["--kernel", FAULTS, "--timer", TIMER, *asked])  # never into what is there


def test_each_sweep_has_noise_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = argparse.Namespace(kernel="mxfp8-dim0", shapes=["tiny"], calibration=None, timer="simulated:4")
    desk, clocks = repeats.Desk(tmp_path, given, "simulated"), list[str]()

    def swept(*arguments: str) -> None:
        if arguments[0] == "sweep":
            clocks.append(arguments[arguments.index("--timer") + 1])
        else:
            Path(arguments[-1]).write_bytes(b"")

    monkeypatch.setattr(desk, "_fp8tune", swept)
    monkeypatch.setattr(repeats, "measured", lambda database, arch: {})
    for _ in range(3):
        desk.sweep("a sweep")
    assert clocks == ["simulated:4.1", "simulated:4.2", "simulated:4.3"]


def test_a_calibration_is_of_this_device_and_nothing_else(shapes: str, calibrated: str, tmp_path: Path) -> None:
    device = SimulatedBackend(TIMER).device
    repeats.check_calibration(calibrated, device)
    with pytest.raises(UsageError, match="no calibration of this device"):
        repeats.check_calibration(calibrated, replace(device, name="another"))
    used = shutil.copy(calibrated, tmp_path / "used.db")
    swept = CliRunner().invoke(app, ["sweep", "--quick", *GRID, "--shapes", shapes, "--db", str(used)])
    assert swept.exit_code == 0, swept.output
    with pytest.raises(UsageError, match="has rows"):
        repeats.check_calibration(str(used), device)


def test_what_changed_in_a_table_is_named() -> None:
    before = b'NEAREST = ()\nROWS = (\n    ("colwise", 1),\n    ("rowwise", 2),\n)\n'
    assert repeats.changed(before, before.replace(b"2", b"3")) == ['-    ("rowwise", 2),', '+    ("rowwise", 3),']
    other_rule = before.replace(b"()", b'("rowwise",)')
    assert repeats.changed(before, other_rule) == ["-NEAREST = ()", '+NEAREST = ("rowwise",)']
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


SMALL, LARGE = NamedInts(BLOCK_SIZE=64), NamedInts(BLOCK_SIZE=128)
PROBLEMS = [Problem("colwise", NamedInts(M=1000 * n, K=512, G=4), "jagged") for n in (1, 2, 3)]


@dataclass
class Swept:
    """As much of a contest as the comparisons read."""

    config: NamedInts
    slowdowns: Mapping[NamedInts, float] = field(default_factory=dict)
    verdict: PickVerdict = PickVerdict.CERTIFIED

    @property
    def pick(self) -> Swept:
        return self

    def winner(self) -> Swept:
        return self

    def slowdown(self, config: NamedInts) -> float:
        return self.slowdowns[config]


def test_where_two_sweeps_differ_the_larger_loss_counts() -> None:
    one = {PROBLEMS[0]: Swept(SMALL, {SMALL: 1.0, LARGE: 1.01}), PROBLEMS[1]: Swept(SMALL)}
    other = {PROBLEMS[0]: Swept(LARGE, {SMALL: 1.2, LARGE: 1.1}), PROBLEMS[1]: Swept(SMALL), PROBLEMS[2]: Swept(LARGE)}
    differ, agree = repeats.between(Outcome(b"", one), Outcome(b"", other))
    assert differ == pytest.approx(1.2 / 1.1)  # SMALL by the other's times; LARGE loses 1 % by the first's
    assert agree is None
    assert list(repeats.between(Outcome(b"", other), Outcome(b"", one))) == [differ, None]
