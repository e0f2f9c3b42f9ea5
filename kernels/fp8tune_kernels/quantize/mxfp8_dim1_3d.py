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

from collections.abc import Iterator, Mapping

import torch

from ..edges import declared, edge
from ..inputs import dtype_named, random_matrix
from ..runtime.checks import check_weights, fp8_dtype_for
from ..runtime.ops import Inputs, Tensors, register
from ..spec import KernelSpec, NamedInts, Problem
from . import mxfp8_dim1
from .mxfp8_arithmetic import MX_BLOCK, SCALE_MODES, check_scale_mode

__all__ = ["SPEC", "quantize_mxfp8_dim1_3d"]


def quantize_mxfp8_dim1_3d(
    w: torch.Tensor, *, float8_dtype: torch.dtype | None = None, scale_mode: str = "floor"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each expert of ``w`` in blocks of 32 rows; returns ``(q, scales)`` as the module and the package say."""
    return _operator(w, float8_dtype, scale_mode)


def reference(w: torch.Tensor, float8_dtype: torch.dtype, scale_mode: str) -> Tensors:
    """The same in plain torch, an expert at a time: all of them in float32 would not fit beside large weights."""
    q, scales = outputs(w, float8_dtype, scale_mode)
    for expert, codes, scale in zip(w, q, scales, strict=True):
        found = mxfp8_dim1.reference(expert, float8_dtype, scale_mode)
        codes.copy_(found[0])
        scale.copy_(found[1])
    return q, scales


def inputs(problem: Problem, device: str) -> Inputs:
    """``(w, float8_dtype, scale_mode)`` of a problem."""
    E, N, K = (problem.shape[dim] for dim in "ENK")
    w = random_matrix(problem, E * N, K, device).view(E, N, K)
    return w, dtype_named(problem.fp8_dtype), problem.scale_mode


def outputs(w: torch.Tensor, float8_dtype: torch.dtype, scale_mode: str) -> Tensors:
    """Uninitialised ``q`` and ``scales``."""
    E, N, K = w.shape
    q = torch.empty(E, K, N, dtype=float8_dtype, device=w.device).transpose(1, 2)
    return q, torch.empty(E, K, -(-N // MX_BLOCK), dtype=torch.float8_e8m0fnu, device=w.device)


def launch(config: Mapping[str, int], inputs: Inputs, outputs: Tensors) -> None:
    """One launch of ``mxfp8-dim1``'s kernel: a program for every tile of every expert."""
    mxfp8_dim1.launch(_of_rows(config), inputs, outputs)


def problems(row: Mapping[str, int]) -> Iterator[NamedInts]:
    """The weights of a row's layer, ``(E, N, K)``, and those of the layer's other projection, ``(E, K, N)``."""
    yield NamedInts(E=row["E"], N=row["N"], K=row["K"])
    yield NamedInts(E=row["E"], N=row["K"], K=row["N"])


def _of_rows(config: Mapping[str, int]) -> dict[str, int]:
    """The config with its axes named as ``mxfp8-dim1`` names them."""
    return {"BLOCK_SIZE_M" if name == "BLOCK_SIZE_N" else name: value for name, value in config.items()}


SPEC = KernelSpec(
    name="mxfp8-dim1-3d",
    axes={
        "BLOCK_SIZE_N": (32, 64, 128, 256, 512),
        "BLOCK_SIZE_K": (32, 64, 128, 256, 512),
        "num_warps": (1, 2, 4, 8, 16),
        "num_stages": (1,),  # a tile is read once: there is no loop to pipeline
    },
    default=NamedInts(BLOCK_SIZE_N=256, BLOCK_SIZE_K=128, num_warps=8, num_stages=1),
    key=("E", "N", "K"),
    problems=problems,
    inputs=inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    interpreted={"E": 2, "N": 77, "K": 45},  # no tile divides either; the last block has 13 rows
    invalid=lambda config, shape, limits: mxfp8_dim1.invalid(_of_rows(config), shape, limits),
    edges=declared(
        edge("half a block of rows, NaN", "nan", E=3, N=48, K=80),
        edge("a block of rows and 16 more", E=2, N=528, K=48),
        edge("infinity", "infinite", E=2, N=16, K=48),
        edge("zeros", "zeros", E=1, N=48, K=16),
        edge("one row, huge values", "huge", E=3, N=1, K=37),
        edge("one column, tiny values", "tiny", E=2, N=80, K=1),
        edge("odd numbers past an aligned address", offset=1, E=2, N=61, K=513),
    ),
    scale_modes=SCALE_MODES,
    uses_fp8=True,
)


def arguments(w: torch.Tensor, float8_dtype: torch.dtype | None, scale_mode: str) -> Inputs:
    """An operator's arguments -> the inputs of its kernel. Raises ValueError for what a kernel cannot take."""
    check_weights("w", w, as_stored=True)
    check_scale_mode(scale_mode)
    return w, fp8_dtype_for(w.device, float8_dtype), scale_mode


def key(w: torch.Tensor, float8_dtype: torch.dtype, scale_mode: str) -> tuple[int, ...]:
    """The values of the lookup key: E, N, K."""
    return tuple(w.shape)


_operator = register(SPEC, quantize_mxfp8_dim1_3d, arguments, key)
