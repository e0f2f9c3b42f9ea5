"""Steps of training under FSDP2 beside the same steps on one device."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from grouped_experts import GroupedExperts
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from fp8tune_kernels import choose_experts, moe_layer
from fp8tune_kernels.gemm import gathered_weights
from fp8tune_kernels.torchtitan import grouped_mm_method, quantize_after_all_gather

DIM, HIDDEN, ROWS, STEPS = 32, 48, 40, 2


class Model(nn.Module):
    """Two layers of experts; each is recomputed in the backward pass if asked."""

    def __init__(self, experts: int, *, is_checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GroupedExperts(DIM, HIDDEN, experts) for _ in range(2))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        for layer in self.layers:
            out = checkpoint(layer, x, counts, use_reentrant=False) if self.is_checkpointed else layer(x, counts)
            x = x + out
        return x


def trained(model: nn.Module, experts: int, device: torch.device, micro_batches: int, weights: Any) -> list[float]:
    """The losses; every rank has the same rows, so their mean is that of one. ``weights``: called after a backward."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        for number in range(micro_batches):
            x = torch.randn(ROWS, DIM, generator=generator).to(device)
            counts = torch.zeros(experts, dtype=torch.int64)
            counts[0], counts[-1] = 13, ROWS - 13
            loss = model(x, counts.to(device)).square().mean() / micro_batches
            weights(is_last=number + 1 == micro_batches)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


Case = tuple[dict[str, Any], int]
"""Options, and how often each weight is quantized after an all-gather in a step."""

EXPERTS: dict[str, Case] = {
    "plain": ({}, 2),  # before the forward pass and before the backward pass
    "checkpointed": ({"is_checkpointed": True}, 2),
    "checkpointed, kept": ({"is_checkpointed": True, "reshard": False}, 1),
    "accumulated": ({"micro_batches": 2, "reshard": False}, 1),
    "accumulated in bf16, resharded": ({"micro_batches": 2, "dtype": torch.bfloat16}, 4),
    "uneven": ({"experts": 3}, 2),
    "fewer experts than ranks": ({"experts": 1, "placed": 1}, 2),
    "no hook": ({"is_hooked": False}, 0),
    "folded": ({"recipe": "folded", "is_checkpointed": True, "reshard": False}, 1),
}


def experts_under_fsdp(mesh: Any, device: torch.device) -> None:
    """Grouped experts train to the losses and weights of one device, and a checkpoint of them has plain tensors."""
    for name, (options, times) in EXPERTS.items():
        assert trained_experts(mesh, device, **options) == (True, 6 * STEPS * times), name
    is_same, _ = trained_experts(mesh, device, is_planted=True)
    assert not is_same  # the check sees codes that are older than the weights
    local_shards(mesh.size(), device)


def trained_experts(mesh: Any, device: torch.device, **options: Any) -> tuple[bool, int]:
    """Compare losses and weights with one device, and count how often weights were quantized."""
    GroupedExperts._grouped_mm = grouped_mm_method(recipe=options.get("recipe"))  # type: ignore[method-assign]
    experts, dtype = options.get("experts", 4), options.get("dtype")
    micro_batches, reshard = options.get("micro_batches", 1), options.get("reshard", True)
    torch.manual_seed(0)
    model = Model(experts, is_checkpointed=options.get("is_checkpointed", False)).to(device)
    alone = copy.deepcopy(model)
    alone_losses = _alone(alone, experts, device, micro_batches, dtype)
    if options.get("is_hooked", True):
        quantize_after_all_gather(model, recipe=options.get("recipe", "default"))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    place = (lambda _: Shard(1)) if options.get("placed") else None
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, shard_placement_fn=place)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)

    def keep(*, is_last: bool) -> None:
        if micro_batches > 1 and not reshard:
            model.set_reshard_after_backward(is_last)
            model.set_requires_gradient_sync(is_last)

    with Count(is_planted=options.get("is_planted", False), weights=len(list(model.parameters()))) as count:
        losses = trained(model, experts, device, micro_batches, keep)
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    for tensor in torch.load(saved, weights_only=False).values():
        assert not isinstance(tensor, DTensor) or type(tensor.to_local()) is Tensor
    return losses == alone_losses and have_the_weights(model, alone), count.times


def have_the_weights(model: nn.Module, alone: nn.Module) -> bool:
    gathered = [parameter.full_tensor() for parameter in model.parameters()]  # by every rank, whatever the first are
    return all(map(torch.equal, gathered, alone.parameters()))


def _alone(model: nn.Module, experts: int, device: torch.device, micro_batches: int, dtype: Any) -> list[float]:
    """Without FSDP: what is computed with is the weights, or their cast, as FSDP would gather them."""
    if dtype is None:
        return trained(model, experts, device, micro_batches, lambda **_: None)
    original = GroupedExperts._grouped_mm

    def cast(self: Any, *, A: Tensor, weight_EOI: Tensor, offs: Tensor) -> Tensor:
        return original(self, A=A, weight_EOI=weight_EOI.to(dtype), offs=offs)

    GroupedExperts._grouped_mm = cast  # type: ignore[method-assign]
    try:
        return trained(model, experts, device, micro_batches, lambda **_: None)
    finally:
        GroupedExperts._grouped_mm = original  # type: ignore[method-assign]


