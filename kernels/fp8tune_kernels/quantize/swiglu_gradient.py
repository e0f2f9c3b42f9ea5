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
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from ..catalog import SPANS
from ..edges import declared, edge
from ..groups import padded_rows
from ..inputs import dtype_named, offsets, random_matrix
from ..runtime.checks import fp8_dtype_for
from ..runtime.launching import launch_kernel
from ..runtime.ops import Inputs, Tensors, register
from ..spec import DeviceLimits, KernelSpec, NamedInts, Problem
from . import gated_rows, whole_rows
from .aligned_blocks import (
    ALIGNMENT,
    Block,
    block_at,
    inverse_of,
    largest_of_both,
    load_codes,
    scale_of_bits,
)
from .arithmetic import FP8_MAX, reference_cast
from .factors import factor_of, random_powers, reference_factor
from .gate_and_up import (
    check_gate_and_up,
    check_values,
    load_gate_and_up,
    options_of,
    random_gate_and_up,
    scale_of_rows,
    split,
    store_gate_and_up,
    values_of,
)
from .gated import ACTIVATIONS, gated_gradient, reference_gated_gradient
from .gated_rows import blocks_of_rows, ends_within, key, problems

__all__ = ["SPEC", "quantize_swiglu_gradient"]

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
    rows = tl.cdiv(block.rows, ROWS)
    lanes, columns, others = tl.arange(0, ROWS), tl.arange(0, WIDTH), WIDTH + tl.arange(0, WIDTH // 2)
    has_rows = (block.group < G) & (block.rows > 0)  # a third of the blocks has none, of 128 groups of 256 rows
    factors = _factors(factors_ptr, block.group, has_rows, N, columns, INTERLEAVED)
    if HAS_REST:
        factors_rest = _factors(factors_ptr, block.group, has_rows, N, others, INTERLEAVED)
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
        of_gate, of_up = _unpacked(factors)
        y_gate, y_up = d_gate * of_gate, d_up * of_up
        largest = largest_of_both(y_gate, y_up)
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
            of_gate, of_up = _unpacked(factors_rest)
            y_gate_rest, y_up_rest = d_gate_rest * of_gate, d_up_rest * of_up
            largest = tl.maximum(largest, largest_of_both(y_gate_rest, y_up_rest))
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
    if sums_ptr is not None:
        tl.debug_barrier()  # all threads' codes and scales before they are read
        _sums_of_columns(q_ptr, scales_ptr, factors_ptr, sums_ptr, 2 * N, G, block, BLOCK_SIZE_M, 128)


@triton.jit
def _factors(
    factors_ptr: tl.tensor,
    group: tl.tensor,
    has_rows: tl.tensor,
    N: tl.tensor,
    columns: tl.tensor,
    INTERLEAVED: tl.constexpr,
) -> tl.tensor:
    """What the gradients of gate and up are multiplied by: a row of both, as :func:`_unpacked` reads them.

    Powers of two are numbers of bfloat16. So both take one register a column while rows pass by, not two.
    """
    of_gate, of_up = columns, N + columns
    if INTERLEAVED:
        of_gate, of_up = 2 * columns, 2 * columns + 1
    inside = (columns < N) & has_rows
    at = factors_ptr + group.to(tl.int64) * (2 * N)
    gate = factor_of(tl.load(at + of_gate, mask=inside, other=1.0)).to(tl.int32, bitcast=True)
    up = factor_of(tl.load(at + of_up, mask=inside, other=1.0)).to(tl.int32, bitcast=True)
    return (gate | (up >> 16))[None, :]


@triton.jit
def _unpacked(factors: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Those of gate and up, float32. A compiler moves what it knows out of the loop, and needs the registers again."""
    if is_cuda():
        gate, up = tl.inline_asm_elementwise(
            "and.b32 $0, $2, 0xffff0000; shl.b32 $1, $2, 16;",
            "=r,=r,r",
            [factors],
            dtype=(tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        gate, up = factors & -65536, factors << 16
    return gate.to(tl.float32, bitcast=True), up.to(tl.float32, bitcast=True)


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
    inside = is_read[:, None] & (columns < N)[None, :]
    dh = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if weights is None:
        d_gate, d_up, _ = gated_gradient(gate, up, dh, ACTIVATION)
        return d_gate, d_up, tl.zeros((lanes.shape[0],), tl.float32)
    else:  # noqa: RET505 - Triton drops a branch only where both are written
        d_gate, d_up, h = gated_gradient(gate, up, dh * weights, ACTIVATION)
        return d_gate, d_up, tl.sum(dh * h, 1)


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
        codes = load_codes(q_ptr, columns_end, block, rows, columns)
        total = tl.sum(codes * inverse_of(scales)[:, None], 0) * factors
        sums = sums_ptr + tl.program_id(0).to(tl.int64) * columns_end
        tl.store(sums + columns, total, mask=columns < columns_end)


def quantize_swiglu_gradient(
    x: torch.Tensor,
    dh: torch.Tensor,
    offs: torch.Tensor,
    factors: torch.Tensor,
    x_scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    activation: str = "swiglu",
    layout: str = "halves",
    bias_gradient: bool = False,
    float8_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns ``(q, scales, d_weights, d_bias)`` as the module and the package say.

    ``activation``: ``"swiglu"`` or ``"gpt-oss"``. ``layout``: ``"halves"`` or ``"interleaved"``. ``bias_gradient``:
    whether ``d_bias`` is wanted; else it has no element, as ``d_weights`` without ``weights``. Scratch for ``d_bias``:
    ``8*N`` bytes a block of rows.
    """
    return _operator(x, dh, offs, factors, x_scales, bias, weights, activation, layout, bias_gradient, float8_dtype)


def reference(
    x: torch.Tensor,
    dh: torch.Tensor,
    offs: torch.Tensor,
    factors: torch.Tensor,
    x_scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    weights: torch.Tensor | None,
    activation: str,
    layout: str,
    bias_gradient: bool,
    float8_dtype: torch.dtype,
) -> Tensors:
    """The same in plain torch; reads ``offs`` on the host. Zeros where a launch writes nothing."""
    rest = factors, x_scales, bias, weights, activation, layout, bias_gradient, float8_dtype
    q, scales, d_weights, d_bias = outputs(x, dh, offs, *rest)
    G, C = offs.shape[0], x.shape[1]
    factors = factors.view(G, C)
    for rows in blocks_of_rows(*dh.shape):
        ends = ends_within(offs, rows)
        values = values_of(x[rows], ends, None if x_scales is None else x_scales[rows], bias)
        dh_rows = dh[rows].float().clone()
        dh_rows[int(ends[-1]) :] = 0
        weighted = dh_rows
        if weights is not None:
            outside = torch.arange(len(dh_rows), device=dh.device) >= ends[-1]
            weighted = dh_rows * weights[rows].masked_fill(outside, 0)[:, None]
        d_gate, d_up, h = reference_gated_gradient(*split(values, layout), weighted, ACTIVATIONS.index(activation))
        if weights is not None:
            d_weights[rows] = (dh_rows * h).sum(1)
        d = torch.empty_like(values)
        for half, of_it in zip(split(d, layout), (d_gate, d_up), strict=True):
            half.copy_(of_it)
        for group, (start, end) in enumerate(_bounds(ends)):
            d[start:end] *= reference_factor(factors[group])
        d[int(ends[-1]) :] = 0
        scales[rows] = scale_of_rows(d, float8_dtype)
        q[rows] = reference_cast(d, scales[rows], float8_dtype)
    if bias_gradient:
        for group, (start, end) in enumerate(_bounds(offs)):
            d_bias[group] = (q[start:end].float() * scales[start:end].reciprocal()).sum(0) * factors[group]
    return q, scales, d_weights, d_bias


def _bounds(ends: torch.Tensor) -> list[tuple[int, int]]:
    """The first row of each group and the one past its last."""
    return list(zip([0, *ends.tolist()[:-1]], ends.tolist(), strict=True))


def inputs(problem: Problem, device: str) -> Inputs:
    """All of :func:`reference`'s arguments. A shape may say more: see :mod:`.swiglu_rowwise`; and ``bias_gradient``."""
    M, N, G = (problem.shape[dim] for dim in "MNG")
    x, x_scales = random_gate_and_up(problem, M, N, device)
    dh = random_matrix(replace(problem, in_dtype="bfloat16", seed=problem.seed + 1), M, N, device)
    bias = random_matrix(replace(problem, in_dtype="bfloat16", seed=problem.seed + 3), G, 2 * N, device)
    weights = random_matrix(replace(problem, in_dtype="float32", seed=problem.seed + 4), M, 1, device)
    return (
        x,
        dh,
        offsets(problem, device),
        random_powers(problem, (G, 2 * N), device, -6, 6),
        x_scales,
        bias if problem.shape.get("bias") else None,
        weights.view(M) if problem.shape.get("weights") else None,
        *options_of(problem),
        bool(problem.shape.get("bias_gradient")),
        dtype_named(problem.fp8_dtype),
    )


def outputs(x: torch.Tensor, dh: torch.Tensor, offs: torch.Tensor, *rest: Any) -> Tensors:
    """Uninitialised ``q``, ``scales``, ``d_weights`` and ``d_bias``."""
    _, _, _, weights, _, _, bias_gradient, float8_dtype = rest
    (M, C), G = x.shape, offs.shape[0]
    return (
        x.new_empty(M, C, dtype=float8_dtype),
        x.new_empty(M, 1, dtype=torch.float32),
        x.new_empty(0 if weights is None else M, dtype=torch.float32),
        x.new_empty((G, C) if bias_gradient else (0,), dtype=torch.float32),
    )


def launch(config: Mapping[str, int], inputs: Inputs, outputs: Tensors) -> None:
    """One launch; with the gradient of the bias, sums of blocks, which a GEMM adds up."""
    x, dh, offs, factors, x_scales, bias, weights, activation, layout, bias_gradient, dtype = inputs
    q, scales, d_weights, d_bias = outputs
    (M, C), G = q.shape, offs.shape[0]
    if not C:
        return
    blocks = padded_rows(M, G, ALIGNMENT) // config["BLOCK_SIZE_M"]
    sums = x.new_empty(blocks, C, dtype=torch.float32) if bias_gradient else None
    given = (x, dh, offs, x_scales, bias, weights, factors)
    tensors = (*given, q, scales, None if weights is None else d_weights, sums)
    is_interleaved = layout == "interleaved"
    constants = (FP8_MAX[dtype], ACTIVATIONS.index(activation), is_interleaved, *whole_rows.tile_of(config, C // 2))
    options = whole_rows.options(config, C // 2, MATRICES, q.device)
    launch_kernel(swiglu_gradient_kernel, blocks, tensors, (M, C // 2, G), constants, options)
    if sums is not None:
        torch.mm(_blocks_of_groups(offs, blocks, config["BLOCK_SIZE_M"]), sums, out=d_bias)


def _blocks_of_groups(offs: torch.Tensor, blocks: int, BLOCK_SIZE_M: int) -> torch.Tensor:
    """(G, blocks), float32: 1 where a block of places is of a group. Nothing waits for the device."""
    sizes = offs.diff(prepend=offs.new_zeros(1))
    ends = ((sizes + ALIGNMENT - 1) // ALIGNMENT).clamp_(min=1).cumsum(0) * ALIGNMENT
    places = torch.arange(blocks, device=offs.device) * BLOCK_SIZE_M
    group = torch.searchsorted(ends, places, right=True)
    return (group == torch.arange(len(offs), device=offs.device)[:, None]).float()


def invalid(config: Mapping[str, int], shape: Mapping[str, int], limits: DeviceLimits) -> str | None:
    """The hardware reason why a config cannot pay, or None. The default has to run, not to pay."""
    return None if config == SPEC.default else gated_rows.wrong_rows(config, shape, limits, MATRICES)


SPEC = KernelSpec(
    name="swiglu-gradient",
    axes=gated_rows.AXES,
    default=NamedInts(BLOCK_SIZE_M=16, TILE=4096, num_warps=8, num_stages=1),
    key=gated_rows.KEY,
    span=SPANS["swiglu-gradient"],
    problems=problems,
    inputs=inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    interpreted=gated_rows.INTERPRETED,
    invalid=invalid,
    edges=declared(
        *gated_rows.EDGES,
        edge("interleaved, gpt-oss", routing="empty", M=277, N=80, G=4, layout=1, activation=1),
        # sums have any order: here each has one term
        edge("weights, a bias and one column", routing="empty", M=277, N=1, G=4, weights=1, bias=1),
        edge(
            "weights, a bias, its gradient and one column of a row a group",
            routing="balanced",
            M=5,
            N=1,
            G=5,
            weights=1,
            bias=1,
            bias_gradient=1,
        ),
        edge(
            "interleaved, gpt-oss, a bias and its gradient",
            routing="balanced",
            M=5,
            N=80,
            G=5,
            layout=1,
            activation=1,
            bias=1,
            bias_gradient=1,
        ),
        edge("weights that are NaN", "nan", routing="ragged", M=131, N=1, G=3, layout=1, weights=1),
    ),
    routed=True,
    layout_sizes={"N": 272},
    in_dtypes=gated_rows.IN_DTYPES,
    uses_fp8=True,
)


def _arguments(
    x: torch.Tensor,
    dh: torch.Tensor,
    offs: torch.Tensor,
    factors: torch.Tensor,
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
    dtype = fp8_dtype_for(x.device, float8_dtype)
    return x, dh, offs, factors, x_scales, bias, weights, activation, layout, bias_gradient, dtype


def _key(x: torch.Tensor, dh: torch.Tensor, offs: torch.Tensor, *rest: Any) -> tuple[int, ...]:
    return key(x, offs)


_operator = register(SPEC, quantize_swiglu_gradient, _arguments, _key, replays=True)
