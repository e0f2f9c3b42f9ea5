"""``fp8tune.sweep``, ``lookup`` and ``export``: what the commands do, from Python."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from command_line import fp8tune as command
from database_rows import config, finished_sweep, problem
from places import ROOT
from servers import on_both

import fp8tune
from fp8tune import api
from fp8tune.errors import UsageError
from fp8tune.store.results import Store
from fp8tune.sweeping.events import Finished, Started, TrialDone
from fp8tune.sweeping.options import Options
from fp8tune_kernels.runtime import lookup

ONE = str(ROOT / "tests" / "api" / "one.toml")

TINY: dict[str, Any] = {
    "shapes": ONE,
    "timer": "simulated:1",
    "quick": True,
    "grid": {"BLOCK_SIZE": 1, "num_warps": [4, 8], "num_stages": 1},
}


@on_both
def test_a_sweep_tells_its_callback_and_gives_its_picks(database: str) -> None:
    events: list[object] = []
    swept = fp8tune.sweep("rowwise-2d", db=database, callback=events.append, **TINY)
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    assert sum(isinstance(event, TrialDone) for event in events) == swept.trials > 0
    assert (swept.is_right, swept.left_out, swept.db) == (True, 0, database)
    assert set(swept.picks["verdict"]) == {"quick"}
    assert len(swept.picks) == len(swept.problems) == len(swept.results.picks()) > 0
    assert set(swept.problems["configs"]) == set(swept.problems["ok"]) == {9}
    assert any("simulated clock" in line for line in swept.notices)
    events.clear()  # a sweep that was done is answered from its rows
    again = fp8tune.sweep("rowwise-2d", db=swept.db, callback=events.append, **TINY)
    assert all(event.from_database for event in events if isinstance(event, TrialDone))
    assert again.picks.equals(swept.picks)


def test_a_callback_that_raises_ends_a_sweep_which_the_same_call_goes_on_with(database: str) -> None:
    def stop(event: object) -> None:
        if isinstance(event, TrialDone):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fp8tune.sweep("rowwise-2d", db=database, callback=stop, **TINY)
    assert len(fp8tune.open(database).trials()) == 1
    with Store.open(database, writable=False) as store:
        (said,) = store.unfinished_sweeps()
    assert said.startswith("fp8tune.sweep(kernel=('rowwise-2d',), shapes=(")
    events: list[Any] = []
    fp8tune.sweep("rowwise-2d", db=database, callback=events.append, **TINY)
    assert sum(isinstance(event, TrialDone) and event.from_database for event in events) == 1


def test_a_sweep_has_the_options_of_the_command() -> None:
    ours = {"kernel": "kernels", **{name: name for name in inspect.signature(api.sweep).parameters if name != "kernel"}}
    of_the_terminal = {"format", "command", "on"}  # Python sweeps on the GPU that is here
    assert {*ours.values()} - {"callback"} == {field.name for field in fields(Options)} - of_the_terminal
    defaults = Options()
    for name, parameter in inspect.signature(api.sweep).parameters.items():
        if name not in ("kernel", "shapes", "callback", "grid"):
            assert parameter.default == getattr(defaults, name)


@pytest.mark.parametrize(
    ("shape", "arch", "step"),
    [
        ("M=16640 K=5120 G=16", "sm_90", "key"),
        ("M=16640 K=5000 G=16", "sm_90", "nearest"),
        ({"M": 16640, "K": 5120, "G": 16}, "gfx942", "fallback"),
        ("M=16640 K=5120 G=16", "sm_80", "default"),
    ],
)
def test_a_lookup_says_by_which_step(shape: Any, arch: str, step: str) -> None:
    found = fp8tune.lookup("colwise", shape, arch=arch)
    assert (found.step, found.is_own, found.arch) == (step, False, arch)
    assert set(found.config) == {"BLOCK_SIZE", "BLOCK_SIZE_ITER", "LEAD", "num_warps", "num_stages", "maxnreg"}
    assert (found.row_key is None) == (step in ("fallback", "default"))
    assert (found.row_key == found.key) == (step == "key")
    assert str(found).startswith(f"colwise, {found.key} on {arch}: {found.config} (")


def test_a_lookup_gives_what_is_launched_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from fp8tune.replay.loading import load_spec

    spec = load_spec("colwise")
    lookup.forget()
    with lookup.compiling_for("sm_90"):
        for M, K, G in ((16640, 5120, 16), (100, 77, 3), (1 << 17, 5120, 1)):
            found = fp8tune.lookup("colwise", {"M": M, "K": K, "G": G}, arch="sm_90")
            assert lookup.config_for(spec, tuple(found.key.values()), torch.device("meta")) == found.config


def test_a_lookup_reads_the_users_own_table_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8TUNE_TABLES", str(tmp_path))
    shipped = fp8tune.lookup("colwise", "M=16640 K=5120 G=16", arch="gfx942")
    key = (("G", 16), ("K", 5120), ("M_bucket", 16384))
    rows = (("colwise", "", key, (("BLOCK_SIZE", 16), ("num_warps", 2)), 0),)
    (tmp_path / "gfx942.py").write_text(
        f"NEAREST: tuple = ()\nORIGINS: tuple = ((),)\nROWS: tuple[object, ...] = {rows!r}\n"
    )
    lookup.forget()
    try:
        found = fp8tune.lookup("colwise", "M=16640 K=5120 G=16", arch="gfx942")
        (tmp_path / "gfx942.py").write_text("no table")
        lookup.forget()
        with pytest.raises(UsageError, match="is no table"):
            fp8tune.lookup("colwise", "M=16640 K=5120 G=16", arch="gfx942")
    finally:
        monkeypatch.undo()
        lookup.forget()
    assert (shipped.step, shipped.is_own) == ("fallback", False)
    assert (found.step, found.is_own, found.config["num_warps"]) == ("key", True, 2)
    assert str(found).endswith("(the row of its key in your own table)")


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
    exported = fp8tune.export(arch="sm_90", db=stored)
    assert list(exported.files) == ["sm_90.py"]
    assert command("export", "--arch", "sm_90", "--output", tmp_path / "own.py").returncode == 0
    assert str(exported) == (tmp_path / "own.py").read_text()
    assert exported.write(tmp_path / "made") == [tmp_path / "made" / "sm_90.py"]
    assert (tmp_path / "made" / "sm_90.py").read_text() == str(exported)


@on_both
def test_an_export_into_a_table_keeps_its_rows(stored: str, tmp_path: Path) -> None:
    row = '    ("rowwise", "", None, (("num_warps", 4),), 0),\n'
    there = tmp_path / "there.py"
    there.write_text(f"NEAREST: tuple = ()\nORIGINS: tuple = ((),)\nROWS: tuple[object, ...] = (\n{row})\n")
    results = fp8tune.open(stored)
    assert row in str(fp8tune.export(arch="sm_90", db=results, into=there))
    assert row not in str(fp8tune.export(arch="sm_90", db=results))
    assert row in there.read_text()


@on_both
def test_an_export_in_a_format_of_others(stored: str) -> None:
    exported = fp8tune.export(arch="sm_90", kernel="colwise", format="hf", db=stored, sizes={"N": "G"})
    assert any("device_name=NVIDIA_H100" in name for name in exported.files)
    assert all(name.endswith(".json") for name in exported.files)
