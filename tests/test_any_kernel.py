"""A kernel with dims of its own names, two input dtypes and no FP8, through every command."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from command_line import fp8tune
from places import PLANTED

from fp8tune.ceiling import FLOP_PER_S
from fp8tune.records import Kind
from fp8tune.store.results import Store

SOFTMAX = f"{PLANTED / 'softmax.py'}:SPEC"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With shapes, and a database of their sweep."""
    folder = tmp_path_factory.mktemp("softmax")
    (folder / "rows.toml").write_text("[[rows]]\nn_rows = [4096, 16384]\nn_cols = 1000\n")
    done = sweep(folder, "--timer", "simulated:1", "--db", "swept.db")
    assert done.returncode == 0, done.stderr
    return folder


def sweep(folder: Path, *options: str):
    return fp8tune("sweep", "--kernel", SOFTMAX, "--shapes", "rows.toml", *options, cwd=folder)


def shown(folder: Path) -> list[dict[str, object]]:
    return json.loads(fp8tune("show", "--db", "swept.db", "--format", "json", cwd=folder).stdout)


def test_each_shape_is_swept_with_each_dtype(folder: Path) -> None:
    rows = shown(folder)
    found = [(row["shape"]["n_rows"], row["in_dtype"]) for row in rows]
    assert found == [(n, dtype) for n in (4096, 16384) for dtype in ("bfloat16", "float32")]
    assert {(row["routing"], row["fp8_dtype"], row["scale_mode"], row["check"]) for row in rows} == {
        ("none", None, None, "exact")
    }
    assert [row["flops"] for row in rows] == [5 * n * 1000 for n, _ in found]


def test_a_table_names_its_dims_and_dtypes(folder: Path) -> None:
    table = fp8tune("show", "--db", "swept.db", "--kernel", "softmax", cwd=folder).stdout
    assert table.splitlines()[1].split()[:3] == ["n_rows", "n_cols", "dtype"]
    assert "n_rows=4096 n_cols=1000 float32" in table
    lines = list(csv.DictReader(io.StringIO(fp8tune("show", "--db", "swept.db", "--format", "csv", cwd=folder).stdout)))
    assert {line["fp8_dtype"] for line in lines} == {""}


def test_a_share_is_of_the_higher_bound(folder: Path) -> None:
    with Store.open(str(folder / "swept.db")) as store:
        (device,) = {item.device for item in store.studies(kinds=[Kind.SIMULATED])}
        store.record_ceiling(1, device, 3000.0)
        for dtype, flop_per_s in (("bfloat16", 1e12), ("float32", 1e15)):
            store.record_calibration(1, device, FLOP_PER_S + dtype, flop_per_s)
    rows = shown(folder)
    assert [row["bound"] for row in rows] == ["compute", "memory"] * 2
    for row in rows:
        bytes_moved = (4 if row["in_dtype"] == "bfloat16" else 8) * row["flops"] / 5
        bounds_us = 1e6 * row["flops"] / row["peak_flop_per_s"], bytes_moved / 3e6
        assert row["ceiling_share"] == pytest.approx(max(bounds_us) / row["time_us"])
    assert "compute" in fp8tune("show", "--db", "swept.db", cwd=folder).stdout


def test_it_is_exported_with_its_dtype_in_the_key(folder: Path) -> None:
    done = fp8tune("export", "--arch", "simulated", "--db", "swept.db", "--allow-quick", "-o", "table.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    table = (folder / "table.py").read_text()
    assert "'in_dtype', 2" in table.replace('"', "'")


def test_lint_varies_what_its_key_lacks_and_names_the_dtype(folder: Path) -> None:
    done = fp8tune("lint", SOFTMAX, "--shapes", "rows.toml", "--timer", "simulated:1", cwd=folder)
    assert "n_rows_bucket=4096 n_cols=1000 in_dtype=float32" in done.stdout
    assert " scale_mode " not in done.stdout


def test_it_is_benched(folder: Path) -> None:
    options = ("--kernel", SOFTMAX, "--shapes", "rows.toml", "--timer", "simulated:1", "--format", "json")
    rows = json.loads(fp8tune("bench", *options, cwd=folder).stdout)
    (first, *_) = [row for row in rows if row["row"] == "problem"]
    assert (first["fp8_dtype"], first["flops"]) == (None, 5 * 4096 * 1000)
    assert first["bound"] in ("memory", "compute")
    assert first["peak_flop_per_s"] > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--shapes", "rows.toml,scale=exact"), "scale=exact: softmax has no scale modes"),
        (("--shapes", "rows.toml,routing=zipf"), "routing=zipf: softmax has no groups"),
        (
            ("--shapes", "tiny"),
            "its problems ask for n_rows, and the shapes have M, K, N, E; give others with --shapes",
        ),
    ],
)
def test_what_it_does_not_have_is_one_line(folder: Path, options: tuple[str, ...], said: str) -> None:
    done = fp8tune("sweep", "--kernel", SOFTMAX, "--timer", "simulated:1", "--db", "x.db", *options, cwd=folder)
    if "--shapes" not in options:
        done = sweep(folder, "--timer", "simulated:1", "--db", "x.db", *options)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) <= 2
