"""Steps of training under FSDP2 beside the same steps on one device."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from grouped_experts import GroupedExperts
from ranks import are_bytes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from fp8tune_kernels.gemm import gathered_weights
from fp8tune_kernels.torchtitan import grouped_mm_method, quantize_after_all_gather

DIM, HIDDEN, ROWS, STEPS, MICRO_BATCHES = 32, 48, 40, 2, 2


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


CASES = {
    "plain": {},
    "kept": {"reshard": False},
    "checkpointed": {"is_checkpointed": True},
    "checkpointed, kept": {"is_checkpointed": True, "reshard": False},
    "bf16": {"dtype": torch.bfloat16},
    "accumulated": {"micro_batches": MICRO_BATCHES, "reshard": False},
    "accumulated in bf16, resharded": {"micro_batches": MICRO_BATCHES, "dtype": torch.bfloat16},
    "uneven": {"experts": 3},
    "fewer experts than ranks": {"experts": 1, "placed": 1},
    "no hook": {"is_hooked": False},
    "folded": {"recipe": "folded", "is_checkpointed": True, "reshard": False},
    "not requantized": {"is_planted": True},
}


def case(mesh: Any, device: torch.device, **options: Any) -> dict[str, Any]:
    """Losses and weights beside those of one device, and how often weights were quantized."""
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

    counted = Count(is_planted=options.get("is_planted", False), weights=len(list(model.parameters())))
    with counted:
        losses = trained(model, experts, device, micro_batches, keep)
    shards = [parameter.full_tensor().detach() for parameter in model.parameters()]
    wanted = [parameter.detach() for parameter in alone.parameters()]
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    return {
        "losses": losses == alone_losses,
        "weights": all(are_bytes(a, b) for a, b in zip(shards, wanted, strict=True)),
        "largest difference": max(float((a - b).abs().max()) for a, b in zip(shards, wanted, strict=True)),
        "quantized": counted.times,
        "saved": sorted({type(each.to_local()).__name__ for each in loaded.values() if isinstance(each, DTensor)}),
    }


def _alone(model: nn.Module, experts: int, device: torch.device, micro_batches: int, dtype: Any) -> list[float]:
    """Without FSDP: what is computed with is the weights, or their cast, as FSDP would gather them."""
    if dtype is None:
        return trained(model, experts, device, micro_batches, lambda **_: None)
    kept = GroupedExperts._grouped_mm

    def cast(self: Any, *, A: Tensor, weight_EOI: Tensor, offs: Tensor) -> Tensor:
        return kept(self, A=A, weight_EOI=weight_EOI.to(dtype), offs=offs)

    GroupedExperts._grouped_mm = cast  # type: ignore[method-assign]
    try:
        return trained(model, experts, device, micro_batches, lambda **_: None)
    finally:
        GroupedExperts._grouped_mm = kept  # type: ignore[method-assign]


class Count:
    """How often weights are quantized after an all-gather; where a fault is planted, only after each one's first."""

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


def local_shards(ranks: int, device: torch.device) -> dict[str, bool]:
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
    with (counted := Count(is_planted=False, weights=1)):
        out = experts(offs)
    wanted = multiply(None, A=rows, weight_EOI=shard, offs=offs)
    upstream = torch.ones_like(out)
    out.backward(upstream)
    wanted.backward(upstream)
    grad = experts.w.grad
    assert isinstance(grad, DTensor)
    assert shard.grad is not None
    are_equal = torch.equal(grad.to_local(), shard.grad.float())
    return {"out": torch.equal(out, wanted), "grad": are_equal, "has codes": counted.times == 1}


def fsdp(mesh: Any, device: torch.device) -> dict[str, Any]:
    """Every case."""
    found: dict[str, Any] = {name: case(mesh, device, **options) for name, options in CASES.items()}
    return {**found, "local shards": local_shards(mesh.size(), device)}
