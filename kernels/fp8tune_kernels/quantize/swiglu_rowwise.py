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

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
import triton
import triton.language as tl

from ..catalog import SPANS
from ..edges import declared, edge
from ..groups import padded_rows
from ..inputs import dtype_named, offsets, random_matrix
from ..runtime.checks import fp8_dtype_for
from ..runtime.launching import launch_kernel
from ..runtime.ops import Inputs, Tensors, register
from ..spec import DeviceLimits, KernelSpec, NamedInts, Problem
from . import gated_rows, whole_rows
from .aligned_blocks import ALIGNMENT, block_at, largest_of_both, largest_of_rows, scale_of_bits
from .arithmetic import FP8_MAX, quantize, reference_cast
from .gate_and_up import (
    check_gate_and_up,
    load_gate_and_up,
    options_of,
    random_gate_and_up,
    scale_of_rows,
    split,
    store_gate_and_up,
    values_of,
)
from .gated import ACTIVATIONS, gated, reference_gated
from .gated_rows import blocks_of_rows, ends_within, key

__all__ = ["SPEC", "quantize_swiglu_rowwise"]

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
    kept_ptr: tl.tensor,  # (M, 2N), row-major, or None
    kept_scales_ptr: tl.tensor,  # (M,) or None
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
    lanes, columns, others = tl.arange(0, ROWS), tl.arange(0, WIDTH), WIDTH + tl.arange(0, WIDTH // 2)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    for number in tl.range(0, tl.cdiv(block_rows, ROWS), num_stages=num_stages):
        row = first + number * ROWS
        in_rows = number * ROWS + lanes < block_rows
        is_read = in_rows & (row + lanes < last)  # rows of no group become zeros
        weights = 1.0
        if weights_ptr is not None:
            weights = tl.load(weights_ptr + row + lanes, mask=is_read, other=0.0)[:, None]
        gate, up = load_gate_and_up(x_ptr, x_scales_ptr, bias_ptr, group, N, row, is_read, lanes, columns, INTERLEAVED)
        h = gated(gate, up, ACTIVATION) * weights if weights_ptr is not None else gated(gate, up, ACTIVATION)
        largest = largest_of_rows(h)
        if HAS_REST:
            gate_rest, up_rest = load_gate_and_up(
                x_ptr, x_scales_ptr, bias_ptr, group, N, row, is_read, lanes, others, INTERLEAVED
            )
            h_rest = gated(gate_rest, up_rest, ACTIVATION)
            if weights_ptr is not None:
                h_rest = h_rest * weights
            largest = tl.maximum(largest, largest_of_rows(h_rest))
        if kept_ptr is not None:
            of_x = largest_of_both(gate, up)
            if HAS_REST:
                of_x = tl.maximum(of_x, largest_of_both(gate_rest, up_rest))
            scale = scale_of_bits(of_x, FP8_MAX)
            tl.store(kept_scales_ptr + row + lanes, scale, mask=in_rows)
            store_gate_and_up(kept_ptr, gate, up, scale, FP8_MAX, N, row, in_rows, lanes, columns, INTERLEAVED)
            if HAS_REST:
                store_gate_and_up(
                    kept_ptr, gate_rest, up_rest, scale, FP8_MAX, N, row, in_rows, lanes, others, INTERLEAVED
                )
        scale = scale_of_bits(largest, FP8_MAX)
        tl.store(scales_ptr + row + lanes, scale, mask=in_rows)
        q_rows = q_ptr + row.to(tl.int64) * N + lanes[:, None] * N
        q = quantize(h, scale[:, None], dtype, FP8_MAX)
        tl.store(q_rows + columns[None, :], q, mask=in_rows[:, None] & (columns < N)[None, :])
        if HAS_REST:
            q = quantize(h_rest, scale[:, None], dtype, FP8_MAX)
            tl.store(q_rows + others[None, :], q, mask=in_rows[:, None] & (others < N)[None, :])


def quantize_swiglu_rowwise(
    x: torch.Tensor,
    offs: torch.Tensor,
    x_scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    activation: str = "swiglu",
    layout: str = "halves",
    keep: bool = False,
    float8_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns ``(q, scales, q_x, scales_x)`` as the module and the package say.

    ``activation``: ``"swiglu"`` or ``"gpt-oss"``. ``layout``: ``"halves"`` or ``"interleaved"``. ``keep``: whether x is
    quantized too; else ``q_x`` and ``scales_x`` have no element.
    """
    return _operator(x, offs, x_scales, bias, weights, activation, layout, keep, float8_dtype)


def reference(
    x: torch.Tensor,
    offs: torch.Tensor,
    x_scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    weights: torch.Tensor | None,
    activation: str,
    layout: str,
    keep: bool,
    float8_dtype: torch.dtype,
) -> Tensors:
    """The same in plain torch; reads ``offs`` on the host."""
    q, scales, q_x, scales_x = outputs(x, offs, x_scales, bias, weights, activation, layout, keep, float8_dtype)
    for rows in blocks_of_rows(*q.shape):
        ends = ends_within(offs, rows)
        values = values_of(x[rows], ends, None if x_scales is None else x_scales[rows], bias)
        h = reference_gated(*split(values, layout), ACTIVATIONS.index(activation))
        last = int(ends[-1])
        if weights is not None:
            h[:last] *= weights[rows][:last, None]
        h[last:] = 0
        scales[rows] = scale_of_rows(h, float8_dtype)
        q[rows] = reference_cast(h, scales[rows], float8_dtype)
        if keep:
            scales_x[rows] = scale_of_rows(values, float8_dtype)
            q_x[rows] = reference_cast(values, scales_x[rows], float8_dtype)
    return q, scales, q_x, scales_x


def inputs(problem: Problem, device: str) -> Inputs:
    """All of :func:`reference`'s arguments.

    A problem's shape may say more: ``activation`` and ``layout``, places in their lists, and 1 or 0 for ``bias``,
    ``weights`` and ``keep``.
    """
    M, N, G = (problem.shape[dim] for dim in "MNG")
    x, x_scales = random_gate_and_up(problem, M, N, device)
    bias = random_matrix(replace(problem, in_dtype="bfloat16", seed=problem.seed + 3), G, 2 * N, device)
    weights = random_matrix(replace(problem, in_dtype="float32", seed=problem.seed + 4), M, 1, device)
    return (
        x,
        offsets(problem, device),
        x_scales,
        bias if problem.shape.get("bias") else None,
        weights.view(M) if problem.shape.get("weights") else None,
        *options_of(problem),
        bool(problem.shape.get("keep")),
        dtype_named(problem.fp8_dtype),
    )


def outputs(
    x: torch.Tensor,
    offs: torch.Tensor,
    x_scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    weights: torch.Tensor | None,
    activation: str,
    layout: str,
    keep: bool,
    float8_dtype: torch.dtype,
) -> Tensors:
    """Uninitialised ``q``, ``scales``, ``q_x`` and ``scales_x``."""
    M, N = x.shape[0], x.shape[1] // 2
    return (
        x.new_empty(M, N, dtype=float8_dtype),
        x.new_empty(M, 1, dtype=torch.float32),
        x.new_empty((M, 2 * N) if keep else (0,), dtype=float8_dtype),
        x.new_empty((M, 1) if keep else (0,), dtype=torch.float32),
    )


def launch(config: Mapping[str, int], inputs: Inputs, outputs: Tensors) -> None:
    """One launch."""
    x, offs, x_scales, bias, weights, activation, layout, keep, float8_dtype = inputs
    q, scales, q_x, scales_x = outputs
    M, N = q.shape
    kept = (q_x, scales_x) if keep else (None, None)
    tensors = (x, offs, x_scales, bias, weights, q, scales, *kept)
    constants = (
        FP8_MAX[float8_dtype],
        ACTIVATIONS.index(activation),
        layout == "interleaved",
        *whole_rows.tile_of(config, N),
    )
    if M * N:
        rows = M if bias is None else padded_rows(M, offs.shape[0], ALIGNMENT)
        programs = -(-rows // config["BLOCK_SIZE_M"])
        options = whole_rows.options(config, N, MATRICES, q.device)
        launch_kernel(swiglu_rowwise_kernel, programs, tensors, (M, N, offs.shape[0]), constants, options)


def problems(row: Mapping[str, int]) -> Iterator[NamedInts]:
    """Yield the activation that a GEMM down reads; with ``weights`` and ``keep``, if the row says so."""
    options = {name: row[name] for name in ("weights", "keep") if row.get(name)}
    return (NamedInts({**shape, **options}) for shape in gated_rows.problems(row))


def invalid(config: Mapping[str, int], shape: Mapping[str, int], limits: DeviceLimits) -> str | None:
    """The hardware reason why a config cannot pay, or None. The default has to run, not to pay."""
    return None if config == SPEC.default else gated_rows.wrong_rows(config, shape, limits, MATRICES)


SPEC = KernelSpec(
    name="swiglu-rowwise",
    axes=gated_rows.AXES,
    default=NamedInts(BLOCK_SIZE_M=16, TILE=4096, num_warps=8, num_stages=1),
    key=gated_rows.KEY,
    span=SPANS["swiglu-rowwise"],
    problems=problems,
    inputs=inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    interpreted=gated_rows.INTERPRETED,
    invalid=invalid,
    edges=declared(
        *gated_rows.EDGES,
        edge("codes kept, NaN", "nan", routing="ragged", M=277, N=48, G=4, keep=1),
        edge("interleaved, gpt-oss, bias", routing="empty", M=277, N=80, G=4, layout=1, activation=1, bias=1, keep=1),
        edge("weights, interleaved", "infinite", routing="ragged", M=131, N=48, G=3, layout=1, weights=1),
    ),
    routed=True,
    layout_sizes={"N": 272},
    in_dtypes=gated_rows.IN_DTYPES,
    uses_fp8=True,
)


def _arguments(
    x: torch.Tensor,
    offs: torch.Tensor,
    x_scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    weights: torch.Tensor | None,
    activation: str,
    layout: str,
    keep: bool,
    float8_dtype: torch.dtype | None,
) -> Inputs:
    check_gate_and_up(x, offs, x_scales, bias, weights, activation, layout)
    return x, offs, x_scales, bias, weights, activation, layout, keep, fp8_dtype_for(x.device, float8_dtype)


_operator = register(SPEC, quantize_swiglu_rowwise, _arguments, key)
