"""``colwise-dual``: :mod:`.colwise` of two matrices whose rows fall into the same groups, in one launch.

    q_x, scales_x = colwise(x, offs)
    q_y, scales_y = colwise(y, offs)

    x, y      (M, N) and (M, K), row-major, both bfloat16, float16 or float32
    offs      (G,), int32: the end row of each group, non-decreasing, at most M; an empty group has no row
    q_x, q_y  (M, N) and (M, K), strides (1, M rounded up to 16)
    scales_x, scales_y  (G*N,) and (G*K,), float32, group-major; a GEMM is given the reciprocals

With an ``alignment`` q_x and q_y are (P, N) and (P, K), as :mod:`.colwise` has them.

The weight gradient of a grouped GEMM needs both: one launch leaves one tail in which multiprocessors idle, not two.

Scratch of panels: ``4*G*(N + K)`` bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..edges import edge
from ..runtime import declare
from ..runtime.declare import Call, Config
from . import colwise, panels
from .panels import quantize_columns
from .tiles import Matrix, Options, stride_of_columns


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


def launch(config: Config, call: Call) -> None:
    """Launch the kernel; with panels, after zeroing what they count in."""
    programs = [
        panels.programs(config, len(call.q_x), columns, call.G, call.device, call.alignment)
        for columns in (call.N, call.K)
    ]
    work_x, work_y = (panels.work_for(config, columns, call.G, call.x) for columns in (call.N, call.K))
    count = max(programs) if config["LEAD"] else sum(programs)
    call.run(colwise_dual_kernel, count, panels.options(config), work_x=work_x, work_y=work_y)


def halves(call: Call) -> tuple[Call, Call]:
    """Return the two calls of ``colwise`` that this is."""
    x = call.replace(q=call.q_x, scales=call.scales_x, K=call.N)
    return x, call.replace(x=call.y, q=call.q_y, scales=call.scales_y)


def reference(call: Call) -> None:
    """Quantize both in plain torch; reads ``offs`` on the host."""
    for half in halves(call):
        colwise.reference(half)


def unwritten(call: Call) -> None:
    """Write zeros past the last group's multiple of the alignment."""
    for half in halves(call):
        colwise.clear_past_the_groups(half)


def allocate_x(M: int, N: int, G: int, alignment: int, float8_dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return uninitialized FP8 values as ``colwise`` writes them."""
    return colwise.allocate(M, N, G, alignment, float8_dtype, device)


def check(x: torch.Tensor, y: torch.Tensor) -> None:
    """Raise ValueError unless ``y`` has the dtype and the device of ``x``."""
    if (y.dtype, y.device) != (x.dtype, x.device):
        raise ValueError(f"y is {y.dtype} on {y.device}, wanted {x.dtype} on {x.device} as x")


SPEC = declare.kernel(
    name="colwise-dual",
    arguments=(declare.matrix("x", "M", "N"), declare.matrix("y", "M", "K", 1), declare.OFFSETS, *colwise.OPTIONS),
    outputs=(
        declare.fp8("q_x", allocate=allocate_x),
        declare.float32("scales_x", "G * N"),
        declare.fp8("q_y", allocate=colwise.allocate),
        declare.float32("scales_y", "G * K"),
    ),
    check=check,
    launch=launch,
    reference=reference,
    unwritten=unwritten,
    axes={
        "BLOCK_SIZE": (16, 32, 64, 128),
        "BLOCK_SIZE_ITER": (128, 256, 512),
        "LEAD": panels.AXES["LEAD"],
        "num_warps": (2, 4, 8),
        "num_stages": (1, 2),
        "maxnreg": panels.AXES["maxnreg"],
    },
    default={"BLOCK_SIZE": 64, "BLOCK_SIZE_ITER": 256, "LEAD": 0, "num_warps": 4, "num_stages": 1, "maxnreg": 0},
    key=("M_bucket", "N", "K", "G"),
    problems=({"M": "M", "N": "N", "K": "K", "G": "E"},),  # the gradient of the output, and the activations
    interpreted={"M": 109, "N": 37, "K": 19, "G": 3},  # no block divides a dim; the second matrix starts mid-grid
    invalid=lambda config, shape, limits: panels.invalid(config, max(shape["N"], shape["K"]), limits),
    edges=(
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
)

quantize_colwise_dual = SPEC.define()
