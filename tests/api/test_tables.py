"""``fp8tune.open``: rows of a database as DataFrames."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas
import pytest
from database_rows import H100, H200, begin, config, end_finals, finished_sweep, problem, row, subject
from servers import on_both

import fp8tune
from fp8tune.api import frames
from fp8tune.errors import DatabaseError, UsageError
from fp8tune.records import Outcome, Status
from fp8tune.redaction import redacted
from fp8tune.store.results import Store
from fp8tune.sweeping.picks import keep_current

SMALL, LARGE = problem(K=1024), problem(K=5120)
DEFAULT, FASTER = config(64, 4, 2), config(32)


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A screen of two problems on an H100, and finals of one on an H200: in a file, and on a server."""
    path = str(tmp_path_factory.mktemp("api") / "rows.db")
    if request.param == "postgresql":
        path = request.getfixturevalue("postgresql").database()
    with Store.open(path, create=True) as store:
        finished_sweep(store, {SMALL: {DEFAULT: 30.0, FASTER: 20.0}, LARGE: {DEFAULT: 100.0, FASTER: 120.0}})
        sweep = begin(store, H200, "finals")
        store.record_ceiling(sweep, H200, 4000.0)
        blocks = {DEFAULT: 90.0, FASTER: 80.0}
        rows = [
            row(
                time_us + process / 10,
                of=LARGE,
                config=of,
                device=H200,
                process=f"final {process}",
                round=round,
                stage=stage,
            )
            for of, time_us in blocks.items()
            for stage, processes in (("screen", [9]), ("final", range(4)))
            for process in processes
            for round in range(2)
        ]
        samples = Outcome(Status.OK, 80.0, samples_us=(79.0, 80.0, 90.0), tick_us=0.5)
        store.add_many(sweep, [*rows, replace(row(of=LARGE, config=FASTER, device=H200, round=7), outcome=samples)])
        store.add(sweep, row(None, of=LARGE, config=config(128), device=H200, status=Status.WRONG))
        store.mark_complete(sweep, subject(LARGE, H200), 3)
        end_finals(store, sweep, LARGE, H200)
        store.finish_sweep(sweep)
    return path


def test_picks_have_their_verdict_and_what_stands_beside_it(path: str) -> None:
    picks = fp8tune.open(path).picks()
    assert list(picks.columns) == [column.name for column in frames.PICKS]
    assert dict(picks.dtypes.astype(str)) == {column.name: column.dtype for column in frames.PICKS}
    assert list(picks["shape"]) == ["M=16640 K=1024 G=64", "M=16640 K=5120 G=64", "M=16640 K=5120 G=64"]
    assert list(picks["verdict"]) == ["quick", "quick", "certified"]
    decided = picks[picks["device"] == "NVIDIA H200"].iloc[0]
    assert (decided["config"], decided["runner_up"], decided["processes"]) == (str(FASTER), str(DEFAULT), 4)
    assert decided["time_us"] == pytest.approx(80.15, rel=1e-3)
    assert decided["ceiling_share"] == pytest.approx(decided["gb_per_s"] / 4000.0)
    assert not decided["is_default"]
    assert decided["is_complete"]
    assert picks["ceiling_share"].isna().sum() == 2  # where no copy was timed
    assert (pandas.Timestamp.now("UTC") - picks["measured_at"]).max() < pandas.Timedelta(hours=1)


def test_finals_are_the_finalists_and_their_blocks_are_trials(path: str) -> None:
    results = fp8tune.open(path)
    finals = results.finals()
    assert list(zip(finals["config"], finals["is_pick"], finals["processes"], finals["blocks"], strict=True)) == [
        (str(FASTER), True, 4, 8),
        (str(DEFAULT), False, 4, 8),
    ]
    assert finals["slowdown_ratio"].iloc[0] == 1.0
    assert finals["slowdown_ratio"].iloc[1] == pytest.approx(90 / 80, rel=0.01)
    trials = results.trials(device="h200")
    assert (trials["stage"] == "final").sum() == 16
    assert list(trials[trials["status"] != "ok"]["reason"]) == ["wrong"]
    (sampled,) = trials[trials["samples"] > 0].to_dict("records")
    assert [sampled[name] for name in ("median_us", "min_us", "max_us", "samples", "tick_us")] == [80, 79, 90, 3, 0.5]
    assert trials["time_us"].isna().sum() == 1


