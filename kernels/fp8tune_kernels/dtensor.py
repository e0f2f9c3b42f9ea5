"""Sharding rules for the operators ``torch.ops.fp8tune``: importing this module gives them to DTensor.

``fp8_grouped_mm`` takes DTensors without it (:mod:`fp8tune_kernels.gemm.shards`). It is for those who call operators or
quantizers on DTensors themselves. A rule says how outputs lie where inputs lie so, on one dim of a mesh; DTensor
redistributes what lies otherwise.

    operator                                    sharded inputs                          outputs
    quantize_rowwise_2d, quantize_mxfp8_dim0    x on rows                               codes and scales on rows
    quantize_mxfp8_dim1                         x on columns                            codes on columns, scales on 0
    quantize_colwise_3d                         w on E, or on N                         codes and scales likewise
    quantize_transpose_3d_...                   w on E, or on K                         codes and scales likewise
    quantize_colwise_transpose_3d               w on E                                  codes and scales on E
    quantize_mxfp8_dim1_3d...                   w on E, or on K                         codes likewise, scales on E or 1
    grouped_mm_forward                          B_t on N; A and B_t on K                on N; partial
    grouped_mm_input_gradient                   grad and B_t on N; B_t on K             partial; on K
    grouped_mm_weight_gradient                  grad on N; A on K                       on N; on K
    these three                                 all on rows and experts, with own offs  on rows, or on E

Everything may be replicated, and what is not named here has to be: the scales of columns of groups lie as one row, in
which no dim is that of the columns. Offs that are ``Shard(0)`` are each rank's own ends, on a mesh of one dim.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

from .runtime.ops import OPERATORS

__all__ = ["RULES"]

Placements = list[Placement | None]

Case = tuple[Sequence[Placement], Sequence[Placement]]
"""Placements of outputs and of the tensors among the inputs, given or not."""

_R, _P, _ROWS, _COLUMNS, _LAST = Replicate(), Partial(), Shard(0), Shard(1), Shard(2)

RULES: dict[str, tuple[Case, ...]] = {
    "quantize_rowwise_2d": (((_ROWS, _ROWS), (_ROWS,)),),
    "quantize_mxfp8_dim0": (((_ROWS, _ROWS), (_ROWS,)),),
    "quantize_mxfp8_dim1": (((_COLUMNS, _ROWS), (_COLUMNS,)),),
    "quantize_colwise_3d": (((Shard(0), Shard(0)), (Shard(0),)), ((_LAST, _LAST), (_LAST,))),
    "quantize_transpose_3d_atomic": (((Shard(0), Shard(0)), (Shard(0),)), ((_LAST, _LAST), (Shard(1),))),
    "quantize_transpose_3d_reduction": (((Shard(0), Shard(0)), (Shard(0),)), ((_LAST, _LAST), (Shard(1),))),
    "quantize_colwise_transpose_3d": (((Shard(0),) * 4, (Shard(0),)),),
    "quantize_mxfp8_dim1_3d": (((Shard(0), Shard(0)), (Shard(0),)), ((_LAST, Shard(1)), (_LAST,))),
    "quantize_mxfp8_dim1_3d_via_2d": (((Shard(0), Shard(0)), (Shard(0),)), ((_LAST, Shard(1)), (_LAST,))),
    "quantize_rowwise": (),
    "quantize_colwise": (),
    "quantize_colwise_dual": (),
    "quantize_rowwise_colwise": (),
    # A, B_t, offs; codes and scales of A and of B_t
    "grouped_mm_forward": (
        ((_COLUMNS,), (_R, _LAST, _R, _R, _R, _LAST, _LAST)),
        ((_P,), (_COLUMNS, Shard(1), _R, _COLUMNS, _R, Shard(1), _R)),
    ),
    # grad, B_t, offs; codes and scales of grad and of B_t, whose codes are (E, N, K)
    "grouped_mm_input_gradient": (
        ((_P,), (_COLUMNS, _LAST, _R, _COLUMNS, _R, Shard(1), _R)),
        ((_COLUMNS,), (_R, Shard(1), _R, _R, _R, _LAST, _LAST)),
    ),
    # grad, A, offs; codes and scales of grad and of A: scales of (E * columns) elements
    "grouped_mm_weight_gradient": (
        ((Shard(1),), (_COLUMNS, _R, _R)),
        ((_LAST,), (_R, _COLUMNS, _R)),
    ),
}
"""Operator -> the cases beside that in which everything is replicated."""


def _register(name: str) -> None:
    operator = getattr(OPERATORS, name).default
    arguments = operator._schema.arguments
    outputs = len(operator._schema.returns)

    @register_sharding(operator)
    def acceptable(*given: Any) -> Sequence[tuple[Placements, Placements]]:
        """Which of the cases these inputs may be brought to."""
        are_tensors = [hasattr(each, "placements") for each in given]
        offs = [each for argument, each in zip(arguments, given, strict=False) if argument.name == "offs"]
        tensors = sum("Tensor" in str(argument.type) for argument in arguments)
        cases: list[Case] = [((_R,) * outputs, (_R,) * tensors)]
        if offs and any(placement.is_shard() for placement in offs[0].placements):
            if len(offs[0].placements) > 1:
                raise ValueError("offs is sharded on a mesh of several dims: call fp8_grouped_mm, or on a submesh")
            cases = [((_ROWS,) * outputs, (_ROWS,) * tensors)]
        else:
            cases += [case for case in RULES[name] if _fits(case, arguments, are_tensors)]
        return [([*out], _spread(into, arguments, are_tensors)) for out, into in cases]


def _fits(case: Case, arguments: Sequence[Any], are_tensors: Sequence[bool]) -> bool:
    """Whether the case says how each of the tensors that are given lies."""
    among = [given for argument, given in zip(arguments, are_tensors, strict=False) if "Tensor" in str(argument.type)]
    return not any(among[len(case[1]) :])


def _spread(into: Sequence[Placement], arguments: Sequence[Any], are_tensors: Sequence[bool]) -> Placements:
    """A placement for each argument: None for what is no tensor, or not given."""
    placements = iter((*into, *(_R for _ in arguments)))
    spread: Placements = []
    for argument, is_tensor in zip(arguments, are_tensors, strict=False):
        placement = next(placements) if "Tensor" in str(argument.type) else None
        spread.append(placement if is_tensor else None)
    return spread


def _load() -> None:
    """Define all operators, then register."""
    package = sys.modules[__name__.rpartition(".")[0]]
    for name in package.__all__:
        getattr(package, name)
    for name in RULES:
        _register(name)


_load()
