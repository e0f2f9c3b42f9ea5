"""Weights that FSDP2 gathers are quantized then: which ones, by which method, and never old values of them."""

from __future__ import annotations

import pytest
import torch
from grouped_experts import GroupedExperts
from torch import nn

from fp8tune_kernels.gemm.gathered_weights import GatheredWeights, ShardedWeights
from fp8tune_kernels.torchtitan import grouped_mm_method, quantize_after_all_gather

pytestmark = pytest.mark.usefixtures("quantizers_in_plain_torch")


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
