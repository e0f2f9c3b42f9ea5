"""``--shapes SET[,NAME=VALUE...]``: which sizes are kept, and which settings they get."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fp8tune.errors import UsageError
from fp8tune.options import SweepOptions
from fp8tune.plan import shapes
from fp8tune.plan.problems import problems
from fp8tune.plan.shapes import Settings
from fp8tune.replay.loading import load_spec
from fp8tune.sweeping.planning import planned


def test_sizes_filter_and_settings_apply() -> None:
    selected = shapes.parse("llama4,K=5120,G=16,routing=zipf,dtype=bfloat16,seed=3")
    assert selected.settings == Settings(routing="zipf", dtype="bfloat16", seed=3)
    found = problems(load_spec("colwise"), selected.rows, selected.settings, size=selected.size)
    assert {(problem.shape["K"], problem.shape["G"], problem.routing) for problem in found} == {(5120, 16, "zipf")}


def test_a_dim_that_a_kernel_lacks_is_looked_up_in_the_row() -> None:
    selected = shapes.parse("llama4,E=8")
    found = problems(load_spec("colwise"), selected.rows, size=selected.size)
    assert {problem.shape["M"] for problem in found} == {131072}


def test_a_file_has_settings_beside_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('routing = "empty"\nseed = 7\n[[rows]]\nM = [64, 128]\nK = 96\nN = 32\nE = 2\n')
    assert shapes.parse(f"{path},M=64").settings == Settings(routing="empty", seed=7)
    assert shapes.parse(f"{path},routing=zipf").settings == Settings(routing="zipf", seed=7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("K=5120", "names no shape set"),
        ("lama4", "did you mean llama4"),
        ("llama4,routing=jaged", "did you mean jagged"),
        ("llama4,rooting=jagged", "did you mean routing"),
        ("llama4,dtype=bf16", "dtype"),
        ("llama4,seed=-1", "seed"),
        (f"llama4,seed={2**64}", "seed"),
        (f"llama4,seed={'9' * 9999}", "seed"),
        ("llama4,K", "NAME=VALUE"),
        ("llama4,", "NAME=VALUE"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        shapes.parse(text)


def test_two_routings_in_one_sweep_are_refused() -> None:
    with pytest.raises(UsageError, match="one command for each"):
        planned(SweepOptions(shapes=("tiny,routing=zipf", "llama4")))


def test_a_size_that_no_problem_has_is_named() -> None:
    selected = shapes.parse("llama4,K=77")
    with pytest.raises(UsageError, match="K=77"):
        problems(load_spec("colwise"), selected.rows, size=selected.size)


def test_a_hostile_file_is_refused_at_once(tmp_path: Path) -> None:
    """A key of 100,000 parts took over a minute."""
    path, began = tmp_path / "dots.toml", time.monotonic()
    for text in (".".join("a" * 100_000) + " = 1\n", "#\n" * 100_000, (".".join("a" * 900) + " = 1\n") * 35):
        path.write_text(text)
        with pytest.raises(UsageError):
            shapes.parse(str(path))
    assert time.monotonic() - began < 20
