"""``swiglu-gradient``: the gradient of an expert MLP's gated activation, quantized by rows and by columns.

    d_gate, d_up       = gated_gradient(gate, up, dh * weights)             see :mod:`.gated`
    d[m, n]            = d_gate and d_up in the ``layout`` of x; never written
    scales[m]          = scale of the maximum over n of |d[m, n] / factors[g, n]|        see :mod:`.arithmetic`
    q[m, n]            = fp8(d[m, n] / factors[g, n] * scales[m])

    z[m, n]            = q[m, n] / (scales[m] * row_factors[m]) * factors[g, n]
    column_scales[g*C + n] = scale of the maximum over rows m of group g of |z[m, n]|,  C = 2N
    q_columns[place[g] + m - start[g], n] = fp8(z[m, n] * column_scales[g*C + n])

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
    scale_of_bits,
)
from fp8tune_kernels.quantize.arithmetic import FP8_MAX, quantize, reference_cast, reference_scale
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
    M: tl.tensor,
    N: tl.tensor,
    G: tl.tensor,
    FP8_MAX: tl.constexpr,
    ACTIVATION: tl.constexpr,  # a place in ACTIVATIONS
    INTERLEAVED: tl.constexpr,
    WIDTH: tl.constexpr,  # a power of two from N on
    ROWS: tl.constexpr,  # that are cast at a time
    BLOCK_SIZE_M: tl.constexpr,  # places of a program
    BLOCK_SIZE_N: tl.constexpr,
    num_stages: tl.constexpr,
) -> None:
    """One program: a block (:mod:`.aligned_blocks`) by rows, and what its codes add to the maxima of columns."""
    block = block_at(offs_ptr, M, G, tl.program_id(0) * BLOCK_SIZE_M, BLOCK_SIZE_M)
    lanes, columns = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    of_gate, of_up = columns, N + columns
    if INTERLEAVED:
        of_gate, of_up = 2 * columns, 2 * columns + 1
    has_factors = (columns < N) & (block.group < G)
    factors = factors_ptr + block.group.to(tl.int64) * (2 * N)
    gate_factors = _inverse(tl.load(factors + of_gate, mask=has_factors, other=1.0))[None, :]
    up_factors = _inverse(tl.load(factors + of_up, mask=has_factors, other=1.0))[None, :]
    for number in tl.range(0, tl.cdiv(block.rows, ROWS), num_stages=num_stages):
        row = block.first + number * ROWS
        in_rows = number * ROWS + lanes < block.rows
        is_read = in_rows & (block.group < G)  # rows of no group become zeros
        gate, up = load_gate_and_up(
            x_ptr, x_scales_ptr, bias_ptr, block.group, N, row, is_read, lanes, columns, INTERLEAVED
        )
        at = dh_ptr + row.to(tl.int64) * N + (lanes[:, None] * N + columns[None, :])
        dh = tl.load(at, mask=is_read[:, None] & (columns < N)[None, :], other=0.0).to(tl.float32)
        weighted = dh
        if weights_ptr is not None:
            weighted = dh * tl.load(weights_ptr + row + lanes, mask=is_read, other=0.0)[:, None]
        d_gate, d_up, h = gated_gradient(gate, up, weighted, ACTIVATION)
        if weights_ptr is not None:
            tl.store(d_weights_ptr + row + lanes, tl.sum(dh * h, 1), mask=in_rows)
        d_gate, d_up = d_gate * gate_factors, d_up * up_factors
        scale = scale_of_bits(tl.maximum(largest_of_rows(d_gate), largest_of_rows(d_up)), FP8_MAX)
        tl.store(scales_ptr + row + lanes, scale, mask=in_rows)
        codes_of_gate = quantize(d_gate, scale[:, None], dtype, FP8_MAX)
        codes_of_up = quantize(d_up, scale[:, None], dtype, FP8_MAX)
        store_gate_and_up(q_ptr, codes_of_gate, codes_of_up, N, row, in_rows, lanes, columns, INTERLEAVED)
    tl.debug_barrier()  # all threads' codes and scales before they are read
    if block.group < G:
        _maxima_of_columns(
            q_ptr,
            scales_ptr,
            row_factors_ptr,
            factors_ptr,
            largest_ptr,
            sums_ptr,
            2 * N,
            block,
            BLOCK_SIZE_M,
            BLOCK_SIZE_N,
        )
    elif sums_ptr is not None:
        for column in tl.range(0, 2 * N, BLOCK_SIZE_N, num_stages=1):
            at = column + tl.arange(0, BLOCK_SIZE_N)
            sums = sums_ptr + tl.program_id(0).to(tl.int64) * (2 * N)
            tl.store(sums + at, tl.zeros((BLOCK_SIZE_N,), tl.float32), mask=at < 2 * N)


@triton.jit
def _maxima_of_columns(
    q_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    row_factors_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    columns_end: tl.tensor,
    block: Block,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
) -> None:
    """The largest magnitudes of z in a block's columns, into those of its group; and their sums, if they are wanted."""
    rows, lanes = tl.arange(0, BLOCK_SIZE_M), tl.arange(0, BLOCK_SIZE_N)
    scales, row_factors = _row_factors(scales_ptr, row_factors_ptr, block, rows)
    inverse = _inverse(scales * row_factors)[:, None]
    of_group = block.group.to(tl.int64) * columns_end
    for column in tl.range(0, columns_end, BLOCK_SIZE_N, num_stages=1):
        columns = column + lanes
        inside = columns < columns_end
        z = _load_codes(q_ptr, columns_end, block, rows, columns)
        factors = tl.load(factors_ptr + of_group + columns, mask=inside, other=1.0)
        if sums_ptr is not None:
            total = tl.sum(z * _inverse(scales)[:, None], 0) * factors
            sums = sums_ptr + tl.program_id(0).to(tl.int64) * columns_end
            tl.store(sums + columns, total, mask=inside)
        bits = tl.max((z * inverse).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
        bits = (bits.to(tl.float32, bitcast=True) * factors).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        tl.atomic_max(largest_ptr + of_group + columns, bits, mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=["M", "G"])
def swiglu_gradient_columns_kernel(
    q_ptr: tl.tensor,  # (M, C), row-major
    scales_ptr: tl.tensor,  # (M,)
    row_factors_ptr: tl.tensor,  # (M,)
    factors_ptr: tl.tensor,  # (G, C)
    largest_ptr: tl.tensor,  # (G, C), int32
    offs_ptr: tl.tensor,  # (G,)
    q_columns_ptr: tl.tensor,  # (P, C), strides (1, P)
    column_scales_ptr: tl.tensor,  # (G, C)
    M: tl.tensor,
    C: tl.tensor,
    G: tl.tensor,
    FP8_MAX: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,  # places of a program
    BLOCK_SIZE_N: tl.constexpr,
    PACK: tl.constexpr,
) -> None:
    """One program: BLOCK_SIZE_N columns of a block, from codes of the rows to codes of the columns."""
    across = tl.cdiv(C, BLOCK_SIZE_N)
    block = block_at(offs_ptr, M, G, tl.program_id(0) // across * BLOCK_SIZE_M, BLOCK_SIZE_M)
    if block.group < G:
        columns = tl.program_id(0) % across * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
        words = tl.arange(0, BLOCK_SIZE_M // PACK)
        inside = columns < C
        of_group = block.group.to(tl.int64) * C
        scale = scale_of_bits(tl.load(largest_ptr + of_group + columns, mask=inside, other=0), FP8_MAX)
        tl.store(column_scales_ptr + of_group + columns, scale, mask=inside & block.is_first)
        grown = (tl.load(factors_ptr + of_group + columns, mask=inside, other=1.0) * scale)[None, :]
        packed = tl.zeros((BLOCK_SIZE_M // PACK, BLOCK_SIZE_N), tl.uint32)
        for number in tl.static_range(PACK):
            rows = words * PACK + number
            scales, row_factors = _row_factors(scales_ptr, row_factors_ptr, block, rows)
            z = _load_codes(q_ptr, C, block, rows, columns) * _inverse(scales * row_factors)[:, None]
            codes = quantize(z, grown, q_columns_ptr.dtype.element_ty, FP8_MAX).to(tl.uint8, bitcast=True)
            codes = tl.where((rows < block.rows)[:, None], codes.to(tl.uint32), 0)  # a NaN would be no zero
            packed = packed | (codes << (8 * number))
        to_ptr = bytes_of(q_columns_ptr, PACK) + block.place // PACK
        stride = stride_of_columns(M, G, 128) // PACK
        at = to_ptr + words[:, None] + columns.to(tl.int64)[None, :] * stride
        tl.store(at, packed.to(to_ptr.dtype.element_ty), mask=inside[None, :] & (words >= 0)[:, None])


@triton.jit
def _inverse(factors: tl.tensor) -> tl.tensor:
    """1 / factors, exact of powers of two."""
    return tl.div_rn(tl.full(factors.shape, 1.0, tl.float32), factors)


@triton.jit
def _row_factors(
    scales_ptr: tl.tensor, row_factors_ptr: tl.tensor, block: Block, rows: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """The scales and the factors of a block's rows; 1 past them."""
    inside = rows < block.rows
    scales = tl.load(scales_ptr + block.first + rows, mask=inside, other=1.0)
    return scales, tl.load(row_factors_ptr + block.first + rows, mask=inside, other=1.0)


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
        largest = z.abs().amax(0) if len(z) else z.new_zeros(C)
        scale = reference_scale(largest * factors[group], float8_dtype, power_of_two=True)
        column_scales[group * C : (group + 1) * C] = scale
        q_columns[place : place + end - start] = reference_cast(z, factors[group] * scale, float8_dtype)
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
    sums = x.new_empty(blocks, C, dtype=torch.float32) if bias_gradient else None
    width, rows = tile_of(config, C // 2)
    given = (x, dh, offs, x_scales, bias, weights, factors, row_factors)
    tensors = (*given, q, scales, largest, None if weights is None else d_weights, sums)
    constants = (FP8_MAX[dtype], ACTIVATIONS.index(activation), layout == "interleaved", width, rows)
    options = {name: config[name] for name in ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "num_warps", "num_stages")}
    launch_kernel(swiglu_gradient_rows_kernel, blocks, tensors, (M, C // 2, G), constants, options)
    if sums is not None:
        torch.mm(_blocks_of_groups(offs, blocks, config["BLOCK_SIZE_M"]), sums, out=d_bias)
    codes = (q, scales, row_factors, factors, largest, offs, q_columns, column_scales)
    options = {name: config[name] for name in ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "PACK")}
    options["num_warps"] = min(config["num_warps"], 4)
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
    width, rows = tile_of(config, shape["N"])
    least = min(SPEC.axes["TILE"])
    if least < config["TILE"] and rows == tile_of({**config, "TILE": least}, shape["N"])[1]:
        return f"same binary as TILE={least}: one row at a time"
    return wrong_tile(config, width * rows, limits, least=4, too_few="too few loads under way", held="gate and up do")


SPEC = KernelSpec(
    name="swiglu-gradient",
    axes=swiglu_rowwise_transposed.SPEC.axes,
    default=NamedInts(BLOCK_SIZE_M=64, BLOCK_SIZE_N=128, TILE=2048, PACK=4, num_warps=8, num_stages=1),
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
