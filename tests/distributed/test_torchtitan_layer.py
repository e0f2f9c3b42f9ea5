"""The forward pass of torchtitan's routed experts: near its own in bfloat16, with each kind of experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from grouped_experts import (
    FusedGroupedExperts,
    GptOssGroupedExperts,
    GroupedExperts,
    LocalTokenDispatcher,
    RoutedExperts,
)

from fp8tune_kernels import moe_layer
from fp8tune_kernels.gemm.gathered_weights import GatheredWeights, ShardedWeights
from fp8tune_kernels.torchtitan import routed_experts_method

pytestmark = pytest.mark.usefixtures("quantizers_in_plain_torch")

T, DIM, HIDDEN, EXPERTS, TOP_K = 40, 32, 48, 4, 2


def tokens() -> tuple[torch.Tensor, ...]:
    """x, scores, ids and the count of each expert, of which one has no token."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(T, DIM, generator=draw).requires_grad_()
    scores = torch.rand(T, TOP_K, generator=draw).requires_grad_()
    ids = torch.stack([torch.tensor([0, 2, 3])[torch.randperm(3, generator=draw)[:TOP_K]] for _ in range(T)])
    return x, scores, ids, torch.bincount(ids.flatten(), minlength=EXPERTS)


def step(forward: Any, routed: RoutedExperts) -> list[torch.Tensor]:
    """The output, and the gradients of x, scores and parameters."""
    x, scores, *rest = tokens()
    out = forward(routed, x, scores, *rest)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [x, scores, *routed.parameters()], grad)]


def routed_of(kind: type) -> RoutedExperts:
    torch.manual_seed(0)
    return RoutedExperts(kind(DIM, HIDDEN, EXPERTS))


def near(mine: list[torch.Tensor], others: list[torch.Tensor], least: float) -> bool:
    pairs = zip(mine, others, strict=True)
    return all(torch.cosine_similarity(a.flatten().double(), b.flatten().double(), 0) > least for a, b in pairs)


class Dispatcher(LocalTokenDispatcher):
    """Dispatcher of expert parallelism with one device."""

    ep_mesh = "one device"


def test_it_is_near_torchtitans_own_forward_pass() -> None:
    routed = routed_of(GroupedExperts)
    own = step(RoutedExperts.forward, routed)
    assert near(step(routed_experts_method(precision="bf16"), routed), own, 0.9999)
    mine = step(routed_experts_method(), routed)
    assert near(mine, own, 0.995)
    assert [grad.dtype for grad in mine] == [torch.float32] * 6


@pytest.mark.parametrize("kind", [GroupedExperts, FusedGroupedExperts, GptOssGroupedExperts])
def test_rows_that_a_dispatcher_has_sent_give_the_layers_results(kind: type) -> None:
    routed = routed_of(kind)
    whole = step(routed_experts_method(), routed)
    routed.token_dispatcher = Dispatcher()
    assert near(
        step(routed_experts_method(recompute="h"), routed), whole, 0.995
    )  # scores are applied to sums, not to rows of h
    with pytest.raises(ValueError, match="precision must be 'fp8' or 'auto' with expert parallelism"):
        step(routed_experts_method(precision="bf16"), routed)


def test_gate_and_up_in_one_parameter_give_the_bytes_of_two() -> None:
    two, fused = routed_of(GroupedExperts), routed_of(FusedGroupedExperts)
    experts = two.inner_experts
    with torch.no_grad():
        fused.inner_experts.w13.copy_(torch.stack([experts.w1_EFD, experts.w3_EFD], 2))
        fused.inner_experts.w2_EDF.copy_(experts.w2_EDF)
    out, d_x, d_scores, d_w1, d_w2, d_w3 = step(routed_experts_method(), two)
    results = step(routed_experts_method(), fused)
    for mine, right in zip(results, (out, d_x, d_scores, torch.stack([d_w1, d_w3], 2), d_w2), strict=True):
        assert near([mine], [right], 0.99999)  # the sum over columns has another order
    assert torch.equal(results[0], out)


def test_experts_of_gpt_oss_are_those_of_the_layer() -> None:
    routed = routed_of(GptOssGroupedExperts)
    experts = routed.inner_experts
    x, scores, ids, counts = tokens()
    biases = {"b13": experts.mlp1_bias_EG, "b2": experts.mlp2_bias_ED}
    options = {"activation": "gpt-oss", "layout": "interleaved", **biases}
    right = moe_layer(x, experts.mlp1_weight_EGD, experts.mlp2_weight_EDF, ids, scores, **options)
    assert torch.equal(routed_experts_method()(routed, x, scores, ids, counts), right.float())
    experts.swiglu_limit = 6.0
    with pytest.raises(ValueError, match=r"swiglu_limit must be 7.0, got 6.0"):
        step(routed_experts_method(), routed)


def test_two_parameters_that_were_quantized_after_a_gather_are_refused() -> None:
    routed = routed_of(GroupedExperts)
    w = routed.inner_experts.w1_EFD.detach()
    gathered, _ = ShardedWeights(w, "folded").fsdp_post_all_gather((w,), w.shape, w.dtype)  # type: ignore[misc]
    assert isinstance(gathered, GatheredWeights)
    routed.inner_experts.w1_EFD = torch.nn.Parameter(gathered)
    with pytest.raises(ValueError, match="w1_EFD must not be quantized after its all-gather"):
        step(routed_experts_method(), routed)
