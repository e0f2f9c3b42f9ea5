"""What ``fp8_moe_mlp`` is given: weights or codes of them, and the checks of all operands before any launch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.checks import check_matrix, check_offsets, check_weights
from .operands import are_multiples
from .quantized_weights import QuantizedWeights

__all__ = ["check_layer", "given_weights"]


def given_weights(
    name: str, w: Tensor | QuantizedWeights, float8_dtype: torch.dtype | None
) -> tuple[Tensor, tuple[Tensor, ...], torch.dtype | None]:
    """Weights as they lie, (E, rows, columns), codes of them that were made before, and the dtype of those.

    Raises ValueError for weights that were quantized for another recipe, layout or dtype.
    """
    if isinstance(w, Tensor):
        return w, (), float8_dtype
    if w.recipe != "folded":
        raise ValueError(f"{name} was quantized for recipe {w.recipe!r}, wanted quantize_weights(w, recipe='folded')")
    if w.layout != "ENK":
        raise ValueError(f"{name} was quantized as {w.layout}, wanted weights that lie as (E, rows, columns)")
    if float8_dtype not in (None, w.float8_dtype):
        raise ValueError(f"float8_dtype is {float8_dtype}, wanted {w.float8_dtype}: {name} was quantized to it")
    return w.weights.transpose(1, 2), w.codes, w.float8_dtype


def check_layer(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    offs: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    row_weights: Tensor | None,
) -> None:
    """Raise ValueError, naming the argument, unless the operands are those of one MLP of E experts."""
    check_matrix("x", x)
    check_weights("w13", w13, as_stored=True)
    check_weights("w2", w2, as_stored=True)
    check_offsets(offs, x.device)
    (M, K), (E, C, _) = x.shape, w13.shape
    for name, w, wanted in (("w13", w13, (E, C, K)), ("w2", w2, (E, K, C // 2))):
        if tuple(w.shape) != wanted or C % 2:
            raise ValueError(f"{name} has shape {tuple(w.shape)}, wanted (E, 2N, K) and (E, K, N) beside x of K={K}")
        if w.device != x.device:
            raise ValueError(f"{name} is on {w.device}, wanted {x.device} as x")
    if not are_multiples(C // 2, K):
        raise ValueError(f"w13 has N={C // 2} and K={K}, wanted positive multiples of 16")
    if offs.shape[0] != E:
        raise ValueError(f"offs has {offs.shape[0]} groups, wanted {E}: one for each expert of w13")
    for name, bias, size in (("b13", b13, (E, C)), ("b2", b2, (E, K)), ("row_weights", row_weights, (M,))):
        if bias is not None and (tuple(bias.shape) != size or not bias.is_floating_point() or bias.device != x.device):
            given = f"{bias.dtype} of shape {tuple(bias.shape)} on {bias.device}"
            raise ValueError(f"{name} is {given}, wanted floating-point values of shape {size} on {x.device}")
