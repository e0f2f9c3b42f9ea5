"""``mxfp8-dim1-3d-via-2d``: what ``mxfp8-dim1-3d`` gives, in two steps: the way to measure its one step against.

    the experts, (E, N, K), as one matrix (E*N, K)    ->  ``mxfp8-dim1``: columns of all experts in one piece
    a torch copy of q and one of the scales           ->  (E, N, K), strides (N*K, 1, N), and (E, K, ceil(N / 32))

Where N is no multiple of 32 the experts are padded first: a block must not straddle two of them. Contract, reference
and problems are those of :mod:`.mxfp8_dim1_3d`.
"""

from __future__ import annotations

import torch

from ..edges import edge
from ..runtime import declare
from ..runtime.declare import Call, Config
from . import mxfp8_dim1
from .mxfp8_arithmetic import MX_BLOCK, SCALE_MODES
from .mxfp8_dim1_3d import ARGUMENTS, EDGES, INTERPRETED, KEY, OUTPUTS, PROBLEMS, reference


def launch(config: Config, call: Call) -> None:
    """Cast all experts as one matrix, into memory of its own, and part them by copies."""
    E, N, K, blocks = call.E, call.N, call.K, -(-call.N // MX_BLOCK)
    rows = E * blocks * MX_BLOCK
    padded = torch.nn.functional.pad(call.w, (0, 0, 0, blocks * MX_BLOCK - N)) if N % MX_BLOCK else call.w
    q = mxfp8_dim1.allocate(rows, K, call.float8_dtype, call.device)
    scales = call.scales.new_empty(K, E * blocks)
    mxfp8_dim1.launch(config, call.replace(x=padded.reshape(rows, K), M=rows, q=q, scales=scales))
    call.q.copy_(q.unflatten(0, (E, blocks * MX_BLOCK))[:, :N])
    call.scales.copy_(scales.unflatten(1, (E, blocks)).transpose(0, 1))


SPEC = declare.kernel(
    name="mxfp8-dim1-3d-via-2d",
    arguments=ARGUMENTS,
    defaults={"scale_mode": "floor"},
    outputs=OUTPUTS,
    launch=launch,
    reference=reference,
    axes=mxfp8_dim1.AXES,
    default={"BLOCK_SIZE_M": 128, "BLOCK_SIZE_K": 128, "num_warps": 4, "num_stages": 1},
    key=KEY,
    problems=PROBLEMS,
    interpreted=INTERPRETED,
    invalid=mxfp8_dim1.invalid,
    edges=(
        *EDGES,
        edge("one column, tiny values", "tiny", E=2, N=61, K=1),
        edge("no padding, past an aligned address", offset=1, E=2, N=32, K=513),
    ),
    scale_modes=SCALE_MODES,
)

quantize_mxfp8_dim1_3d_via_2d = SPEC.define()
