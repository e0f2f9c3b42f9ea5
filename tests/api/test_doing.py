"""``fp8tune.sweep``, ``compare``, ``lookup`` and ``export``: what the commands do, from Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import fp8tune as command
from database_rows import config, finished_sweep, problem
from places import ROOT
from servers import on_both

import fp8tune
from fp8tune.errors import UsageError
from fp8tune.store.results import Store
from fp8tune.sweeping.events import Finished, Started, TrialDone
from fp8tune_kernels.runtime import lookup

ONE = str(ROOT / "tests" / "api" / "one.toml")
SHORT = fp8tune.SweepOptions(timer="simulated:1", grid=("BLOCK_SIZE=1", "num_warps=4,8", "num_stages=1"))
NOTEBOOK = ROOT / "docs" / "examples" / "results.ipynb"


@on_both
def test_a_sweep_passes_its_events_on_and_returns_its_picks(database: str) -> None:
    events: list[object] = []
    done = fp8tune.sweep("rowwise-2d", ONE, db=database, quick=True, on_event=events.append, options=SHORT)
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    assert (done.is_right, done.left_out, done.db) == (None, 0, database)
    assert set(done.picks["verdict"]) == {"quick"}
    assert done.results.picks().equals(done.picks)
    assert any("simulated clock" in line for line in done.notices)
    events.clear()  # the same call is answered from the database
    again = fp8tune.sweep("rowwise-2d", ONE, db=database, quick=True, on_event=events.append, options=SHORT)
    assert all(event.from_database for event in events if isinstance(event, TrialDone))
    assert again.picks.equals(done.picks)


def test_a_callback_that_raises_ends_a_sweep_and_the_same_call_resumes(tmp_path: Path) -> None:
    db = str(tmp_path / "rows.db")

    def stop(event: object) -> None:
        if isinstance(event, TrialDone):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fp8tune.sweep("rowwise-2d", ONE, db=db, quick=True, on_event=stop, options=SHORT)
    assert len(fp8tune.open(db).trials()) == 1
    events: list[Any] = []
    fp8tune.sweep("rowwise-2d", ONE, db=db, quick=True, on_event=events.append, options=SHORT)
    assert sum(isinstance(event, TrialDone) and event.from_database for event in events) == 1


def test_without_a_callback_progress_goes_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fp8tune.sweep("rowwise-2d", ONE, db=tmp_path / "rows.db", quick=True, options=SHORT)
    assert capsys.readouterr().out == ""


def test_a_comparison_has_rows_and_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = fp8tune.compare("HEAD..HEAD", "colwise", db=ROOT / "results.db")
    assert result.exit_code == 0
    assert set(result.rows["verdict"]) == {"SAME-CODE"}
    assert {"kernel", "size", "device", "speedup", "lower", "upper"} <= set(result.rows.columns)
    with pytest.raises(UsageError, match=r"main\.\.branch"):
        fp8tune.compare("HEAD")


@pytest.mark.parametrize(
    ("size", "arch", "step"),
    [
        ("M=16640 K=5120 G=16", "sm_90", "key"),
        ("M=16640,K=5000,G=16", "sm_90", "nearest"),
        ({"M": 16640, "K": 5120, "G": 16}, "gfx942", "fallback"),
        ("M=16640 K=5120 G=16", "sm_80", "default"),
    ],
)
def test_a_lookup_names_its_step(size: Any, arch: str, step: str) -> None:
    result = fp8tune.lookup("colwise", size, arch=arch)
    assert (result.step, result.is_own, result.arch) == (step, False, arch)
    assert str(result).startswith(f"colwise, {result.key} on {arch}: {result.config} (")


def test_a_lookup_returns_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from fp8tune.replay.loading import load_spec

    spec = load_spec("colwise")
    lookup.forget()
    with lookup.compiling_for("sm_90"):
        for M, K, G in ((16640, 5120, 16), (100, 77, 3), (1 << 17, 5120, 1)):
            result = fp8tune.lookup("colwise", {"M": M, "K": K, "G": G}, arch="sm_90")
            assert lookup.config_for(spec, tuple(result.key.values()), torch.device("meta")) == result.config
    with pytest.raises(UsageError, match="has no layout 'diagonal'"):
        fp8tune.lookup("colwise", "M=1 K=1 G=1 layout=diagonal", arch="sm_90")


@pytest.fixture
def stored(database: str) -> str:
    with Store.open(database, create=True) as store:
        finished_sweep(store, {problem(K=K): {config(32): 100.0, config(64): 120.0} for K in (1024, 2048)})
    return database


@on_both
def test_an_export_is_the_text_that_the_command_writes(
    stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8TUNE_DB", stored)  # --db takes no password
    with pytest.raises(UsageError, match="2 quick picks left out"):
        fp8tune.export("sm_90", db=stored)
    export = fp8tune.export("sm_90", db=stored, allow_quick=True)
    assert command("export", "--arch", "sm_90", "--allow-quick", "-o", tmp_path / "own.py").returncode == 0
    assert str(export) == (tmp_path / "own.py").read_text()
    assert export.write(tmp_path / "made") == [tmp_path / "made" / "sm_90.py"]
    files = fp8tune.export("sm_90", "colwise", format="hf", db=stored, sizes={"N": "G"}, allow_quick=True).files
    assert all("device_name=NVIDIA_H100" in name and name.endswith(".json") for name in files)


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its code, without Jupyter."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FP8TUNE_BASE", str(ROOT / "results.db"))
    exec("\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"), {})
    assert "proven" in capsys.readouterr().out


def test_modules_are_not_callable() -> None:
    import fp8tune.comparing
    import fp8tune.sweeping

    assert not callable(fp8tune.comparing)
    assert not callable(fp8tune.sweeping)
    assert callable(fp8tune.sweep)
    assert callable(fp8tune.compare)
