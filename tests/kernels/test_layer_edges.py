"""Edge cases of ``moe_layer``, forward and backward, in both precisions, with each activation, layout and recompute."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_moe_layer import NEAR, ROUTINGS, Case, E, N, exact, random_case, results, sqnr, transposed

from fp8tune_kernels import moe_layer
from fp8tune_kernels.moe.expert_weights import quantize_down, quantize_gate_up
from fp8tune_kernels.moe.layer import RECOMPUTE

pytestmark = pytest.mark.usefixtures("quantizers_in_plain_torch")

both_precisions = pytest.mark.parametrize("precision", ["fp8", "bf16"])

KINDS = (("swiglu", "halves"), ("gpt-oss", "interleaved"))


def with_options(precision: str) -> Iterator[tuple[dict[str, Any], tuple[str, str]]]:
    """Options of the layer, and its kind."""
    for kind, recompute in itertools.product(KINDS, RECOMPUTE):
        yield {"activation": kind[0], "layout": kind[1], "recompute": recompute, "precision": precision}, kind


def assert_near(case: Case, precision: str) -> None:
    least = NEAR[precision] - (6 if len(case.x) == 1 else 0)  # gradients of three weights are no mean of many
    for options, kind in with_options(precision):
        for result, right in zip(results(case, **options), exact(case, *kind), strict=True):
            assert result.shape == right.shape
            assert result.isfinite().all()
            assert sqnr(result, right) > least, options


@both_precisions
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing_with_every_option(routing: str, precision: str) -> None:
    assert_near(random_case(routing, is_full=True), precision)


def of_first_expert(case: Case) -> Case:
    """One expert in all: every choice is its."""
    names = ("w13", "w2", "b13", "b2")
    parts = {name: getattr(case, name).detach()[:1].requires_grad_() for name in names}
    return case._replace(ids=torch.zeros_like(case.ids), **parts)


def choices(case: Case, count: int) -> Case:
    """As many experts for each token, all different."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(E, generator=draw)[:count] for _ in range(len(case.x))])
    return case._replace(ids=ids, weights=torch.rand(ids.shape, generator=draw).requires_grad_())


SIZES = {
    "one token": random_case(tokens=1, is_full=True),
    "one expert": of_first_expert(random_case(is_full=True)),
    "one choice": choices(random_case(is_full=True), 1),
    "every expert": choices(random_case(is_full=True), E),
    "weights of zero": random_case(is_full=True)._replace(weights=torch.zeros(41, 3, requires_grad=True)),
}


@both_precisions
@pytest.mark.parametrize("size", SIZES)
def test_sizes_at_their_ends(size: str, precision: str) -> None:
    assert_near(SIZES[size], precision)


@both_precisions
@pytest.mark.parametrize("name", ["b13", "b2"])
def test_one_bias_alone(name: str, precision: str) -> None:
    assert_near(random_case("other devices", is_full=True)._replace(**{name: None}), precision)


@both_precisions
@pytest.mark.parametrize("is_full", [False, True])
def test_no_tokens_with_every_option(is_full: bool, precision: str) -> None:
    for case in (random_case(tokens=0, is_full=is_full), transposed(random_case(tokens=0, is_full=is_full))):
        leaves = [tensor for tensor in case[:6] if tensor is not None]
        for options, _ in with_options(precision):
            out, *grads = results(case, **options)
            assert out.shape == case.x.shape
            for grad, leaf in zip(grads, leaves, strict=True):
                assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype)
                assert not grad.any()


@both_precisions
def test_clamped_gates_have_no_gradient(precision: str) -> None:
    """gpt-oss' gate above its limit: its weights get none, and those of up do."""
    case = random_case(is_full=True)
    b13 = torch.cat([torch.full((E, N), 100.0), torch.zeros(E, N)], 1).requires_grad_()
    for recompute in RECOMPUTE:
        options = {"activation": "gpt-oss", "precision": precision, "recompute": recompute}
        _, _, d_w13, _, d_b13, *_ = results(case._replace(b13=b13), **options)
        assert not d_w13[:, :N].any()
        assert not d_b13[:, :N].any()
        assert d_w13[:, N:].any()


def test_gradients_of_weights_that_were_quantized_before_are_added_to_buffers() -> None:
    """Two micro-batches by FP8 values of one block of memory: the sum of both, not rounded first."""
    cases = [random_case("other devices", seed=seed) for seed in (0, 1)]
    w13, w2 = (getattr(cases[0], name).detach().requires_grad_() for name in ("w13", "w2"))
    before = quantize_gate_up(w13), quantize_down(w2)
    buffers = {f"grad_{name}": torch.zeros_like(w, dtype=torch.float32) for name, w in (("w13", w13), ("w2", w2))}
    sums = [torch.zeros_like(buffer) for buffer in buffers.values()]
    sizes = [torch.zeros_like(buffer) for buffer in buffers.values()]
    for case in cases:
        whole = case._replace(w13=w13, w2=w2)
        _, d_x, *d_weights = results(whole)
        for total, size, grad in zip(sums, sizes, d_weights, strict=False):
            total += grad
            size += grad.abs()
        x = case.x.detach().requires_grad_()
        moe_layer(x, *before, case.ids, case.weights.detach(), **buffers).backward(case.grad)
        assert torch.equal(x.grad, d_x)
    assert w13.grad is w2.grad is None
    for buffer, total, size in zip(buffers.values(), sums, sizes, strict=True):
        assert total.abs().sum() > 0
        assert ((buffer - total).abs() <= size / 256).all()  # half a unit in the last place of bfloat16, 8 bits
