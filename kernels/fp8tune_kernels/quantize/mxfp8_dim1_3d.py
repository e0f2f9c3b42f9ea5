"""``mxfp8-dim1-3d``: quantize expert weights to MXFP8 in blocks of 32 along N, each expert transposed in memory.

    amax[e, k, b]   = max over the 32 rows n of block b of |w[e, n, k]|
    scales[e, k, b] = E8M0 scale of amax[e, k, b]              see :mod:`.mxfp8_arithmetic`
    q[e, n, k]      = fp8(clamp(w[e, n, k] / scales[e, k, n // 32]))

    w       (E, N, K), row-major, bfloat16, float16 or float32: weights as they lie in memory
    q       (E, N, K), strides (N*K, 1, N): the right operand of the input gradient's GEMM, which contracts over N
    scales  (E, K, ceil(N / 32)), row-major, float8_e8m0fnu

One launch for all experts; casting ``(E*N, K)`` as one matrix costs a copy to part them (``mxfp8-dim1-3d-via-2d``). A
GEMM wants N to be a multiple of 32; where it is not, the last block of each expert's column is the shorter.
"""

from __future__ import annotations

from ..edges import edge
from ..runtime import declare
from ..runtime.declare import Call, Config
from . import mxfp8_dim1
from .mxfp8_arithmetic import SCALE_MODE, SCALE_MODES, scales_of


def launch(config: Config, call: Call) -> None:
    """Launch the kernel of ``mxfp8-dim1``, a program per tile of every expert."""
    mxfp8_dim1.launch(_of_rows(config), call.replace(x=call.w, M=call.N), call.E)


def _of_rows(config: Config) -> Config:
    """Return the config with its axes named as ``mxfp8-dim1`` names them."""
    return {"BLOCK_SIZE_M" if name == "BLOCK_SIZE_N" else name: value for name, value in config.items()}


def reference(call: Call) -> None:
    """Quantize an expert at a time in plain torch: all in float32 would not fit beside large weights."""
    for x, q, scales in zip(call.w, call.q, call.scales, strict=True):
        mxfp8_dim1.reference(call.replace(x=x, q=q, scales=scales))


ARGUMENTS = (declare.weights(as_stored=True), declare.FLOAT8_DTYPE, SCALE_MODE)
OUTPUTS = (declare.fp8("q", "E", "N", "K", transposed=True), scales_of("E", "K", "-(-N // 32)"))
KEY = ("E", "N", "K")
INTERPRETED = {"E": 2, "N": 77, "K": 45}  # no tile divides either; the last block has 13 rows
PROBLEMS = ({"E": "E", "N": "N", "K": "K"}, {"E": "E", "N": "K", "K": "N"})
"""The weights of a row's layer, and those of the layer's other projection."""
EDGES = (
    edge("half a block of rows, NaN", "nan", E=3, N=48, K=80),
    edge("a block of rows and 16 more", E=2, N=528, K=48),
    edge("infinity", "infinite", E=2, N=16, K=48),
    edge("zeros", "zeros", E=1, N=48, K=16),
    edge("one row, huge values", "huge", E=3, N=1, K=37),
)

SPEC = declare.kernel(
    name="mxfp8-dim1-3d",
    arguments=ARGUMENTS,
    defaults={"scale_mode": "floor"},
    outputs=OUTPUTS,
    launch=launch,
    reference=reference,
    axes={"BLOCK_SIZE_N" if name == "BLOCK_SIZE_M" else name: values for name, values in mxfp8_dim1.AXES.items()},
    default={"BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 128, "num_warps": 8, "num_stages": 1},
    key=KEY,
    problems=PROBLEMS,
    interpreted=INTERPRETED,
    invalid=lambda config, shape, limits: mxfp8_dim1.invalid(_of_rows(config), shape, limits),
    edges=(
        *EDGES,
        edge("one column, tiny values", "tiny", E=2, N=80, K=1),
        edge("odd numbers past an aligned address", offset=1, E=2, N=61, K=513),
    ),
    scale_modes=SCALE_MODES,
)

quantize_mxfp8_dim1_3d = SPEC.define()
