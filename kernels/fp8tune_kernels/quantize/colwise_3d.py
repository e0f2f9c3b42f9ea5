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

from ..edges import edge, long_tail, past_half
from ..runtime import declare
from ..runtime.declare import Call, Config
from . import rowwise_2d, weights


def launch(config: Config, call: Call) -> None:
    """Launch the kernel of ``rowwise-2d``, whichever experts the columns of a program belong to."""
    rowwise_2d.launch(_of_rows(config), call.replace(x=call.w, M=call.E * call.N))


def _of_rows(config: Config) -> Config:
    """Return the config with its axes named as ``rowwise-2d`` names them."""
    names = {"BLOCK_SIZE_N": "BLOCK_SIZE", "BLOCK_SIZE_K": "BLOCK_SIZE_ITER"}
    return {names.get(name, name): value for name, value in config.items()}


def reference(call: Call) -> None:
    """Quantize an expert at a time in plain torch: all in float32 would not fit beside large weights."""
    for columns, q, scales in zip(call.w.mT, call.q.mT, call.scales.mT, strict=True):
        rowwise_2d.reference(call.replace(x=columns, q=q, scales=scales))


OUTPUTS = (declare.fp8("q", "E", "K", "N", transposed=True), declare.float32("scales", "E", "1", "N"))

SPEC = declare.kernel(
    name="colwise-3d",
    arguments=weights.ARGUMENTS,
    outputs=OUTPUTS,
    launch=launch,
    reference=reference,
    axes={
        "BLOCK_SIZE_N": (1, 2, 4, 8),
        "BLOCK_SIZE_K": (1024, 2048, 4096, 8192),
        "num_warps": (2, 4, 8, 16),
        "num_stages": (1, 2, 4),
    },
    default={"BLOCK_SIZE_N": 1, "BLOCK_SIZE_K": 8192, "num_warps": 4, "num_stages": 1},
    key=weights.KEY,
    problems=weights.PROBLEMS,
    interpreted={"E": 2, "N": 5, "K": 5003},  # no block divides either; columns stay longer than short tiles
    invalid=lambda config, shape, limits: rowwise_2d.invalid(_of_rows(config), shape, limits),
    edges=(
        edge("one column, huge values", "huge", E=1, N=1),
        edge("a block of columns and one more, long tails", E=1, N=17, K=long_tail("K")),
        edge("a prime, infinity", "infinite", E=1, N=7, K=past_half("K", 16)),
        edge("three columns, NaN", "nan", E=3, N=1, K=past_half("K", 16)),
        edge("zeros", "zeros", E=2, N=1),
        edge("one row, tiny values", "tiny", E=3, N=5, K=1),
        edge("a block of rows and one more past an aligned address", offset=1, E=1, N=5, K=past_half("K")),
    ),
)

quantize_colwise_3d = SPEC.define()
