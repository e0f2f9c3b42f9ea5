"""``fp8_moe_mlp``: ``moe_layer`` of rows that are sorted by expert."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8tune_kernels import fp8_grouped_mm, fp8_moe_mlp, moe_layer, quantize_down, quantize_gate_up
from fp8tune_kernels.groups import group_ends
from fp8tune_kernels.moe.layer import RECOMPUTE
from fp8tune_kernels.quantize.gated import reference_gated
from fp8tune_kernels.spec import ROUTINGS

pytestmark = pytest.mark.usefixtures("quantizers_in_plain_torch")

K, N, E = 64, 48, 3
GPT_OSS = {"activation": "gpt-oss", "layout": "interleaved"}


def operands(M: int = 157, *, is_full: bool = False) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=draw) * std).bfloat16().requires_grad_()

    tensors = {"x": normal(M, K), "w13": normal(E, 2 * N, K, std=K**-0.5), "w2": normal(E, K, N, std=N**-0.5)}
    if is_full:
        weights = torch.rand(M, generator=draw).requires_grad_()
        tensors |= {"b13": normal(E, 2 * N), "b2": normal(E, K), "row_weights": weights}
    return tensors


def ends(routing: str, M: int = 157) -> torch.Tensor:
    return torch.tensor(group_ends(routing, M, E), dtype=torch.int32)


def with_gradients(out: torch.Tensor, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    return [out, *torch.autograd.grad(out, [*tensors.values()], grad)]


def assert_those_of_the_layer(routing: str, M: int, is_full: bool, **options: Any) -> None:
    """Compare with one choice per row, and a weight of one where none is given."""
    tensors, offs = operands(M, is_full=is_full), ends(routing, M)
    results = with_gradients(fp8_moe_mlp(offs=offs, **tensors, **options), tensors)
    x, w13, w2, *beside = tensors.values()
    rows = torch.arange(M, dtype=torch.int32)
    ids = torch.searchsorted(offs, rows, right=True, out_int32=True)[:, None]
    weights = beside[-1][:, None] if beside else torch.ones(M, 1)
    biases = dict(zip(("b13", "b2"), beside, strict=False))
    right = with_gradients(moe_layer(x, w13, w2, ids, weights, **biases, **options), tensors)
    assert all(map(torch.equal, results, right))
    last = int(offs[-1])
    assert not results[0][last:].any()


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_results_are_those_of_the_layer(routing: str, is_full: bool) -> None:
    assert_those_of_the_layer(routing, 157, is_full, **(GPT_OSS if is_full else {}))


@pytest.mark.parametrize("is_full", [False, True])
def test_no_rows_at_all(is_full: bool) -> None:
    assert_those_of_the_layer("balanced", 0, is_full)


def test_the_output_is_that_of_two_grouped_gemms() -> None:
    """To the byte, but for h, which is rounded once here and twice there."""
    tensors, offs = operands(), ends("ragged")
    with torch.no_grad():
        y = fp8_grouped_mm(tensors["x"], tensors["w13"].transpose(1, 2), offs)
        h = reference_gated(*y.chunk(2, 1), 0)
        right = fp8_grouped_mm(h, tensors["w2"].transpose(1, 2), offs)
        assert torch.equal(fp8_moe_mlp(offs=offs, **tensors), right)


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_weights_quantized_before_give_the_same_bytes(recompute: str) -> None:
    tensors, offs = operands(is_full=True), ends("ragged")
    before = {"w13": quantize_gate_up(tensors["w13"]), "w2": quantize_down(tensors["w2"])}
    results = [
        with_gradients(fp8_moe_mlp(offs=offs, recompute=recompute, **{**tensors, **weights}), tensors)
        for weights in ({}, before)
    ]
    assert all(map(torch.equal, *results))


def test_operands_that_do_not_fit_are_refused() -> None:
    for name, wrong in (
        ("offs", torch.zeros(4, dtype=torch.int32)),
        ("offs", torch.tensor([5, 3, 9], dtype=torch.int32)),
        ("row_weights", torch.zeros(156)),
    ):
        with pytest.raises(ValueError, match=f"^{name} (is|has|ends)"):
            fp8_moe_mlp(**{**operands(), "offs": ends("ragged"), name: wrong})
