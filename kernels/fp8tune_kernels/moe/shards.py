"""A layer of DTensors: what each rank computes of its shards, and how the results are placed.

On each dim of the mesh the placements of w13 and x decide. Tokens are x, ``topk_ids`` and ``topk_weights``:

    w13 (E, 2N, K)  w2 (E, K, N)  tokens     out        gradients of tokens  gradients of weights
    Replicate       Replicate     Replicate  Replicate  Replicate            Replicate
    Replicate       Replicate     Shard(0)   Shard(0)   Shard(0)             Partial
    Shard(0), E     Shard(0)      Replicate  Partial    Partial              Shard(0)
    Shard(1), 2N    Shard(2), N   Replicate  Partial    Partial              Shard(1), Shard(2)

Operands in another placement are redistributed to that of the table. b13 lies as dims 0 and 1 of w13, b2 as dim 0 of
w2. The last line needs the layout "interleaved", where a shard has gate and up of the same columns, and no b2, which
each rank would add.

A rank quantizes its shards alone. Scales and results are the bytes of one device where no sum over experts or columns
is cut: there partial results are rounded to bfloat16 before they are added.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, cast

from torch import Size, Tensor

from ..gemm.shards import PLAIN, local_shard, range_of_shard

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

P = ParamSpec("P")
TOKENS = ("x", "topk_ids", "topk_weights")
WEIGHTS = ("w13", "w2", "b13", "b2")


class Rule(NamedTuple):
    """Placements of operands and results on one dim of a mesh."""

    tokens: Placement
    weights: Mapping[str, Placement]
    out: Placement
    are_gradients_partial: bool
    """Gradients of weights; otherwise they lie as the weights do."""


def layer_on_shards(layer: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Return a layer that takes DTensors as well, differentiable as it was.

    Raises ValueError for a DTensor beside plain operands or buffers, for operands on several meshes, and for w13 whose
    shards hold gate and up of different columns.
    """
    any_layer: Callable[..., Tensor] = layer

    @functools.wraps(layer)
    def either(x: Tensor, w13: Any, w2: Any, topk_ids: Tensor, topk_weights: Tensor, **options: Any) -> Tensor:
        if type(x) in PLAIN and (type(w13) in PLAIN or not isinstance(w13, Tensor)):
            return any_layer(x, w13, w2, topk_ids, topk_weights, **options)
        operands = {"x": x, "w13": w13, "w2": w2, "topk_ids": topk_ids, "topk_weights": topk_weights}
        return _on_shards(any_layer, operands, options)

    return cast(Callable[P, Tensor], either)


def choose_on_shards(choose: Callable[P, tuple[Tensor, Tensor]]) -> Callable[P, tuple[Tensor, Tensor]]:
    """Return a choice of experts that takes logits (T, E) as a DTensor as well: rows may be sharded, columns not."""
    any_choose: Callable[..., tuple[Tensor, Tensor]] = choose

    @functools.wraps(choose)
    def either(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        if type(logits) in PLAIN:
            return any_choose(logits, top_k)
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if not isinstance(logits, DTensor):
            return any_choose(logits, top_k)
        placements = [Shard(0) if placement.is_shard(0) else Replicate() for placement in logits.placements]
        chosen = any_choose(local_shard(logits, placements, placements), top_k)
        mesh, shape = logits.device_mesh, Size((logits.shape[0], top_k))
        layout: Any = {"run_check": False, "shape": shape, "stride": (top_k, 1)}
        ids, weights = (DTensor.from_local(tensor, mesh, placements, **layout) for tensor in chosen)
        return ids, weights

    return cast(Callable[P, tuple[Tensor, Tensor]], either)


def _on_shards(layer: Callable[..., Tensor], operands: dict[str, Any], options: dict[str, Any]) -> Tensor:
    from torch.distributed.tensor import DTensor, Partial

    operands |= {name: options.pop(name) for name in ("b13", "b2") if options.get(name) is not None}
    sharded = [name for name, operand in operands.items() if isinstance(operand, DTensor)]
    if not sharded:
        return layer(**operands, **options)
    for name, operand in operands.items():
        if not isinstance(operand, DTensor):
            raise ValueError(f"{name} must be a DTensor as {sharded[0]}, got a plain operand: or give all to_local()")
        if operand.device_mesh != operands[sharded[0]].device_mesh:
            raise ValueError(f"{name} must be on the mesh of {sharded[0]}, got {operand.device_mesh}")
    if buffers := [name for name in ("grad_w13", "grad_w2") if options.get(name) is not None]:
        raise ValueError(f"{buffers[0]} must be None beside DTensors: their gradients may be partial sums")
    x, w13 = operands["x"], operands["w13"]
    mesh, layout = w13.device_mesh, options.get("layout", "halves")
    rules = [_rule(x.placements[dim], w13.placements[dim], layout, "b2" in operands) for dim in range(mesh.ndim)]
    local = {}
    for name, operand in operands.items():
        if name in TOKENS:
            expected, gradients = [rule.tokens for rule in rules], [rule.out for rule in rules]
        else:
            expected = [rule.weights[name] for rule in rules]
            gradients = [Partial() if rule.are_gradients_partial else rule.weights[name] for rule in rules]
        local[name] = local_shard(operand, expected, gradients)
    by_expert = [dim for dim, rule in enumerate(rules) if rule.weights["w13"].is_shard(0)]
    if by_expert:
        first, _ = range_of_shard(w13.shape[0], mesh, by_expert)
        local["topk_ids"] = local["topk_ids"] - first  # ids of other ranks are negative or past the last expert
    out, placements = layer(**local, **options), [rule.out for rule in rules]
    return DTensor.from_local(out, mesh, placements, run_check=False, shape=x.shape, stride=(x.shape[1], 1))


def _rule(x: Placement, w13: Placement, layout: str, has_b2: bool) -> Rule:
    """Return a line of the table."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if w13.is_shard(0):
        return Rule(Replicate(), dict.fromkeys(WEIGHTS, Shard(0)), Partial(), False)
    if w13.is_shard(1):
        if layout != "interleaved" or has_b2:
            problem = "b2, which each rank would add" if has_b2 else f"layout {layout!r}, whose shards part gate and up"
            raise ValueError(f"w13 must not be sharded on its rows beside {problem}: give all operands to_local()")
        weights = {"w13": Shard(1), "w2": Shard(2), "b13": Shard(1)}
        return Rule(Replicate(), weights, Partial(), False)
    tokens = Shard(0) if x.is_shard(0) else Replicate()
    return Rule(tokens, dict.fromkeys(WEIGHTS, Replicate()), tokens, tokens.is_shard())
