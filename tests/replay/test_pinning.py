"""A pinned kernel launches what its table says, on every rank, and times nothing."""

from __future__ import annotations

import logging
import math
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import KernelInterface

from fp8tune_kernels.pinning import PinError, pin, unpin


class Launched(KernelInterface):
    """Stand-in for a ``triton.jit`` function; launches nothing."""

    arg_names = ("x", "n", "mode", "BLOCK")

    def __init__(self) -> None:
        def kernel(x: Any, n: int, mode: str, BLOCK: int) -> None: ...

        self.fn = kernel
        self.seen: list[dict[str, Any]] = []

    def run(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append(kwargs)


class Bf16:
    dtype = "torch.bfloat16"


CONFIGS = [triton.Config({"BLOCK": block}, num_warps=4) for block in (64, 128, 256)]
CONFIGS += [triton.Config({"BLOCK": 128}, num_warps=8)]


def tuner(times: Callable[[int], float] | None = None, configs: Any = CONFIGS, **options: Any) -> Autotuner:
    """Return a tuner whose benchmark gives these times for a BLOCK; without them it may not run."""
    launched = Launched()

    def do_bench(call: Callable[[], None], quantiles: object) -> list[float]:
        assert times is not None, "benchmarked"
        call()
        return [times(launched.seen.pop()["BLOCK"])] * 3

    return Autotuner(launched, launched.arg_names, configs, ["n", "mode"], None, None, do_bench=do_bench, **options)


def block(kernel: Any, n: Any = 4096, mode: Any = "fast") -> int:
    """Launch and return the BLOCK."""
    kernel[(1,)](Bf16(), n, mode=mode)
    launched = kernel
    while not isinstance(launched, Launched):
        launched = launched.fn
    seen: int = launched.seen[-1]["BLOCK"]
    return seen


def key(n: Any, mode: Any = "fast") -> tuple[Any, ...]:
    return (n, mode, "torch.bfloat16")


TABLE: Mapping[tuple[Any, ...], Any] = {
    key(4096): {"kwargs": {"BLOCK": 128}, "num_warps": 8},
    key(64): {"kwargs": {"BLOCK": 64}, "num_warps": 4},
    key(64, "slow"): {"kwargs": {"BLOCK": 256}},
}
UNKNOWN, OTHER = r"the key \(65, 'slow', 'torch.bfloat16'\): run fp8tune tune --kernel \S+ -- ", "nor one with the same"


@pytest.mark.parametrize(
    ("unknown", "blocks"),
    [
        ("strict", {(4096, "fast"): 128, (64, "slow"): 256, (65, "slow"): UNKNOWN}),
        ("tune", {(4096, "fast"): 128, (65, "fast"): 64}),  # of unknown keys Triton's timing decides
        ("nearest", {**{(n, "fast"): 64 for n in (1, 500)}, **{(n, "fast"): 128 for n in (600, 4096, 10**6)}}),
        # sizes are compared by their ratio, texts and flags are left alone
        ("nearest", {(10**6, "slow"): 256, (4096, "other"): OTHER, ("4096", "fast"): OTHER, (False, "fast"): OTHER}),
        ("nearest", {(math.nan, "fast"): OTHER}),
        ("off", {(4096, "fast"): 64}),
    ],
)
def test_keys_of_the_table_are_launched_and_others_as_asked(
    unknown: str, blocks: dict[Any, int | str], caplog: pytest.LogCaptureFixture
) -> None:
    kernel = tuner(lambda block: block)
    pin(TABLE, kernel, unknown=unknown)
    for (n, mode), expected in blocks.items():
        if isinstance(expected, int):
            assert block(kernel, n, mode) == expected
            continue
        with pytest.raises(PinError, match=expected):
            block(kernel, n, mode)
    assert caplog.text.count("has no config for the key") <= 1


def test_ranks_whose_timings_differ_launch_the_same_once_pinned():
    ranks = [tuner(lambda block: block), tuner(lambda block: -block)]
    assert [block(rank) for rank in ranks] == [64, 256]
    for rank in ranks:
        pin(TABLE, rank)
    assert [(block(rank), rank.best_config.num_warps) for rank in ranks] == [(128, 8)] * 2
    for rank in (*ranks, *ranks):
        unpin(rank)
    assert [block(rank) for rank in ranks] == [64, 256]


def test_nearest_launches_nothing_that_the_kernels_pruning_refuses():
    def fits(configs: list[Any], named: dict[str, Any], mode: str, **_: Any) -> list[Any]:
        return [config for config in configs if config.kwargs["BLOCK"] <= named["n"] and mode == "fast"]

    kernel = tuner(prune_configs_by={"early_config_prune": fits})
    pin(TABLE, kernel, unknown="nearest")
    assert [block(kernel, n) for n in (1000, 100, 4096)] == [128, 64, 128]
    with pytest.raises(PinError, match="nor one"):
        block(kernel, 3)
    unpin(kernel)
    assert "run" not in vars(kernel)


NUMBERS = st.integers(0, 2**40) | st.floats(-1e9, 1e9)


@given(
    st.dictionaries(st.tuples(NUMBERS, st.sampled_from(["a", "b"])), st.sampled_from([64, 128]), min_size=1), st.data()
)
def test_every_rank_finds_the_same_nearest_key_in_whatever_order_it_read_them(rows, data):
    table = {key(*item): {"kwargs": {"BLOCK": size}} for item, size in rows.items()}
    shuffled = dict(data.draw(st.permutations(list(table.items()))))
    expected = (data.draw(NUMBERS), next(iter(rows))[1])
    results = []
    for rank_table in (table, shuffled):
        kernel = tuner()
        pin(rank_table, kernel, unknown="nearest")
        results.append(block(kernel, *expected))
    assert results[0] == results[1]
    if expected in rows:
        assert results[0] == rows[expected]


def test_heuristics_around_the_autotuner_and_dtypes_in_key_and_config():
    inner = tuner(configs=[*CONFIGS])
    kernel = triton.heuristics({"mode": lambda named: tl.float32})(inner)
    kernel.arg_names = inner.arg_names
    inner.configs.append(triton.Config({"BLOCK": tl.float32}))
    pin({key(8, "fp32"): {"kwargs": {"BLOCK": {"dtype": "tl.float32"}}}}, kernel, unknown="strict")
    assert block(kernel, 8) == tl.float32


def test_the_variable_overrides_what_the_program_asks_for(monkeypatch, caplog):
    kernel = tuner(lambda block: block)
    for variable, unknown, size in (("strict", "off", 128), ("off", "strict", 64)):
        monkeypatch.setenv("FP8TUNE_PIN", variable)
        pin(TABLE, kernel, unknown=unknown)
        assert block(kernel) == size
    assert "is not pinned to a dict: off" in caplog.text


VENDORED = """
KERNEL = "test_pinning:Launched.__init__.<locals>.kernel"
TABLE = {"NVIDIA H200": {(4096, "fast", "torch.bfloat16"): {"kwargs": {"BLOCK": 256}, "num_warps": 4}}}
"""


@pytest.fixture
def on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")


@pytest.mark.usefixtures("on_an_h200")
def test_kernels_find_their_tables_in_a_folder_or_a_file(tmp_path, monkeypatch, caplog):
    """Two kernels around one function, named by attributes of this module, with a table for each of two devices."""
    small, large = tuners = [tuner(lambda block: block), tuner(lambda block: block)]
    monkeypatch.setattr(sys.modules[__name__], "small", small, raising=False)
    monkeypatch.setattr(sys.modules[__name__], "large", triton.heuristics({})(large), raising=False)
    for name, size in (("small", "64"), ("large", "256")):
        text = VENDORED.replace("Launched.__init__.<locals>.kernel", name).replace("256", size)
        (tmp_path / f"{name}.py").write_text(text)
        (tmp_path / f"{name}_a100.py").write_text(text.replace("H200", "A100").replace(size, "128"))
    (tmp_path / "__init__.py").write_text("raise AssertionError('no table')")
    moved = tuner()
    moved.fn.fn.__name__ = "small"
    for table, kernels, blocks in (
        (tmp_path, [None], [64, 256]),
        (tmp_path, tuners, [64, 256]),
        (tmp_path / "large.py", [None], [64, 256]),
        (str(tmp_path / "small.py"), [moved], [64, 64]),
    ):
        for kernel in kernels:
            pin(table, kernel)
        assert [block(kernel) for kernel in (*tuners, *tuners)] == [*blocks, *blocks]
        if kernels == [moved]:
            assert block(moved) == 64
        unpin()
        assert [block(kernel) for kernel in tuners] == [64, 64]
    pin(tmp_path / "large.py")
    block(large)
    record = caplog.records[-1]
    assert (record.name, record.levelno) == ("fp8tune", logging.WARNING)
    assert "large.py: 1 key for NVIDIA H200; unknown keys: nearest" in record.message
    unpin()
    (tmp_path / "gone.py").write_text(VENDORED.replace("test_pinning:", "no_such_module:"))
    for table in ("gone.py", ""):
        with pytest.raises(PinError, match="which cannot be imported"):
            pin(tmp_path / table)
    assert [block(kernel) for kernel in tuners] == [64, 64]  # of several kernels none is pinned


def test_a_device_that_the_table_lacks_is_said_and_the_interpreter_takes_any(tmp_path, caplog, monkeypatch):
    (tmp_path / "table.py").write_text(VENDORED)
    for device, size in (("NVIDIA A100", 64), ("Triton interpreter", 256)):
        monkeypatch.setattr("fp8tune_kernels.pinning.installed._device_name", lambda device=device: device)
        kernel = tuner(lambda block: block)
        pin(tmp_path / "table.py", kernel, unknown="tune")
        assert block(kernel) == size
    assert "0 keys for NVIDIA A100 (it has NVIDIA H200)" in caplog.text


REFUSED = "no table that can be read: "


@pytest.mark.parametrize(
    ("table", "kernel", "why"),
    [
        ("1 +", tuner(), f"{REFUSED}ValueError: SyntaxError"),
        ("raise SystemExit(3)", tuner(), f"{REFUSED}ValueError: it has no KERNEL or no TABLE"),
        ("KERNEL = 'm:k'", tuner(), f"{REFUSED}ValueError: it has no KERNEL or no TABLE"),
        (VENDORED.replace("BLOCK", "TILE"), tuner(), "is of another kernel: .* has no argument 'TILE'"),
        (VENDORED.replace("num_warps", "warps"), tuner(), "a row that cannot be used: 'warps' is no option"),
        (VENDORED.replace('{"kwargs": {"BLOCK": 256}, "num_warps": 4}', "7"), tuner(), "a row that cannot be used"),
        (VENDORED.replace("{(4096", "{4096: 1, (4096"), tuner(), "a row that cannot be used"),
        (VENDORED.replace("256", '{"dtype": "os.system"}'), tuner(), "a row that cannot be used"),
        (TABLE, {}, "dict is no Triton kernel"),
        (TABLE, None, "a dict names no kernel: pass the kernel"),
        (tuner(), TABLE, "is no table: give a file"),
        (TABLE, Launched(), "has no autotuner: pin a file"),
        (None, tuner(), f"table.py is {REFUSED}FileNotFoundError"),
    ],
)
def test_what_is_no_table_or_no_kernel_is_refused_in_one_line(tmp_path, table, kernel, why):
    if isinstance(table, str):
        (tmp_path / "table.py").write_text(table)
    with pytest.raises(PinError, match=why) as error:
        pin(tmp_path / "table.py" if table is None or isinstance(table, str) else table, kernel)
    assert "\n" not in str(error.value)


def test_a_declared_config_keeps_its_pre_hook_and_another_gets_the_one_that_all_have():
    called: list[int] = []

    def hook(named: dict[str, Any]) -> None:
        called.append(named["BLOCK"])

    kernel = tuner(configs=[triton.Config({"BLOCK": 64}, pre_hook=hook), triton.Config({"BLOCK": 128}, pre_hook=hook)])
    pin(TABLE, kernel, unknown="strict", stale="use")
    block(kernel)
    block(kernel, 64, "slow")
    assert called == [128, 256]
    mixed = [*CONFIGS, triton.Config({"BLOCK": 128}, num_warps=2, pre_hook=hook)]
    with pytest.raises(PinError, match="does not declare, and its pre_hooks differ"):
        pin({key(1): {"kwargs": {"BLOCK": 512}}}, tuner(configs=mixed), stale="use")


def test_threads_that_launch_first_together_agree(caplog):
    kernel = tuner()
    pin(TABLE, kernel, unknown="nearest")
    results: list[bool] = []
    expected = [key(n) for n in range(1, 200)]
    threads = [
        threading.Thread(target=lambda: results.extend(item in kernel.cache for item in expected)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 8 * 199
    assert (caplog.text.count("is pinned to"), len(kernel.cache)) == (1, 199)


TRAINING = """
import sys
from fp8tune_kernels import pin
HEAVY = {"typer", "click", "sqlalchemy", "pandas", "pydantic", "rich", "fp8tune"}
assert not {"torch", "triton", "numpy", *HEAVY} & set(sys.modules), "importing pin"
import torch, triton, triton.language as tl

@triton.autotune([triton.Config({"B": b}) for b in (8, 16)], key=["n"])
@triton.jit
def kernel(x, n, B: tl.constexpr):
    tl.store(x + tl.arange(0, B), B, mask=tl.arange(0, B) < n)

pin({(4, "torch.int32"): {"kwargs": {"B": 16}}}, kernel, unknown="strict")
x = torch.zeros(4, dtype=torch.int32)
kernel[(1,)](x, 4)
assert not HEAVY & set(sys.modules), "launching"
print(x.tolist())
"""


def test_a_training_job_needs_the_package_of_kernels_alone(tmp_path):
    """In a process that can import fp8tune, and imports neither it nor what it depends on."""
    (tmp_path / "train.py").write_text(TRAINING)
    variables = {**os.environ, "PYTHONPATH": f"{ROOT / 'kernels'}:{ROOT}", "TRITON_INTERPRET": "1"}
    ended = subprocess.run([sys.executable, tmp_path / "train.py"], capture_output=True, text=True, env=variables)
    assert ended.stdout == "[16, 16, 16, 16]\n", ended.stderr


def test_the_example_launches_what_its_table_says():
    assert runpy.run_path(str(ROOT / "docs" / "examples" / "pin_autotuned.py"))["main"]() == [1024, 1024, 2048]


def test_a_later_pin_of_a_bare_kernel_takes_the_place_of_the_first(tmp_path):
    bare = Launched()
    for warps in (8, 2):
        text = VENDORED.replace('"num_warps": 4', f'"num_warps": {warps}').replace("NVIDIA H200", "")
        (tmp_path / "table.py").write_text(text + 'KEY = ("n", "mode")\n')
        pin(tmp_path / "table.py", bare)
    bare[(1,)](x=torch.empty(1, dtype=torch.bfloat16), n=4096, mode="fast", BLOCK=64)
    assert [(kwargs["BLOCK"], kwargs["num_warps"]) for kwargs in bare.seen] == [(64, 2)]
    unpin(bare)
    assert "run" not in vars(bare)
