"""``fp8tune.open``: results as DataFrames, with the same filters everywhere."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
from database_rows import H200, begin, config, end_finals, finished_sweep, problem, row, subject

import fp8tune
from fp8tune.api import frames
from fp8tune.errors import DatabaseError, UsageError
from fp8tune.records import Outcome, Status
from fp8tune.store.results import Store

SMALL, LARGE = problem(K=1024), problem(K=5120)
DEFAULT, FASTER = config(64, 4, 2), config(32)
METHODS = (*frames.TABLES, "trials")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A coarse pass of two sizes on an H100 and a confirmation of one on an H200."""
    path = str(tmp_path_factory.mktemp("api") / "rows.db")
    with Store.open(path, create=True) as store:
        finished_sweep(store, {SMALL: {DEFAULT: 30.0, FASTER: 20.0}, LARGE: {DEFAULT: 100.0, FASTER: 120.0}})
        sweep = begin(store, H200, "finals")
        store.record_ceiling(sweep, H200, 4000.0)
        blocks = [
            row(time_us + n / 10, size=LARGE, config=tried, device=H200, process=f"final {n}", round=turn, stage=stage)
            for tried, time_us in {DEFAULT: 90.0, FASTER: 80.0}.items()
            for stage, processes in (("screen", [9]), ("final", range(4)))
            for n in processes
            for turn in range(2)
        ]
        samples = Outcome(Status.OK, 80.0, samples_us=(79.0, 80.0, 90.0), tick_us=0.5)
        sampled = replace(row(size=LARGE, config=FASTER, device=H200, round=7), outcome=samples)
        store.add_many(sweep, [*blocks, sampled])
        store.mark_complete(sweep, subject(LARGE, H200), 2)
        end_finals(store, sweep, LARGE, H200)
        store.finish_sweep(sweep)
    return path


def test_picks_have_verdict_speedup_and_units(path: str) -> None:
    picks = fp8tune.open(path).picks()
    assert list(picks["size"]) == ["M=16640 K=1024 G=64", "M=16640 K=5120 G=64", "M=16640 K=5120 G=64"]
    assert list(picks["verdict"]) == ["quick", "quick", "proven"]
    pick = picks[picks["device"] == "NVIDIA H200"].iloc[0]
    assert (pick["config"], pick["processes"], pick["bound"]) == (str(FASTER), 4, "memory")
    assert pick["peak_share"] == pytest.approx(pick["gb_per_s"] / 4000.0)
    assert pick["default_speedup"] == pytest.approx(90 / 80, rel=0.01)
    assert picks["peak_share"].isna().sum() == 2  # where no copy was timed
    assert dict(picks.dtypes.astype(str)) == {
        frames.RENAMED.get(name, name): frames.dtype(str(field.annotation))
        for name, field in frames.TABLES["picks"].model_fields.items()
    }


def test_a_server_gives_the_tables_of_a_file(path: str, postgresql_url: str) -> None:
    with Store.open(postgresql_url, create=True) as store, Store.open(path, writable=False) as file:
        store.merge(file)
    for method in METHODS:
        ours, theirs = (getattr(fp8tune.open(database), method)() for database in (postgresql_url, path))
        assert ours.drop(columns="db", errors="ignore").equals(theirs.drop(columns="db", errors="ignore")), method


def test_finals_and_samples_are_rows_of_their_own(path: str) -> None:
    results = fp8tune.open(path)
    finals = results.finals("colwise", "K=5120", "H200")
    assert list(zip(finals["config"], finals["is_pick"], finals["processes"], strict=True)) == [
        (str(FASTER), True, 4),
        (str(DEFAULT), False, 4),
    ]
    assert finals["slower_share"].tolist() == [0.0, pytest.approx(90 / 80 - 1, rel=0.05)]
    samples = results.samples()
    assert (samples["sample_us"].tolist(), samples["sample"].tolist()) == ([79.0, 80.0, 90.0], [0, 1, 2])
    assert (results.trials(device="H200")["stage"] == "final").sum() == 16


@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_the_same_filters(method: str, path: str) -> None:
    read = getattr(fp8tune.open(path), method)
    assert list(inspect.signature(read).parameters) == ["kernel", "size", "device", "verdict"]
    everything = len(read())
    assert everything > 0
    assert len(read("colwise")) == len(read(["colwise"])) == len(read(device="sm_90")) == everything
    assert len(read(kernel=[])) == len(read(size="K=7")) == len(read(size="layout=transposed")) == 0
    parts = [len(read(verdict=word)) for word in ("proven", "quick", ["open", "stale"])]
    if method != "devices":  # the same GPU may have picks of both words
        assert sum(parts) == everything
    assert parts[2] == 0
    assert len(read(size={"K": 5120})) == len(read(size="M=16640,K=5120")) == len(read(size="K=5120 G=64"))
    assert list(read(size="K=7").columns) == list(read().columns)


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({"kernel": "colwse"}, "did you mean colwise"),
        ({"verdict": "certified"}, "verdict 'certified'"),
        ({"size": "K"}, "write M=16640,K=1408"),
        ({"size": {"K": "many"}}, "write M=16640,K=1408"),
    ],
)
def test_an_unknown_name_is_one_line(filters: dict[str, object], message: str, path: str) -> None:
    for method in METHODS:
        with pytest.raises(UsageError, match=message):
            getattr(fp8tune.open(path), method)(**filters)


def test_a_database_that_cannot_be_used_is_refused_at_once(tmp_path: object) -> None:
    with pytest.raises(DatabaseError, match="does not exist"):
        fp8tune.open(f"{tmp_path}/none.db")
    with pytest.raises(UsageError, match="in memory"):
        fp8tune.open(":memory:")
