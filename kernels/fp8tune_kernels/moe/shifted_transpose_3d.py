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

from typing import Any

import torch
import triton
import triton.language as tl

from ..edges import edge
from ..quantize import transposed_codes, transposed_codes_3d, weights
from ..quantize.aligned_blocks import inverse_of
from ..quantize.arithmetic import FP8_MAX, reference_cast
from ..quantize.factors import random_powers
from ..quantize.transposed_codes import Tile, random_codes, transpose_tile
from ..runtime import declare
from ..runtime.declare import Call, Config
from ..spec import Problem

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


def launch(config: Config, call: Call) -> None:
    """Launch two kernels: one finds the shifts, one transposes a tile per program."""
    if programs := call.E * -(-call.N // config["BLOCK_SIZE_M"]) * -(-call.K // config["BLOCK_SIZE_K"]):
        shifts = call.scales.new_empty(call.E, call.N)
        call.run(expert_scales_kernel, call.E, SCALES, shifts=shifts, out=call.scales_transposed)
        maximum = FP8_MAX[call.q.dtype]
        call.run(shifted_transpose_3d_kernel, programs, config, transposed=call.q_transposed, FP8_MAX=maximum)


def reference(call: Call) -> None:
    """Shift and transpose in plain torch."""
    of_rows = call.scales.view(call.E, call.N)
    usable = (of_rows > 0) & of_rows.isfinite()
    least = of_rows.masked_fill(~usable, float("inf")).amin(1, keepdim=True)
    least = torch.where(least.isinf(), 1.0, least)
    shifted = reference_cast(call.q.mT, (of_rows.reciprocal() * least).unsqueeze(2), call.q.dtype)
    call.q_transposed.view(torch.uint8).copy_(shifted.view(torch.uint8))
    call.scales_transposed.copy_(least.expand_as(call.scales_transposed))


def inputs(problem: Problem, device: str) -> dict[str, Any]:
    """Return random codes and scales."""
    E, N, K = (problem.shape[dim] for dim in "ENK")
    q = random_codes(problem, E * N, K, device).view(E, N, K).transpose(1, 2)
    return {"q": q, "scales": random_powers(problem, (E, N), device, 4, 14)}


SPEC = declare.kernel(
    name="shifted-transpose-3d",
    arguments=(
        declare.Argument("q", dims=("E", "K", "N"), check=transposed_codes_3d.check_codes),
        declare.tensor("scales", "E * N"),
    ),
    outputs=(
        declare.Output("q_transposed", ("E", "N", "K"), "q.dtype", transposed=True),
        declare.float32("scales_transposed", "E", "K"),
    ),
    inputs=inputs,
    launch=launch,
    reference=reference,
    axes={
        "BLOCK_SIZE_M": (32, 64, 128),
        "BLOCK_SIZE_K": (32, 64, 128, 256),
        "num_warps": (1, 2, 4, 8),
        "num_stages": (1,),
    },
    default={"BLOCK_SIZE_M": 128, "BLOCK_SIZE_K": 64, "num_warps": 4, "num_stages": 1},
    key=weights.KEY,
    problems=weights.problems_of_16_rows,
    interpreted={"E": 2, "N": 144, "K": 101},  # no block divides either; an expert has several tiles
    invalid=lambda config, shape, limits: transposed_codes.invalid(config, shape["K"], limits),
    edges=(
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

transpose_codes_to_one_scale = SPEC.define("transpose_codes_to_one_scale")
