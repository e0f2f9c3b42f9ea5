"""``mxfp8-dim1-3d-via-2d``: what ``mxfp8-dim1-3d`` gives, in two steps: the way to measure its one step against.

    the experts, (E, N, K), as one matrix (E*N, K)    ->  ``mxfp8-dim1``: columns of all experts in one piece
    a torch copy of q and one of the scales           ->  (E, N, K), strides (N*K, 1, N), and (E, K, ceil(N / 32))

Where N is no multiple of 32 the experts are padded first: a block must not straddle two of them. Contract, reference
and problems are those of :mod:`.mxfp8_dim1_3d`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..edges import declared, edge
from ..runtime.ops import Inputs, Tensors, register
from ..spec import KernelSpec, NamedInts
from . import mxfp8_dim1, mxfp8_dim1_3d
from .mxfp8_arithmetic import MX_BLOCK, SCALE_MODES

__all__ = ["SPEC", "quantize_mxfp8_dim1_3d_via_2d"]


def quantize_mxfp8_dim1_3d_via_2d(
    w: torch.Tensor, *, float8_dtype: torch.dtype | None = None, scale_mode: str = "floor"
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`.mxfp8_dim1_3d.quantize_mxfp8_dim1_3d`, slowly: same arguments, bytes and errors."""
    return _operator(w, float8_dtype, scale_mode)


def launch(config: Mapping[str, int], inputs: Inputs, outputs: Tensors) -> None:
    """The cast of all experts as one matrix, into memory of its own, and the copies that part them."""
    w, float8_dtype, scale_mode = inputs
    q, scales = outputs
    E, N, K = w.shape
    blocks = -(-N // MX_BLOCK)
    padded = torch.nn.functional.pad(w, (0, 0, 0, blocks * MX_BLOCK - N)) if N % MX_BLOCK else w
    flat = (padded.reshape(E * blocks * MX_BLOCK, K), float8_dtype, scale_mode)
    together = mxfp8_dim1.outputs(*flat)
    mxfp8_dim1.launch(config, flat, together)
    q.copy_(together[0].unflatten(0, (E, blocks * MX_BLOCK))[:, :N])
    scales.copy_(together[1].unflatten(1, (E, blocks)).transpose(0, 1))


SPEC = KernelSpec(
    name="mxfp8-dim1-3d-via-2d",
    axes=mxfp8_dim1.SPEC.axes,
    default=NamedInts(BLOCK_SIZE_M=128, BLOCK_SIZE_K=128, num_warps=4, num_stages=1),
    key=mxfp8_dim1_3d.SPEC.key,
    problems=mxfp8_dim1_3d.problems,
    inputs=mxfp8_dim1_3d.inputs,
    outputs=mxfp8_dim1_3d.outputs,
    launch=launch,
    reference=mxfp8_dim1_3d.reference,
    interpreted=mxfp8_dim1_3d.SPEC.interpreted,
    invalid=mxfp8_dim1.invalid,
    edges=declared(
        edge("half a block of rows, NaN", "nan", E=3, N=48, K=80),
        edge("a block of rows and 16 more", E=2, N=528, K=48),
        edge("infinity", "infinite", E=2, N=16, K=48),
        edge("zeros", "zeros", E=1, N=48, K=16),
        edge("one row, huge values", "huge", E=3, N=1, K=37),
        edge("one column, tiny values", "tiny", E=2, N=61, K=1),
        edge("no padding, past an aligned address", offset=1, E=2, N=32, K=513),
    ),
    scale_modes=SCALE_MODES,
    uses_fp8=True,
)

_operator = register(SPEC, quantize_mxfp8_dim1_3d_via_2d, mxfp8_dim1_3d.arguments, mxfp8_dim1_3d.key)
