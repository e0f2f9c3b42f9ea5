"""Layers of DTensors on each rank, beside one device."""

from __future__ import annotations

from typing import Any

import torch
from ranks import assert_placed, assert_refused
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fp8tune_kernels import choose_experts, moe_layer

T, K, N, E, TOP_K = 41, 48, 64, 4, 2  # rows of two ranks are not equally many

NAMES = ("x", "logits", "w13", "w2", "b13", "b2")
S0, S1, S2 = Shard(0), Shard(1), Shard(2)
WEIGHTS = ("w13", "w2", "b13", "b2")

SHARDED: dict[str, tuple[dict[str, Any], str, str]] = {
    "replicated": ({}, "R R R R R R R", ""),
    "rows": ({"x": S0, "logits": S0}, "S(0) S(0) S(0) P P P P", "w13 w2 b13 b2"),
    "rows of the router": ({"x": S0}, "S(0) S(0) R P P P P", "w13 w2 b13 b2"),
    "experts": (dict.fromkeys(WEIGHTS, S0), "P P R S(0) S(0) S(0) S(0)", "out x logits"),
    "experts, rows to gather": ({"x": S0, "logits": S0, "w13": S0}, "P S(0) S(0) S(0) R R R", "out x logits"),
    "columns": ({"w13": S1, "w2": S2, "b13": S1}, "P P R S(1) S(2) S(1)", "out x logits w13"),
    "no tokens": ({"x": S0, "logits": S0}, "S(0) S(0) S(0) P P P P", ""),
    "no rows on a rank": (dict.fromkeys(WEIGHTS, S0), "P P R S(0) S(0) S(0) S(0)", "out x logits"),
}
"""Name -> placements of operands that are not replicated; those of the output and of each gradient, which goes back to
where its operand was; results that are a sum over ranks, or read one. All others are one device's bytes."""


def operands(device: torch.device, *, tokens: int, unused: slice, has_b2: bool) -> dict[str, Tensor]:
    """Random operands of a layer as one device has them, of which some experts get no token."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=draw) * std).bfloat16().to(device)

    tensors = (normal(tokens, K), normal(tokens, E), normal(E, 2 * N, K, std=K**-0.5), normal(E, K, N, std=N**-0.5))
    inputs = dict(zip(NAMES, (*tensors, normal(E, 2 * N), normal(E, K)), strict=True))
    inputs["logits"][:, unused] = -20
    return inputs if has_b2 else {name: tensor for name, tensor in inputs.items() if name != "b2"}


def layer_of(leaves: dict[str, Tensor], **options: Any) -> Tensor:
    """The router's choice and the layer."""
    ids, weights = choose_experts(leaves["logits"], TOP_K)
    biases = {name: leaves.get(name) for name in ("b13", "b2")}
    return moe_layer(leaves["x"], leaves["w13"], leaves["w2"], ids, weights, **biases, **options)


def results(inputs: dict[str, Tensor], grad: Tensor, **options: Any) -> dict[str, Tensor]:
    """The output, and the gradients of all operands."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    out = layer_of(leaves, **options)
    gradients = torch.autograd.grad(out, list(leaves.values()), grad)
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def layers(mesh: Any, device: torch.device) -> None:
    """Each way to shard, in both precisions."""
    for case, (sharded, placed, sums) in SHARDED.items():
        tokens = 0 if case == "no tokens" else T
        unused = slice(2, 4) if case == "no rows on a rank" else slice(1, 2)
        inputs = operands(device, tokens=tokens, unused=unused, has_b2=case != "columns")
        grad = torch.randn(tokens, K, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
        for precision in ("fp8", "bf16"):
            options = {"precision": precision, "layout": "interleaved"}
            right = results(inputs, grad, **options)
            spread = {name: distribute_tensor(x, mesh, [sharded.get(name, Replicate())]) for name, x in inputs.items()}
            mine = results(spread, distribute_tensor(grad, mesh, [Replicate()]), **options)
            for name, place in zip(right, placed.split(), strict=True):
                label = f"{case}, {precision}, {name}"
                assert_placed(label, mine[name], right[name], place.replace("P", "P(sum)"), is_sum=name in sums.split())


def compiled_layer(mesh: Any, device: torch.device) -> None:
    """torch.compile gives results with sharded experts in the bytes of the eager call."""
    inputs = operands(device, tokens=T, unused=slice(1, 2), has_b2=True)
    leaves = {
        name: distribute_tensor(tensor, mesh, [SHARDED["experts"][0].get(name, Replicate())]).requires_grad_()
        for name, tensor in inputs.items()
    }
    grad = distribute_tensor(torch.ones(T, K, dtype=torch.bfloat16, device=device), mesh, [Replicate()])
    both = []
    for function in (layer_of, torch.compile(layer_of, backend="aot_eager", fullgraph=True, dynamic=False)):
        out = function(leaves)
        both.append([out, *torch.autograd.grad(out, list(leaves.values()), grad)])
    for eager, traced in zip(*both, strict=True):
        assert torch.equal(eager.to_local(), traced.to_local())


def refused_layers(mesh: Any, device: torch.device) -> None:
    """Operands that are no layer of DTensors."""
    inputs = operands(device, tokens=T, unused=slice(1, 2), has_b2=True)
    spread = {name: distribute_tensor(tensor, mesh, [Replicate()]) for name, tensor in inputs.items()}
    ids, weights = choose_experts(spread["logits"], TOP_K)
    whole = {"x": spread["x"], "w13": spread["w13"], "w2": spread["w2"], "topk_ids": ids, "topk_weights": weights}
    rows = distribute_tensor(inputs["w13"], mesh, [Shard(1)])
    plain = "got a plain operand: or give all to_local()"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"x": inputs["x"]}, f"x must be a DTensor as w13, {plain}"),
        ({"b13": inputs["b13"]}, f"b13 must be a DTensor as x, {plain}"),
        ({"w13": rows}, "w13 must not be sharded on its rows beside layout 'halves', whose shards part gate and up"),
        ({"w13": rows, "layout": "interleaved", "b2": spread["b2"]}, "w13 must not be sharded on its rows beside b2"),
        ({"grad_w2": torch.zeros_like(inputs["w2"])}, "grad_w2 must be None beside DTensors"),
    ]
    for change, says in cases:
        assert_refused(says, moe_layer, **{**whole, **change})
