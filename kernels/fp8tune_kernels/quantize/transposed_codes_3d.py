"""``transposed-codes-3d``: copy codes of expert weights to where the input gradient's GEMM reads them.

    q_transposed[e, n, k] = q[e, k, n]

    q             (E, K, N), strides (K*N, 1, K), FP8: the right operand of the forward's grouped GEMM
    q_transposed  (E, N, K), strides (N*K, 1, N): the layout of ``transpose-3d``'s codes

N is a multiple of 16. The codes of PACK rows are put together before they change threads: as words they take 1 to 4 %
less time than as bytes on an H100. In memory each expert's row-major (N, K) codes become (K, N). Nothing is cast, and
scales of q stay those of its columns: they are folded into the other operand (:mod:`.rowwise_factored`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..edges import edge
from ..runtime import declare
from ..runtime.checks import FP8_DTYPES
from ..runtime.declare import Call, Config
from ..spec import Problem
from . import transposed_codes, weights
from .transposed_codes import Tile, random_codes, transpose_tile


@triton.jit(do_not_specialize=["E"])  # so that the binary that few experts check is the one that many run
def transposed_codes_3d_kernel(
    q_ptr: tl.tensor,  # (E, K, N), strides (K*N, 1, K)
    transposed_ptr: tl.tensor,  # (E, N, K), strides (N*K, 1, N)
    E: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    BLOCK_SIZE_M: tl.constexpr,  # of N
    BLOCK_SIZE_K: tl.constexpr,
    PACK: tl.constexpr,
) -> None:
    """One program: a tile of an expert, those of the same rows side by side."""
    across, down = tl.cdiv(K, BLOCK_SIZE_K), tl.cdiv(N, BLOCK_SIZE_M)
    expert = (tl.program_id(0) // (across * down)).to(tl.int64)
    row = tl.program_id(0) // across % down * BLOCK_SIZE_M
    transpose_tile(
        Tile(
            q_ptr + (expert * N + row) * K,
            transposed_ptr + (expert * N * K + row),
            None,
            N - row,
            tl.program_id(0) % across * BLOCK_SIZE_K,
            K,
            N,
        ),
        N - row,
        0.0,
        PACK,
        BLOCK_SIZE_M,
        BLOCK_SIZE_K,
    )


def launch(config: Config, call: Call) -> None:
    """Launch a program per tile."""
    programs = call.E * -(-call.N // config["BLOCK_SIZE_M"]) * -(-call.K // config["BLOCK_SIZE_K"])
    call.run(transposed_codes_3d_kernel, programs, config, transposed=call.q_transposed)


def reference(call: Call) -> None:
    """Copy in plain torch."""
    call.q_transposed.view(torch.uint8).copy_(call.q.mT.view(torch.uint8))


def random(problem: Problem, device: str) -> torch.Tensor:
    """Return random codes, the ``(E, K, N)`` view."""
    E, N, K = (problem.shape[size] for size in "ENK")
    return random_codes(problem, E * N, K, device).view(E, N, K).transpose(1, 2)


def check_codes(q: torch.Tensor) -> None:
    """Raise ValueError unless ``q`` are the FP8 weights of all experts, with whole words of rows."""
    if q.dim() != 3 or q.dtype not in FP8_DTYPES or not q.mT.is_contiguous():
        layout = f"{q.dtype} of shape {tuple(q.shape)} and strides {q.stride()}"
        raise ValueError(f"q is {layout}, wanted FP8 codes (E, K, N) that lie as (E, N, K)")
    if q.shape[2] % 16:
        raise ValueError(f"q has N={q.shape[2]}, wanted a multiple of 16")


SPEC = declare.kernel(
    name="transposed-codes-3d",
    arguments=(declare.Argument("q", dims=("E", "K", "N"), check=check_codes, random=random),),
    outputs=(declare.Output("q_transposed", ("E", "N", "K"), "q.dtype", transposed=True),),
    launch=launch,
    reference=reference,
    axes={
        "BLOCK_SIZE_M": (32, 64, 128),
        "BLOCK_SIZE_K": (64, 128, 256),
        "PACK": (1, 4),
        "num_warps": (1, 2, 4, 8),
        "num_stages": (1,),
    },
    default={"BLOCK_SIZE_M": 128, "BLOCK_SIZE_K": 256, "PACK": 4, "num_warps": 8, "num_stages": 1},
    key=weights.KEY,
    problems=weights.problems_of_16_rows,
    interpreted={"E": 2, "N": 144, "K": 101},  # no block divides either; an expert has several tiles
    invalid=lambda config, shape, limits: transposed_codes.invalid(config, shape["K"], limits),
    edges=(
        edge("a block and 16 more, NaN", "nan", E=2, N=272, K=80),
        edge("a few rows, infinity", "infinite", E=2, N=48, K=272),
        edge("zeros", "zeros", E=1, N=16, K=48),
        edge("the least rows, huge values", "huge", E=3, N=16, K=37),
        edge("one column, tiny values", "tiny", E=2, N=272, K=1),
        edge("a block and one more past an aligned address", offset=1, E=2, N=144, K=65),
    ),
    in_dtypes=("float8_e4m3fn", "float8_e4m3fnuz"),
)

transpose_codes_3d = SPEC.define("transpose_codes_3d")
