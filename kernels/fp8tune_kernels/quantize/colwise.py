"""``colwise``: quantize an ``(M, K)`` matrix to FP8 with one scale per group of rows and column, transposed in memory.

    amax[g, k]      = max over rows m of group g of |x[m, k]|
    scales[g*K + k] = scale of amax[g, k]                                see :mod:`.arithmetic`
    q[m, k]         = fp8(clamp(x[m, k] * scales[g*K + k]))              for m in group g; 0 in rows of no group

    x       (M, K), row-major, bfloat16, float16 or float32
    offs    (G,), int32: the end row of each group, non-decreasing, at most M; an empty group has no row
    q       (M, K), strides (1, M rounded up to 16): the column-major operand of a scaled grouped GEMM
    scales  (G*K,), float32, group-major; a GEMM is given the reciprocals

With an ``alignment`` the codes of each group begin at a multiple of it, and zeros follow up to the next:

    q       (P, K), strides (1, P), P = padded_rows(M, G, alignment)        see :mod:`fp8tune_kernels.groups`
    q[place[g] + m - start[g], k] = fp8(clamp(x[m, k] * scales[g*K + k]))   for m in group g
    place[g + 1] = place[g] + max(1, ceil(size[g] / alignment)) * alignment

What lies past the last group's multiple is not written. A grouped GEMM that contracts over rows then needs no masks.

Both operands of a grouped GEMM's weight gradient, ``grad.t() @ A`` of each group, are quantized this way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import triton
import triton.language as tl

from ..edges import declared, edge
from ..groups import padded_rows, taken_rows
from ..inputs import dtype_named, offsets, random_matrix
from ..runtime.checks import check_alignment, check_matrix, check_offsets, fp8_dtype_for
from ..runtime.launching import launch_kernel
from ..runtime.ops import Inputs, Tensors, register
from ..spec import SCALE_MODES, KernelSpec, NamedInts, Problem, bucket
from . import panels
from .arithmetic import FP8_MAX, reference_cast, reference_scale
from .panels import quantize_columns
from .tiles import Matrix, Options, stride_of_columns

__all__ = ["SPEC", "quantize_colwise"]


@triton.jit(do_not_specialize=["M", "G"])  # both change every step: neither may recompile anything
def colwise_kernel(
    x_ptr: tl.tensor,  # (M, K), row-major
    offs_ptr: tl.tensor,  # (G,)
    q_ptr: tl.tensor,  # (M, K), strides (1, M rounded up to 16); or, aligned, (P, K), strides (1, P)
    scales_ptr: tl.tensor,  # (G * K,), group-major
    work_ptr: tl.tensor,  # see fp8tune_kernels.quantize.panels
    M: tl.tensor,
    K: tl.tensor,
    G: tl.tensor,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # of the groups in the codes
    BLOCK_SIZE: tl.constexpr,
    BLOCK_SIZE_ITER: tl.constexpr,
    LEAD: tl.constexpr,
    num_warps: tl.constexpr,
    num_stages: tl.constexpr,
) -> None:
    """Either form of :mod:`.panels`."""
    quantize_columns(
        Matrix(x_ptr, offs_ptr, q_ptr, scales_ptr, M, K, G, stride_of_columns(M, G, ALIGNMENT), 0, ALIGNMENT),
        work_ptr,
        tl.program_id(0),
        Options(FP8_MAX, POWER_OF_TWO, BLOCK_SIZE, BLOCK_SIZE_ITER, LEAD, num_warps),
        num_stages,
    )


def quantize_colwise(
    x: torch.Tensor,
    offs: torch.Tensor,
    *,
    float8_dtype: torch.dtype | None = None,
    power_of_two: bool = True,
    alignment: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each group of rows of ``x`` column by column; returns ``(q, scales)`` as the module and the package say.

    ``alignment``: of the groups in ``q``, 1 or a power of two from 16 on. Scratch, where the config is one of panels:
    ``4*G*K`` bytes and some counters.
    """
    return _operator(x, offs, float8_dtype, power_of_two, alignment)


