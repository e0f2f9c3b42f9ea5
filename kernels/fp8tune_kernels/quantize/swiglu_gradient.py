"""``swiglu-gradient``: the gradient of an expert MLP's gated activation, quantized row by row. It is never written.

    d_gate, d_up = gated_gradient(gate, up, dh * weights)             see :mod:`.gated`
    d[m, n]      = d_gate and d_up in the ``layout`` of x
    scales[m]    = scale of the maximum over n of |d[m, n] / factors[g, n]|        see :mod:`.arithmetic`
    q[m, n]      = fp8(d[m, n] / factors[g, n] * scales[m])                        for m in group g

    x              (M, 2N), row-major: gate and up in the ``layout`` halves or interleaved; bfloat16, or FP8 codes
    dh             (M, N), row-major, bfloat16: the gradient of what the GEMM down read
    offs           (G,), int32: the end row of each group, non-decreasing, at most M; an empty group has no row
    factors        (G, 2N), float32, powers of two: scales of the weights' codes (gate and up)
    x_scales       (M, 1), float32, powers of two: what codes were multiplied by; None beside bfloat16
    bias           (G, 2N), bfloat16, added to x of bfloat16 and rounded; or None
    weights        (M,), float32: a factor a row; or None
    q              (M, 2N), row-major: the left operand of the input gradient's GEMM. Zeros in rows of no group
    scales         (M, 1), float32, powers of two; a GEMM is given the reciprocals
    d_weights      (M,), float32, if there are weights: the sum over n of dh * h, in an order of the config's
    d_bias         (G, 2N), float32, if it is wanted: the sum over rows of q / scales * factors, likewise

The GEMM of the input gradient reads the weights' codes transposed as bytes, without scales: these are factors here. The
GEMM of the weight gradient reads ``q`` as :mod:`.transposed_codes` lays it out.

Scratch for ``d_bias``: ``8*N`` bytes a block of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from ..edges import edge
from ..groups import padded_rows
from ..inputs import random_matrix
from ..runtime import declare
from ..runtime.checks import refuse
from ..runtime.declare import Call, Config
from ..spec import Problem
from . import gate_and_up
from .aligned_blocks import ALIGNMENT, Block, block_at, inverse_of, largest_of_both, load_codes, scale_of_bits
from .arithmetic import reference_cast
from .factors import factor_of, random_powers, reference_factor
from .gate_and_up import Rows, Source, bounds, load_gate_and_up, scale_of_rows, split, store_gate_and_up
from .gated import ACTIVATIONS, gated_gradient, reference_gated_gradient

MATRICES = 3
"""(M, N) that a program reads: gate, up and dh."""


@triton.jit(do_not_specialize=["M", "G"])  # both change every step: neither may recompile anything
def swiglu_gradient_kernel(
    x_ptr: tl.tensor,  # (M, 2N), row-major
    dh_ptr: tl.tensor,  # (M, N), row-major
    offs_ptr: tl.tensor,  # (G,)
    x_scales_ptr: tl.tensor,  # (M,); None beside bfloat16
    bias_ptr: tl.tensor,  # (G, 2N) or None
    weights_ptr: tl.tensor,  # (M,) or None
    factors_ptr: tl.tensor,  # (G, 2N)
    q_ptr: tl.tensor,  # (M, 2N), row-major
    scales_ptr: tl.tensor,  # (M,)
    d_weights_ptr: tl.tensor,  # (M,) or None
    sums_ptr: tl.tensor,  # (programs, 2N), float32, or None
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
    num_stages: tl.constexpr,
) -> None:
    """One program: a block (:mod:`.aligned_blocks`) by rows, and the sums of its columns."""
    block = block_at(offs_ptr, M, G, tl.program_id(0) * BLOCK_SIZE_M, BLOCK_SIZE_M)
    tiles = tl.cdiv(block.rows, ROWS)
    source = Source(x_ptr, x_scales_ptr, bias_ptr, N, INTERLEAVED)
    lanes, columns, others = tl.arange(0, ROWS), tl.arange(0, WIDTH), WIDTH + tl.arange(0, WIDTH // 2)
    has_rows = (block.group < G) & (block.rows > 0)  # a third of the blocks has none, of 128 groups of 256 rows
    factors = _load_factors(factors_ptr, source, block.group, has_rows, columns)
    if HAS_REST:
        factors_rest = _load_factors(factors_ptr, source, block.group, has_rows, others)
    for number in tl.range(0, tiles, num_stages=num_stages):
        row = block.first + number * ROWS
        in_rows = number * ROWS + lanes < block.rows
        is_read = in_rows & (block.group < G)  # rows of no group become zeros
        weights = None
        if weights_ptr is not None:
            weights = tl.load(weights_ptr + row + lanes, mask=is_read, other=0.0)[:, None]
        rows = Rows(block.group, row, lanes, in_rows, is_read, weights)
        d_gate, d_up, total = _gradient(dh_ptr, source, rows, columns, ACTIVATION)
        of_gate, of_up = _unpack(factors)
        y_gate, y_up = d_gate * of_gate, d_up * of_up
        largest = largest_of_both(y_gate, y_up)
        if HAS_REST:
            d_gate_rest, d_up_rest, total_rest = _gradient(dh_ptr, source, rows, others, ACTIVATION)
            of_gate, of_up = _unpack(factors_rest)
            y_gate_rest, y_up_rest = d_gate_rest * of_gate, d_up_rest * of_up
            largest = tl.maximum(largest, largest_of_both(y_gate_rest, y_up_rest))
            total += total_rest
        if weights_ptr is not None:
            tl.store(d_weights_ptr + row + lanes, total, mask=in_rows)
        scale = scale_of_bits(largest, FP8_MAX)
        tl.store(scales_ptr + row + lanes, scale, mask=in_rows)
        store_gate_and_up(q_ptr, source, rows, columns, y_gate, y_up, scale, FP8_MAX)
        if HAS_REST:
            store_gate_and_up(q_ptr, source, rows, others, y_gate_rest, y_up_rest, scale, FP8_MAX)
    if sums_ptr is not None:
        tl.debug_barrier()  # all threads' codes and scales before they are read
        _sum_columns(q_ptr, scales_ptr, factors_ptr, sums_ptr, 2 * N, G, block, BLOCK_SIZE_M, 128)


@triton.jit
def _load_factors(
    factors_ptr: tl.tensor, source: Source, group: tl.tensor, has_rows: tl.tensor, columns: tl.tensor
) -> tl.tensor:
    """Return the factors for gradients of gate and up: a row of both, packed into int32 for :func:`_unpack`.

    Powers of two are numbers of bfloat16. So both take one register a column while rows pass by, not two.
    """
    of_gate, of_up = columns, source.N + columns
    if source.INTERLEAVED:
        of_gate, of_up = 2 * columns, 2 * columns + 1
    inside = (columns < source.N) & has_rows
    at = factors_ptr + group.to(tl.int64) * (2 * source.N)
    gate = factor_of(tl.load(at + of_gate, mask=inside, other=1.0)).to(tl.int32, bitcast=True)
    up = factor_of(tl.load(at + of_up, mask=inside, other=1.0)).to(tl.int32, bitcast=True)
    return (gate | (up >> 16))[None, :]


@triton.jit
def _unpack(factors: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the factors of gate and up as float32."""
    if is_cuda():
        gate, up = tl.inline_asm_elementwise(
            "and.b32 $0, $2, 0xffff0000; shl.b32 $1, $2, 16;",
            "=r,=r,r",
            [factors],
            dtype=(tl.int32, tl.int32),
            is_pure=False,  # else the compiler moves it out of the loop, and the registers are needed again
            pack=1,
        )
    else:
        gate, up = factors & -65536, factors << 16
    return gate.to(tl.float32, bitcast=True), up.to(tl.float32, bitcast=True)


