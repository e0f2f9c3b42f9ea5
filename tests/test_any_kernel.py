"""A kernel with dims of its own names, two input dtypes and no FP8, through every command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def picks(folder: Path) -> list[dict[str, Any]]:
    text = fp8tune("show", "softmax", "--db", "swept.db", "--format", "json", cwd=folder).stdout
    return json.loads(text)["picks"]  # type: ignore[no-any-return]


def test_each_shape_is_swept_with_each_dtype(folder: Path) -> None:
    rows = picks(folder)
    sizes = [(row["size"]["n_rows"], row["attributes"]["dtype"]) for row in rows]
    assert sizes == [(n, dtype) for n in (4096, 16384) for dtype in ("bfloat16", "float32")]
    assert {(row["attributes"]["routing"], row["attributes"]["output"]) for row in rows} == {("none", "")}


def test_a_table_names_its_dims_and_dtypes(folder: Path) -> None:
    title, _, heading, *rows = fp8tune("show", "softmax", "--db", "swept.db", cwd=folder).stdout.splitlines()
    assert "4 sizes with n_cols=1000" in title
    assert heading.split()[:3] == ["n_rows", "dtype", "speedup"]
    assert [row.split()[:2] for row in rows[:2]] == [["4096", "bf16"], ["4096", "fp32"]]


def test_a_share_is_of_the_higher_bound(folder: Path) -> None:
    peaks = {"bfloat16": 1e12, "float32": 1e15}
    with Store.open(str(folder / "swept.db")) as store:
        (device,) = {item.device for item in store.studies(kinds=[Kind.SIMULATED])}
        store.record_ceiling(1, device, 3000.0)
        for dtype, flop_per_s in peaks.items():
            store.record_calibration(1, device, FLOP_PER_S + dtype, flop_per_s)
    rows = picks(folder)
    assert [row["bound"] for row in rows] == ["compute", "memory"] * 2
    for row in rows:
        dtype, values = row["attributes"]["dtype"], row["size"]["n_rows"] * 1000
        bounds_us = 1e6 * 5 * values / peaks[dtype], (4 if dtype == "bfloat16" else 8) * values / 3e6
        assert row["peak_share"] == pytest.approx(max(bounds_us) / row["time_us"])


def test_it_is_exported_with_its_dtype_in_the_key(folder: Path) -> None:
    done = fp8tune("export", "--arch", "simulated", "--db", "swept.db", "--allow-quick", "-o", "table.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    table = (folder / "table.py").read_text()
    assert "'in_dtype', 2" in table.replace('"', "'")


def test_its_lookup_key_is_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8TUNE_TIMER", "simulated:1")
    done = fp8tune("doctor", SOFTMAX, "--db", "swept.db", cwd=folder)
    assert "the lookup key of softmax" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--shapes", "rows.toml,scale=exact"), "scale=exact: softmax has no scale modes"),
        (("--shapes", "rows.toml,routing=zipf"), "routing=zipf: softmax has no groups"),
        (
            ("--shapes", "tiny"),
            "its problems ask for n_rows, and the shapes have M, K, N, E; give others with --shapes",
        ),
    ],
)
def test_what_it_does_not_have_is_one_line(folder: Path, options: tuple[str, ...], message: str) -> None:
    done = fp8tune("sweep", "--kernel", SOFTMAX, "--timer", "simulated:1", "--db", "x.db", *options, cwd=folder)
    if "--shapes" not in options:
        done = sweep(folder, "--timer", "simulated:1", "--db", "x.db", *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) <= 2
