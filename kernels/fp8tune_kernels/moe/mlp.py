"""The MLPs of all experts on rows that are sorted by expert, as expert parallelism delivers them.

It is :func:`.layer.moe_layer` without its order of rows and its sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.checks import check_ends, check_offsets
from .expert_weights import ExpertWeights
from .layer import run_layer

__all__ = ["fp8_moe_mlp"]


def fp8_moe_mlp(
    x: Tensor,
    w13: Tensor | ExpertWeights,
    w2: Tensor | ExpertWeights,
    offs: Tensor,
    *,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    row_weights: Tensor | None = None,
    activation: str = "swiglu",
    layout: str = "halves",
    recompute: str = "none",
    keep_weights: bool = True,
    float8_dtype: torch.dtype | None = None,
) -> Tensor:
    """Run each row through the MLP of its expert in FP8 and return (M, K), bfloat16; zeros past ``offs[-1]``.

    Differentiable once, in all operands but ``offs``.

    x            (M, K), row-major: the rows of expert after expert
    offs         (E,), int32: the end row of each expert's group, non-decreasing, at most M; groups may be empty
    row_weights  (M,), floating-point: a router's weight for each row; None for ones

    Other arguments are those of ``moe_layer``, and so are its errors. Also raises ValueError for other ``offs`` and
    ``row_weights``, on a CPU for the values of ``offs`` as well.
    """
    check_offsets(offs, x.device)
    if x.is_cpu and not torch.compiler.is_compiling():
        check_ends(offs, x.shape[0])
    experts = (w13 if isinstance(w13, Tensor) else w13.weights).shape[0]
    if offs.shape[0] != experts:
        raise ValueError(f"offs has {offs.shape[0]} groups, wanted {experts}: one for each expert of w13")
    weights = x.new_ones(x.shape[0], dtype=torch.float32) if row_weights is None else row_weights.contiguous()
    if weights.shape != x.shape[:1] or not weights.is_floating_point() or weights.device != x.device:
        problem = f"{weights.dtype} of shape {tuple(weights.shape)} on {weights.device}"
        raise ValueError(f"row_weights is {problem}, wanted floating-point values ({x.shape[0]},) on {x.device}")
    ids = offs
    if b2 is not None:  # its gradients need the expert of each row
        rows = torch.arange(x.shape[0], dtype=offs.dtype, device=offs.device)
        ids = torch.searchsorted(offs, rows, right=True, out_int32=True)[:, None]  # past the last expert: of none
        weights = weights[:, None]
    return run_layer(
        x, w13, w2, ids, weights, b13, b2, activation, layout, "fp8", recompute, keep_weights, None, None, float8_dtype
    )
