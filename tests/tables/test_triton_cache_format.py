"""Triton's autotuner launches what was written for it, without a benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import format_picks as made
import pytest
import torch
import triton
import triton.language as tl
from any_text import any_text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from fp8tune.errors import UsageError
from fp8tune.records import Device
from fp8tune.replay.recording import Config, Kernel
from fp8tune.tables.files import write as write_files
from fp8tune.tables.formats import Options
from fp8tune.tables.formats.triton_cache import write
from fp8tune.tables.picks import KernelPicks

CONFIGS = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (64, 128) for warps in (4, 8)]


@triton.autotune(CONFIGS, key=["n", "flag", "mode", "scale"])
@JITFunction  # whether or not this session interprets kernels
def scaled(x, out, n, flag, mode, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


pruned = triton.autotune(CONFIGS, key=["n"], prune_configs_by={"early_config_prune": print})(scaled.fn)
hooked = triton.autotune([triton.Config({"BLOCK": 64}, pre_hook=print), *CONFIGS], key=["n"])(scaled.fn)
lone = triton.autotune(CONFIGS[:1], key=["n"])(scaled.fn)
BY_WIDTH = {2: scaled}

RECORDED = tuple(Config({"BLOCK": config.kwargs["BLOCK"]}, config.num_warps, config.num_stages) for config in CONFIGS)
ROW, TYPED = (7, True, "fast", 1.5), ({"dtype": "tl.float32"}, True, "", None)


def picks(*keys: tuple[object, ...], kernel: str = "scaled", times_us=(12.5, 30.0, 9.0, 11.0)) -> KernelPicks:
    recorded = Kernel(f"{__name__}:{kernel}", key=("n",), configs=RECORDED)
    dtypes = ("torch.bfloat16", "torch.bfloat16")
    chosen = [made.pick({"n": 96}, times_us, recorded, key=(*key, *dtypes)) for key in keys]
    return made.kernel_picks(*chosen, kernel=recorded, device=replace(made.H200, triton=triton.__version__))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Launches on an H200 without a benchmark, by Triton's autotuner with its cache on."""
    seen: list[dict[str, Any]] = []

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("benchmarked")

    monkeypatch.setattr(JITFunction, "run", lambda _, *args, **kwargs: seen.append(kwargs))
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32)))
    monkeypatch.setattr(scaled, "_bench", refuse)
    monkeypatch.setattr(scaled, "cache_results", True)
    scaled.cache.clear()
    with knobs.cache.scope():
        yield seen


def launch(folder: Path, *arguments: object) -> None:
    knobs.cache.dir = str(folder / "NVIDIA_H200")
    x = torch.zeros(96, dtype=torch.bfloat16)
    scaled[(1,)](x, x.clone(), *arguments)


numbers = st.floats(allow_nan=False, allow_infinity=False)
keys = st.tuples(st.integers(-(2**40), 2**40), st.booleans() | st.none(), any_text(max_size=9), numbers)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=keys)
def test_triton_launches_the_pick_of_any_key_and_times_nothing(key, launches, tmp_path) -> None:
    write_files(write([picks(key)], Options()), tmp_path)
    launch(tmp_path, *key)
    assert (launches[-1]["BLOCK"], launches[-1]["num_warps"]) == (128, 4)
    with pytest.raises(AssertionError, match="benchmarked"):
        launch(tmp_path, key[0] + 1, *key[1:])


def test_launches_with_one_key_get_the_config_whose_largest_slowdown_is_least(launches, tmp_path) -> None:
    first, second = picks(ROW), picks(ROW, times_us=(10.0, 40.0, 11.0, 14.0))
    write_files(write([replace(first, picks=(*first.picks, *second.picks))], Options()), tmp_path)
    launch(tmp_path, *ROW)
    assert (launches[-1]["BLOCK"], launches[-1]["num_warps"]) == (128, 4)


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (picks(ROW, kernel="hooked"), "has a pre_hook"),
        (picks(ROW, kernel="pruned"), "prunes its configs"),
        (picks(ROW, kernel="lone"), "has a single config"),
        (picks(ROW, kernel="CONFIGS"), "no triton.autotune any more"),
        (picks(ROW, kernel="missing"), "cannot import .*:missing: AttributeError"),
        (picks(TYPED), "can be written"),
        (replace(picks(ROW), device=replace(made.H200, triton="3.5.1")), "measured under triton 3.5.1"),
        (replace(picks(ROW), device=Device("interpreter")), "on interpreter has no triton.autotune or no GPU"),
        (replace(picks(ROW), recorded=None), "no GPU: export it --for python"),
    ],
)
def test_a_kernel_that_triton_would_not_read_files_for_is_refused(kernel: KernelPicks, reason: str) -> None:
    with pytest.raises(UsageError, match=rf"{reason}[^\n]*\Z"):
        write([kernel], Options())
    assert not isinstance(driver._active, SimpleNamespace)  # the stand-in is gone


def test_a_launch_that_is_left_out_is_named(tmp_path) -> None:
    notices: list[str] = []
    (file,) = write([picks(ROW, TYPED, kernel="BY_WIDTH[2]")], Options(notice=notices.append))
    assert file.path.name == "scaled.autotune.json"
    (notice,) = notices
    assert "n=96 cannot be written: Triton does not cache the key" in notice
