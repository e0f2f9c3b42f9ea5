"""Expert weights that were quantized before, for both passes of a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..gemm.gathered_weights import GatheredWeights, multipliable
from ..runtime.checks import check_weights, fp8_dtype_for
from .fp8_steps import quantized_both_ways


@dataclass(frozen=True)
class ExpertWeights:
    """Weights and their FP8 values, which :func:`~fp8tune_kernels.moe.layer.moe_layer` takes in place of weights.

    They are those of the weights at the time of quantization: nothing notices when the weights change.
    """

    weights: Tensor
    """(E, rows, columns), row-major, or ``.mT`` of row-major weights. Gradients reach it."""
    codes: Tensor
    """FP8 values (E, columns, rows), a view."""
    scales: Tensor
    """One per row of each expert."""
    transposed: Tensor | None
    """FP8 values transposed in memory: (E, rows, columns), a view. None: each backward pass makes them."""
    transposed_scales: Tensor | None
    """One per column, the same for a whole expert; None where the rows' scales are factors of a gradient."""


def quantize_gate_up(w13: Tensor, float8_dtype: torch.dtype | None = None) -> ExpertWeights:
    """Quantize the weights of gate and up, (E, 2N, K), for both passes: row-major, or ``.mT`` of row-major weights."""
    codes, scales, transposed, _ = _quantized("w13", w13, False, float8_dtype)
    return ExpertWeights(w13, codes, scales, transposed, None)


def quantize_down(w2: Tensor, float8_dtype: torch.dtype | None = None) -> ExpertWeights:
    """Quantize the weights of down, (E, K, N), for both passes: row-major, or ``.mT`` of row-major weights."""
    return ExpertWeights(w2, *_quantized("w2", w2, True, float8_dtype))


def of_gathered(name: str, w: GatheredWeights) -> ExpertWeights:
    """Return ``w13`` or ``w2`` with the FP8 values that were made after its all-gather.

    Raises ValueError for values of another recipe, RuntimeError for weights that have changed in place since.
    """
    gathered = multipliable(w)
    if gathered.recipe != "folded":
        problem = f"{name} was quantized for recipe {gathered.recipe!r} after its all-gather"
        raise ValueError(f"{problem}, wanted quantize_after_all_gather(..., recipe='folded')")
    codes, scales, by_rows = gathered.codes
    # those of w2 have a scale per row: the backward pass transposes again, to one scale per expert
    return ExpertWeights(gathered.weights.mT, codes, scales, by_rows if name == "w13" else None, None)


def check_stored(name: str, w: Tensor) -> None:
    """Raise ValueError unless weights (E, rows, columns) are row-major, or the transposed view of such."""
    is_view = w.dim() == 3 and w.mT.is_contiguous()
    check_weights(name, w.mT if is_view else w, as_stored=True)


def _quantized(name: str, w: Tensor, one_scale: bool, float8_dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    check_stored(name, w)
    with torch.no_grad():
        return quantized_both_ways(w.detach(), one_scale, fp8_dtype_for(w.device, float8_dtype))
