"""``swiglu-rowwise``: the gated activation of an expert MLP, quantized row by row. The activation is never written.

    h[m, n]   = gated(gate[m, n], up[m, n]) * weights[m]                see :mod:`.gated`
    scales[m] = scale of the maximum over n of |h[m, n]|                see :mod:`.arithmetic`
    q[m, n]   = fp8(h[m, n] * scales[m])

    x             (M, 2N), row-major: gate and up in the ``layout`` halves or interleaved; bfloat16, or FP8 codes
    offs          (G,), int32: the end row of each group, non-decreasing, at most M; an empty group has no row
    x_scales      (M, 1), float32, powers of two: what codes were multiplied by; None beside bfloat16
    bias          (G, 2N), bfloat16, added to x of bfloat16 and rounded; or None
    weights       (M,), float32: a factor a row; or None
    q             (M, N), row-major: the left operand of the GEMM down. Zeros in rows of no group
    scales        (M, 1), float32, powers of two; a GEMM is given the reciprocals
    q_x, scales_x (M, 2N) and (M, 1), if they are kept: codes of x, bias included, as ``rowwise-2d`` makes them

A program has whole rows in registers, a few at a time: nothing is read twice. The GEMM that contracts over rows reads
``q`` as :mod:`.transposed_codes` lays it out.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from ..edges import edge
from ..groups import padded_rows
from ..runtime import declare
from ..runtime.declare import Call, Config, Shape
from ..spec import NamedInts
from . import gate_and_up
from .aligned_blocks import ALIGNMENT, block_at, largest_of_both, largest_of_rows, scale_of_bits
from .arithmetic import quantize, reference_cast
from .gate_and_up import Rows, Source, load_gate_and_up, scale_of_rows, split, store_gate_and_up
from .gated import ACTIVATIONS, gated, reference_gated

MATRICES = 2
"""(M, N) that a program reads: gate and up."""


@triton.jit(do_not_specialize=["M", "G"])  # both change every step: neither may recompile anything
def swiglu_rowwise_kernel(
    x_ptr: tl.tensor,  # (M, 2N), row-major
    offs_ptr: tl.tensor,  # (G,)
    x_scales_ptr: tl.tensor,  # (M,); None beside bfloat16
    bias_ptr: tl.tensor,  # (G, 2N) or None
    weights_ptr: tl.tensor,  # (M,) or None
    q_ptr: tl.tensor,  # (M, N), row-major
    scales_ptr: tl.tensor,  # (M,)
    q_x_ptr: tl.tensor,  # (M, 2N), row-major, or None
    scales_x_ptr: tl.tensor,  # (M,) or None
    M: tl.tensor,
    N: tl.tensor,
    G: tl.tensor,
    FP8_MAX: tl.constexpr,
    ACTIVATION: tl.constexpr,  # a place in ACTIVATIONS
    INTERLEAVED: tl.constexpr,
    WIDTH: tl.constexpr,  # columns of the first tile; a second of half as many may follow
    HAS_REST: tl.constexpr,
    ROWS: tl.constexpr,  # that are cast at a time
    BLOCK_SIZE_M: tl.constexpr,  # of a program
    num_stages: tl.constexpr,
) -> None:
    """One program: BLOCK_SIZE_M rows; with a bias a block of one group (:mod:`.aligned_blocks`)."""
    first = tl.program_id(0) * BLOCK_SIZE_M
    group, block_rows, last = 0, tl.minimum(BLOCK_SIZE_M, M - first), tl.load(offs_ptr + G - 1)
    if bias_ptr is not None:
        block = block_at(offs_ptr, M, G, first, BLOCK_SIZE_M)
        group, first, block_rows = block.group, block.first, block.rows
    source = Source(x_ptr, x_scales_ptr, bias_ptr, N, INTERLEAVED)
    lanes, columns, others = tl.arange(0, ROWS), tl.arange(0, WIDTH), WIDTH + tl.arange(0, WIDTH // 2)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    for number in tl.range(0, tl.cdiv(block_rows, ROWS), num_stages=num_stages):
        row = first + number * ROWS
        in_rows = number * ROWS + lanes < block_rows
        is_read = in_rows & (row + lanes < last)  # rows of no group become zeros
        weights = None
        if weights_ptr is not None:
            weights = tl.load(weights_ptr + row + lanes, mask=is_read, other=0.0)[:, None]
        rows = Rows(group, row, lanes, in_rows, is_read, weights)
        gate, up = load_gate_and_up(source, rows, columns)
        h = _weighted(gated(gate, up, ACTIVATION), rows)
        largest = largest_of_rows(h)
        if HAS_REST:
            gate_rest, up_rest = load_gate_and_up(source, rows, others)
            h_rest = _weighted(gated(gate_rest, up_rest, ACTIVATION), rows)
            largest = tl.maximum(largest, largest_of_rows(h_rest))
        if q_x_ptr is not None:
            of_x = largest_of_both(gate, up)
            if HAS_REST:
                of_x = tl.maximum(of_x, largest_of_both(gate_rest, up_rest))
            scale = scale_of_bits(of_x, FP8_MAX)
            tl.store(scales_x_ptr + row + lanes, scale, mask=in_rows)
            store_gate_and_up(q_x_ptr, source, rows, columns, gate, up, scale, FP8_MAX)
            if HAS_REST:
                store_gate_and_up(q_x_ptr, source, rows, others, gate_rest, up_rest, scale, FP8_MAX)
        scale = scale_of_bits(largest, FP8_MAX)
        tl.store(scales_ptr + row + lanes, scale, mask=in_rows)
        q_rows = q_ptr + row.to(tl.int64) * N + lanes[:, None] * N
        q = quantize(h, scale[:, None], dtype, FP8_MAX)
        tl.store(q_rows + columns[None, :], q, mask=in_rows[:, None] & (columns < N)[None, :])
        if HAS_REST:
            q = quantize(h_rest, scale[:, None], dtype, FP8_MAX)
            tl.store(q_rows + others[None, :], q, mask=in_rows[:, None] & (others < N)[None, :])


@triton.jit
def _weighted(h: tl.tensor, rows: Rows) -> tl.tensor:
    """Return h, times the weight of its row if there are weights."""
    if rows.weights is not None:
        h = h * rows.weights
    return h


def launch(config: Config, call: Call) -> None:
    """Launch one program per BLOCK_SIZE_M rows; with a bias, of groups that begin at multiples of 128."""
    if call.M * call.N:
        rows = call.M if call.bias is None else padded_rows(call.M, call.G, ALIGNMENT)
        gate_and_up.launch(config, call, swiglu_rowwise_kernel, -(-rows // config["BLOCK_SIZE_M"]), MATRICES)


def reference(call: Call) -> None:
    """Quantize the activation in plain torch; reads ``offs`` on the host."""
    for rows, ends, x, factors in gate_and_up.row_blocks(call):
        h = reference_gated(*split(x, call.layout), ACTIVATIONS.index(call.activation))
        if factors is not None:
            h *= factors
        h[int(ends[-1]) :] = 0
        call.scales[rows] = scale_of_rows(h, call.float8_dtype)
        call.q[rows] = reference_cast(h, call.scales[rows], call.float8_dtype)
        if call.keep:
            call.scales_x[rows] = scale_of_rows(x, call.float8_dtype)
            call.q_x[rows] = reference_cast(x, call.scales_x[rows], call.float8_dtype)


def problems(row: Shape) -> Iterator[NamedInts]:
    """Yield the activation that a GEMM down reads; with ``weights`` and ``keep``, if the row says so."""
    options = {name: row[name] for name in ("weights", "keep") if row.get(name)}
    return (NamedInts({**shape, **options}) for shape in gate_and_up.problems(row))


SPEC = declare.kernel(
    name="swiglu-rowwise",
    arguments=(
        gate_and_up.X,
        declare.OFFSETS,
        *gate_and_up.OPTIONS,
        declare.flag("keep"),
        declare.FLOAT8_DTYPE,
    ),
    outputs=(
        declare.fp8("q", "M", "N"),
        declare.float32("scales", "M", "1"),
        declare.fp8("q_x", "M", "2 * N", requested_by="keep"),
        declare.float32("scales_x", "M", "1", requested_by="keep"),
    ),
    check=gate_and_up.check_scales_and_bias,
    inputs=gate_and_up.random_inputs,
    launch=launch,
    reference=reference,
    problems=problems,
    invalid=lambda config, shape, limits: gate_and_up.wrong_rows(config, shape, limits, MATRICES),
    edges=(
        *gate_and_up.EDGES,
        edge("codes kept, NaN", "nan", routing="ragged", M=277, N=48, G=4, keep=1),
        edge("interleaved, gpt-oss, bias", routing="empty", M=277, N=80, G=4, layout=1, activation=1, bias=1, keep=1),
        edge("weights, interleaved", "infinite", routing="ragged", M=131, N=48, G=3, layout=1, weights=1),
    ),
    **gate_and_up.DECLARED,
)

quantize_swiglu_rowwise = SPEC.define()
