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

``alignment``: 1 or a power of two from 16 on. Scratch of panels: ``4*G*K`` bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..edges import edge
from ..groups import padded_rows, taken_rows
from ..runtime import declare
from ..runtime.declare import Call, Config
from . import panels
from .arithmetic import reference_cast, reference_scale
from .panels import quantize_columns
from .tiles import Matrix, Options, stride_of_columns


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


def launch(config: Config, call: Call) -> None:
    """Launch the kernel; with panels, after zeroing what they count in."""
    programs = panels.programs(config, len(call.q), call.K, call.G, call.device, call.alignment)
    if programs:
        work = panels.work_for(config, call.K, call.G, call.x)
        call.run(colwise_kernel, programs, panels.options(config), work=work)


def reference(call: Call) -> None:
    """Quantize the columns of a group at a time in plain torch; reads ``offs`` on the host."""
    start, place = 0, 0
    for scales, end in zip(call.scales.view(call.G, call.K), call.offs.tolist(), strict=True):
        rows, taken = call.x[start:end], taken_rows(end - start, call.alignment)
        amax = rows.abs().amax(0).float() if len(rows) else torch.zeros_like(scales)
        scales.copy_(reference_scale(amax, call.float8_dtype, call.power_of_two))
        call.q[place : place + len(rows)] = reference_cast(rows, scales, call.float8_dtype)
        call.q[place + len(rows) : place + taken].zero_()
        start, place = end, place + taken
    call.q[place:].zero_()


def allocate(M: int, K: int, G: int, alignment: int, float8_dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return uninitialized FP8 values whose columns are contiguous, each group aligned."""
    rows, stride = M, (M + 15) // 16 * 16
    if alignment > 1:
        rows = stride = padded_rows(M, G, alignment)
    return torch.empty_strided((rows, K), (1, stride), dtype=float8_dtype, device=device)


def clear_past_the_groups(call: Call) -> None:
    """Write zeros past the last group's multiple of the alignment, without waiting for the device."""
    if call.alignment > 1:
        sizes = call.offs.diff(prepend=call.offs.new_zeros(1))
        end = ((sizes + call.alignment - 1) // call.alignment).clamp(min=1).sum() * call.alignment
        rows = torch.arange(len(call.q), device=call.device)
        call.q.view(torch.uint8).masked_fill_((rows >= end)[:, None], 0)


OPTIONS = (declare.FLOAT8_DTYPE, declare.POWER_OF_TWO, declare.ALIGNMENT)
KEY = ("M_bucket", "K", "G")
INTERPRETED = {"M": 157, "K": 101, "G": 3}  # no block divides a dim; several groups stay several
EDGES = (
    edge("one row, huge values", "huge", routing="ragged", M=1, K=48, G=3),
    edge("a block and one more", routing="balanced", M=513, K=144, G=1),
    edge("rows of no group, NaN", "nan", routing="empty", M=277, K=48, G=4),
    edge("a prime, infinity", "infinite", routing="ragged", M=67, K=48, G=3),
    edge("empty groups, zeros", "zeros", routing="empty", M=37, K=48, G=3),
    edge("one column, tiny values", "tiny", routing="ragged", M=67, K=1, G=2),
    edge("an odd number of columns past an aligned address", offset=1, routing="ragged", M=131, K=129, G=2),
    edge("aligned groups, NaN", "nan", routing="ragged", M=277, K=48, G=4, alignment=128),
    edge("aligned groups of which some are empty, NaN", "nan", routing="empty", M=277, K=80, G=4, alignment=16),
)
PROBLEMS = ({"M": "M", "K": "K", "G": "E"}, {"M": "M", "K": "N", "G": "E"})
"""Both operands of the weight gradient: the activations and the gradient of the output."""

SPEC = declare.kernel(
    name="colwise",
    arguments=(declare.matrix("x", "M", "K"), declare.OFFSETS, *OPTIONS),
    outputs=(declare.fp8("q", allocate=allocate), declare.float32("scales", "G * K")),
    launch=launch,
    reference=reference,
    unwritten=clear_past_the_groups,
    axes=panels.AXES,
    default={"BLOCK_SIZE": 64, "BLOCK_SIZE_ITER": 256, "LEAD": 192, "num_warps": 4, "num_stages": 1, "maxnreg": 0},
    key=KEY,
    problems=PROBLEMS,
    interpreted=INTERPRETED,
    invalid=lambda config, shape, limits: panels.invalid(config, shape["K"], limits),
    edges=EDGES,
)

quantize_colwise = SPEC.define()
