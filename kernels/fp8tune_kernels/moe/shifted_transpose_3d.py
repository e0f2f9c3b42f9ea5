"""``shifted-transpose-3d``: transpose FP8 values of expert weights, and bring each expert's rows to one scale.

    least[e]              = min over n of scales[e, n], of those that are positive and finite; 1 if none is
    q_transposed[e, n, k] = fp8(float32(q[e, k, n]) * least[e] / scales[e, n])
    scales_transposed[e, k] = least[e]

    q                  (E, K, N), strides (K*N, 1, K), FP8: weights (E, N, K) with a scale per row
    scales             E*N contiguous values of float32: what the rows were multiplied by, powers of two
    q_transposed       (E, N, K), strides (N*K, 1, N): what a GEMM over N reads, memory (E, K, N)
    scales_transposed  (E, K), float32

A gradient that is multiplied by such weights needs no factor of the expert, so it is cast once per token. Shifts are
powers of two, at most 1: exact but for values that become subnormal. N is a multiple of 16.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from ..edges import declared, edge
from ..quantize import transposed_codes, transposed_codes_3d, weights
from ..quantize.aligned_blocks import inverse_of
from ..quantize.arithmetic import FP8_MAX, reference_cast
from ..quantize.factors import check_scales, random_powers
from ..quantize.transposed_codes import Tile, random_codes, transpose_tile
from ..runtime.launching import launch_kernel
from ..runtime.ops import Inputs, Tensors, register
from ..spec import KernelSpec, NamedInts, Problem

__all__ = ["SPEC", "transpose_codes_to_one_scale"]

SCALES = {"BLOCK_SIZE": 1024, "num_warps": 4}
"""Config of the first launch, which reads 4 bytes for each row of the weights."""


@triton.jit
def expert_scales_kernel(
    scales_ptr: tl.tensor,  # (E, N)
    shifts_ptr: tl.tensor,  # (E, N)
    out_ptr: tl.tensor,  # (E, K)
    N: tl.tensor,
    K: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """Find one expert's least scale, and the shifts of its rows."""
    expert, lanes = tl.program_id(0), tl.arange(0, BLOCK_SIZE)
    scales, infinity = scales_ptr + expert * N, float("inf")
    least = tl.full((BLOCK_SIZE,), infinity, tl.float32)
    for first in range(0, N, BLOCK_SIZE):
        scale = tl.load(scales + first + lanes, mask=first + lanes < N, other=infinity)
        least = tl.where((scale > 0) & (scale < least), scale, least)
    smallest = tl.min(least, 0)
    smallest = tl.where(smallest < infinity, smallest, 1.0)
    for first in range(0, N, BLOCK_SIZE):
        scale = tl.load(scales + first + lanes, mask=first + lanes < N, other=1.0)
        # exact: of powers of two
        tl.store(shifts_ptr + expert * N + first + lanes, inverse_of(scale) * smallest, mask=first + lanes < N)
    for first in range(0, K, BLOCK_SIZE):
        least_of_all = tl.full((BLOCK_SIZE,), 0.0, tl.float32) + smallest
        tl.store(out_ptr + expert * K + first + lanes, least_of_all, mask=first + lanes < K)


