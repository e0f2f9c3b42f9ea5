"""``colwise-dual``: :mod:`.colwise` of two matrices whose rows fall into the same groups, in one launch.

    q_x, scales_x = colwise(x, offs)
    q_y, scales_y = colwise(y, offs)

    x, y      (M, N) and (M, K), row-major, both bfloat16, float16 or float32
    offs      (G,), int32: the end row of each group, non-decreasing, at most M; an empty group has no row
    q_x, q_y  (M, N) and (M, K), strides (1, M rounded up to 16)
    scales_x, scales_y  (G*N,) and (G*K,), float32, group-major; a GEMM is given the reciprocals

With an ``alignment`` q_x and q_y are (P, N) and (P, K), as :mod:`.colwise` has them.

The weight gradient of a grouped GEMM needs both: one launch leaves one tail in which multiprocessors idle, not two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from ..edges import declared, edge
from ..inputs import random_matrix
from ..runtime.checks import check_alignment, check_matrix, check_offsets, fp8_dtype_for
from ..runtime.launching import launch_kernel
from ..runtime.ops import Inputs, Tensors, register
from ..spec import SCALE_MODES, KernelSpec, NamedInts, Problem, bucket
from . import colwise, panels
from .arithmetic import FP8_MAX
from .panels import quantize_columns
from .tiles import Matrix, Options, stride_of_columns

__all__ = ["SPEC", "quantize_colwise_dual"]


@triton.jit(do_not_specialize=["M", "G"])  # both change every step: neither may recompile anything
def colwise_dual_kernel(
    x_ptr: tl.tensor,  # (M, N), row-major
    y_ptr: tl.tensor,  # (M, K), row-major
    offs_ptr: tl.tensor,  # (G,)
    q_x_ptr: tl.tensor,  # (M, N), strides (1, M rounded up to 16); or, aligned, (P, N), strides (1, P)
    scales_x_ptr: tl.tensor,  # (G * N,), group-major
    q_y_ptr: tl.tensor,  # (M, K), likewise
    scales_y_ptr: tl.tensor,  # (G * K,), group-major
    work_x_ptr: tl.tensor,  # see fp8tune_kernels.quantize.panels
    work_y_ptr: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
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
    """Either form of :mod:`.panels`, for x and then y: in panels, a program that finds no ticket of x
    left goes on to y; walking twice, one program works for either. The loop only chooses which: the code exists once.
    """
    programs_of_x = tl.cdiv(N, BLOCK_SIZE) * (G + 1 if ALIGNMENT == 1 else G)  # see panels.programs
    is_of_y = tl.program_id(0) >= programs_of_x
    for matrix in tl.range(
        tl.where(LEAD == 0, is_of_y.to(tl.int32), 0), tl.where(LEAD == 0, is_of_y.to(tl.int32), 1) + 1
    ):
        matrix_ptr, q_ptr, scales_ptr, work_ptr, columns = x_ptr, q_x_ptr, scales_x_ptr, work_x_ptr, N
        if matrix == 1:
            matrix_ptr, q_ptr, scales_ptr, work_ptr, columns = y_ptr, q_y_ptr, scales_y_ptr, work_y_ptr, K
        quantize_columns(
            Matrix(
                matrix_ptr, offs_ptr, q_ptr, scales_ptr, M, columns, G, stride_of_columns(M, G, ALIGNMENT), 0, ALIGNMENT
            ),
            work_ptr,
            tl.program_id(0) - matrix * programs_of_x,
            Options(FP8_MAX, POWER_OF_TWO, BLOCK_SIZE, BLOCK_SIZE_ITER, LEAD, num_warps),
            num_stages,
        )


def quantize_colwise_dual(
    x: torch.Tensor,
    y: torch.Tensor,
    offs: torch.Tensor,
    *,
    float8_dtype: torch.dtype | None = None,
    power_of_two: bool = True,
    alignment: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize each group of rows of ``x`` and ``y`` column by column; returns ``(q_x, scales_x, q_y, scales_y)``.

    ``alignment``: of the groups in the codes, 1 or a power of two from 16 on. Scratch, where the config is one of
    panels: ``4*G*(N + K)`` bytes and some counters. ValueError also where ``y`` has other rows, another dtype or
    another device than ``x``.
    """
    return _operator(x, y, offs, float8_dtype, power_of_two, alignment)


def reference(x: torch.Tensor, y: torch.Tensor, *beside: Any) -> Tensors:
    """The same in plain torch; reads ``offs`` on the host."""
    return *colwise.reference(x, *beside), *colwise.reference(y, *beside)


def inputs(problem: Problem, device: str) -> Inputs:
    """``(x, y, offs, float8_dtype, power_of_two)`` of a problem, and its alignment, if its shape has one."""
    M, N, K = (problem.shape[dim] for dim in "MNK")
    x = random_matrix(problem, M, N, device)
    y = random_matrix(replace(problem, seed=problem.seed + 1), M, K, device)
    return x, y, *colwise.inputs_beside(problem, device)