def test_samples_are_rows_of_their_own(path: str) -> None:
    results = fp8tune.open(path)
    assert len(results.samples("colwise")) == 0  # none is of finals
    found = results.samples("colwise", stage=None, shape="K=5120", config={"BLOCK_SIZE": 32})
    assert found["sample_us"].tolist() == [79.0, 80.0, 90.0]
    assert found["sample"].tolist() == [0, 1, 2]
    assert (found["config"] == str(FASTER)).all()
    assert str(found["config"].dtype) == "category"
    assert results.samples("colwise", stage="screen", config="BLOCK_SIZE=64").empty
    assert list(results.samples("colwise").columns) == list(found.columns)
    with pytest.raises(UsageError, match="unknown stage 'finals': did you mean final"):
        results.samples("colwise", stage="finals")


def test_picks_that_were_kept_are_the_ones_that_are_decided(path: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept.db"
    with Store.open(str(kept), create=True) as store, Store.open(path, writable=False) as other:
        store.merge(other)
        keep_current(store)
    for name in ("picks", "finals"):
        for filters in (
            {},
            {"arch": "sm_90", "kernel": ["colwise"], "expand": True},
            {"kernel": []},
            {"shape": "K=1024"},
        ):
            expected = getattr(fp8tune.open(path), name)(**filters)
            pandas.testing.assert_frame_equal(getattr(fp8tune.open(kept), name)(**filters), expected)
    assert fp8tune.open(kept).picks(kernel=[]).empty


def test_filters_choose_rows_and_expand_adds_columns(path: str) -> None:
    results = fp8tune.open(path)
    assert len(results.trials(shape={"K": 1024})) == len(results.trials(shape=" K=1024  G=64 ")) == 2
    assert len(results.picks(kernel="colwise", arch=["sm_90"], device="H100")) == 2
    assert len(results.picks(shape="K=7")) == 0
    assert list(results.picks(shape="K=7").columns) == [column.name for column in frames.PICKS]
    expanded = results.picks(expand=True, shape="K=1024").iloc[0]
    assert (expanded["shape.K"], expanded["config.BLOCK_SIZE"], expanded["config.num_stages"]) == (1024, 32, 1)


def test_devices_have_their_software_and_what_was_measured_of_them(path: str) -> None:
    devices = fp8tune.open(path).devices()
    assert list(devices["device"]) == ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]
    assert list(devices["problems"]) == [2, 1]
    assert devices["copy_gb_per_s"].iloc[1] == 4000.0
    assert devices["copy_gb_per_s"].isna().iloc[0]
    assert len(fp8tune.open(path).devices(device="H200")) == 1
    assert H100.driver in set(devices["driver"])


@on_both
def test_rows_that_are_added_later_are_read(database: str) -> None:
    Store.open(database, create=True).close()
    results = fp8tune.open(database)
    assert len(results.picks()) == len(results.trials()) == len(results.finals()) == len(results.devices()) == 0
    with Store.open(database) as store:
        finished_sweep(store, {SMALL: {FASTER: 20.0}})
    assert len(results.picks()) == 1


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda results: results.picks(kernel="colwse"), "unknown kernel 'colwse': did you mean colwise"),
        (lambda results: results.trials(arch="sm_91"), "unknown arch 'sm_91'"),
        (lambda results: results.finals(shape="K"), "'K' is no shape"),
        (lambda results: results.picks(shape={"K": "large"}), "is no shape"),
        (lambda results: fp8tune.open(":memory:"), "in memory"),
    ],
)
def test_what_nobody_knows_is_an_error_of_fp8tune(path: str, ask: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ask(fp8tune.open(path))  # type: ignore[operator]


def test_a_database_that_is_not_there_is_an_error_when_it_is_opened(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="does not exist"):
        fp8tune.open(tmp_path / "none.db")
    assert issubclass(DatabaseError, fp8tune.Fp8tuneError)


def test_without_a_name_own_rows_are_read_over_the_base(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FP8TUNE_BASE", path)
    assert repr(fp8tune.open()) == f"<fp8tune.Results of {redacted(path)}>"
    with Store.open("fp8tune.db", create=True) as store:
        finished_sweep(store, {problem(K=2048): {FASTER: 20.0}})
    assert repr(fp8tune.open()) == f"<fp8tune.Results of fp8tune.db over {redacted(path)}>"
    assert len(fp8tune.open().picks()) == 4


def test_the_package_is_imported_as_lightly_as_before() -> None:
    code = """
import sys
import fp8tune
loaded = {name for name in sys.modules if name.startswith("fp8tune")} - {"fp8tune"}
assert not loaded and not {"pandas", "numpy", "torch", "sqlalchemy"} & {*sys.modules}, loaded
import fp8tune.sweeping.events, fp8tune.tables.select
assert callable(fp8tune.sweep) and callable(fp8tune.export)
assert {"open", "sweep", "lookup", "export", "Results"} <= {*dir(fp8tune)}
fp8tune.open, fp8tune.lookup
assert not {"torch", "triton", "typer", "rich"} & {*sys.modules}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
