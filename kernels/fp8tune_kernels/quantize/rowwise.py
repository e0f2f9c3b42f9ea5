"""``rowwise``: quantize an ``(N, M)`` matrix to FP8 with one scale per row and group of columns, row-major out.

    amax[g, n]      = max over columns m of group g of |x[n, m]|
    scales[g*N + n] = scale of amax[g, n]                                see :mod:`.arithmetic`
    q[n, m]         = fp8(clamp(x[n, m] * scales[g*N + n]))              for m in group g; 0 in columns of no group

    x       (N, M), row-major, or the ``.t()`` view of a row-major (M, N) tensor; bfloat16, float16 or float32
    offs    (G,), int32: the end column of each group, non-decreasing, at most M; an empty group has no column
    q       (N, M), row-major: the left operand of a scaled grouped GEMM over groups of its columns
    scales  (G*N,), float32, group-major; a GEMM is given the reciprocals

``grad.t()`` is the left operand of a grouped GEMM's weight gradient, ``grad.t() @ A`` of each group. Of a transposed
view this is :mod:`.colwise` with rows and columns exchanged.

Scratch, where the config of a view is one of panels: ``4*G*N`` bytes and some counters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..edges import edge, past_half
from ..runtime import declare
from ..runtime.declare import Call, Config
from . import panels
from .arithmetic import magnitude, magnitude_to_float32, quantize, reference_cast, reference_scale, scale_of
from .panels import quantize_columns
from .tiles import Matrix, Options


@triton.jit(do_not_specialize=["M", "G"])  # both change every step: neither may recompile anything
def rowwise_kernel(
    x_ptr: tl.tensor,  # (N, M), row-major
    offs_ptr: tl.tensor,  # (G,)
    q_ptr: tl.tensor,  # (N, M), row-major
    scales_ptr: tl.tensor,  # (G * N,), group-major
    M: tl.tensor,
    N: tl.tensor,
    G: tl.tensor,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_SIZE_ITER: tl.constexpr,
    num_stages: tl.constexpr,
) -> None:
    """One program: BLOCK_SIZE rows of one group, or of the padding columns after the last group (``group == G``).

    The first BLOCK_SIZE_ITER columns of a group stay in registers, so that a group no longer than that is read once.
    Of a longer one the rest is walked twice, forwards for the maximum and backwards for the cast, so that the columns
    read last are found in the cache.

    Columns are counted from the last multiple of 16 at or before the group's first element, in the numbering that x
    and q share (``n * M + m``). So chunks of 16 are aligned in both, whatever M and wherever the group starts.
    """
    group = tl.program_id(0) % (G + 1)
    rows = tl.program_id(0) // (G + 1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    start = tl.load(offs_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(offs_ptr + group, mask=group < G, other=M)

    begin = rows.to(tl.int64) * M + start
    first = begin // 16 * 16
    x_rows = x_ptr + first[:, None]
    q_rows = q_ptr + first[:, None]
    head = (begin - first).to(tl.int32)[:, None]
    tail = tl.where(rows < N, end - start, 0)[:, None] + head
    read_tail = tl.where(group < G, tail, 0)  # the padding columns are not read: they become the code of 0
    longest = end - start + tl.where(M % 16 == 0, start % 16, 15)
    tiles = tl.cdiv(longest, BLOCK_SIZE_ITER)

    columns = tl.arange(0, BLOCK_SIZE_ITER)[None, :]
    first_x = tl.load(x_rows + columns, mask=_in_whole_chunks(columns, head, read_tail), other=0.0)
    largest = _largest_of_chunks(first_x)
    for tile in tl.range(1, tl.where(group < G, tiles, 0), num_stages=num_stages):
        tile_columns = tile * BLOCK_SIZE_ITER + columns
        x = tl.load(x_rows + tile_columns, mask=_in_whole_chunks(tile_columns, head, read_tail), other=0.0)
        largest = tl.maximum(largest, _largest_of_chunks(x))

    # The chunks that a group shares with its neighbours, one at either end: byte by byte, and only where there are any.
    shared = (M % 16 != 0) | (start % 16 != 0) | (end % 16 != 0)
    lanes = tl.arange(0, 32)[None, :]
    edge_columns = tl.where(lanes < 16, lanes, tail // 16 * 16 + lanes - 16)
    in_edges = (edge_columns >= head) & (edge_columns < tail) & ~_in_whole_chunks(edge_columns, head, tail)
    edges = tl.zeros((BLOCK_SIZE, 32), x_ptr.dtype.element_ty)
    if shared:
        edges = tl.load(x_rows + edge_columns, mask=in_edges & (group < G), other=0.0)

    bits = tl.maximum(tl.max(largest, 1), tl.max(magnitude(edges), 1))
    scale = scale_of(magnitude_to_float32(bits, x_ptr.dtype.element_ty), FP8_MAX, POWER_OF_TWO)
    tl.store(scales_ptr + group.to(tl.int64) * N + rows, scale, mask=rows < tl.where(group < G, N, 0))

    for tile in tl.range(1, tiles, num_stages=num_stages):
        tile_columns = (tiles - tile) * BLOCK_SIZE_ITER + columns
        x = tl.load(x_rows + tile_columns, mask=_in_whole_chunks(tile_columns, head, read_tail), other=0.0)
        q = quantize(x, scale[:, None], q_ptr.dtype.element_ty, FP8_MAX)
        tl.store(q_rows + tile_columns, q, mask=_in_whole_chunks(tile_columns, head, tail))
    q = quantize(first_x, scale[:, None], q_ptr.dtype.element_ty, FP8_MAX)
    tl.store(q_rows + columns, q, mask=_in_whole_chunks(columns, head, tail))
    if shared:
        edge_q = quantize(edges, scale[:, None], q_ptr.dtype.element_ty, FP8_MAX)
        tl.store(q_rows + edge_columns, edge_q, mask=in_edges)


@triton.jit
def _largest_of_chunks(x: tl.tensor) -> tl.tensor:
    """The largest magnitude in each 16 columns, which one thread holds: (rows, columns) -> (rows, columns / 16)."""
    chunk: tl.constexpr = min(16, x.shape[1])
    return tl.max(magnitude(x).reshape(x.shape[0], x.shape[1] // chunk, chunk), 2)


@triton.jit
def _in_whole_chunks(columns: tl.tensor, head: tl.tensor, tail: tl.tensor) -> tl.tensor:
    """Return True where the chunk of 16 around a column lies in [head, tail): accesses of all 16 stay wide."""
    chunks = columns // 16 * 16
    return (chunks >= head) & (chunks + 16 <= tail)


@triton.jit(do_not_specialize=["M", "G"])
def rowwise_transposed_kernel(
    x_ptr: tl.tensor,  # (M, N), row-major: the matrix whose transpose is quantized
    offs_ptr: tl.tensor,  # (G,)
    q_ptr: tl.tensor,  # (N, M), row-major
    scales_ptr: tl.tensor,  # (G * N,), group-major
    work_ptr: tl.tensor,  # see fp8tune_kernels.quantize.panels
    M: tl.tensor,
    N: tl.tensor,
    G: tl.tensor,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_SIZE_ITER: tl.constexpr,
    LEAD: tl.constexpr,
    num_warps: tl.constexpr,
    num_stages: tl.constexpr,
) -> None:
    """Either form of :mod:`.panels`: rows of q are columns in memory."""
    quantize_columns(
        Matrix(x_ptr, offs_ptr, q_ptr, scales_ptr, M, N, G, M, 0, 1),
        work_ptr,
        tl.program_id(0),
        Options(FP8_MAX, POWER_OF_TWO, BLOCK_SIZE, BLOCK_SIZE_ITER, LEAD, num_warps),
        num_stages,
    )


def launch(config: Config, call: Call) -> None:
    """Launch one of the kernels; with panels of a view, after zeroing what they count in."""
    if call.x.stride(1) != 1:  # a view; by the stride alone: one token must not change it
        programs = panels.programs(config, call.M, call.N, call.G, call.device)
        work = panels.work_for(config, call.N, call.G, call.x)
        call.run(rowwise_transposed_kernel, programs, panels.options(config), work=work)
    else:  # each block of rows of every group and of the padding
        options = {name: value for name, value in config.items() if name not in ("LEAD", "maxnreg")}
        call.run(rowwise_kernel, -(-call.N // config["BLOCK_SIZE"]) * (call.G + 1), options)


def reference(call: Call) -> None:
    """Quantize one group of columns at a time in plain torch; reads ``offs`` on the host."""
    start = 0
    for scales, end in zip(call.scales.view(call.G, call.N), call.offs.tolist(), strict=True):
        columns = call.x[:, start:end]
        amax = columns.abs().amax(1).float() if end > start else torch.zeros_like(scales)
        scales.copy_(reference_scale(amax, call.float8_dtype, call.power_of_two))
        call.q[:, start:end] = reference_cast(columns, scales[:, None], call.float8_dtype)
        start = end
    call.q[:, start:].zero_()


SPEC = declare.kernel(
    name="rowwise",
    arguments=(
        declare.matrix("x", "N", "M", or_transposed=True),
        declare.OFFSETS,
        declare.FLOAT8_DTYPE,
        declare.POWER_OF_TWO,
    ),
    outputs=(declare.fp8("q", "N", "M"), declare.float32("scales", "G * N")),
    launch=launch,
    reference=reference,
    axes={
        "BLOCK_SIZE": (1, 4, 16, 64),
        "BLOCK_SIZE_ITER": (128, 256, 512, 1024, 2048, 4096, 16384),
        "LEAD": panels.AXES["LEAD"],
        "num_warps": (2, 4, 8, 16),
        "num_stages": (1, 3),
        "maxnreg": panels.AXES["maxnreg"],
    },
    default={"BLOCK_SIZE": 64, "BLOCK_SIZE_ITER": 256, "LEAD": 192, "num_warps": 4, "num_stages": 1, "maxnreg": 0},
    key=("M_bucket", "N", "G", "input_layout_transposed"),
    problems=({"N": "N", "M": "M", "G": "E"},),  # the gradient of the output, transposed
    interpreted={"N": 5, "M": 293, "G": 3},  # no block divides a dim; groups stay longer than the short tiles
    invalid=lambda config, shape, limits: panels.invalid(config, shape["N"], limits),
    edges=(
        edge("one column, huge values", "huge", routing="ragged", N=48, M=1, G=3),
        edge("a block and one more", routing="balanced", N=16, M=past_half("M"), G=1),
        edge("columns of no group, NaN", "nan", routing="empty", N=80, M=272, G=4),
        edge("a prime, infinity", "infinite", routing="ragged", N=16, M=67, G=3),
        edge("empty groups, zeros", "zeros", routing="empty", N=48, M=37, G=3),
        edge("one row, tiny values", "tiny", routing="ragged", N=1, M=67, G=2),
        edge("an odd number of rows past an aligned address", offset=1, routing="ragged", N=65, M=144, G=2),
    ),
    input_layouts=("contiguous", "transposed"),
)

quantize_rowwise = SPEC.define()
