"""``weights-transposed``: quantize expert weights as ``colwise-3d`` does, and write the same codes transposed as well.

    amax[e, n]            = max over k of |w[e, k, n]|
    scales[e, 0, n]       = scale of amax[e, n]                        see :mod:`.arithmetic`
    q[e, k, n]            = fp8(clamp(w[e, k, n] * scales[e, 0, n]))
    q_transposed[e, n, k] = q[e, k, n]

    w             (E, K, N), strides (K*N, 1, K), bfloat16, float16 or float32     see :mod:`.weights`
    q             (E, K, N), strides (K*N, 1, K): the right operand of the forward's grouped GEMM
    scales        (E, 1, N), float32; a GEMM is given the reciprocals
    q_transposed  (E, N, K), strides (N*K, 1, N): the layout of ``transpose-3d``'s codes

The input gradient's GEMM reads ``q_transposed`` without scales: those of the columns are factors of its other operand
(:mod:`.rowwise_factored`). In memory w is a row-major (E*N, K) matrix in E equal groups of rows; each value is read
once (:mod:`.row_blocks`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from fp8tune_kernels.quantize import colwise_3d, panels, row_blocks, transpose_3d, weights
from fp8tune_kernels.quantize.arithmetic import FP8_MAX
from fp8tune_kernels.quantize.row_blocks import BlockOptions, Rows, quantize_blocks
from fp8tune_kernels.runtime.launching import launch_kernel
from fp8tune_kernels.runtime.ops import Inputs, Tensors, register
from fp8tune_kernels.spec import SCALE_MODES, KernelSpec, NamedInts

__all__ = ["SPEC", "quantize_weights_transposed"]


@triton.jit(do_not_specialize=["E", "most"])  # so that the binary that few experts check is the one that many run
def weights_transposed_kernel(
    w_ptr: tl.tensor,  # (E, K, N), strides (K*N, 1, K)
    q_ptr: tl.tensor,  # (E, K, N), strides (K*N, 1, K)
    scales_ptr: tl.tensor,  # (E, 1, N)
    transposed_ptr: tl.tensor,  # (E, N, K), strides (N*K, 1, N)
    work_ptr: tl.tensor,  # see fp8tune_kernels.quantize.row_blocks
    E: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    most: tl.tensor,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,  # of N
    BLOCK_SIZE_K: tl.constexpr,
    HELD: tl.constexpr,
    num_stages: tl.constexpr,
) -> None:
    """Either form of :mod:`.row_blocks`: E groups of N rows, each transposed within its own N*K codes."""
    quantize_blocks(
        Rows(w_ptr, None, q_ptr, scales_ptr, transposed_ptr, None, None, None, E * N, K, E, N, 0),
        work_ptr,
        most,
        BlockOptions(FP8_MAX, POWER_OF_TWO, GROUPS, BLOCK_SIZE_M, BLOCK_SIZE_K),
        HELD,
        num_stages,
    )


def quantize_weights_transposed(
    w: torch.Tensor, *, float8_dtype: torch.dtype | None = None, power_of_two: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize each column of each expert's ``w``; returns ``(q, scales, q_transposed)`` as the module says.

    Scratch, where tiles are held: about ``4*E*N`` bytes, and 4 a tile.
    """
    return _operator(w, float8_dtype, power_of_two)


def reference(w: torch.Tensor, float8_dtype: torch.dtype, power_of_two: bool) -> Tensors:
    """The same in plain torch, an expert at a time."""
    q, scales = colwise_3d.reference(w, float8_dtype, power_of_two)
    (transposed, _) = transpose_3d.outputs(w, float8_dtype, power_of_two)
    return q, scales, transposed.copy_(q.mT)


def outputs(w: torch.Tensor, float8_dtype: torch.dtype, power_of_two: bool) -> Tensors:
    """Uninitialised ``q``, ``scales`` and ``q_transposed``."""
    (transposed, _) = transpose_3d.outputs(w, float8_dtype, power_of_two)
    return *colwise_3d.outputs(w, float8_dtype, power_of_two), transposed


def launch(config: Mapping[str, int], inputs: Inputs, outputs: Tensors) -> None:
    """One launch; where tiles are held, after one that zeroes what they count in."""
    w, float8_dtype, power_of_two = inputs
    E, K, N = w.shape
    most = row_blocks.most_blocks(config, E * N, E)
    tensors = (w, *outputs, row_blocks.work_for(config, E * N, K, most, w))
    constants = (FP8_MAX[float8_dtype], power_of_two, row_blocks.groups_constant(E))
    programs = row_blocks.programs(config, E * N, K, E, w.device)
    launch_kernel(weights_transposed_kernel, programs, tensors, (E, N, K, most), constants, panels.options(config))


SPEC = KernelSpec(
    name="weights-transposed",
    axes=row_blocks.AXES,
    default=NamedInts(BLOCK_SIZE_M=64, BLOCK_SIZE_K=256, HELD=1, num_warps=4, num_stages=1, maxnreg=0),
    key=weights.KEY,
    problems=weights.problems,
    inputs=weights.inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    interpreted={"E": 2, "N": 157, "K": 301},  # no block divides either; an expert has several blocks
    invalid=lambda config, shape, limits: row_blocks.invalid(config, shape["N"], shape["K"], limits),
    edges=transpose_3d.edges,
    uses_fp8=True,
    scale_modes=SCALE_MODES,
)

_operator = register(SPEC, quantize_weights_transposed, weights.arguments, weights.key)