def outputs(x: torch.Tensor, y: torch.Tensor, *beside: Any) -> Tensors:
    """Uninitialised ``q_x``, ``scales_x``, ``q_y`` and ``scales_y``."""
    return *colwise.outputs(x, *beside), *colwise.outputs(y, *beside)


def unwritten(inputs: Inputs, outputs: Tensors) -> None:
    """Write zeros past the last group's multiple of the alignment."""
    _, _, offs, _, _, alignment = (*inputs, 1)[:6]
    for q in outputs[::2]:
        colwise.clear_past_the_groups(q, offs, alignment)


def launch(config: Mapping[str, int], inputs: Inputs, outputs: Tensors) -> None:
    """One launch; where panels are asked for, after two that zero what they count in."""
    x, y, offs, float8_dtype, power_of_two, alignment = (*inputs, 1)[:6]
    (M, N), K, G = x.shape, y.shape[1], offs.shape[0]
    programs = [panels.programs(config, len(outputs[0]), columns, G, x.device, alignment) for columns in (N, K)]
    work = [panels.work_for(config, columns, G, x) for columns in (N, K)]
    if count := max(programs) if config["LEAD"] else sum(programs):
        tensors = (x, y, offs, *outputs, *work)
        constants = (FP8_MAX[float8_dtype], power_of_two, alignment)
        launch_kernel(colwise_dual_kernel, count, tensors, (M, N, K, G), constants, panels.options(config))


def problems(row: Mapping[str, int]) -> Iterator[NamedInts]:
    """The operands of the weight gradient: the output's gradient, ``(M, N)``, with A, ``(M, K)``; ``G = E``."""
    yield NamedInts(M=row["M"], N=row["N"], K=row["K"], G=row["E"])


SPEC = KernelSpec(
    name="colwise-dual",
    axes={
        "BLOCK_SIZE": (16, 32, 64, 128),
        "BLOCK_SIZE_ITER": (128, 256, 512),
        "LEAD": panels.AXES["LEAD"],
        "num_warps": (2, 4, 8),
        "num_stages": (1, 2),
        "maxnreg": panels.AXES["maxnreg"],
    },
    default=NamedInts(BLOCK_SIZE=64, BLOCK_SIZE_ITER=256, LEAD=0, num_warps=4, num_stages=1, maxnreg=0),
    key=("M_bucket", "N", "K", "G"),
    problems=problems,
    inputs=inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    unwritten=unwritten,
    interpreted={"M": 109, "N": 37, "K": 19, "G": 3},  # no block divides a dim; the second matrix starts mid-grid
    invalid=lambda config, shape, limits: panels.invalid(config, max(shape["N"], shape["K"]), limits),
    edges=declared(
        edge("one row, huge values", "huge", routing="ragged", M=1, N=48, K=80, G=3),
        edge("a block and one more", routing="balanced", M=513, N=144, K=48, G=1),
        edge("rows of no group, NaN", "nan", routing="empty", M=277, N=48, K=80, G=4),
        edge("a prime, infinity", "infinite", routing="ragged", M=67, N=80, K=48, G=3),
        edge("empty groups, zeros", "zeros", routing="empty", M=37, N=48, K=48, G=3),
        edge("one column each, tiny values", "tiny", routing="ragged", M=67, N=1, K=1, G=2),
        edge("odd numbers of columns past an aligned address", offset=1, routing="ragged", M=131, N=129, K=65, G=2),
        edge("aligned groups, NaN", "nan", routing="ragged", M=277, N=48, K=80, G=4, alignment=128),
        edge("aligned, some empty, NaN", "nan", routing="empty", M=277, N=80, K=48, G=4, alignment=16),
    ),
    routed=True,
    uses_fp8=True,
    scale_modes=SCALE_MODES,
)


def _arguments(
    x: torch.Tensor,
    y: torch.Tensor,
    offs: torch.Tensor,
    float8_dtype: torch.dtype | None,
    power_of_two: bool,
    alignment: int = 1,
) -> Inputs:
    check_matrix("x", x)
    check_matrix("y", y)
    if (y.shape[0], y.dtype, y.device) != (x.shape[0], x.dtype, x.device):
        wanted = f"{x.shape[0]} rows of {x.dtype} on {x.device} as in x"
        raise ValueError(f"y has {y.shape[0]} rows of {y.dtype} on {y.device}, wanted {wanted}")
    check_offsets(offs, x.device)
    check_alignment(alignment)
    return x, y, offs, fp8_dtype_for(x.device, float8_dtype), power_of_two, alignment


def _key(x: torch.Tensor, y: torch.Tensor, offs: torch.Tensor, *beside: Any) -> tuple[int, ...]:
    return bucket(x.shape[0]), x.shape[1], y.shape[1], offs.shape[0]


_operator = register(SPEC, quantize_colwise_dual, _arguments, _key)
