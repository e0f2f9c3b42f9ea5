"""``show`` and ``explain``: an overview that fits a screen, filters, order, why a pick is the pick."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import fp8tune
from database_rows import H100, H200, begin, config, end_finals, finished_sweep, problem, row, subject

from fp8tune.records import Problem, Status
from fp8tune.render import legend
from fp8tune.render.documents import DOCUMENTS
from fp8tune.render.fields import faults
from fp8tune.stats.study import Precedence, Verdict
from fp8tune.store.results import Store

SHAPES = ((16640, 5120), (65536, 5120), (131072, 1408))


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finals of a shape on an H100, in which the committed order keeps a config that is not the fastest; screens."""
    path = tmp_path_factory.mktemp("show") / "results.db"
    with Store.open(str(path), create=True) as store:
        screened = {problem(M=M, K=K): {config(32): M / 100, config(64): M / 99} for M, K in reversed(SHAPES)}
        finished_sweep(store, screened, H200)
        of = problem()
        finished_sweep(store, {of: {config(32): 100.0, config(64): 101.0, config(128): 130.0}}, H100)
        sweep = begin(store, H100, "finals")
        for process in range(4):
            for block, time_us in ((32, 100.0), (64, 99.5)):
                for round in range(3):
                    timed = row(time_us + 0.01 * process * round, of=of, config=config(block), stage="final")
                    store.add(sweep, replace(timed, process=f"final {process:02}", round=round))
        failed = row(None, of=of, config=config(128, 8), status=Status.OUT_OF_RESOURCES)
        store.add(sweep, failed)
        end_finals(store, sweep, of)
        store.mark_complete(sweep, subject(of), 4)
    return path


def shown(database: Path, *arguments: str, command: str = "show") -> str:
    done = fp8tune(command, *arguments, "--db", database)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(database: Path, *arguments: str) -> str:
    done = fp8tune(*arguments, "--db", database)
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


def test_without_arguments_a_line_a_kernel_fits_80_columns(tmp_path: Path) -> None:
    path = tmp_path / "two.db"
    with Store.open(str(path), create=True) as store:
        other = Problem("a-kernel-with-a-name-that-is-much-too-long", problem().shape)
        for of in (problem(), other):
            finished_sweep(store, {of: {config(32): 100.0}}, H100, request=of.kernel)
    title, header, *lines = shown(path).splitlines()
    assert title == f"2 picks of 2 kernels in {path}"
    assert [line.split()[0] for line in lines[:2]] == [f"...{other.kernel[-23:]}", "colwise"]
    assert all(len(line) <= 80 for line in (header, *lines))
    assert "in all: 2 quick" in lines


def test_rows_are_sorted_as_they_are_read(database: Path) -> None:
    rows = json.loads(shown(database, "--format", "json"))
    assert [tuple(one["shape"].values())[:2] for one in rows if one["device"] == H200.name] == list(SHAPES)


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        (["--shape", "M=16640,K=5120"], [16640, 16640]),
        (["--shape", "K=1408", "--shape", "M=65536"], [65536, 131072]),
        (["--device", "h200", "--top", "2"], [16640, 65536]),
        (["--device", "H200", "--sort", "time"], [131072, 65536, 16640]),
        (["--verdict", "near-tie"], [16640]),
        (["--verdict", "quick", "--verdict", "near-tie", "--sort", "time", "--top", "1"], [131072]),
    ],
)
def test_filters_and_order(database: Path, arguments: list[str], sizes: list[int]) -> None:
    rows = json.loads(shown(database, *arguments, "--format", "json"))
    assert [one["shape"]["M"] for one in rows] == sizes


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--shape", "K=5121"], "no problem has K=5121: the nearest are 1408, 5120"),
        (["--shape", "N=1"], "unknown size 'N': known: G, K, M"),
        (["--shape", "K=1408,M=16640"], "no problem has K=1408,M=16640 together"),
        (["--shape", "wide"], "write it as M=16640,K=1408"),
        (["--device", "H300"], "unknown device 'H300'"),
        (["--verdict", "certifed"], "did you mean certified"),
        (["--top", "0"], "--top"),
        (["--sort", "size"], "'shape', 'time', 'share', 'gain', 'noise'"),
        (["--failed", "--sort", "time"], "are for picks"),
    ],
)
def test_a_wrong_value_is_one_line_that_says_what_there_is(database: Path, arguments: list[str], says: str) -> None:
    said = refused(database, "show", *arguments)
    assert says in said
    assert said.count("\n") == 1


def test_a_faster_config_never_stands_there_without_saying_why_it_is_not_the_pick(database: Path) -> None:
    (found,) = json.loads(shown(database, "--device", "H100", "--format", "json"))
    assert found["runner_up_us"] < found["time_us"]
    assert found["why_not_runner_up"] in ("tied", "default stays", "committed stays")
    assert f" %  {found['why_not_runner_up']}  " in shown(database, "--device", "H100", "--sort", "shape")


def test_markdown_and_a_legend_of_what_is_printed(database: Path) -> None:
    assert shown(database, "--sort", "shape", "--format", "markdown").count("| ---: |") > 0
    lines = shown(database, "--verdict", "near-tie", "--explain").partition("what the columns and words mean\n")[2]
    terms = [line.split("  ")[1] for line in lines.splitlines()]
    assert {"us", "of ceiling", "next best", "near-tie"} <= set(terms)
    assert not {"certified", "ambiguous", "GPUs"} & set(terms)


def test_every_verdict_and_reason_has_its_line_in_the_legend() -> None:
    assert set(legend.VERDICTS) == set(Verdict)
    assert set(legend.WHY_NOT) == set(filter(None, Precedence))
    assert set(legend.STATUSES) == set(map(str, Status))


def test_explain_says_how_one_pick_came_about(database: Path) -> None:
    said = shown(database, "colwise", "16640x5120", "--device", "H100", "--explain", command="explain")
    for part in (
        "colwise, M=16640 K=5120 G=64, jagged, on NVIDIA H100 80GB HBM3 (sm_90)",
        "the finals, in fresh processes",
        "in 4 fresh processes",
        "out_of_resources",
        "why the verdict is near-tie",
        "what a lookup of K=5120 G=64 launches",
        "what the columns and words mean",
    ):
        assert part in said
    found = json.loads(shown(database, "colwise", "M=16640", "--device", "H100", "--format", "json", command="explain"))
    assert not list(faults(DOCUMENTS["explanation"].fields, found))
    assert [one["status"] for one in found["configs"]] == ["ok", "ok", "ok", "out_of_resources"]
    assert [one["stage"] for one in found["configs"]] == ["final", "final", "screen", "screen"]
    assert (found["processes"], len(found["pairs"])) == (4, 2)
    first, second = found["pairs"]
    assert first["slowdown"] * second["slowdown"] == pytest.approx(1)
    low, high = found["configs"][1]["interval"]
    assert low <= found["configs"][1]["slowdown"] <= high


def test_explain_lists_what_an_ambiguous_shape_fits(database: Path) -> None:
    said = refused(database, "explain", "colwise", "M=16640").splitlines()
    assert said[-1].startswith("fp8tune: 2 problems fit M=16640: name one by its sizes, --device")
    assert [line.rpartition(" on ")[2] for line in said[:-1]] == [H100.name, H200.name]
    assert "no problem has M=7" in refused(database, "explain", "colwise", "M=7")
    assert "fits 7x7" in refused(database, "explain", "colwise", "7x7")
    assert "unknown routing" in refused(database, "explain", "colwise", "M=16640", "--routing", "even")
