"""From a sweep of the passes of grouped-mm to the method that a layer takes: ``sweep --op``, ``show --op``, export."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command_line import fp8tune
from forked import workers_forked_from_here
from places import PUBLISHED_OPERATIONS

from fp8tune_kernels.catalog import METHODS, PASSES, PRECISIONS
from fp8tune_kernels.gemm import methods
from fp8tune_kernels.runtime import lookup

LAYERS = """
[[rows]]
M = [16384, 65536]
K = 2048
N = 1536
E = 64

[[rows]] # no grouped GEMM takes it
M = 16384
K = 2047
N = 1536
E = 64
"""


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("passes") / "layers.toml"
    path.write_text(LAYERS)
    return path


@pytest.fixture(scope="module")
def database(shapes: Path) -> Path:
    path = shapes.with_name("results.db")
    swept = fp8tune("sweep", "--op", "grouped-mm", "--shapes", shapes, "--timer", "simulated:1", "--db", path)
    assert swept.returncode == 0, swept.stderr
    return path


def test_every_pass_of_a_layer_has_a_choice_with_its_evidence(database: Path) -> None:
    rows = json.loads(fp8tune("show", "--op", "grouped-mm", "--db", database, "--format", "json").stdout)
    assert len(rows) == 2 * (3 + 3 + 2)
    for row in rows:
        assert (row["row"], row["arch"], row["seed"]) == ("choice", "simulated", 0)
        assert row["methods"][row["method"]] == pytest.approx(row["time_us"])
        allowed = METHODS[2:] if row["precision"] == "fp8" else METHODS
        assert {*row["methods"]} == {*allowed}
        assert METHODS[row["config"]["METHOD"]] == row["method"]
        assert row["speedup"] == pytest.approx(row["bf16_us"] / row["time_us"])
        assert row["verdict"]
        assert len(row["slowdown"]) == 2
    first = [(row["pass"], row["precision"]) for row in rows if row["shape"]["M"] == 16384]
    assert first[:3] == [("forward", precision) for precision in PRECISIONS]
    assert first[-1] == ("weight gradient", "auto")
    fp8, either = rows[0], rows[1]
    assert fp8["bf16_us"] == either["methods"]["bf16, torch's GEMM"]


def test_the_table_has_the_methods_by_name(database: Path) -> None:
    shown = fp8tune("show", "--op", "grouped-mm", "--db", database)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0] == "passes of grouped-mm on simulated:1 (simulated), casts included, us"
    assert all(name in lines[2] for name in (*METHODS, "choice", "over bf16", "verdict"))
    assert len([line for line in lines if line.strip().startswith("16384")]) == 8
    assert "METHOD" not in shown.stdout
    legend = fp8tune("sweep", "--help").stdout
    assert "METHOD" in legend


def test_published_rows_come_after_and_other_layers_are_left_out(database: Path, shapes: Path) -> None:
    assert fp8tune("import", PUBLISHED_OPERATIONS, "--db", database).returncode == 0
    everything = json.loads(fp8tune("show", "--op", "grouped-mm", "--db", database, "--format", "json").stdout)
    kinds = [row["row"] for row in everything]
    assert kinds == ["choice"] * 16 + ["published"] * (len(kinds) - 16)
    assert len(kinds) > 16
    only = fp8tune("show", "--op", "grouped-mm", "--shapes", shapes, "--db", database, "--format", "json")
    assert [row["row"] for row in json.loads(only.stdout)] == ["choice"] * 16
    none = fp8tune("show", "--op", "grouped-mm", "--shapes", "tiny", "--db", database)
    assert not none.stdout.strip()
    assert "fp8tune sweep --op grouped-mm --shapes tiny" in none.stderr
    csv = fp8tune("show", "--op", "grouped-mm", "--db", database, "--format", "csv")
    assert csv.stdout.startswith("source,")
    assert "--format json" in csv.stderr


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("FP8TUNE_TABLES", str(tmp_path))
    yield tmp_path
    lookup.forget()


def test_an_exported_table_decides_the_method_of_a_layer(database: Path, tables: Path) -> None:
    rows = json.loads(fp8tune("show", "--op", "grouped-mm", "--db", database, "--format", "json").stdout)
    done = fp8tune("export", "--arch", "simulated", "--output", tables / "interpreter.py", "--db", database)
    assert done.returncode == 0, done.stderr
    lookup.forget()
    for row in (row for row in rows if row["row"] == "choice"):
        name, precision = row["pass"].replace(" ", "-"), PRECISIONS.index(row["precision"])
        found = methods.method_for(name, *row["shape"].values(), precision, torch.device("cpu"))
        assert METHODS[found] == row["method"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--op", "mxfp8-grouped-mm"], "one method"),
        (["--op", "grouped-mm", "--kernel", "colwise"], "leave out --kernel"),
    ],
)
def test_what_no_sweep_of_passes_can_be_is_refused(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = fp8tune("sweep", *arguments, "--db", tmp_path / "none.db")
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "none.db").exists()


def test_a_pass_is_not_compiled_for_an_arch_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # or that is what the command would speak of
    arguments = ["--op", "grouped-mm", "--static", "--arch", "gfx942", "--shapes", "tiny", "--db", tmp_path / "none.db"]
    with workers_forked_from_here():
        done = fp8tune("sweep", *arguments)
    assert done.returncode == 2
    assert "is not compiled: a method is chosen by its time" in done.stderr


def test_shapes_without_an_operation_are_refused(database: Path) -> None:
    done = fp8tune("show", "--shapes", "tiny", "--db", database)
    assert done.returncode == 2
    assert "--op grouped-mm" in done.stderr


def test_a_sweep_that_names_nothing_leaves_the_passes_out() -> None:
    from fp8tune.sweep.options import Options

    assert not {*Options().kernels} & {*PASSES}
