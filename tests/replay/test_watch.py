"""Launches are told apart by what Triton tells them apart by, grids are asked once for each config."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fp8tune.errors import UsageError
from fp8tune.replay.naming import attribute_of
from fp8tune.replay.values import Unrecordable, decoded, encoded
from fp8tune.replay.watch import patches, times
from fp8tune.replay.watch.describing import described, grid_of, with_values
from fp8tune.replay.watch.kernel import CALM, MANY_VALUES, STRIDES, WatchedKernel, signature_of
from fp8tune.replay.watch.process import Process


def signature(*args: Any, ignored: Collection[str] = (), **kwargs: Any) -> Hashable:
    return signature_of(["x", "y", "n"], args, {"grid": (1,), "warmup": False, **kwargs}, ignored)


def test_signatures_differ_where_a_launch_does() -> None:
    x, y = torch.zeros(8, 8), torch.zeros(8, 8)
    same = signature(x, y, 3)
    others = [
        *(signature(x, y, 4), signature(x.t(), y, 3), signature(x.bfloat16(), y, 3), signature(x, x, 3)),
        *(signature(x.view(-1)[1:], y, 3), signature(x, y[:4], 3), signature(x, None, 3), signature(x, n=y, y=3)),
        *(signature((x, 1), y, 3), signature((x.t(), 1), y, 3), signature((x, 2), y, 3)),
    ]
    assert len({same, *others}) == 1 + len(others)
    assert signature(x, y, 3) == signature(x, y=y, n=3) == signature(x.clone(), y.clone(), 3) == same
    assert signature(x, n=1, ignored={"n"}) == signature(x, n=2, ignored={"n"})  # a seed


def test_a_grid_is_asked_for_configs_and_powers_of_two_around_them() -> None:
    def grid(meta: Any) -> tuple[int, int]:
        if meta["BLOCK"] > 512:
            raise ValueError
        return -(-meta["n"] // meta["BLOCK"]), meta.get("SPLITS", 1) * meta["IS_EVEN"]

    configs = [{"BLOCK": block, "SPLITS": 3, "UNUSED": 1} for block in (64, 256)]
    result = grid_of(grid, {"n": 1000}, configs, {"IS_EVEN": lambda meta: meta["n"] % 2 == 0})
    assert result.axes == ("BLOCK", "SPLITS")
    expected = {(64, 3): (16, 3), (8, 8): (125, 8), (1024, 3): None}
    assert {key: result.programs(dict(zip(result.axes, key, strict=True))) for key in expected} == expected
    assert grid_of((4, 2), {}, configs, {}).programs({"BLOCK": 64}) == (4, 2)
    with pytest.raises(ZeroDivisionError):  # for every config
        grid_of(lambda meta: (1 // 0,), {}, [{"BLOCK": 64}], {})


def test_views_of_one_buffer_share_storage() -> None:
    packed = torch.arange(24, dtype=torch.float32)
    result = described({"out": torch.zeros(3), "k": packed[8:16], "q": packed[4:8]})
    places = [(item.storage, item.offset, item.alignment) for item in result.values()]
    assert places == [(0, 0, 16), (1, 4, 16), (1, 0, 16)]


def test_values_are_statistics_and_integers_are_stored_whole() -> None:
    tensors = {
        "ends": torch.tensor([2, 2, 9], dtype=torch.int32),
        "large": torch.arange(20_000, dtype=torch.int64).flip(0),
        "flags": torch.tensor([True, False]),
        "x": torch.tensor([1.0, 3.0, math.nan, 0.0]),
        "codes": torch.ones(4).to(torch.float8_e4m3fn),
        "empty": torch.empty(0),
        "least": torch.full((4,), -math.inf),
        "unset": torch.full((4,), math.nan),
        "mixed": torch.tensor([math.inf, -math.inf]),
    }
    result = with_values(described(tensors), tensors)
    ends, large, x = result["ends"], result["large"], result["x"]
    assert (ends.values, ends.is_sorted, ends.most) == ((2, 2, 9), True, 9.0)
    assert (large.values, large.least, large.most, large.is_sorted) == (None, 0.0, 19_999.0, False)
    assert large.integers == tuple(range(19_999, -1, -1))
    assert len(large.packed) < 20_000 * 8
    assert with_values(described(tensors), tensors, stores=False)["large"].integers is None
    assert result["flags"].values == (1, 0)
    assert (x.least, x.most, x.zeros, x.not_finite, x.mean) == (0.0, 3.0, 0.25, 0.25, pytest.approx(4 / 3))
    assert (result["codes"].mean, result["empty"].least) == (1.0, None)
    constants = {name: result[name].constant for name in ("x", "codes", "least", "unset", "mixed")}
    expected = {"codes": 1.0, "least": {"float": "-inf"}, "unset": {"float": "nan"}}
    assert constants == {"x": None, "mixed": None, **expected}


def test_a_tensor_descriptor_is_its_tensor_and_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    base = torch.arange(128, dtype=torch.float32).view(8, 16)
    blocks = TensorDescriptor.from_tensor(base, [4, 16])
    assert signature(blocks) == signature(TensorDescriptor.from_tensor(base.clone(), [4, 16]))
    assert signature(blocks) != signature(TensorDescriptor.from_tensor(base, [8, 16]))
    (result,) = with_values(described({"x": blocks}), {"x": blocks}).values()
    assert (result.shape, result.strides, result.descriptor, result.most) == ((8, 16), (16, 1), (4, 16), 127.0)
    with pytest.raises(Unrecordable, match="with options"):
        described({"x": TensorDescriptor.from_tensor(base, [4, 16], padding="nan")})
    monkeypatch.delattr(TensorDescriptor, "round_f32_to_tf32", raising=False)  # Triton 3.6 has none
    vars(blocks).pop("round_f32_to_tf32", None)
    assert described({"x": blocks})["x"].descriptor == (4, 16)


def test_values_that_json_lacks_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, text in (
        (-math.inf, {"float": "-inf"}),
        ((1, (None, torch.float16)), {"tuple": (1, {"tuple": (None, {"dtype": "torch.float16"})})}),
        (tl.float32, {"dtype": "tl.float32"}),
        (attribute_of, {"function": "fp8tune.replay.naming:attribute_of"}),
    ):
        if value is not attribute_of:
            assert encoded(value, "") == text
        assert decoded(text) == value
    with pytest.raises(Unrecordable, match=r"argument x is of type list"):
        encoded([1], "argument x")
    (tmp_path / "dtype_canary.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)  # launches come out of databases too: dtypes import no other module
    with pytest.raises(UsageError, match="none of torch"):
        decoded({"dtype": "dtype_canary.float32"})


def test_a_search_for_a_kernels_name_runs_no_code_of_what_modules_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    class Touchy:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(f"{name} is deprecated")

    @triton.jit
    def nowhere(x: Any) -> None:
        pass

    monkeypatch.setattr(sys.modules[__name__], "TOUCHY", Touchy(), raising=False)
    assert attribute_of(nowhere) is None
    monkeypatch.setattr(sys.modules[__name__], "LISTED", [None, nowhere], raising=False)
    assert attribute_of(nowhere) == f"{__name__}:LISTED[1]"


def kernel(x: Any, n: Any, BLOCK: tl.constexpr) -> None:
    """Stand for a kernel; never launched."""


def watched(folder: Path, inner: Callable[[int], object] = str) -> tuple[WatchedKernel, Callable[[Any], None]]:
    """Return a kernel and a function that launches it, which calls ``inner``."""
    tuner, process = triton.autotune([triton.Config({"BLOCK": 64})], key=[])(triton.jit(kernel)), Process(folder)
    process.watched[id(tuner)] = result = WatchedKernel(tuner)
    run, x = patches.recorded_run(lambda self, x, n, **kwargs: inner(n), process), torch.zeros(64)
    return result, lambda n: run(tuner, x, n, grid=(1,), warmup=False)


def test_a_kernel_that_repeats_itself_is_looked_at_less_often_and_counted_all_the_same(tmp_path: Path) -> None:
    result, launch = watched(tmp_path)
    for number in range(6 * CALM):
        launch(2 + number % 3)
    counts = [entry.count for entry in result.entries.values()]
    assert counts == pytest.approx([2 * CALM] * 3, rel=0.05)
    assert result.calm < 2 * CALM
    for _ in range(max(STRIDES) + 1):
        launch(7)
    assert len(result.entries) == 4, "a new launch that comes again is found"
    assert result.weight == 1, "and the kernel is watched closely again"


def test_a_launch_that_was_first_captured_in_a_graph_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, launch = watched(tmp_path)
    for is_capturing, least in ((True, None), (True, None), (False, 0.0), (True, 0.0)):
        monkeypatch.setattr(times, "is_capturing", lambda is_capturing=is_capturing: is_capturing)
        launch(7)
        (entry,) = result.entries.values()
        assert entry.launch is not None
        assert (entry.launch.tensors[0].least, entry.launch.in_graph) == (least, least is None)
    assert entry.count == 4


def test_what_a_launch_launches_is_not_recorded_and_failing_launches_are_not_counted(tmp_path: Path) -> None:
    result, launch = watched(tmp_path, inner=lambda n: n < 3 and launch(n + 1))
    launch(1)
    assert [entry.count for entry in result.entries.values()] == [1]
    failing, launch_failing = watched(tmp_path, inner=lambda n: 1 // n)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            launch_failing(0)
    launch_failing(1)
    assert [(kernel.count, kernel.scalars["n"]) for kernel in failing.document({}).launches] == [(1, 1)]


def test_a_number_that_always_differs_tells_no_launches_apart(tmp_path: Path) -> None:
    result, launch = watched(tmp_path)
    for seed in range(10 * MANY_VALUES):
        launch(seed)
    assert MANY_VALUES <= len(result.entries) <= MANY_VALUES + 1
    assert sum(entry.count for entry in result.entries.values()) == 10 * MANY_VALUES
    launch(object())  # what no recording can hold is launched and counted all the same
    skipped = result.document({}).skipped
    assert list(skipped.values()) == [1]
