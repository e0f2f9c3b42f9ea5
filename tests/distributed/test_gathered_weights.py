"""Under FSDP2, with weights quantized after each all-gather, training is what it is on one device: the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from grouped_experts import GroupedExperts
from torch import nn

from fp8tune_kernels.gemm.gathered_weights import GatheredWeights, ShardedWeights
from fp8tune_kernels.torchtitan import grouped_mm_method, quantize_after_all_gather

pytestmark = pytest.mark.usefixtures("quantizers_in_plain_torch")

WEIGHTS, STEPS = 6, 2

QUANTIZED = {
    "plain": 2 * WEIGHTS * STEPS,  # before the forward pass and before the backward pass
    "kept": WEIGHTS * STEPS,
    "checkpointed": 2 * WEIGHTS * STEPS,
    "checkpointed, kept": WEIGHTS * STEPS,
    "bf16": 2 * WEIGHTS * STEPS,
    "accumulated": WEIGHTS * STEPS,  # two micro-batches a step
    "accumulated in bf16, resharded": 4 * WEIGHTS * STEPS,
    "uneven": 2 * WEIGHTS * STEPS,
    "fewer experts than ranks": 2 * WEIGHTS * STEPS,
    "no hook": 0,
    "folded": WEIGHTS * STEPS,
}
"""Case -> how often weights were quantized after an all-gather."""


@pytest.mark.slow
def test_training_is_that_of_one_device(ranks: list[dict[str, Any]]) -> None:
    for found in (rank["fsdp"].copy() for rank in ranks):
        assert found.pop("local shards") == {"out": True, "grad": True, "has codes": True}
        stale = found.pop("not requantized")
        assert not stale["losses"]  # the check sees codes that are older than the weights
        assert not stale["weights"]
        for case, result in found.items():
            assert (result["losses"], result["weights"]) == (True, True), (case, result)
            assert result["saved"] == ["Tensor"], case  # a checkpoint has plain tensors
        assert {case: result["quantized"] for case, result in found.items()} == QUANTIZED


def test_experts_multiply_by_the_method_whatever_the_weights_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    experts, x, counts = GroupedExperts(32, 48, 3), torch.randn(40, 32), torch.tensor([13, 0, 27])
    in_bf16 = experts(x, counts)
    monkeypatch.setattr(GroupedExperts, "_grouped_mm", grouped_mm_method())
    in_fp8 = experts(x, counts)
    assert 0 < (in_fp8 - in_bf16).norm() < 0.1 * in_bf16.norm()
    rows, offs, w = x.bfloat16(), torch.tensor([13, 13, 40], dtype=torch.int32), experts.w1_EFD
    either = [experts._grouped_mm(A=rows, offs=offs, **{name: w}) for name in ("weight_EOI", "weight_ENK")]
    assert torch.equal(*either)
    assert torch.equal(either[0], experts._grouped_mm(A=rows, offs=offs, B_t=w.transpose(1, 2)))
    with pytest.raises(ValueError, match="weight_EOI is None"):
        experts._grouped_mm(A=rows, offs=offs)


def test_parameters_that_are_no_expert_weights_are_left() -> None:
    module = nn.ModuleDict(
        {"gate": nn.Linear(32, 4), "experts": GroupedExperts(32, 48, 3), "odd": GroupedExperts(9, 8, 2)}
    )
    names = quantize_after_all_gather(module)
    assert names == ["experts.w1_EFD", "experts.w2_EDF", "experts.w3_EFD"]
    assert isinstance(module["experts"].w1_EFD, ShardedWeights)
    assert type(module["gate"].weight) is nn.Parameter
    with pytest.raises(ValueError, match="nothing to quantize"):
        quantize_after_all_gather(module["gate"])


def test_without_sharding_a_prepared_module_trains_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupedExperts, "_grouped_mm", grouped_mm_method())
    losses = []
    for is_prepared in (False, True):
        torch.manual_seed(0)
        experts = GroupedExperts(32, 48, 3)
        if is_prepared:
            quantize_after_all_gather(experts)
        optimizer = torch.optim.AdamW(experts.parameters(), lr=1e-2)
        for _ in range(3):
            loss = experts(torch.ones(40, 32), torch.tensor([13, 0, 27])).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == losses[1]


def test_gathered_weights_that_were_changed_are_refused() -> None:
    w = torch.randn(2, 48, 32).bfloat16()
    hooks = ShardedWeights(w, "default")
    (gathered, codes) = hooks.fsdp_post_all_gather((w,), w.shape, w.dtype)  # type: ignore[misc]
    parameter = nn.Parameter(torch.as_strided(gathered, w.shape, w.stride(), 0))
    assert isinstance(parameter, GatheredWeights)
    assert parameter.made.codes is codes
    assert type(parameter * 2) is torch.Tensor
    multiply = grouped_mm_method()
    arguments = {"A": torch.randn(32, 32).bfloat16(), "offs": torch.tensor([16, 32], dtype=torch.int32)}
    out = multiply(None, weight_EOI=parameter, **arguments)
    assert torch.equal(out, multiply(None, weight_EOI=w, **arguments))
    with torch.no_grad():
        parameter.add_(1)
    with pytest.raises(RuntimeError, match="changed in place after they were gathered"):
        multiply(None, weight_EOI=parameter, **arguments)
