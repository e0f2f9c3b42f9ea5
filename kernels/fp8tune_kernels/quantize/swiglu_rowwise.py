"""``swiglu-rowwise``: the gated activation of an expert MLP, quantized row by row. The activation is never written.

    h[m, n]   = gated(gate[m, n], up[m, n]) * weights[m]                see :mod:`.gated`
    scales[m] = scale of the maximum over n of |h[m, n]|                see :mod:`.arithmetic`
    q[m, n]   = fp8(h[m, n] * scales[m])

    x             (M, 2N), row-major: gate and up in the ``layout`` halves or interleaved; bfloat16, or FP8 codes
    offs          (G,), int32: the end row of each group, non-decreasing, at most M; an empty group has no row
    x_scales      (M, 1), float32: what codes were multiplied by; None beside bfloat16
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
from typing import Any

import torch
import triton
import triton.language as tl

from fp8tune_kernels.edges import declared, edge, past_half
from fp8tune_kernels.groups import padded_rows
from fp8tune_kernels.inputs import dtype_named, offsets, random_matrix
from fp8tune_kernels.quantize.aligned_blocks import ALIGNMENT, block_at, largest_of_rows, scale_of_bits
from fp8tune_kernels.quantize.arithmetic import FP8_MAX, quantize, reference_cast, reference_scale
from fp8tune_kernels.quantize.gated import ACTIVATIONS, LAYOUTS, gated, reference_gated
from fp8tune_kernels.quantize.limits import wrong_tile
from fp8tune_kernels.runtime.checks import FP8_DTYPES, check_offsets, fp8_dtype_for
from fp8tune_kernels.runtime.launching import launch_kernel
from fp8tune_kernels.runtime.ops import Inputs, Tensors, register
from fp8tune_kernels.spec import DTYPE_FLAG, DTYPES, DeviceLimits, KernelSpec, NamedInts, Problem, bucket

__all__ = ["SPEC", "load_gate_and_up", "quantize_swiglu_rowwise", "store_gate_and_up"]


@triton.jit
def load_gate_and_up(
    x_ptr: tl.tensor,
    x_scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    group: tl.tensor,
    N: tl.tensor,
    row: tl.tensor,
    in_rows: tl.tensor,
    lanes: tl.tensor,
    columns: tl.tensor,
    INTERLEAVED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Rows ``row + lanes`` and some columns of gate and up as float32 that hold values of bfloat16; zeros outside.

    ``columns`` start at a multiple of their number. Bias included.
    """
    inside = in_rows[:, None] & (columns < N)[None, :]
    x_rows = x_ptr + row.to(tl.int64) * (2 * N) + lanes[:, None] * (2 * N)
    if INTERLEAVED:
        WIDTH: tl.constexpr = columns.shape[0]
        both = tl.min(columns, 0) * 2 + tl.arange(0, 2 * WIDTH)
        x = tl.load(x_rows + both[None, :], mask=in_rows[:, None] & (both < 2 * N)[None, :], other=0.0)
        gate, up = tl.split(x.to(tl.float32).reshape(lanes.shape[0], WIDTH, 2))
    else:
        gate = tl.load(x_rows + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x_rows + N + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if x_scales_ptr is not None:
        scale = tl.load(x_scales_ptr + row + lanes, mask=in_rows, other=1.0)
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None]
        gate, up = gate * inverse, up * inverse
    if bias_ptr is not None:
        of_gate, of_up = columns, N + columns
        if INTERLEAVED:
            of_gate, of_up = 2 * columns, 2 * columns + 1
        bias = bias_ptr + group.to(tl.int64) * (2 * N)
        is_read = (tl.max(in_rows.to(tl.int32), 0) > 0) & (columns < N)
        gate += tl.load(bias + of_gate, mask=is_read, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + of_up, mask=is_read, other=0.0).to(tl.float32)[None, :]
        gate = tl.where(inside, gate.to(tl.bfloat16).to(tl.float32), 0.0)
        up = tl.where(inside, up.to(tl.bfloat16).to(tl.float32), 0.0)
    return gate, up