@triton.jit
def _gradient(
    dh_ptr: tl.tensor, source: Source, rows: Rows, columns: tl.tensor, ACTIVATION: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return d_gate and d_up of a tile, and of each row the sum of dh * h, if there are weights."""
    gate, up = load_gate_and_up(source, rows, columns)
    at = dh_ptr + rows.first.to(tl.int64) * source.N + (rows.lanes[:, None] * source.N + columns[None, :])
    inside = rows.is_read[:, None] & (columns < source.N)[None, :]
    dh = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if rows.weights is None:
        d_gate, d_up, _ = gated_gradient(gate, up, dh, ACTIVATION)
        return d_gate, d_up, tl.zeros((rows.lanes.shape[0],), tl.float32)
    else:  # noqa: RET505 - Triton drops a branch only where both are written
        d_gate, d_up, h = gated_gradient(gate, up, dh * rows.weights, ACTIVATION)
        return d_gate, d_up, tl.sum(dh * h, 1)


@triton.jit
def _sum_columns(
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
    """Store the column sums of a block's dequantized codes; zeros if the block belongs to no group."""
    rows, lanes = tl.arange(0, BLOCK_SIZE_M), tl.arange(0, BLOCK_SIZE_N)
    scales = tl.load(scales_ptr + block.first + rows, mask=rows < block.rows, other=1.0)
    for column in tl.range(0, columns_end, BLOCK_SIZE_N, num_stages=1):
        columns = column + lanes
        inside = (columns < columns_end) & (block.group < G)
        factors = tl.load(factors_ptr + block.group.to(tl.int64) * columns_end + columns, mask=inside, other=0.0)
        codes = load_codes(q_ptr, columns_end, block, rows, columns)
        total = tl.sum(codes * inverse_of(scales)[:, None], 0) * factors
        sums = sums_ptr + tl.program_id(0).to(tl.int64) * columns_end
        tl.store(sums + columns, total, mask=columns < columns_end)


def launch(config: Config, call: Call) -> None:
    """Launch the kernel; with the gradient of the bias, add up the sums of blocks with a GEMM."""
    if call.N:
        blocks = padded_rows(call.M, call.G, ALIGNMENT) // config["BLOCK_SIZE_M"]
        sums = call.x.new_empty(blocks, 2 * call.N, dtype=torch.float32) if call.bias_gradient else None
        gate_and_up.launch(config, call, swiglu_gradient_kernel, blocks, MATRICES, sums=sums)
        if sums is not None:
            torch.mm(_blocks_of_groups(call.offs, blocks, config["BLOCK_SIZE_M"]), sums, out=call.d_bias)


def _blocks_of_groups(offs: torch.Tensor, blocks: int, BLOCK_SIZE_M: int) -> torch.Tensor:
    """Return (G, blocks), float32: 1 where a block of places is of a group. Nothing waits for the device."""
    sizes = offs.diff(prepend=offs.new_zeros(1))
    ends = ((sizes + ALIGNMENT - 1) // ALIGNMENT).clamp_(min=1).cumsum(0) * ALIGNMENT
    places = torch.arange(blocks, device=offs.device) * BLOCK_SIZE_M
    group = torch.searchsorted(ends, places, right=True)
    return (group == torch.arange(len(offs), device=offs.device)[:, None]).float()


def reference(call: Call) -> None:
    """Quantize the gradient in plain torch; reads ``offs`` on the host."""
    scales_of_weights = call.factors.view(call.G, 2 * call.N)
    for rows, ends, x, factors in gate_and_up.row_blocks(call):
        dh = call.dh[rows].float().clone()
        dh[int(ends[-1]) :] = 0
        weighted = dh if factors is None else dh * factors
        d_gate, d_up, h = reference_gated_gradient(*split(x, call.layout), weighted, ACTIVATIONS.index(call.activation))
        if factors is not None:
            call.d_weights[rows] = (dh * h).sum(1)
        d = torch.empty_like(x)
        for half, gradient in zip(split(d, call.layout), (d_gate, d_up), strict=True):
            half.copy_(gradient)
        for group, (start, end) in enumerate(bounds(ends)):
            d[start:end] *= reference_factor(scales_of_weights[group])
        d[int(ends[-1]) :] = 0
        call.scales[rows] = scale_of_rows(d, call.float8_dtype)
        call.q[rows] = reference_cast(d, call.scales[rows], call.float8_dtype)
    if call.bias_gradient:
        for group, (start, end) in enumerate(bounds(call.offs)):
            values = call.q[start:end].float() * call.scales[start:end].reciprocal()
            call.d_bias[group] = values.sum(0) * scales_of_weights[group]


def random_inputs(problem: Problem, device: str) -> Mapping[str, Any]:
    """Return random arguments."""
    M, N, G = (problem.shape[size] for size in "MNG")
    dh = random_matrix(replace(problem, in_dtype="bfloat16", seed=problem.seed + 1), M, N, device)
    factors = random_powers(problem, (G, 2 * N), device, -6, 6)
    return {**gate_and_up.random_inputs(problem, device), "dh": dh, "factors": factors}


def check_dh(dh: torch.Tensor, M: int, N: int, device: torch.device) -> None:
    """Raise ValueError unless dh is row-major (M, N) of bfloat16."""
    if dh.shape != (M, N) or dh.dtype != torch.bfloat16 or not dh.is_contiguous() or dh.device != device:
        refuse("dh", dh, f"row-major ({M}, {N}) of torch.bfloat16 on {device}")


GPT_OSS: Any = {"layout": 1, "activation": 1}

SPEC = declare.kernel(
    name="swiglu-gradient",
    arguments=(
        gate_and_up.X,
        declare.Argument("dh", check=check_dh),
        declare.OFFSETS,
        declare.tensor("factors", "2 * N * G"),
        *gate_and_up.OPTIONS,
        declare.flag("bias_gradient"),
        declare.FLOAT8_DTYPE,
    ),
    outputs=(
        declare.fp8("q", "M", "2 * N"),
        declare.float32("scales", "M", "1"),
        declare.float32("d_weights", "M", requested_by="weights"),
        declare.float32("d_bias", "G", "2 * N", requested_by="bias_gradient"),
    ),
    check=gate_and_up.check_scales_and_bias,
    inputs=random_inputs,
    launch=launch,
    reference=reference,
    problems=gate_and_up.problems,
    invalid=lambda config, shape, limits: gate_and_up.wrong_rows(config, shape, limits, MATRICES),
    edges=(
        *gate_and_up.EDGES,
        edge("interleaved, gpt-oss", routing="empty", M=277, N=80, G=4, **GPT_OSS),
        # sums have any order: here each has one term
        edge("weights, a bias and one column", routing="empty", M=277, N=1, G=4, weights=1, bias=1),
        edge("a row a group", routing="balanced", M=5, N=1, G=5, weights=1, bias=1, bias_gradient=1),
        edge("a row a group, gpt-oss", routing="balanced", M=5, N=80, G=5, **GPT_OSS, bias=1, bias_gradient=1),
        edge("weights that are NaN", "nan", routing="ragged", M=131, N=1, G=3, layout=1, weights=1),
    ),
    **gate_and_up.DECLARED,
)

quantize_swiglu_gradient = SPEC.define(replays=True)