@triton.jit(do_not_specialize=["E"])  # so that the binary that few experts check is the one that many run
def shifted_transpose_3d_kernel(
    q_ptr: tl.tensor,  # (E, K, N), strides (K*N, 1, K)
    shifts_ptr: tl.tensor,  # (E, N)
    transposed_ptr: tl.tensor,  # (E, N, K), strides (N*K, 1, N)
    E: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    FP8_MAX: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,  # of N
    BLOCK_SIZE_K: tl.constexpr,
) -> None:
    """Transpose one tile of an expert; programs of the same rows are neighbours."""
    across, down = tl.cdiv(K, BLOCK_SIZE_K), tl.cdiv(N, BLOCK_SIZE_M)
    expert = (tl.program_id(0) // (across * down)).to(tl.int64)
    row = tl.program_id(0) // across % down * BLOCK_SIZE_M
    transpose_tile(
        Tile(
            q_ptr + (expert * N + row) * K,
            transposed_ptr + (expert * N * K + row),
            shifts_ptr + expert * N + row,
            N - row,
            tl.program_id(0) % across * BLOCK_SIZE_K,
            K,
            N,
        ),
        N - row,
        FP8_MAX,
        1,  # words of shifted values came out wrong: see transposed_codes
        BLOCK_SIZE_M,
        BLOCK_SIZE_K,
    )


def transpose_codes_to_one_scale(q: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(q_transposed, scales_transposed)`` as the module describes them.

    Raises ValueError, before any launch, for other dtypes, ranks and strides, and for N that is no multiple of 16.
    """
    return _operator(q, scales)


def reference(q: torch.Tensor, scales: torch.Tensor) -> Tensors:
    """Shift and transpose in plain torch."""
    transposed, scales_transposed = outputs(q, scales)
    of_rows = scales.view(q.shape[0], q.shape[2])
    usable = (of_rows > 0) & of_rows.isfinite()
    least = of_rows.masked_fill(~usable, float("inf")).amin(1, keepdim=True)
    least = torch.where(least.isinf(), 1.0, least)
    shifted = reference_cast(q.mT, (of_rows.reciprocal() * least).unsqueeze(2), q.dtype)
    transposed.view(torch.uint8).copy_(shifted.view(torch.uint8))
    scales_transposed.copy_(least.expand_as(scales_transposed))
    return transposed, scales_transposed


def inputs(problem: Problem, device: str) -> Inputs:
    """Return ``(q, scales)``."""
    E, N, K = (problem.shape[dim] for dim in "ENK")
    q = random_codes(problem, E * N, K, device).view(E, N, K).transpose(1, 2)
    return q, random_powers(problem, (E, N), device, 4, 14)


def outputs(q: torch.Tensor, scales: torch.Tensor) -> Tensors:
    """Return uninitialized ``q_transposed`` and ``scales_transposed``."""
    E, K, _ = q.shape
    return *transposed_codes_3d.SPEC.outputs(q), scales.new_empty(E, K)


def launch(config: Mapping[str, int], inputs: Inputs, outputs: Tensors) -> None:
    """Launch two kernels: one finds the shifts, one transposes a tile per program."""
    (q, scales), (transposed, scales_transposed) = inputs, outputs
    E, K, N = q.shape
    if programs := E * -(-N // config["BLOCK_SIZE_M"]) * -(-K // config["BLOCK_SIZE_K"]):
        shifts = scales.new_empty(E, N)
        launch_kernel(expert_scales_kernel, E, (scales, shifts, scales_transposed), (N, K), (), SCALES)
        tensors = (q, shifts, transposed)
        launch_kernel(shifted_transpose_3d_kernel, programs, tensors, (E, N, K), (FP8_MAX[q.dtype],), config)


SPEC = KernelSpec(
    name="shifted-transpose-3d",
    axes={
        "BLOCK_SIZE_M": (32, 64, 128),
        "BLOCK_SIZE_K": (32, 64, 128, 256),
        "num_warps": (1, 2, 4, 8),
        "num_stages": (1,),
    },
    default=NamedInts(BLOCK_SIZE_M=128, BLOCK_SIZE_K=64, num_warps=4, num_stages=1),
    key=weights.KEY,
    problems=weights.problems_of_16_rows,
    inputs=inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    interpreted={"E": 2, "N": 144, "K": 101},  # no block divides either; an expert has several tiles
    invalid=lambda config, shape, limits: transposed_codes.invalid(config, shape["K"], limits),
    edges=declared(
        edge("a block and 16 more", E=2, N=272, K=80),
        edge("a few rows, scales that are infinite or 0", "infinite", E=2, N=48, K=272),
        edge("NaN", "nan", E=2, N=144, K=48),
        edge("the least rows, tiny scales", "tiny", E=3, N=16, K=37),
        edge("one column", E=2, N=272, K=1),
        edge("more rows than are looked at together", E=1, N=1040, K=48),
        edge("a block and one more past an aligned address", offset=1, E=2, N=144, K=65),
    ),
    in_dtypes=("float8_e4m3fn", "float8_e4m3fnuz"),
)


def _arguments(q: torch.Tensor, scales: torch.Tensor) -> Inputs:
    transposed_codes_3d.check_codes(q)
    check_scales("scales", scales, q.shape[0] * q.shape[2], q.device)
    return q, scales


def key(q: torch.Tensor, scales: torch.Tensor) -> tuple[int, ...]:
    """Return the lookup key of inputs."""
    E, K, N = q.shape
    return E, K, N


_operator = register(SPEC, transpose_codes_to_one_scale, _arguments, key)