@triton.jit
def store_gate_and_up(
    q_ptr: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    scale: tl.tensor,
    FP8_MAX: tl.constexpr,
    N: tl.tensor,
    row: tl.tensor,
    in_rows: tl.tensor,
    lanes: tl.tensor,
    columns: tl.tensor,
    INTERLEAVED: tl.constexpr,
) -> None:
    """Store codes of both, with a scale a row, where :func:`load_gate_and_up` found them."""
    q_rows = q_ptr + row.to(tl.int64) * (2 * N) + lanes[:, None] * (2 * N)
    gate = quantize(gate, scale[:, None], q_ptr.dtype.element_ty, FP8_MAX)
    up = quantize(up, scale[:, None], q_ptr.dtype.element_ty, FP8_MAX)
    if INTERLEAVED:
        WIDTH: tl.constexpr = columns.shape[0]
        both = tl.min(columns, 0) * 2 + tl.arange(0, 2 * WIDTH)
        codes = tl.join(gate, up).reshape(lanes.shape[0], 2 * WIDTH)
        tl.store(q_rows + both[None, :], codes, mask=in_rows[:, None] & (both < 2 * N)[None, :])
    else:
        inside = in_rows[:, None] & (columns < N)[None, :]
        tl.store(q_rows + columns[None, :], gate, mask=inside)
        tl.store(q_rows + N + columns[None, :], up, mask=inside)


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
            of_x = tl.maximum(largest_of_rows(gate), largest_of_rows(up))
            if HAS_REST:
                of_x = tl.maximum(of_x, tl.maximum(largest_of_rows(gate_rest), largest_of_rows(up_rest)))
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
    values = values_of(x, offs, x_scales, bias)
    h = reference_gated(*split(values, layout), ACTIVATIONS.index(activation))
    last = int(offs[-1])
    if weights is not None:
        h[:last] *= weights[:last, None]
    h[last:] = 0
    scales.copy_(scale_of_rows(h, float8_dtype))
    q.copy_(reference_cast(h, scales, float8_dtype))
    if keep:
        scales_x.copy_(scale_of_rows(values, float8_dtype))
        q_x.copy_(reference_cast(values, scales_x, float8_dtype))
    return q, scales, q_x, scales_x


