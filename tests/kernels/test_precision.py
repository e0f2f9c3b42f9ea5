"""The rule of ``precision="auto"``: where FP8 begins to pay, and that nothing but shapes decides."""

from __future__ import annotations

import csv
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT
from torch._dynamo.testing import CompileCounterWithBackend

from fp8tune_kernels import moe_layer
from fp8tune_kernels.gemm import precision
from fp8tune_kernels.gemm.precision import LAYER, PRODUCT, Costs, Rule, is_fp8_layer, is_fp8_product, least_fp8_rows
from fp8tune_kernels.runtime.lookup import compiling_for

E, K, N, TOP_K = 4, 64, 32, 2

NEVER = 2**62

FROM_20_ROWS = Rule(Costs(1e3, 0, 0), Costs(1.0, 0, -5.0 * 1e-3), 0.0)
"""Saves a microsecond per 10**9 products of a row, and costs five per 10**9 weights: 5 rows per expert."""

SIZES = st.tuples(st.integers(1, 512), st.integers(1, 1024), st.integers(1, 256)).map(
    lambda sizes: (16 * sizes[0], 16 * sizes[1], sizes[2])
)


@pytest.mark.parametrize("rule", [LAYER["sm_90"], PRODUCT["sm_90"]], ids=["layer", "product"])
@given(sizes=SIZES)
def test_fp8_pays_from_the_least_rows_on(rule: Rule, sizes: tuple[int, int, int]) -> None:
    least = least_fp8_rows(rule, *sizes)

    def pays(rows: int) -> bool:
        return rule.saved.us(rows, *sizes) > 0 and rule.bf16.us(rows, *sizes) > rule.launch_us

    assert least > 0
    if least == NEVER:
        assert not pays(2**40)
    else:
        assert pays(least + 1)
        assert not pays(least - 1)


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "gfx942", "interpreter"])
def test_an_arch_without_measurements_takes_bf16(arch: str) -> None:
    meta = torch.device("meta")
    with compiling_for(arch):
        assert not is_fp8_layer(2**20, 4096, 4096, 8, 8, meta)
        assert not is_fp8_product(2**20, 4096, 4096, 8, meta)
    with compiling_for("sm_90"):
        assert is_fp8_layer(2**20, 4096, 4096, 8, 8, meta)
        assert is_fp8_product(2**20, 4096, 4096, 8, meta)


LAYERS = {
    "OLMoE": (2048, 1024, 64, 8),
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "DeepSeek-MoE-16B": (2048, 1408, 64, 6),
    "Qwen3-Next-80B-A3B": (2048, 512, 512, 10),
}
"""Hidden size, size of an expert, experts and experts a token of each layer in the file below."""


def test_an_h200_with_gluon_kernels_takes_the_precision_that_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(precision, "is_requested", lambda _: True)
    with (ROOT / "docs" / "results" / "data" / "moe-layer-gluon-h200.csv").open() as file:
        times = {
            (row["layer"], int(row["tokens"]), row["contender"]): float(row["median_us"])
            for row in csv.DictReader(file)
        }
    cases = {(layer, tokens) for layer, tokens, _ in times}
    assert len(cases) == 8
    for layer, tokens in cases:
        is_faster = times[layer, tokens, "each step, Gluon"] < times[layer, tokens, "bf16"]
        assert is_fp8_layer(tokens, *LAYERS[layer], torch.device("meta")) == is_faster, (layer, tokens)
    monkeypatch.setattr(precision, "is_requested", lambda _: False)
    with compiling_for("sm_90"):  # the Triton kernels are slower
        assert not is_fp8_layer(4096, *LAYERS["Qwen3-30B-A3B"], torch.device("meta"))


@pytest.fixture
def rule_here(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Give the rule of 20 rows to the device of these tests."""
    monkeypatch.setitem(LAYER, precision._gpu_or_arch(torch.device(device)), FROM_20_ROWS)
    monkeypatch.setitem(PRODUCT, precision._arch(torch.device(device)), FROM_20_ROWS)


def operands(rows: int, device: str) -> dict[str, Any]:
    draw = torch.Generator(device).manual_seed(rows)
    tokens = rows // TOP_K
    return {
        "x": torch.randn(tokens, K, generator=draw, device=device).bfloat16().requires_grad_(),
        "w13": torch.randn(E, 2 * N, K, generator=draw, device=device).bfloat16().requires_grad_(),
        "w2": torch.randn(E, K, N, generator=draw, device=device).bfloat16().requires_grad_(),
        "topk_ids": torch.randint(0, E, (tokens, TOP_K), generator=draw, device=device),
        "topk_weights": torch.rand(tokens, TOP_K, generator=draw, device=device).requires_grad_(),
    }


@pytest.mark.usefixtures("rule_here", "quantizers_in_plain_torch")
@pytest.mark.parametrize(("rows", "taken"), [(18, "bf16"), (20, "fp8"), (40, "fp8")])
def test_a_layer_takes_what_the_rule_says(rows: int, taken: str, device: str) -> None:
    chosen = operands(rows, device)
    results = {name: moe_layer(**chosen, precision=name) for name in ("fp8", "bf16", "auto")}
    assert not torch.equal(results["fp8"], results["bf16"])
    assert torch.equal(results["auto"], results[taken])


@pytest.mark.usefixtures("rule_here", "quantizers_in_plain_torch")
def test_one_number_of_rows_parts_compiled_layers(device: str) -> None:
    weights = operands(2, device)
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def compiled(x: torch.Tensor, ids: torch.Tensor, of_ids: torch.Tensor) -> torch.Tensor:
        return moe_layer(x, weights["w13"], weights["w2"], ids, of_ids, precision="auto")

    compiles = []
    for rows in (24, 12, 30, 16, 48, 8):
        chosen = {**operands(rows, device), "w13": weights["w13"], "w2": weights["w2"]}
        out = compiled(chosen["x"], chosen["topk_ids"], chosen["topk_weights"])
        out.sum().backward()
        assert torch.equal(out, moe_layer(**chosen, precision="fp8" if rows >= 20 else "bf16"))
        compiles.append(counter.frame_count)
    assert compiles[1:] == [compiles[1]] * 5  # one for each precision, whatever the number of tokens
