"""``fp8tune bench``: what is timed, what is in no ratio, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Ended, fp8tune
from toy_operation import OnCpu, doubled, operation

from fp8tune import registry
from fp8tune.bench import run
from fp8tune.measure import backends
from fp8tune.options import BenchOptions


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Ended]:
    """Run the command on a simulated GPU, in a terminal of 80 columns."""
    monkeypatch.setenv("FP8TUNE_TIMER", "simulated:1")
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *arguments: fp8tune("bench", *arguments, cwd=tmp_path)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[str]]:
    """Register the toy operation, check it on the CPU, and return the arguments that time it."""

    def register(**options: Any) -> list[str]:
        chosen = operation(**options)
        monkeypatch.setattr(run, "load", lambda reference, is_kernel: chosen)
        monkeypatch.setattr("fp8tune.bench.contenders.load", lambda reference, is_kernel: chosen)
        monkeypatch.setattr(backends, "SimulatedBackend", OnCpu)
        shapes = tmp_path / "toy.toml"
        shapes.write_text('[[rows]]\nname = "small"\nM = [128, 256]\nK = 32\n')
        return ["--op", "doubling", "--shapes", str(shapes)]

    return register


def contenders(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in document["subjects"][0]["sizes"][0]["contenders"]}


def test_a_wrong_rival_is_in_no_ratio(bench: Any, toy: Any) -> None:
    result = bench(*toy(), "--format", "json")
    assert result.returncode == 0
    document = json.loads(result.stdout)
    cells = contenders(document)
    assert cells["half"]["is_wrong"]
    assert "out is wrong" in cells["half"]["reason"]
    assert (cells["half"]["time_us"], cells["half"]["speedup"]) == (None, None)
    assert cells["absent"]["reason"] == "rival is not installed"
    assert "no such kernel" in cells["broken"]["reason"]
    assert document["subjects"][0]["means"].keys() == {"fp8tune, again", "torch"}
    size = document["subjects"][0]["sizes"][0]
    assert cells["torch"]["speedup"] == cells["torch"]["time_us"] / cells["fp8tune"]["time_us"]
    assert size["tflops"] == pytest.approx(128 * 32 / cells["fp8tune"]["time_us"] / 1e6)


def test_the_table_has_one_line_a_size_and_says_why_a_column_is_missing(bench: Any, toy: Any) -> None:
    result = bench(*toy())
    lines = result.stdout.splitlines()
    assert lines[0].startswith("doubling on simulated:1")
    header = next(line for line in lines if "time us" in line)
    assert "half" in header
    assert "absent" not in header
    assert sum("  wrong  " in line for line in lines) == 2
    assert any(line.startswith("absent not timed on M=128 K=32: rival is not installed") for line in lines)
    assert max(map(len, lines)) <= 80
    assert "| " in bench(*toy(), "--format", "markdown").stdout


def test_a_wrong_output_of_ours_ends_with_1(bench: Any, toy: Any) -> None:
    result = bench(*toy(ours=doubled(2.5)), "--format", "json")
    assert result.returncode == 1
    assert "is wrong" in result.stderr
    cells = contenders(json.loads(result.stdout))
    assert all(item["speedup"] is None for item in cells.values())
    assert cells["torch"]["time_us"]


def test_against_chooses_rivals(bench: Any) -> None:
    shapes = "--shapes", "tiny"
    assert [*contenders(json.loads(bench("--kernel", "colwise", *shapes, "--format", "json").stdout))] == [
        *("fp8tune", "torch.compile", "torchao")
    ]
    named = bench("--op", "moe-mlp", *shapes, "--against", "torch.compile", "--format", "json")
    assert {*contenders(json.loads(named.stdout))} >= {"fp8tune", "torch", "torch.compile"}
    alone = bench("--op", "grouped-mm", *shapes, "--against", "none", "--format", "json")
    assert all(name.startswith("fp8tune") for name in contenders(json.loads(alone.stdout)))
    unknown = bench("--kernel", "colwise", "--against", "torchoa")
    assert unknown.returncode == 2
    assert "torchao" in unknown.stderr


def test_shapes_set_sizes_routing_and_groups(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("16 32\n0 16\n")
    document = json.loads(
        bench("--op", "grouped-mm", "--shapes", "grouped-mm,K=5120,groups=rows.txt", "--format", "json").stdout
    )
    (size,) = document["subjects"][0]["sizes"]
    assert (size["size"], size["routing"]) == ({"M": 64, "N": 8192, "K": 5120, "G": 4}, "listed")
    text = bench("--op", "grouped-mm", "--shapes", "grouped-mm,N=8192,M=16640,routing=zipf").stdout
    assert "routing=zipf" in text
    for groups, message in (("lost.txt", "cannot be read"), ("toy.txt", "'x' is not a number")):
        (tmp_path / "toy.txt").write_text("x")
        result = bench("--op", "grouped-mm", "--shapes", f"grouped-mm,groups={groups}")
        assert (result.returncode, message in result.stderr) == (2, True)


def test_mxfp8_is_emulated_where_the_hardware_lacks_it(bench: Any) -> None:
    document = json.loads(bench("--op", "mxfp8-grouped-mm", "--shapes", "tiny", "--format", "json").stdout)
    assert document["subjects"][0]["is_emulated"]
    title = bench("--op", "mxfp8-grouped-mm", "--shapes", "tiny").stdout.partition("geometric")[0]
    assert "emulated here" in title


def test_without_a_gpu_one_line_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FP8TUNE_TIMER", raising=False)
    result = fp8tune("bench", "--op", "moe-layer", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == ("fp8tune: bench needs a GPU: set FP8TUNE_TIMER=simulated:1 to try it on a simulated one\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "moe-layers"), "moe-layer"),
        (("--op", "moe-layer", "--shapes", "rows"), "top_k"),
        (("--op", "moe-layer", "--kernel", "colwise"), "leave out one"),
        (("--kernel", "colwse"), "colwise"),
    ],
)
def test_what_cannot_be_timed_is_one_line(bench: Any, arguments: tuple[str, ...], message: str) -> None:
    result = bench(*arguments)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert message in result.stderr


def test_each_operation_has_a_shape_set_of_its_own() -> None:
    backend, _ = backends.backend_for(None, "simulated:1")
    for name in registry.registered(registry.OPERATIONS):
        (subject,) = run.planned(BenchOptions(op=name), backend)
        assert subject.sizes