def values_of(
    x: torch.Tensor, offs: torch.Tensor, x_scales: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Gate and up as float32 that hold values of bfloat16, bias included; zeros in rows of no group."""
    values = x.float()
    if x_scales is not None:
        values = values * x_scales.view(-1, 1).reciprocal()
    start = 0
    for group, end in enumerate(offs.tolist()):
        if bias is not None:
            values[start:end] = (values[start:end] + bias[group].float()).bfloat16().float()
        start = end
    values[start:] = 0
    return values


def split(values: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of gate and up."""
    if layout == "halves":
        gate, up = values.chunk(2, 1)
        return gate, up
    return values[:, 0::2], values[:, 1::2]


def scale_of_rows(values: torch.Tensor, float8_dtype: torch.dtype) -> torch.Tensor:
    """(M, columns) -> (M, 1)."""
    amax = values.abs().amax(1, keepdim=True) if values.shape[1] else values.new_zeros(len(values), 1)
    return reference_scale(amax, float8_dtype, power_of_two=True)


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


def options_of(problem: Problem) -> tuple[str, str]:
    """The activation and the layout of a problem."""
    return ACTIVATIONS[problem.shape.get("activation", 0)], LAYOUTS[problem.shape.get("layout", 0)]


def random_gate_and_up(problem: Problem, M: int, N: int, device: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A matrix (M, 2N) of normal values, in bfloat16 or as codes with their scales (M, 1)."""
    x = random_matrix(replace(problem, in_dtype="bfloat16"), M, 2 * N, device)
    dtype = dtype_named(problem.in_dtype)
    if dtype not in FP8_DTYPES:
        return x, None
    if torch.device(device).type == "meta":
        return x.to(dtype), x.new_empty(M, 1, dtype=torch.float32)
    scales = scale_of_rows(x.float(), dtype)
    return reference_cast(x, scales, dtype), scales


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
    constants = (FP8_MAX[float8_dtype], ACTIVATIONS.index(activation), layout == "interleaved", *tile_of(config, N))
    if M * N:
        rows = M if bias is None else padded_rows(M, offs.shape[0], ALIGNMENT)
        programs = -(-rows // config["BLOCK_SIZE_M"])
        options = {name: value for name, value in config.items() if name != "TILE"}
        launch_kernel(swiglu_rowwise_kernel, programs, tensors, (M, N, offs.shape[0]), constants, options)


def tile_of(config: Mapping[str, int], N: int) -> tuple[int, bool, int]:
    """What a program casts at a time, whole rows: columns of the first tile, whether half as many follow, and rows, as
    many as TILE elements hold. So no more than a third of the lanes have no column, and most often fewer."""
    power = max(1 << max(N - 1, 0).bit_length(), 32)
    has_rest = power >= max(4 * N / 3, 64)
    return power // 2 if has_rest else power, has_rest, min(max(config["TILE"] // power, 1), config["BLOCK_SIZE_M"])


def problems(row: Mapping[str, int]) -> Iterator[NamedInts]:
    """The activation that a GEMM down reads: its K is N here. Which rows of a set are such GEMMs no row says."""
    N = row["K"]
    row["N"]  # KeyError: a row without weights has no MLP
    yield NamedInts(M=row["M"], N=N, G=row["E"])


def invalid(config: Mapping[str, int], shape: Mapping[str, int], limits: DeviceLimits) -> str | None:
    """The hardware reason why a config cannot pay, or None. The default has to run, not to pay."""
    if config == SPEC.default:
        return None
    width, _, rows = tile_of(config, shape["N"])
    if (least := min(SPEC.axes["TILE"])) < config["TILE"] and rows == tile_of({**config, "TILE": least}, shape["N"])[2]:
        return f"same binary as TILE={least}: one row at a time"
    return wrong_tile(config, width * rows, limits, least=4, too_few="too few loads under way", held="gate and up do")


SPEC = KernelSpec(
    name="swiglu-rowwise",
    axes={
        "BLOCK_SIZE_M": (4, 8, 16, 32),
        "TILE": (1024, 2048, 4096, 8192, 16384),
        "num_warps": (4, 8, 16),
        "num_stages": (1, 2),
    },
    default=NamedInts(BLOCK_SIZE_M=8, TILE=4096, num_warps=4, num_stages=1),
    key=("M_bucket", "N", "G", DTYPE_FLAG),
    problems=problems,
    inputs=inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    interpreted={"M": 157, "N": 83, "G": 3},
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
        edge("codes kept, NaN", "nan", routing="ragged", M=277, N=48, G=4, keep=1),
        edge("interleaved, gpt-oss, bias", routing="empty", M=277, N=80, G=4, layout=1, activation=1, bias=1, keep=1),
        edge("weights, interleaved", "infinite", routing="ragged", M=131, N=48, G=3, layout=1, weights=1),
    ),
    routed=True,
    layout_sizes={"N": 272},
    in_dtypes=("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz"),
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


def check_gate_and_up(
    x: torch.Tensor,
    offs: torch.Tensor,
    x_scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    weights: torch.Tensor | None,
    activation: str,
    layout: str,
) -> None:
    """Raise ValueError for what kernels do not read."""
    for name, given, known in (("activation", activation, ACTIVATIONS), ("layout", layout, LAYOUTS)):
        if given not in known:
            raise ValueError(f"{name} is {given!r}, wanted {' or '.join(map(repr, known))}")
    if x.dim() != 2 or not x.is_contiguous() or x.shape[1] % 2:
        raise ValueError(f"x has shape {tuple(x.shape)} and strides {x.stride()}, wanted row-major (M, 2N)")
    is_codes = x.dtype in FP8_DTYPES
    if not is_codes and x.dtype != torch.bfloat16:
        raise ValueError(f"x is {x.dtype}, wanted torch.bfloat16 or FP8 codes")
    if is_codes != (x_scales is not None):
        wanted = "a scale for each row" if is_codes else "None"
        raise ValueError(f"x_scales is {'None' if is_codes else 'a tensor'}, wanted {wanted} beside {x.dtype}")
    if is_codes and bias is not None:
        raise ValueError("bias is a tensor, wanted None: codes of x include it")
    check_offsets(offs, x.device)
    G = offs.shape[0]
    check_values("x_scales", x_scales, torch.float32, len(x), x)
    check_values("bias", bias, torch.bfloat16, G * x.shape[1], x)
    check_values("weights", weights, torch.float32, len(x), x)


def check_values(name: str, given: torch.Tensor | None, dtype: torch.dtype, count: int, x: torch.Tensor) -> None:
    if given is None:
        return
    if given.dtype != dtype or given.numel() != count or not given.is_contiguous() or given.device != x.device:
        has = f"{given.dtype} of shape {tuple(given.shape)}, strides {given.stride()} on {given.device}"
        raise ValueError(f"{name} is {has}, wanted {count} contiguous values of {dtype} on {x.device}")


def key(x: torch.Tensor, offs: torch.Tensor, *rest: Any) -> tuple[int, ...]:
    """The lookup key of inputs."""
    dtype = DTYPES.index(str(x.dtype).removeprefix("torch."))
    return bucket(x.shape[0]), x.shape[1] // 2, offs.shape[0], dtype


_operator = register(SPEC, quantize_swiglu_rowwise, _arguments, key)
