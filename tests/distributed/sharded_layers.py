"""Layers of DTensors, and training of layers under FSDP2, beside the same on one device."""

from __future__ import annotations

import copy
from typing import Any

import torch
from ranks import are_bytes, sqnr
from sharded_training import Count
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from fp8tune_kernels import choose_experts, moe_layer
from fp8tune_kernels.torchtitan import quantize_after_all_gather

T, K, N, E, TOP_K = 41, 48, 64, 4, 2  # rows of two ranks are not equally many

NAMES = ("x", "logits", "w13", "w2", "b13", "b2")
SHARDED: dict[str, dict[str, Any]] = {
    "replicated": {},
    "rows": {"x": Shard(0), "logits": Shard(0)},
    "rows of the router": {"x": Shard(0)},
    "experts": {"w13": Shard(0), "w2": Shard(0), "b13": Shard(0), "b2": Shard(0)},
    "experts, rows to gather": {"x": Shard(0), "logits": Shard(0), "w13": Shard(0)},
    "columns": {"w13": Shard(1), "w2": Shard(2), "b13": Shard(1)},
}
"""Name -> placements of operands that are not replicated."""


def operands(device: torch.device, *, tokens: int, unused: slice, has_b2: bool) -> dict[str, Tensor]:
    """Random operands of a layer as one device has them, of which some experts get no token."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=draw) * std).bfloat16().to(device)

    tensors = (normal(tokens, K), normal(tokens, E), normal(E, 2 * N, K, std=K**-0.5), normal(E, K, N, std=N**-0.5))
    given = dict(zip(NAMES, (*tensors, normal(E, 2 * N), normal(E, K)), strict=True))
    given["logits"][:, unused] = -20
    return given if has_b2 else {name: tensor for name, tensor in given.items() if name != "b2"}


def layer_of(leaves: dict[str, Tensor], **options: Any) -> Tensor:
    """The router's choice and the layer."""
    ids, weights = choose_experts(leaves["logits"], TOP_K)
    biases = {name: leaves.get(name) for name in ("b13", "b2")}
    return moe_layer(leaves["x"], leaves["w13"], leaves["w2"], ids, weights, **biases, **options)


