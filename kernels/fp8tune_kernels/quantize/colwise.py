"""``colwise``: quantize an ``(M, K)`` matrix to FP8 with one scale per group of rows and column, transposed in memory.

    amax[g, k]      = max over rows m of group g of |x[m, k]|
    scales[g*K + k] = scale of amax[g, k]                                see :mod:`.arithmetic`
    q[m, k]         = fp8(clamp(x[m, k] * scales[g*K + k]))              for m in group g; 0 in rows of no group

    x       (M, K), row-major, bfloat16, float16 or float32
    offs    (G,), int32: the end row of each group, non-decreasing, at most M; an empty group has no row
    q       (M, K), strides (1, M rounded up to 16): the column-major operand of a scaled grouped GEMM
    scales  (G*K,), float32, group-major; a GEMM is given the reciprocals

Both operands of a grouped GEMM's weight gradient, ``grad.t() @ A`` of each group, are quantized this way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import triton
import triton.language as tl

from fp8tune_kernels.edges import declared, edge
from fp8tune_kernels.inputs import dtype_named, offsets, random_matrix
from fp8tune_kernels.quantize import panels
from fp8tune_kernels.quantize.arithmetic import FP8_MAX, reference_cast, reference_scale
from fp8tune_kernels.quantize.panels import quantize_columns
from fp8tune_kernels.quantize.tiles import Matrix, Options
from fp8tune_kernels.runtime.checks import check_matrix, check_offsets, fp8_dtype_for
from fp8tune_kernels.runtime.launching import launch_kernel
from fp8tune_kernels.runtime.ops import Inputs, Tensors, register
from fp8tune_kernels.spec import SCALE_MODES, KernelSpec, NamedInts, Problem, bucket

__all__ = ["SPEC", "quantize_colwise"]


@triton.jit(do_not_specialize=["M", "G"])  # both change every step: neither may recompile anything
def colwise_kernel(
    x_ptr: tl.tensor,  # (M, K), row-major
    offs_ptr: tl.tensor,  # (G,)
    q_ptr: tl.tensor,  # (M, K), strides (1, M rounded up to 16)
    scales_ptr: tl.tensor,  # (G * K,), group-major
    work_ptr: tl.tensor,  # see fp8tune_kernels.quantize.panels
    M: tl.tensor,
    K: tl.tensor,
    G: tl.tensor,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_SIZE_ITER: tl.constexpr,
    LEAD: tl.constexpr,
    num_warps: tl.constexpr,
    num_stages: tl.constexpr,
) -> None:
    """Either form of :mod:`.panels`."""
    quantize_columns(
        Matrix(x_ptr, offs_ptr, q_ptr, scales_ptr, M, K, G, tl.cdiv(M, 16) * 16, 0),
        work_ptr,
        tl.program_id(0),
        Options(FP8_MAX, POWER_OF_TWO, BLOCK_SIZE, BLOCK_SIZE_ITER, LEAD, num_warps),
        num_stages,
    )


def quantize_colwise(
    x: torch.Tensor, offs: torch.Tensor, *, float8_dtype: torch.dtype | None = None, power_of_two: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each group of rows of ``x`` column by column; returns ``(q, scales)`` as the module and the package say.

    Scratch, where the config is one of panels: ``4*G*K`` bytes and some counters.
    """
    return _operator(x, offs, float8_dtype, power_of_two)


def reference(x: torch.Tensor, offs: torch.Tensor, float8_dtype: torch.dtype, power_of_two: bool) -> Tensors:
    """The same in plain torch, a group at a time; reads ``offs`` on the host."""
    K = x.shape[1]
    q, scales = outputs(x, offs, float8_dtype, power_of_two)
    start = 0
    for group, end in enumerate(offs.tolist()):
        rows = x[start:end]
        amax = rows.abs().amax(0).float() if len(rows) else rows.new_zeros(K, dtype=torch.float32)
        scale = reference_scale(amax, float8_dtype, power_of_two)
        scales[group * K : (group + 1) * K] = scale
        q[start:end] = reference_cast(rows, scale, float8_dtype)
        start = end
    q[start:].zero_()
    return q, scales