class Count:
    """Counter of quantizations after an all-gather; with ``is_planted`` only each weight's first has an effect."""

    def __init__(self, *, is_planted: bool, weights: int) -> None:
        self.is_planted, self.weights = is_planted, weights

    def __enter__(self) -> Count:
        self.times = 0
        self._kept = gathered_weights.requantize_into

        def counted(*arguments: Any) -> None:
            self.times += 1
            if not self.is_planted or self.times <= self.weights:
                self._kept(*arguments)

        gathered_weights.requantize_into = counted
        return self

    def __exit__(self, *_: object) -> None:
        gathered_weights.requantize_into = self._kept


def local_shards(ranks: int, device: torch.device) -> None:
    """Weights sharded on N by tensor parallelism and gathered by FSDP: ``to_local()``, as torchtitan calls, has codes.

    Beside the same product and gradient of the plain shard.
    """
    mesh = init_device_mesh(device.type, (1, ranks), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    weights, rows = torch.randn(2, 64, DIM).to(device), torch.randn(ROWS, DIM).bfloat16().to(device)
    experts = nn.Module()
    experts.w = nn.Parameter(distribute_tensor(weights, mesh["tp"], [Shard(1)]))
    shard = experts.w.to_local().detach().clone().bfloat16().requires_grad_()
    quantize_after_all_gather(experts)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    experts.forward = lambda offs: multiply(None, A=rows, weight_EOI=experts.w.to_local(), offs=offs)  # type: ignore
    fully_shard(experts, mesh=mesh["dp"], mp_policy=policy)
    multiply, offs = grouped_mm_method(), torch.tensor([13, ROWS], dtype=torch.int32, device=device)
    with Count(is_planted=False, weights=1) as count:
        out = experts(offs)
    expected = multiply(None, A=rows, weight_EOI=shard, offs=offs)
    upstream = torch.ones_like(out)
    out.backward(upstream)
    expected.backward(upstream)
    grad = experts.w.grad
    assert isinstance(grad, DTensor)
    assert shard.grad is not None
    assert torch.equal(out, expected)
    assert torch.equal(grad.to_local(), shard.grad.float())
    assert count.times == 1


class Block(nn.Module):
    """A router and experts; recomputed in the backward pass if asked."""

    def __init__(self, *, is_checkpointed: bool, precision: str) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(4, DIM) * DIM**-0.5)
        self.w13 = nn.Parameter(torch.randn(4, 2 * HIDDEN, DIM) * DIM**-0.5)
        self.w2 = nn.Parameter(torch.randn(4, DIM, HIDDEN) * HIDDEN**-0.5)
        self.is_checkpointed, self.precision = is_checkpointed, precision

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._run, x, use_reentrant=False) if self.is_checkpointed else self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        ids, weights = choose_experts(x.float() @ self.router.float().t(), 2)
        return x + moe_layer(x.contiguous(), self.w13, self.w2, ids, weights, precision=self.precision)


LAYERS: dict[str, Case] = {
    "bf16": ({"precision": "bf16"}, 0),
    "checkpointed": ({"is_checkpointed": True, "reshard": False}, 0),
    "accumulated": ({"micro_batches": 2, "reshard": False}, 0),
    "quantized after the gather": ({"is_prepared": True, "reshard": False, "micro_batches": 2}, 2),
    "quantized after the gather, checkpointed": ({"is_prepared": True, "is_checkpointed": True}, 2),
}


def layers_under_fsdp(mesh: Any, device: torch.device) -> None:
    """Whole layers train to the losses and weights of one device."""
    for name, (options, times) in LAYERS.items():
        assert trained_layers(mesh, device, **options) == (True, 4 * STEPS * times), name
    is_same, _ = trained_layers(mesh, device, is_prepared=True, is_planted=True)
    assert not is_same


def trained_layers(
    mesh: Any,
    device: torch.device,
    *,
    micro_batches: int = 1,
    reshard: bool = True,
    is_checkpointed: bool = False,
    is_prepared: bool = False,
    is_planted: bool = False,
    precision: str = "fp8",
) -> tuple[bool, int]:
    """Like :func:`trained_experts`."""
    torch.manual_seed(0)
    blocks = (Block(is_checkpointed=is_checkpointed, precision=precision) for _ in range(2))
    model = nn.Sequential(*blocks).to(device, torch.bfloat16)
    alone = copy.deepcopy(model)
    if is_prepared:
        quantize_after_all_gather(model, recipe="folded")
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    with Count(is_planted=is_planted, weights=2 * len(model)) as count:
        losses = _losses(model, device, micro_batches)
    is_same = losses == _losses(alone, device, micro_batches)
    return is_same and have_the_weights(model, alone), count.times


def _losses(model: nn.Module, device: torch.device, micro_batches: int) -> list[float]:
    """Losses of two steps. Every rank has the same rows, so the mean over ranks is that of one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    draw, losses = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        for _ in range(micro_batches):
            x = torch.randn(41, DIM, generator=draw).bfloat16().to(device)
            loss = model(x).float().square().mean() / micro_batches
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses
