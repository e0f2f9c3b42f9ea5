"""``colwise-3d``: quantize expert weights to FP8 with one scale per expert and output column; the layout stays.

    amax[e, n]      = max over k of |w[e, k, n]|
    scales[e, 0, n] = scale of amax[e, n]                      see :mod:`.arithmetic`
    q[e, k, n]      = fp8(clamp(w[e, k, n] * scales[e, 0, n]))

    w       (E, K, N), strides (K*N, 1, K), bfloat16, float16 or float32     see :mod:`.weights`
    q       (E, K, N), strides (K*N, 1, K): the column-major right operand of the forward's scaled grouped GEMM
    scales  (E, 1, N), float32; a GEMM is given the reciprocals

K is contiguous: in memory the columns of all experts are the E*N rows of one row-major matrix. So ``rowwise-2d``'s
kernel does the work, and reads each column once where it fits in registers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..catalog import SPANS
from ..edges import declared, edge, long_tail, past_half
from ..runtime.ops import Inputs, Tensors, register
from ..spec import SCALE_MODES, KernelSpec, NamedInts
from . import rowwise_2d, weights

__all__ = ["SPEC", "quantize_colwise_3d"]


def quantize_colwise_3d(
    w: torch.Tensor, *, float8_dtype: torch.dtype | None = None, power_of_two: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each column of each expert's ``w``; returns ``(q, scales)`` as the module and the package say."""
    return _operator(w, float8_dtype, power_of_two)


def reference(w: torch.Tensor, float8_dtype: torch.dtype, power_of_two: bool) -> Tensors:
    """The same in plain torch, an expert at a time: all of them in float32 would not fit beside large weights."""
    q, scales = outputs(w, float8_dtype, power_of_two)
    for columns, codes, scale in zip(w.mT, q.mT, scales.mT, strict=True):
        found = rowwise_2d.reference(columns, float8_dtype, power_of_two)
        codes.copy_(found[0])
        scale.copy_(found[1])
    return q, scales


def outputs(w: torch.Tensor, float8_dtype: torch.dtype, power_of_two: bool) -> Tensors:
    """Uninitialised ``q`` and ``scales``."""
    E, K, N = w.shape
    q = torch.empty_strided(w.shape, (K * N, 1, K), dtype=float8_dtype, device=w.device)
    return q, torch.empty(E, 1, N, dtype=torch.float32, device=w.device)


def launch(config: Mapping[str, int], inputs: Inputs, outputs: Tensors) -> None:
    """One launch: a program for every BLOCK_SIZE_N columns, whichever experts they belong to."""
    w, float8_dtype, power_of_two = inputs
    E, K, N = w.shape
    rowwise_2d.launch_rows(_of_rows(config), (w, *outputs), E * N, K, float8_dtype, power_of_two)


def _of_rows(config: Mapping[str, int]) -> dict[str, int]:
    """The config with its axes named as ``rowwise-2d`` names them."""
    names = {"BLOCK_SIZE_N": "BLOCK_SIZE", "BLOCK_SIZE_K": "BLOCK_SIZE_ITER"}
    return {names.get(name, name): value for name, value in config.items()}


SPEC = KernelSpec(
    name="colwise-3d",
    axes={
        "BLOCK_SIZE_N": (1, 2, 4, 8),
        "BLOCK_SIZE_K": (1024, 2048, 4096, 8192),
        "num_warps": (2, 4, 8, 16),
        "num_stages": (1, 2, 4),
    },
    default=NamedInts(BLOCK_SIZE_N=1, BLOCK_SIZE_K=8192, num_warps=4, num_stages=1),
    key=weights.KEY,
    span=SPANS["colwise-3d"],
    problems=weights.problems,
    inputs=weights.inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    interpreted={"E": 2, "N": 5, "K": 5003},  # no block divides either; columns stay longer than short tiles
    invalid=lambda config, shape, limits: rowwise_2d.invalid(_of_rows(config), shape, limits),
    edges=declared(
        edge("one column, huge values", "huge", E=1, N=1),
        edge("a block of columns and one more, long tails", E=1, N=17, K=long_tail("K")),
        edge("a prime, infinity", "infinite", E=1, N=7, K=past_half("K", 16)),
        edge("three columns, NaN", "nan", E=3, N=1, K=past_half("K", 16)),
        edge("zeros", "zeros", E=2, N=1),
        edge("one row, tiny values", "tiny", E=3, N=5, K=1),
        edge("a block of rows and one more past an aligned address", offset=1, E=1, N=5, K=past_half("K")),
    ),
    uses_fp8=True,
    scale_modes=SCALE_MODES,
)

_operator = register(SPEC, quantize_colwise_3d, weights.arguments, weights.key)
