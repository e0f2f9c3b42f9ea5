"""The layers that `fp8tune bench --op` times: of shape sets, on a seeded routing or on given group sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8tune.bench.layers import GIVEN, Layer, group_sizes, layers_of
from fp8tune.bench.operation_fp8 import FP8_GROUPED_MM
from fp8tune.bench.options import BenchOptions, OperationName
from fp8tune.errors import UsageError
from fp8tune.plan import shapes
from fp8tune.records import NamedInts
from fp8tune_kernels.groups import group_ends

OP = OperationName.GROUPED_MM


def layers(*names: str, **options: object) -> tuple[Layer, ...]:
    given = BenchOptions(op=OP, shapes=names, **options)  # type: ignore[arg-type]
    return layers_of(given, FP8_GROUPED_MM)


def test_rows_of_sets_with_their_names() -> None:
    found = layers("models", "bench-models", seed=3)  # gpt-oss is in both
    kimi = next(layer for layer in found if layer.label == "Kimi-K2 down")
    assert kimi.shape == NamedInts(M=32768, N=7168, K=2048, G=48)
    assert (kimi.routing, kimi.seed, kimi.sizes) == ("jagged", 3, ())
    assert kimi.ends == group_ends("jagged", 32768, 48, 3)
    assert sum(kimi.group_sizes) == 32768
    assert len(found) == len(shapes.load("models").rows) + len(shapes.load("bench-models").rows) - 1
    assert [layer.label for layer in layers("bench-models", "models") if layer.shape["K"] == layer.shape["N"]] == [
        "gpt-oss-120b down"
    ] * 2
    assert found[-1].label == ""


@pytest.mark.parametrize("text", ["3\n0\n5\n", "[3, 0, 5]", "3 0 5", "3,0,\n5\n"])
def test_given_sizes_are_of_any_layer_with_as_many_experts(text: str, tmp_path: Path) -> None:
    mine, sizes = tmp_path / "mine.toml", tmp_path / "sizes.txt"
    mine.write_text('[[rows]]\nname = "mine"\nM = [64, 128]\nK = 32\nN = 48\nE = 3\n[[rows]]\nM=8\nK=16\nN=16\nE=2\n')
    sizes.write_text(text)
    (layer,) = layers(str(mine), groups=str(sizes))
    assert (layer.shape, layer.label) == (NamedInts(M=8, N=48, K=32, G=3), "mine")
    assert (layer.routing, layer.sizes, layer.ends, layer.group_sizes) == (GIVEN, (3, 0, 5), [3, 3, 8], [3, 0, 5])
    assert "sizes=(3, 0, 5)" in repr(layer)  # tells it from others on a clock that draws its times


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("3\n4.5", "'4.5' is no row count: give a whole number a line"),
        ("3\n-1", "'-1' is no row count"),
        ("0 0", "add up to 0 rows"),
        ("", "add up to 0 rows"),
        ("4000000000", "add up to 4000000000 rows: give 1 to 2147483647"),
        ("\ufeff3", "is no row count"),
    ],
)
def test_a_file_of_other_text_is_a_one_line_error(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "sizes.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=says) as refused:
        group_sizes(path)
    assert len(str(refused.value).splitlines()) == 1


def test_files_that_nobody_can_use(tmp_path: Path) -> None:
    path = tmp_path / "sizes.txt"
    path.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="are no text"):
        group_sizes(path)
    with pytest.raises(UsageError, match="cannot read group sizes"):
        group_sizes(tmp_path)
    path.write_text("1 2 3 4 5")
    with pytest.raises(UsageError, match="has 5 groups, and no row of 8 or 48 or 64 or 128 experts fits"):
        layers("bench-models", groups=str(path))