def inputs(problem: Problem, device: str) -> Inputs:
    """``(x, offs, float8_dtype, power_of_two)`` of a problem."""
    x = random_matrix(problem, problem.shape["M"], problem.shape["K"], device)
    return x, offsets(problem, device), dtype_named(problem.fp8_dtype), problem.scale_mode == "power-of-two"


def outputs(x: torch.Tensor, offs: torch.Tensor, float8_dtype: torch.dtype, power_of_two: bool) -> Tensors:
    """Uninitialised ``q`` and ``scales``."""
    M, K = x.shape
    q = torch.empty_strided((M, K), (1, (M + 15) // 16 * 16), dtype=float8_dtype, device=x.device)
    return q, torch.empty(offs.shape[0] * K, dtype=torch.float32, device=x.device)


def launch(config: Mapping[str, int], inputs: Inputs, outputs: Tensors) -> None:
    """One launch; where panels are asked for, after one that zeroes what they count in."""
    x, offs, float8_dtype, power_of_two = inputs
    (M, K), G = x.shape, offs.shape[0]
    if programs := panels.programs(config, M, K, G, x.device):
        tensors = (x, offs, *outputs, panels.work_for(config, K, G, x))
        constants = (FP8_MAX[float8_dtype], power_of_two)
        launch_kernel(colwise_kernel, programs, tensors, (M, K, G), constants, panels.options(config))


def problems(row: Mapping[str, int]) -> Iterator[NamedInts]:
    """Both operands of the weight gradient: A is ``(M, K)``, the output's gradient ``(M, N)``; ``G = E``."""
    yield NamedInts(M=row["M"], K=row["K"], G=row["E"])
    yield NamedInts(M=row["M"], K=row["N"], G=row["E"])


SPEC = KernelSpec(
    name="colwise",
    axes=panels.AXES,
    default=NamedInts(BLOCK_SIZE=64, BLOCK_SIZE_ITER=256, LEAD=192, num_warps=4, num_stages=1, maxnreg=0),
    key=("M_bucket", "K", "G"),
    problems=problems,
    inputs=inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    interpreted={"M": 157, "K": 101, "G": 3},  # no block divides a dim; several groups stay several
    invalid=lambda config, shape, limits: panels.invalid(config, shape["K"], limits),
    edges=declared(
        edge("one row, huge values", "huge", routing="ragged", M=1, K=48, G=3),
        edge("a block and one more", routing="balanced", M=513, K=144, G=1),
        edge("rows of no group, NaN", "nan", routing="empty", M=277, K=48, G=4),
        edge("a prime, infinity", "infinite", routing="ragged", M=67, K=48, G=3),
        edge("empty groups, zeros", "zeros", routing="empty", M=37, K=48, G=3),
        edge("one column, tiny values", "tiny", routing="ragged", M=67, K=1, G=2),
        edge("an odd number of columns past an aligned address", offset=1, routing="ragged", M=131, K=129, G=2),
    ),
    routed=True,
    uses_fp8=True,
    scale_modes=SCALE_MODES,
)


def arguments(x: torch.Tensor, offs: torch.Tensor, float8_dtype: torch.dtype | None, power_of_two: bool) -> Inputs:
    check_matrix("x", x)
    check_offsets(offs, x.device)
    return x, offs, fp8_dtype_for(x.device, float8_dtype), power_of_two


def key(x: torch.Tensor, offs: torch.Tensor, float8_dtype: torch.dtype, power_of_two: bool) -> tuple[int, ...]:
    return bucket(x.shape[0]), x.shape[1], offs.shape[0]


_operator = register(SPEC, quantize_colwise, arguments, key)