def reference(
    x: torch.Tensor, offs: torch.Tensor, float8_dtype: torch.dtype, power_of_two: bool, alignment: int = 1
) -> Tensors:
    """The same in plain torch, a group at a time; reads ``offs`` on the host. Zeros where a launch writes nothing."""
    K = x.shape[1]
    q, scales = outputs(x, offs, float8_dtype, power_of_two, alignment)
    start, place = 0, 0
    for group, end in enumerate(offs.tolist()):
        rows = x[start:end]
        amax = rows.abs().amax(0).float() if len(rows) else rows.new_zeros(K, dtype=torch.float32)
        scale = reference_scale(amax, float8_dtype, power_of_two)
        scales[group * K : (group + 1) * K] = scale
        taken = taken_rows(len(rows), alignment)
        q[place : place + len(rows)] = reference_cast(rows, scale, float8_dtype)
        q[place + len(rows) : place + taken].zero_()
        start, place = end, place + taken
    q[place:].zero_()
    return q, scales


def inputs(problem: Problem, device: str) -> Inputs:
    """``(x, offs, float8_dtype, power_of_two)`` of a problem, and its alignment, if its shape has one."""
    return random_matrix(problem, problem.shape["M"], problem.shape["K"], device), *inputs_beside(problem, device)


def inputs_beside(problem: Problem, device: str) -> Inputs:
    """All inputs of a problem but its matrices."""
    is_power_of_two = problem.scale_mode == "power-of-two"
    alignment = [problem.shape["alignment"]] if "alignment" in problem.shape else []
    return offsets(problem, device), dtype_named(problem.fp8_dtype), is_power_of_two, *alignment


def outputs(
    x: torch.Tensor, offs: torch.Tensor, float8_dtype: torch.dtype, power_of_two: bool, alignment: int = 1
) -> Tensors:
    """Uninitialised ``q`` and ``scales``."""
    (M, K), G = x.shape, offs.shape[0]
    rows, stride = M, (M + 15) // 16 * 16
    if alignment > 1:
        rows = stride = padded_rows(M, G, alignment)
    q = torch.empty_strided((rows, K), (1, stride), dtype=float8_dtype, device=x.device)
    return q, torch.empty(G * K, dtype=torch.float32, device=x.device)


def unwritten(inputs: Inputs, outputs: Tensors) -> None:
    """Write zeros past the last group's multiple of the alignment."""
    _, offs, _, _, alignment = (*inputs, 1)[:5]
    clear_past_the_groups(outputs[0], offs, alignment)


def clear_past_the_groups(q: torch.Tensor, offs: torch.Tensor, alignment: int) -> None:
    """Write zeros there into one matrix of codes, without waiting for the device."""
    if alignment > 1:
        sizes = offs.diff(prepend=offs.new_zeros(1))
        end = ((sizes + alignment - 1) // alignment).clamp(min=1).sum() * alignment
        rows = torch.arange(len(q), device=q.device)
        q.view(torch.uint8).masked_fill_((rows >= end)[:, None], 0)


def launch(config: Mapping[str, int], inputs: Inputs, outputs: Tensors) -> None:
    """One launch; where panels are asked for, after one that zeroes what they count in."""
    x, offs, float8_dtype, power_of_two, alignment = (*inputs, 1)[:5]
    (M, K), G = x.shape, offs.shape[0]
    if programs := panels.programs(config, len(outputs[0]), K, G, x.device, alignment):
        tensors = (x, offs, *outputs, panels.work_for(config, K, G, x))
        constants = (FP8_MAX[float8_dtype], power_of_two, alignment)
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
    unwritten=unwritten,
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
        edge("aligned groups, NaN", "nan", routing="ragged", M=277, K=48, G=4, alignment=128),
        edge("aligned groups of which some are empty, NaN", "nan", routing="empty", M=277, K=80, G=4, alignment=16),
    ),
    routed=True,
    uses_fp8=True,
    scale_modes=SCALE_MODES,
)


def arguments(
    x: torch.Tensor, offs: torch.Tensor, float8_dtype: torch.dtype | None, power_of_two: bool, alignment: int = 1
) -> Inputs:
    check_matrix("x", x)
    check_offsets(offs, x.device)
    check_alignment(alignment)
    return x, offs, fp8_dtype_for(x.device, float8_dtype), power_of_two, alignment


def key(
    x: torch.Tensor, offs: torch.Tensor, float8_dtype: torch.dtype, power_of_two: bool, alignment: int
) -> tuple[int, ...]:
    return bucket(x.shape[0]), x.shape[1], offs.shape[0]


_operator = register(SPEC, quantize_colwise, arguments, key)
