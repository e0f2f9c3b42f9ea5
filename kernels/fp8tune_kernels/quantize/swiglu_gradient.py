"""``swiglu-gradient``: the gradient of an expert MLP's gated activation, quantized by rows and by columns.

    d_gate, d_up       = gated_gradient(gate, up, dh * weights)             see :mod:`.gated`
    d[m, n]            = d_gate and d_up in the ``layout`` of x; never written
    scales[m]          = scale of the maximum over n of |d[m, n] / factors[g, n]|        see :mod:`.arithmetic`
    q[m, n]            = fp8(d[m, n] / factors[g, n] * scales[m])

    column_scales[g*C + n] = scale of the maximum over rows m of group g of |d[m, n] / row_factors[m]|,  C = 2N
    z[m, n]            = q[m, n] / (scales[m] * row_factors[m]) * factors[g, n]
    q_columns[place[g] + m - start[g], n] = fp8(clamp(z[m, n] * column_scales[g*C + n]))

    x              (M, 2N), row-major: gate and up in the ``layout`` halves or interleaved; bfloat16, or FP8 codes
    dh             (M, N), row-major, bfloat16: the gradient of what the GEMM down read
    offs           (G,), int32: the end row of each group, non-decreasing, at most M; an empty group has no row
    x_scales       (M, 1), float32: what codes were multiplied by; None beside bfloat16
    bias           (G, 2N), bfloat16, added to x of bfloat16 and rounded; or None
    weights        (M,), float32: a factor a row; or None
    factors        (G, 2N), float32, powers of two: scales of the weights' codes (gate and up)
    row_factors    (M,), float32, powers of two: scales of the codes of the GEMM's rows
    q              (M, 2N), row-major: the left operand of the input gradient's GEMM. Zeros in rows of no group
    scales         (M, 1), float32; a GEMM is given the reciprocals
    q_columns      (P, 2N), strides (1, P), P = padded_rows(M, G, 128): the layout of ``colwise``'s codes
    column_scales  (G*2N,), float32, group-major
    d_weights      (M,), float32, if there are weights: the sum over n of dh * h, in an order of the config's
    d_bias         (G, 2N), float32, if there is a bias: the sum over rows of q / scales * factors, likewise

So the GEMMs that contract over n and over m read ``q`` and ``q_columns`` with codes that lie as they were made, without
scales: these are factors here (``weights-transposed``, ``rowwise-transposed``).

All scales are powers of two. So the codes of a column are those of the rows in another binade: a second rounding is
none, but where a code of a row is subnormal, below 2**-15 of the largest of its row. Nothing of the input is read again
for the columns, and 12 bytes move for a gate and an up of bfloat16, where rounding from the values moved 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from fp8tune_kernels.edges import declared, edge, past_half
from fp8tune_kernels.groups import padded_rows, taken_rows
from fp8tune_kernels.inputs import dtype_named, offsets, random_matrix
from fp8tune_kernels.quantize import colwise, swiglu_rowwise_transposed
from fp8tune_kernels.quantize.aligned_blocks import (
    ALIGNMENT,
    Block,
    block_at,
    bytes_of,
    largest_of_rows,
    load_block,
    packed_codes,
    scale_of_bits,
    store_block,
)
from fp8tune_kernels.quantize.arithmetic import FP8_MAX, reference_cast, reference_scale
from fp8tune_kernels.quantize.gated import ACTIVATIONS, gated_gradient, reference_gated_gradient
from fp8tune_kernels.quantize.limits import wrong_tile
from fp8tune_kernels.quantize.swiglu_rowwise_transposed import (
    check_gate_and_up,
    check_values,
    key,
    load_gate_and_up,
    options_of,
    problems,
    random_gate_and_up,
    scale_of_rows,
    split,
    store_gate_and_up,
    tile_of,
    values_of,
)
from fp8tune_kernels.quantize.tiles import stride_of_columns
from fp8tune_kernels.runtime.checks import fp8_dtype_for
from fp8tune_kernels.runtime.launching import launch_kernel
from fp8tune_kernels.runtime.ops import Inputs, Tensors, register
from fp8tune_kernels.spec import DeviceLimits, KernelSpec, NamedInts, Problem

__all__ = ["SPEC", "quantize_swiglu_gradient"]


@triton.jit(do_not_specialize=["M", "G"])  # both change every step: neither may recompile anything
def swiglu_gradient_rows_kernel(
    x_ptr: tl.tensor,  # (M, 2N), row-major
    dh_ptr: tl.tensor,  # (M, N), row-major
    offs_ptr: tl.tensor,  # (G,)
    x_scales_ptr: tl.tensor,  # (M,); None beside bfloat16
    bias_ptr: tl.tensor,  # (G, 2N) or None
    weights_ptr: tl.tensor,  # (M,) or None
    factors_ptr: tl.tensor,  # (G, 2N)
    row_factors_ptr: tl.tensor,  # (M,)
    q_ptr: tl.tensor,  # (M, 2N), row-major
    scales_ptr: tl.tensor,  # (M,)
    largest_ptr: tl.tensor,  # (G, 2N), int32, zeros: the bits of the largest magnitude of each column
    d_weights_ptr: tl.tensor,  # (M,) or None
    sums_ptr: tl.tensor,  # (programs, 2N), float32, or None
    blocks_ptr: tl.tensor,  # (programs, 4), int32, for the columns
    M: tl.tensor,
    N: tl.tensor,
    G: tl.tensor,
    FP8_MAX: tl.constexpr,
    ACTIVATION: tl.constexpr,  # a place in ACTIVATIONS
    INTERLEAVED: tl.constexpr,
    WIDTH: tl.constexpr,  # columns of the first tile; a second of half as many may follow
    HAS_REST: tl.constexpr,
    ROWS: tl.constexpr,  # that are cast at a time
    BLOCK_SIZE_M: tl.constexpr,  # places of a program
    BLOCK_SIZE_N: tl.constexpr,
    HELD: tl.constexpr,  # maxima of columns are held in registers, and met in memory once a block
    num_stages: tl.constexpr,
) -> None:
    """One program: a block (:mod:`.aligned_blocks`) by rows, and the maxima of its columns."""
    block = block_at(offs_ptr, M, G, tl.program_id(0) * BLOCK_SIZE_M, BLOCK_SIZE_M)
    store_block(blocks_ptr, block, tl.program_id(0))
    rows = tl.cdiv(block.rows, ROWS)
    lanes, columns, others = tl.arange(0, ROWS), tl.arange(0, WIDTH), WIDTH + tl.arange(0, WIDTH // 2)
    factors = _factors(factors_ptr, block.group, G, N, columns, INTERLEAVED)
    if HELD:
        most_gate, most_up = tl.zeros((ROWS, WIDTH), tl.int32), tl.zeros((ROWS, WIDTH), tl.int32)
    if HAS_REST:
        factors_rest = _factors(factors_ptr, block.group, G, N, others, INTERLEAVED)
        if HELD:
            gate_rest = tl.zeros((ROWS, WIDTH // 2), tl.int32)
            up_rest = tl.zeros((ROWS, WIDTH // 2), tl.int32)
    for number in tl.range(0, rows, num_stages=num_stages):
        row = block.first + number * ROWS
        in_rows = number * ROWS + lanes < block.rows
        is_read = in_rows & (block.group < G)  # rows of no group become zeros
        weights = None
        if weights_ptr is not None:
            weights = tl.load(weights_ptr + row + lanes, mask=is_read, other=0.0)[:, None]
        d_gate, d_up, total = _gradient(
            x_ptr,
            dh_ptr,
            x_scales_ptr,
            bias_ptr,
            weights,
            block.group,
            N,
            row,
            is_read,
            lanes,
            columns,
            ACTIVATION,
            INTERLEAVED,
        )
        y_gate, y_up = d_gate * factors[0], d_up * factors[1]
        largest = tl.maximum(largest_of_rows(y_gate), largest_of_rows(y_up))
        if HAS_REST:
            d_gate_rest, d_up_rest, total_rest = _gradient(
                x_ptr,
                dh_ptr,
                x_scales_ptr,
                bias_ptr,
                weights,
                block.group,
                N,
                row,
                is_read,
                lanes,
                others,
                ACTIVATION,
                INTERLEAVED,
            )
            y_gate_rest, y_up_rest = d_gate_rest * factors_rest[0], d_up_rest * factors_rest[1]
            largest = tl.maximum(largest, tl.maximum(largest_of_rows(y_gate_rest), largest_of_rows(y_up_rest)))
            total += total_rest
        if weights_ptr is not None:
            tl.store(d_weights_ptr + row + lanes, total, mask=in_rows)
        scale = scale_of_bits(largest, FP8_MAX)
        tl.store(scales_ptr + row + lanes, scale, mask=in_rows)
        store_gate_and_up(q_ptr, y_gate, y_up, scale, FP8_MAX, N, row, in_rows, lanes, columns, INTERLEAVED)
        if HAS_REST:
            store_gate_and_up(
                q_ptr, y_gate_rest, y_up_rest, scale, FP8_MAX, N, row, in_rows, lanes, others, INTERLEAVED
            )
        inverse = _inverse(tl.load(row_factors_ptr + row + lanes, mask=is_read, other=1.0))[:, None]
        of_gate, of_up = _magnitude(d_gate * inverse), _magnitude(d_up * inverse)
        if HELD:
            most_gate, most_up = tl.maximum(most_gate, of_gate), tl.maximum(most_up, of_up)
        else:
            _add_maxima(largest_ptr, of_gate, of_up, block.group, G, N, columns, INTERLEAVED)
        if HAS_REST:
            of_gate_rest, of_up_rest = _magnitude(d_gate_rest * inverse), _magnitude(d_up_rest * inverse)
            if HELD:
                gate_rest, up_rest = tl.maximum(gate_rest, of_gate_rest), tl.maximum(up_rest, of_up_rest)
            else:
                _add_maxima(largest_ptr, of_gate_rest, of_up_rest, block.group, G, N, others, INTERLEAVED)
    if HELD:
        _add_maxima(largest_ptr, most_gate, most_up, block.group, G, N, columns, INTERLEAVED)
        if HAS_REST:
            _add_maxima(largest_ptr, gate_rest, up_rest, block.group, G, N, others, INTERLEAVED)
    if sums_ptr is not None:
        tl.debug_barrier()  # all threads' codes and scales before they are read
        _sums_of_columns(q_ptr, scales_ptr, factors_ptr, sums_ptr, 2 * N, G, block, BLOCK_SIZE_M, BLOCK_SIZE_N)


@triton.jit
def _factors(
    factors_ptr: tl.tensor,
    group: tl.tensor,
    G: tl.tensor,
    N: tl.tensor,
    columns: tl.tensor,
    INTERLEAVED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """What the gradients of gate and up are multiplied by: a row each."""
    of_gate, of_up = columns, N + columns
    if INTERLEAVED:
        of_gate, of_up = 2 * columns, 2 * columns + 1
    inside = (columns < N) & (group < G)
    at = factors_ptr + group.to(tl.int64) * (2 * N)
    gate, up = tl.load(at + of_gate, mask=inside, other=1.0), tl.load(at + of_up, mask=inside, other=1.0)
    return _inverse(gate)[None, :], _inverse(up)[None, :]


@triton.jit
def _gradient(
    x_ptr: tl.tensor,
    dh_ptr: tl.tensor,
    x_scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    weights: tl.tensor,
    group: tl.tensor,
    N: tl.tensor,
    row: tl.tensor,
    is_read: tl.tensor,
    lanes: tl.tensor,
    columns: tl.tensor,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """d_gate and d_up of a tile, and of each row the sum of dh * h, if there are weights."""
    gate, up = load_gate_and_up(x_ptr, x_scales_ptr, bias_ptr, group, N, row, is_read, lanes, columns, INTERLEAVED)
    at = dh_ptr + row.to(tl.int64) * N + (lanes[:, None] * N + columns[None, :])
    dh = tl.load(at, mask=is_read[:, None] & (columns < N)[None, :], other=0.0).to(tl.float32)
    if weights is None:
        d_gate, d_up, _ = gated_gradient(gate, up, dh, ACTIVATION)
        return d_gate, d_up, tl.zeros((lanes.shape[0],), tl.float32)
    else:  # noqa: RET505 - Triton drops a branch only where both are written
        d_gate, d_up, h = gated_gradient(gate, up, dh * weights, ACTIVATION)
        return d_gate, d_up, tl.sum(dh * h, 1)


@triton.jit
def _magnitude(values: tl.tensor) -> tl.tensor:
    """The bits without the sign: they order like the values, NaN last."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _add_maxima(
    largest_ptr: tl.tensor,
    of_gate: tl.tensor,
    of_up: tl.tensor,
    group: tl.tensor,
    G: tl.tensor,
    N: tl.tensor,
    columns: tl.tensor,
    INTERLEAVED: tl.constexpr,
) -> None:
    """The maxima of a tile's columns into those of its group."""
    gate_at, up_at = columns, N + columns
    if INTERLEAVED:
        gate_at, up_at = 2 * columns, 2 * columns + 1
    inside = (columns < N) & (group < G)
    at = largest_ptr + group.to(tl.int64) * (2 * N)
    tl.atomic_max(at + gate_at, tl.max(of_gate, 0), mask=inside, sem="relaxed")
    tl.atomic_max(at + up_at, tl.max(of_up, 0), mask=inside, sem="relaxed")