def results(given: dict[str, Tensor], grad: Tensor, **options: Any) -> dict[str, Tensor]:
    """The output, and the gradients of all operands."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in given.items()}
    out = layer_of(leaves, **options)
    gradients = torch.autograd.grad(out, list(leaves.values()), grad)
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def layers(mesh: Any, device: torch.device) -> dict[str, Any]:
    """Each way to shard in both precisions: placement of each result, and "bytes" or its SQNR in dB."""
    found = {}
    cases = [(case, placements, T, slice(1, 2)) for case, placements in SHARDED.items()]
    cases += [("no tokens", SHARDED["rows"], 0, slice(1, 2)), ("no rows on a rank", SHARDED["experts"], T, slice(2, 4))]
    for case, placements, tokens, unused in cases:
        given = operands(device, tokens=tokens, unused=unused, has_b2=case != "columns")
        grad = torch.randn(tokens, K, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
        for precision in ("fp8", "bf16"):
            options = {"precision": precision, "layout": "interleaved"}
            right = results(given, grad, **options)
            spread = {
                name: distribute_tensor(tensor, mesh, [placements.get(name, Replicate())])
                for name, tensor in given.items()
            }
            mine = results(spread, distribute_tensor(grad, mesh, [Replicate()]), **options)
            found[f"{case}, {precision}"] = {name: _compared(mine[name], right[name]) for name in right}
    return found


def _compared(mine: Tensor, right: Tensor) -> list[Any]:
    assert isinstance(mine, DTensor)
    whole = mine.full_tensor()
    return [str(mine.placements[0]), "bytes" if are_bytes(whole, right) else round(sqnr(whole, right), 1)]


def compiled_layer(mesh: Any, device: torch.device) -> dict[str, bool]:
    """Results with sharded experts that torch.compile gives in the bytes of the eager call."""
    given = operands(device, tokens=T, unused=slice(1, 2), has_b2=True)
    leaves = {
        name: distribute_tensor(tensor, mesh, [SHARDED["experts"].get(name, Replicate())]).requires_grad_()
        for name, tensor in given.items()
    }
    grad = distribute_tensor(torch.ones(T, K, dtype=torch.bfloat16, device=device), mesh, [Replicate()])
    both = []
    for function in (layer_of, torch.compile(layer_of, backend="aot_eager", fullgraph=True, dynamic=False)):
        out = function(leaves)
        both.append([out, *torch.autograd.grad(out, list(leaves.values()), grad)])
    pairs = zip(("out", *leaves), *both, strict=True)
    return {name: are_bytes(eager.to_local(), compiled.to_local()) for name, eager, compiled in pairs}


def refused_layers(mesh: Any, device: torch.device) -> dict[str, str]:
    """What is said of operands that are no layer of DTensors."""
    given = operands(device, tokens=T, unused=slice(1, 2), has_b2=True)
    spread = {name: distribute_tensor(tensor, mesh, [Replicate()]) for name, tensor in given.items()}
    ids, weights = choose_experts(spread["logits"], TOP_K)
    whole = {"x": spread["x"], "w13": spread["w13"], "w2": spread["w2"], "topk_ids": ids, "topk_weights": weights}
    rows = distribute_tensor(given["w13"], mesh, [Shard(1)])
    changes: dict[str, dict[str, Any]] = {
        "plain x": {"x": given["x"]},
        "plain bias": {"b13": given["b13"]},
        "halves": {"w13": rows},
        "b2": {"w13": rows, "layout": "interleaved", "b2": spread["b2"]},
        "buffer": {"grad_w2": torch.zeros_like(given["w2"])},
    }
    found = {}
    for name, change in changes.items():
        try:
            moe_layer(**{**whole, **change})
        except ValueError as error:
            found[name] = str(error)
    return found


class Block(nn.Module):
    """A router and experts; recomputed in the backward pass if asked."""

    def __init__(self, *, is_checkpointed: bool, precision: str) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(E, K) * K**-0.5)
        self.w13 = nn.Parameter(torch.randn(E, 2 * N, K) * K**-0.5)
        self.w2 = nn.Parameter(torch.randn(E, K, N) * N**-0.5)
        self.is_checkpointed, self.precision = is_checkpointed, precision

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._run, x, use_reentrant=False) if self.is_checkpointed else self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        ids, weights = choose_experts(x.float() @ self.router.float().t(), TOP_K)
        return x + moe_layer(x.contiguous(), self.w13, self.w2, ids, weights, precision=self.precision)


TRAINED: dict[str, dict[str, Any]] = {
    "fp8": {},
    "bf16": {"precision": "bf16"},
    "checkpointed": {"is_checkpointed": True, "reshard": False},
    "accumulated": {"micro_batches": 2, "reshard": False},
    "accumulated, resharded": {"micro_batches": 2},
    "quantized after the gather": {"is_prepared": True, "reshard": False, "micro_batches": 2},
    "quantized after the gather, checkpointed": {"is_prepared": True, "is_checkpointed": True},
    "not requantized": {"is_prepared": True, "is_planted": True},
}


def trained_layers(mesh: Any, device: torch.device) -> dict[str, Any]:
    """Training under FSDP2: losses and weights that are those of one device, and how often weights were quantized."""
    return {name: _trained(mesh, device, **options) for name, options in TRAINED.items()}


def _trained(
    mesh: Any,
    device: torch.device,
    *,
    micro_batches: int = 1,
    reshard: bool = True,
    is_checkpointed: bool = False,
    is_prepared: bool = False,
    is_planted: bool = False,
    precision: str = "fp8",
) -> list[Any]:
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
    are_losses = losses == _losses(alone, device, micro_batches)
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return [are_losses, all(are_bytes(mine.full_tensor(), right) for mine, right in pairs), count.times]


def _losses(model: nn.Module, device: torch.device, micro_batches: int) -> list[float]:
    """Losses of two steps. Every rank has the same rows, so the mean over ranks is that of one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    draw, losses = torch.Generator().manual_seed(1), []
    for _ in range(2):
        for _ in range(micro_batches):
            x = torch.randn(T, K, generator=draw).bfloat16().to(device)
            loss = model(x).float().square().mean() / micro_batches
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses
