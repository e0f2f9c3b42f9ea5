"""Sharding rules for the operators ``torch.ops.fp8tune``: importing this module gives them to DTensor.

``fp8_grouped_mm`` takes DTensors without it (:mod:`fp8tune_kernels.gemm.shards`). It is for those who call
quantizers on DTensors themselves. A rule says how outputs lie where inputs lie so, on one dim of a mesh; DTensor
redistributes what lies otherwise.

    operator                                    sharded inputs                          outputs
    quantize_rowwise_2d, quantize_mxfp8_dim0    x on rows                               codes and scales on rows
    quantize_mxfp8_dim1                         x on columns                            codes on columns, scales on 0
    quantize_colwise_3d                         w on E, or on N                         codes and scales likewise
    quantize_transpose_3d_...                   w on E, or on K                         codes and scales likewise
    quantize_mxfp8_dim1_3d...                   w on E, or on K                         codes likewise, scales on E or 1

Everything may be replicated, and what is not named here has to be: the scales of columns of groups lie as one row, in
which no dim is that of the columns.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

from .runtime.ops import OPERATORS

__all__ = ["RULES"]

Placements = list[Placement | None]

Case = tuple[Sequence[Placement], Sequence[Placement]]
"""Placements of outputs and of the tensors among the inputs, given or not."""

_R, _ROWS, _COLUMNS, _LAST = Replicate(), Shard(0), Shard(1), Shard(2)

RULES: dict[str, tuple[Case, ...]] = {
    "quantize_rowwise_2d": (((_ROWS, _ROWS), (_ROWS,)),),
    "quantize_mxfp8_dim0": (((_ROWS, _ROWS), (_ROWS,)),),
    "quantize_mxfp8_dim1": (((_COLUMNS, _ROWS), (_COLUMNS,)),),
    "quantize_colwise_3d": (((Shard(0), Shard(0)), (Shard(0),)), ((_LAST, _LAST), (_LAST,))),
    "quantize_transpose_3d_atomic": (((Shard(0), Shard(0)), (Shard(0),)), ((_LAST, _LAST), (Shard(1),))),
    "quantize_transpose_3d_reduction": (((Shard(0), Shard(0)), (Shard(0),)), ((_LAST, _LAST), (Shard(1),))),
    "quantize_mxfp8_dim1_3d": (((Shard(0), Shard(0)), (Shard(0),)), ((_LAST, Shard(1)), (_LAST,))),
    "quantize_mxfp8_dim1_3d_via_2d": (((Shard(0), Shard(0)), (Shard(0),)), ((_LAST, Shard(1)), (_LAST,))),
    "quantize_rowwise": (),
    "quantize_colwise": (),
    "quantize_colwise_dual": (),
}
"""Operator -> the cases beside that in which everything is replicated."""


def _register(name: str) -> None:
    operator = getattr(OPERATORS, name).default
    kinds, outputs = ["Tensor" in str(item.type) for item in operator._schema.arguments], len(operator._schema.returns)

    @register_sharding(operator)
    def acceptable(*arguments: Any) -> Sequence[tuple[Placements, Placements]]:
        """Return the cases that these inputs may be brought to, with None for what is no tensor, or None."""
        cases: list[Case] = [((_R,) * outputs, ()), *RULES[name]]
        answer: list[tuple[Placements, Placements]] = []
        for out, into in cases:
            placements = iter((*into, *(_R for _ in kinds)))
            spread = [next(placements) if kind else None for kind in kinds[: len(arguments)]]
            are_tensors = [hasattr(argument, "placements") for argument in arguments]
            answer.append(
                ([*out], [item if is_one else None for item, is_one in zip(spread, are_tensors, strict=True)])
            )
        return answer


def _load() -> None:
    """Define all operators, then register."""
    package = sys.modules[__name__.rpartition(".")[0]]
    for name in package.__all__:
        getattr(package, name)
    for name in RULES:
        _register(name)


_load()