@triton.jit
def _sums_of_columns(
    q_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    columns_end: tl.tensor,
    G: tl.tensor,
    block: Block,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
) -> None:
    """What the codes of a block stand for, summed over its rows; zeros of a block of no group."""
    rows, lanes = tl.arange(0, BLOCK_SIZE_M), tl.arange(0, BLOCK_SIZE_N)
    scales = tl.load(scales_ptr + block.first + rows, mask=rows < block.rows, other=1.0)
    for column in tl.range(0, columns_end, BLOCK_SIZE_N, num_stages=1):
        columns = column + lanes
        inside = (columns < columns_end) & (block.group < G)
        factors = tl.load(factors_ptr + block.group.to(tl.int64) * columns_end + columns, mask=inside, other=0.0)
        codes = _load_codes(q_ptr, columns_end, block, rows, columns)
        total = tl.sum(codes * _inverse(scales)[:, None], 0) * factors
        sums = sums_ptr + tl.program_id(0).to(tl.int64) * columns_end
        tl.store(sums + columns, total, mask=columns < columns_end)


@triton.jit(do_not_specialize=["M", "G"])
def swiglu_gradient_columns_kernel(
    q_ptr: tl.tensor,  # (M, C), row-major
    scales_ptr: tl.tensor,  # (M,)
    row_factors_ptr: tl.tensor,  # (M,)
    factors_ptr: tl.tensor,  # (G, C)
    largest_ptr: tl.tensor,  # (G, C), int32
    blocks_ptr: tl.tensor,  # (blocks, 4), int32
    q_columns_ptr: tl.tensor,  # (P, C), strides (1, P)
    column_scales_ptr: tl.tensor,  # (G, C)
    M: tl.tensor,
    C: tl.tensor,
    G: tl.tensor,
    FP8_MAX: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,  # places of a program
    BLOCK_SIZE_N: tl.constexpr,
) -> None:
    """One program: BLOCK_SIZE_N columns of a block, from codes of the rows to codes of the columns."""
    across = tl.cdiv(C, BLOCK_SIZE_N)
    block = load_block(blocks_ptr, tl.program_id(0) // across, BLOCK_SIZE_M)
    if block.group < G:
        columns = tl.program_id(0) % across * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
        words = tl.arange(0, BLOCK_SIZE_M // 4) * 4
        inside = columns < C
        of_group = block.group.to(tl.int64) * C
        factors = tl.load(factors_ptr + of_group + columns, mask=inside, other=1.0)
        scale = scale_of_bits(tl.load(largest_ptr + of_group + columns, mask=inside, other=0), FP8_MAX)
        tl.store(column_scales_ptr + of_group + columns, scale, mask=inside & block.is_first)
        grown = (factors * scale)[None, :]
        dtype: tl.constexpr = q_columns_ptr.dtype.element_ty
        packed = packed_codes(
            _shifted(q_ptr, scales_ptr, row_factors_ptr, C, block, words, columns, grown),
            _shifted(q_ptr, scales_ptr, row_factors_ptr, C, block, words + 1, columns, grown),
            _shifted(q_ptr, scales_ptr, row_factors_ptr, C, block, words + 2, columns, grown),
            _shifted(q_ptr, scales_ptr, row_factors_ptr, C, block, words + 3, columns, grown),
            dtype,
            FP8_MAX,
        )
        taken = tl.minimum(tl.maximum(block.rows - words, 0), 4)  # of a word: a NaN would leave no zeros
        kept = tl.where(taken == 4, -1, (1 << (8 * tl.minimum(taken, 3))) - 1)
        packed = packed & kept.to(tl.uint32, bitcast=True)[:, None]
        to_ptr = bytes_of(q_columns_ptr, 4) + block.place // 4
        stride = stride_of_columns(M, G, 128) // 4
        at = to_ptr + (words // 4)[:, None] + columns.to(tl.int64)[None, :] * stride
        tl.store(at, packed, mask=inside[None, :] & (words >= 0)[:, None])


@triton.jit
def _shifted(
    q_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    row_factors_ptr: tl.tensor,
    C: tl.tensor,
    block: Block,
    rows: tl.tensor,
    columns: tl.tensor,
    grown: tl.tensor,
) -> tl.tensor:
    """Codes of rows in the binade of the columns, float32."""
    inside = rows < block.rows
    scales = tl.load(scales_ptr + block.first + rows, mask=inside, other=1.0)
    row_factors = tl.load(row_factors_ptr + block.first + rows, mask=inside, other=1.0)
    return _load_codes(q_ptr, C, block, rows, columns) * _inverse(scales * row_factors)[:, None] * grown


@triton.jit
def _inverse(factors: tl.tensor) -> tl.tensor:
    """1 / factors, exact of powers of two."""
    return tl.div_rn(tl.full(factors.shape, 1.0, tl.float32), factors)


@triton.jit
def _load_codes(
    q_ptr: tl.tensor, columns_end: tl.tensor, block: Block, rows: tl.tensor, columns: tl.tensor
) -> tl.tensor:
    """Codes of a block as float32; zeros outside."""
    inside = (rows < block.rows)[:, None] & (columns < columns_end)[None, :]
    from_ptr = bytes_of(q_ptr, 1) + block.first.to(tl.int64) * columns_end
    codes = tl.load(from_ptr + (rows[:, None] * columns_end + columns[None, :]), mask=inside, other=0)
    return codes.to(q_ptr.dtype.element_ty, bitcast=True).to(tl.float32)


def quantize_swiglu_gradient(
    x: torch.Tensor,
    dh: torch.Tensor,
    offs: torch.Tensor,
    factors: torch.Tensor,
    row_factors: torch.Tensor,
    x_scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    *,
    activation: str = "swiglu",
    layout: str = "halves",
    bias_gradient: bool = False,
    float8_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns ``(q, scales, q_columns, column_scales, d_weights, d_bias)`` as the module and the package say.

    ``activation``: ``"swiglu"`` or ``"gpt-oss"``. ``layout``: ``"halves"`` or ``"interleaved"``. ``bias_gradient``:
    whether ``d_bias`` is wanted; else it has no element, as ``d_weights`` without ``weights``. Scratch: ``8*G*N``
    bytes, and for ``d_bias`` ``8*N`` bytes a block of rows.
    """
    return _operator(
        x, dh, offs, factors, row_factors, x_scales, bias, weights, activation, layout, bias_gradient, float8_dtype
    )


def reference(
    x: torch.Tensor,
    dh: torch.Tensor,
    offs: torch.Tensor,
    factors: torch.Tensor,
    row_factors: torch.Tensor,
    x_scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    weights: torch.Tensor | None,
    activation: str,
    layout: str,
    bias_gradient: bool,
    float8_dtype: torch.dtype,
) -> Tensors:
    """The same in plain torch; reads ``offs`` on the host. Zeros where a launch writes nothing."""
    rest = factors, row_factors, x_scales, bias, weights, activation, layout, bias_gradient, float8_dtype
    q, scales, q_columns, column_scales, d_weights, d_bias = outputs(x, dh, offs, *rest)
    G, C = offs.shape[0], x.shape[1]
    values = values_of(x, offs, x_scales, bias)
    dh = dh.float().clone()
    dh[int(offs[-1]) :] = 0
    weighted = dh
    if weights is not None:
        weighted = dh * weights.masked_fill(torch.arange(len(dh), device=dh.device) >= offs[-1], 0)[:, None]
    d_gate, d_up, h = reference_gated_gradient(*split(values, layout), weighted, ACTIVATIONS.index(activation))
    if weights is not None:
        d_weights.copy_((dh * h).sum(1))
    d = torch.empty_like(values)
    for half, of_it in zip(split(d, layout), (d_gate, d_up), strict=True):
        half.copy_(of_it)
    factors, row_factors = factors.view(G, C), row_factors.view(-1)
    bounds = list(zip([0, *offs.tolist()[:-1]], offs.tolist(), strict=True))
    for group, (start, end) in enumerate(bounds):
        over_rows = d[start:end] * row_factors[start:end, None].reciprocal()
        largest = over_rows.abs().amax(0) if end > start else d.new_zeros(C)
        column_scales[group * C : (group + 1) * C] = reference_scale(largest, float8_dtype, power_of_two=True)
        d[start:end] *= factors[group].reciprocal()
    d[bounds[-1][1] :] = 0
    scales.copy_(scale_of_rows(d, float8_dtype))
    q.copy_(reference_cast(d, scales, float8_dtype))

    q_columns.zero_()
    place = 0
    for group, (start, end) in enumerate(bounds):
        codes, of_rows = q[start:end].float(), scales[start:end]
        if bias_gradient:
            d_bias[group] = (codes * of_rows.reciprocal()).sum(0) * factors[group]
        z = codes * (of_rows * row_factors[start:end, None]).reciprocal()
        grown = factors[group] * column_scales[group * C : (group + 1) * C]
        q_columns[place : place + end - start] = reference_cast(z, grown, float8_dtype)
        place += taken_rows(end - start, ALIGNMENT)
    return q, scales, q_columns, column_scales, d_weights, d_bias


def inputs(problem: Problem, device: str) -> Inputs:
    """All of :func:`reference`'s arguments. A shape may say more: see :mod:`.swiglu_rowwise_transposed`."""
    M, N, G = (problem.shape[dim] for dim in "MNG")
    x, x_scales = random_gate_and_up(problem, M, N, device)
    dh = random_matrix(replace(problem, in_dtype="bfloat16", seed=problem.seed + 1), M, N, device)
    bias = random_matrix(replace(problem, in_dtype="bfloat16", seed=problem.seed + 3), G, 2 * N, device)
    weights = random_matrix(replace(problem, in_dtype="float32", seed=problem.seed + 4), M, 1, device)
    return (
        x,
        dh,
        offsets(problem, device),
        powers_of_two(problem, G, 2 * N, device, 5),
        powers_of_two(problem, M, 1, device, 6).view(M),
        x_scales,
        bias if problem.shape.get("bias") else None,
        weights.view(M) if problem.shape.get("weights") else None,
        *options_of(problem),
        False,
        dtype_named(problem.fp8_dtype),
    )


def powers_of_two(problem: Problem, rows: int, columns: int, device: str, number: int) -> torch.Tensor:
    """Scales from 1/8 to 8."""
    values = random_matrix(replace(problem, in_dtype="float32", seed=problem.seed + number), rows, columns, device)
    return torch.exp2(values.clamp_(-3, 3).round_())


def constrain(inputs: Inputs) -> None:
    """Make powers of two of what should be: of other values, whatever they are."""
    for scales in (*inputs[3:5], inputs[5]):
        if scales is not None and not scales.is_meta:
            finite = scales.nan_to_num(1.0, 1.0, 1.0).abs().clamp(2.0**-8, 2.0**8)
            scales.copy_(torch.exp2(finite.log2().round()))


def outputs(x: torch.Tensor, dh: torch.Tensor, offs: torch.Tensor, *rest: Any) -> Tensors:
    """Uninitialised ``q``, ``scales``, ``q_columns``, ``column_scales``, ``d_weights`` and ``d_bias``."""
    _, _, _, _, weights, _, _, bias_gradient, float8_dtype = rest
    (M, C), G = x.shape, offs.shape[0]
    P = padded_rows(M, G, ALIGNMENT)
    return (
        x.new_empty(M, C, dtype=float8_dtype),
        x.new_empty(M, 1, dtype=torch.float32),
        torch.empty_strided((P, C), (1, P), dtype=float8_dtype, device=x.device),
        x.new_empty(G * C, dtype=torch.float32),
        x.new_empty(0 if weights is None else M, dtype=torch.float32),
        x.new_empty((G, C) if bias_gradient else (0,), dtype=torch.float32),
    )


def unwritten(inputs: Inputs, outputs: Tensors) -> None:
    """Write zeros past the last group's multiple of the alignment."""
    colwise.clear_past_the_groups(outputs[2], inputs[2], ALIGNMENT)


def launch(config: Mapping[str, int], inputs: Inputs, outputs: Tensors) -> None:
    """Two launches, after one that zeroes the maxima of columns: these meet in memory."""
    x, dh, offs, factors, row_factors, x_scales, bias, weights, activation, layout, bias_gradient, dtype = inputs
    q, scales, q_columns, column_scales, d_weights, d_bias = outputs
    (M, C), G, P = q.shape, offs.shape[0], q_columns.shape[0]
    if not C:
        return
    blocks = P // config["BLOCK_SIZE_M"]
    largest = torch.zeros(G * C, dtype=torch.int32, device=x.device)
    places = torch.empty(blocks, 4, dtype=torch.int32, device=x.device)
    sums = x.new_empty(blocks, C, dtype=torch.float32) if bias_gradient else None
    given = (x, dh, offs, x_scales, bias, weights, factors, row_factors)
    tensors = (*given, q, scales, largest, None if weights is None else d_weights, sums, places)
    is_interleaved = layout == "interleaved"
    constants = (FP8_MAX[dtype], ACTIVATIONS.index(activation), is_interleaved, *tile_of(config, C // 2))
    options = {name: config[name] for name in ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "HELD", "num_warps", "num_stages")}
    launch_kernel(swiglu_gradient_rows_kernel, blocks, tensors, (M, C // 2, G), constants, options)
    if sums is not None:
        torch.mm(_blocks_of_groups(offs, blocks, config["BLOCK_SIZE_M"]), sums, out=d_bias)
    codes = (q, scales, row_factors, factors, largest, places, q_columns, column_scales)
    options = {"BLOCK_SIZE_M": config["BLOCK_SIZE_M"], "BLOCK_SIZE_N": config["BLOCK_SIZE_N"], "num_warps": 4}
    programs = blocks * -(-C // config["BLOCK_SIZE_N"])
    launch_kernel(swiglu_gradient_columns_kernel, programs, codes, (M, C, G), (FP8_MAX[dtype],), options)


def _blocks_of_groups(offs: torch.Tensor, blocks: int, BLOCK_SIZE_M: int) -> torch.Tensor:
    """(G, blocks), float32: 1 where a block of places is of a group. Nothing waits for the device."""
    sizes = offs.diff(prepend=offs.new_zeros(1))
    ends = ((sizes + ALIGNMENT - 1) // ALIGNMENT).clamp_(min=1).cumsum(0) * ALIGNMENT
    places = torch.arange(blocks, device=offs.device) * BLOCK_SIZE_M
    group = torch.searchsorted(ends, places, right=True)
    return (group == torch.arange(len(offs), device=offs.device)[:, None]).float()


def invalid(config: Mapping[str, int], shape: Mapping[str, int], limits: DeviceLimits) -> str | None:
    """The hardware reason why a config cannot pay, or None."""
    width, _, rows = tile_of(config, shape["N"])
    least = min(SPEC.axes["TILE"])
    if least < config["TILE"] and rows == tile_of({**config, "TILE": least}, shape["N"])[2]:
        return f"same binary as TILE={least}: one row at a time"
    return wrong_tile(config, width * rows, limits, least=4, too_few="too few loads under way", held="gate and up do")


SPEC = KernelSpec(
    name="swiglu-gradient",
    axes={
        "BLOCK_SIZE_M": (32, 64, 128),
        "BLOCK_SIZE_N": (64, 128, 256),
        "TILE": (1024, 2048, 4096, 8192),
        "HELD": (0, 1),
        "num_warps": (4, 8, 16),
        "num_stages": (1, 2),
    },
    default=NamedInts(BLOCK_SIZE_M=64, BLOCK_SIZE_N=128, TILE=2048, HELD=0, num_warps=8, num_stages=1),
    key=swiglu_rowwise_transposed.SPEC.key,
    problems=problems,
    inputs=inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    constrain=constrain,
    unwritten=unwritten,
    interpreted=swiglu_rowwise_transposed.SPEC.interpreted,
    invalid=invalid,
    edges=declared(
        edge("one row, huge values", "huge", routing="ragged", M=1, N=48, G=3),
        edge("a block and one more", routing="balanced", M=513, N=144, G=1),
        edge("rows of no group, NaN", "nan", routing="empty", M=277, N=48, G=4),
        edge("a prime, infinity", "infinite", routing="ragged", M=67, N=48, G=3),
        edge("empty groups, zeros", "zeros", routing="empty", M=37, N=48, G=3),
        edge("one column, tiny values", "tiny", routing="ragged", M=67, N=1, G=2),
        edge("an odd number of columns past an aligned address", offset=1, routing="ragged", M=131, N=129, G=2),
        edge("a tail of columns", routing="ragged", M=67, N=past_half("N", 16), G=2),
        edge("interleaved, gpt-oss", routing="empty", M=277, N=80, G=4, layout=1, activation=1),
    ),
    routed=True,
    layout_sizes={"N": 272},
    in_dtypes=swiglu_rowwise_transposed.SPEC.in_dtypes,
    uses_fp8=True,
)


def _arguments(
    x: torch.Tensor,
    dh: torch.Tensor,
    offs: torch.Tensor,
    factors: torch.Tensor,
    row_factors: torch.Tensor,
    x_scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    weights: torch.Tensor | None,
    activation: str,
    layout: str,
    bias_gradient: bool,
    float8_dtype: torch.dtype | None,
) -> Inputs:
    check_gate_and_up(x, offs, x_scales, bias, weights, activation, layout)
    M, C = x.shape
    if dh.shape != (M, C // 2) or dh.dtype != torch.bfloat16 or not dh.is_contiguous() or dh.device != x.device:
        has = f"{dh.dtype} of shape {tuple(dh.shape)}, strides {dh.stride()} on {dh.device}"
        raise ValueError(f"dh is {has}, wanted row-major ({M}, {C // 2}) of torch.bfloat16 on {x.device}")
    check_values("factors", factors, torch.float32, offs.shape[0] * C, x)
    check_values("row_factors", row_factors, torch.float32, M, x)
    dtype = fp8_dtype_for(x.device, float8_dtype)
    return x, dh, offs, factors, row_factors, x_scales, bias, weights, activation, layout, bias_gradient, dtype


def _key(x: torch.Tensor, dh: torch.Tensor, offs: torch.Tensor, *rest: Any) -> tuple[int, ...]:
    return key(x, offs)


_operator = register(SPEC, quantize_swiglu_gradient, _arguments, _key)
