"""``transposed-codes``: codes of rows to where a GEMM that contracts over rows reads them, with one scale a group.

    q_transposed[place[g] + m - start[g], k] = q[m, k]                        for m in group g, without scales
    q_transposed[place[g] + m - start[g], k] = fp8(q[m, k] * shift[m])        with scales
    shift[m]               = (1 / (scales[m] * row_factors[m])) / (the largest of them in group g)
    column_scales[g*K + k] = 1 / that largest / factors[g, k]

    q              (M, K), row-major, FP8: the left operand of a grouped GEMM that contracts over K
    offs           (G,), int32: the end row of each group, non-decreasing, at most M; an empty group has no row
    scales         (M, 1), float32, powers of two: what the rows of codes were multiplied by; or None
    row_factors    (M,), float32, powers of two: scales of the other operand's rows; or None, which are ones
    factors        (G, K), float32, powers of two: what columns were divided by before they were cast; or None
    q_transposed   (P, K), strides (1, P), P = padded_rows(M, G, 128): the layout of ``colwise``'s codes
                   place[g + 1] = place[g] + max(1, ceil(size[g] / 128)) * 128
    column_scales  (G*K,), float32, group-major: a GEMM divides by them

Zeros follow a group's codes up to the next multiple of 128; what lies past the last group's is not written.

A sum over rows needs one scale for all of them. As those of the rows are powers of two, codes are moved by exponents:
that rounds only what becomes subnormal, in rows 2**14 and more below the largest of their group, which weigh nothing in
the sum. With ``row_factors`` it is the product's rows that are compared, and the other operand is transposed as it is.
Nothing here is reduced over columns, and no program reads a value twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
import triton
import triton.language as tl

from fp8tune_kernels.edges import declared, edge
from fp8tune_kernels.groups import padded_rows, taken_rows
from fp8tune_kernels.inputs import dtype_named, offsets, random_matrix
from fp8tune_kernels.quantize import colwise
from fp8tune_kernels.quantize.aligned_blocks import (
    ALIGNMENT,
    Block,
    block_at,
    bytes_of,
    inverse_of,
    load_block,
    load_codes,
    packed_codes,
    store_block,
    transpose_bytes,
)
from fp8tune_kernels.quantize.arithmetic import FP8_MAX, reference_cast
from fp8tune_kernels.quantize.tiles import stride_of_columns
from fp8tune_kernels.runtime.checks import FP8_DTYPES, check_offsets
from fp8tune_kernels.runtime.launching import launch_kernel
from fp8tune_kernels.runtime.ops import Inputs, Tensors, register
from fp8tune_kernels.spec import DeviceLimits, KernelSpec, NamedInts, Problem, bucket

__all__ = ["SPEC", "powers_of_two", "restore_powers_of_two", "transpose_codes"]


@triton.jit(do_not_specialize=["M", "G"])  # both change every step: neither may recompile anything
def places_kernel(
    offs_ptr: tl.tensor,  # (G,)
    scales_ptr: tl.tensor,  # (M,) or None
    row_factors_ptr: tl.tensor,  # (M,) or None
    largest_ptr: tl.tensor,  # (G,), int32, zeros: bits of the largest 1 / (scales * row_factors)
    blocks_ptr: tl.tensor,  # (blocks, 4), int32
    M: tl.tensor,
    G: tl.tensor,
    BLOCK_SIZE_M: tl.constexpr,
) -> None:
    """One program: where a block lies, and the largest of its rows."""
    block = block_at(offs_ptr, M, G, tl.program_id(0) * BLOCK_SIZE_M, BLOCK_SIZE_M)
    store_block(blocks_ptr, block, tl.program_id(0))
    if scales_ptr is not None:
        rows = tl.arange(0, BLOCK_SIZE_M)
        inverse = _inverse_of_rows(scales_ptr, row_factors_ptr, block, rows)
        bits = tl.where(rows < block.rows, inverse.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
        is_one = (block.group < G) & (block.rows > 0)
        tl.atomic_max(largest_ptr + block.group, tl.max(bits, 0), mask=is_one, sem="relaxed")


@triton.jit(do_not_specialize=["M", "G"])
def transposed_codes_kernel(
    q_ptr: tl.tensor,  # (M, K), row-major
    scales_ptr: tl.tensor,  # (M,) or None
    row_factors_ptr: tl.tensor,  # (M,) or None
    factors_ptr: tl.tensor,  # (G, K) or None
    largest_ptr: tl.tensor,  # (G,), int32
    blocks_ptr: tl.tensor,  # (blocks, 4), int32
    transposed_ptr: tl.tensor,  # (P, K), strides (1, P)
    column_scales_ptr: tl.tensor,  # (G, K) or None
    M: tl.tensor,
    K: tl.tensor,
    G: tl.tensor,
    FP8_MAX: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,  # places of a program
    BLOCK_SIZE_N: tl.constexpr,  # columns of a program
) -> None:
    """One program: a tile of a block (:mod:`.aligned_blocks`)."""
    across = tl.cdiv(K, BLOCK_SIZE_N)
    block = load_block(blocks_ptr, tl.program_id(0) // across, BLOCK_SIZE_M)
    if block.group < G:
        column = tl.program_id(0) % across * BLOCK_SIZE_N
        stride = stride_of_columns(M, G, 128) // 4
        to_ptr = bytes_of(transposed_ptr, 4) + block.place // 4
        if scales_ptr is None:
            transpose_bytes(q_ptr, to_ptr, stride, K, column, block, 4, BLOCK_SIZE_M, BLOCK_SIZE_N)
        else:
            columns = column + tl.arange(0, BLOCK_SIZE_N)
            words = tl.arange(0, BLOCK_SIZE_M // 4) * 4
            bits = tl.load(largest_ptr + block.group)
            largest = tl.where(bits == 0, 1.0, bits.to(tl.float32, bitcast=True))  # of an empty group: any
            _store_scales(factors_ptr, column_scales_ptr, largest, K, block, columns)
            packed = packed_codes(
                _shifted(q_ptr, scales_ptr, row_factors_ptr, largest, K, block, words, columns),
                _shifted(q_ptr, scales_ptr, row_factors_ptr, largest, K, block, words + 1, columns),
                _shifted(q_ptr, scales_ptr, row_factors_ptr, largest, K, block, words + 2, columns),
                _shifted(q_ptr, scales_ptr, row_factors_ptr, largest, K, block, words + 3, columns),
                transposed_ptr.dtype.element_ty,
                FP8_MAX,
            )
            taken = tl.minimum(tl.maximum(block.rows - words, 0), 4)  # of a word: a NaN would leave no zeros
            kept = tl.where(taken == 4, -1, (1 << (8 * tl.minimum(taken, 3))) - 1)
            packed = packed & kept.to(tl.uint32, bitcast=True)[:, None]
            at = to_ptr + (words // 4)[:, None] + columns.to(tl.int64)[None, :] * stride
            tl.store(at, packed, mask=(columns < K)[None, :] & (words >= 0)[:, None])


@triton.jit
def _inverse_of_rows(scales_ptr: tl.tensor, row_factors_ptr: tl.tensor, block: Block, rows: tl.tensor) -> tl.tensor:
    """1 / (scales * row_factors); 1 past the rows of a block."""
    scales = tl.load(scales_ptr + block.first + rows, mask=rows < block.rows, other=1.0)
    if row_factors_ptr is not None:
        scales *= tl.load(row_factors_ptr + block.first + rows, mask=rows < block.rows, other=1.0)
    return inverse_of(scales)


@triton.jit
def _shifted(
    q_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    row_factors_ptr: tl.tensor,
    largest: tl.tensor,
    K: tl.tensor,
    block: Block,
    rows: tl.tensor,
    columns: tl.tensor,
) -> tl.tensor:
    """Codes of rows times their shift, float32."""
    inverse = _inverse_of_rows(scales_ptr, row_factors_ptr, block, rows)
    return load_codes(q_ptr, K, block, rows, columns) * tl.div_rn(inverse, largest)[:, None]


@triton.jit
def _store_scales(
    factors_ptr: tl.tensor,
    column_scales_ptr: tl.tensor,
    largest: tl.tensor,
    K: tl.tensor,
    block: Block,
    columns: tl.tensor,
) -> None:
    """The scales of a group's columns, by its first block."""
    inside = (columns < K) & block.is_first
    at = block.group.to(tl.int64) * K + columns
    scale = inverse_of(tl.zeros(columns.shape, tl.float32) + largest)
    if factors_ptr is not None:
        scale *= inverse_of(tl.load(factors_ptr + at, mask=inside, other=1.0))
    tl.store(column_scales_ptr + at, scale, mask=inside)


def transpose_codes(
    q: torch.Tensor,
    offs: torch.Tensor,
    scales: torch.Tensor | None = None,
    row_factors: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``(q_transposed, column_scales)`` as the module says; the latter has no element without ``scales``."""
    return _operator(q, offs, scales, row_factors, factors)


def reference(
    q: torch.Tensor,
    offs: torch.Tensor,
    scales: torch.Tensor | None,
    row_factors: torch.Tensor | None,
    factors: torch.Tensor | None,
) -> Tensors:
    """The same in plain torch; reads ``offs`` on the host. Zeros where a launch writes nothing."""
    transposed, column_scales = outputs(q, offs, scales, row_factors, factors)
    K = q.shape[1]
    transposed.zero_()
    start, place = 0, 0
    for group, end in enumerate(offs.tolist()):
        rows = q[start:end]
        if scales is not None:
            of_rows = scales.view(-1, 1)[start:end]
            if row_factors is not None:
                of_rows = of_rows * row_factors.view(-1, 1)[start:end]
            inverse = of_rows.reciprocal()
            largest = inverse.amax() if len(inverse) else q.new_ones((), dtype=torch.float32)
            rows = reference_cast(rows, inverse / largest, q.dtype)
            scale = largest.reciprocal().expand(K)
            if factors is not None:
                scale = scale * factors.view(-1, K)[group].reciprocal()
            column_scales[group * K : (group + 1) * K] = scale
        transposed[place : place + end - start] = rows
        start, place = end, place + taken_rows(end - start, ALIGNMENT)
    return transposed, column_scales


def inputs(problem: Problem, device: str) -> Inputs:
    """``(q, offs, scales, row_factors, factors)`` of a problem; without scales where its shape says ``shifted=0``."""
    M, K, G = (problem.shape[dim] for dim in "MKG")
    q = random_matrix(replace(problem, in_dtype="bfloat16"), M, K, device).to(dtype_named(problem.in_dtype))
    if not problem.shape.get("shifted", 1):
        return q, offsets(problem, device), None, None, None
    scales = (powers_of_two(problem, *size, device, number) for number, size in enumerate(((M, 1), (M, 1), (G, K)), 5))
    return q, offsets(problem, device), *scales


def powers_of_two(problem: Problem, rows: int, columns: int, device: str, number: int) -> torch.Tensor:
    """Scales from 1/8 to 8, float32, ``(rows, columns)``; ``number``: which of a problem's."""
    values = random_matrix(replace(problem, in_dtype="float32", seed=problem.seed + number), rows, columns, device)
    return torch.exp2(values.clamp_(-3, 3).round_())


def constrain(inputs: Inputs) -> None:
    """Make powers of two of scales, whatever they are."""
    restore_powers_of_two(*inputs[2:])


def restore_powers_of_two(*scales: torch.Tensor | None) -> None:
    """Make of scales, which may hold anything, powers of two near 1."""
    for each in scales:
        if each is not None and not each.is_meta:
            finite = each.nan_to_num(1.0, 1.0, 1.0).abs().clamp(2.0**-8, 2.0**8)
            each.copy_(torch.exp2(finite.log2().round()))


def outputs(
    q: torch.Tensor,
    offs: torch.Tensor,
    scales: torch.Tensor | None,
    row_factors: torch.Tensor | None,
    factors: torch.Tensor | None,
) -> Tensors:
    """Uninitialised ``q_transposed`` and ``column_scales``."""
    (M, K), G = q.shape, offs.shape[0]
    P = padded_rows(M, G, ALIGNMENT)
    transposed = torch.empty_strided((P, K), (1, P), dtype=q.dtype, device=q.device)
    return transposed, q.new_empty(0 if scales is None else G * K, dtype=torch.float32)


def unwritten(inputs: Inputs, outputs: Tensors) -> None:
    """Write zeros past the last group's multiple of the alignment."""
    colwise.clear_past_the_groups(outputs[0], inputs[1], ALIGNMENT)


def launch(config: Mapping[str, int], inputs: Inputs, outputs: Tensors) -> None:
    """Two launches: where blocks lie, with the largest row of each group, and the tiles. With scales after one that
    zeroes what the rows of a group meet in."""
    q, offs, scales, row_factors, factors = inputs
    transposed, column_scales = outputs
    (M, K), G = q.shape, offs.shape[0]
    blocks = transposed.shape[0] // config["BLOCK_SIZE_M"]
    if not K:
        return
    zeroed = torch.zeros if scales is not None else torch.empty
    largest = zeroed(G, dtype=torch.int32, device=q.device)
    places = torch.empty(blocks, 4, dtype=torch.int32, device=q.device)
    options = {"BLOCK_SIZE_M": config["BLOCK_SIZE_M"], "num_warps": 1}
    launch_kernel(places_kernel, blocks, (offs, scales, row_factors, largest, places), (M, G), (), options)
    tensors = (q, scales, row_factors, factors, largest, places, transposed, None if scales is None else column_scales)
    programs = blocks * -(-K // config["BLOCK_SIZE_N"])
    launch_kernel(transposed_codes_kernel, programs, tensors, (M, K, G), (FP8_MAX[q.dtype],), config)


def problems(row: Mapping[str, int]) -> Iterator[NamedInts]:
    """Rows and the gradient of what they are multiplied to, whose codes are shifted."""
    yield NamedInts(M=row["M"], K=row["K"], G=row["E"])
    yield NamedInts(M=row["M"], K=row["N"], G=row["E"])


def invalid(config: Mapping[str, int], shape: Mapping[str, int], limits: DeviceLimits) -> str | None:
    """The hardware reason why a config cannot pay, or None."""
    values = config["BLOCK_SIZE_M"] * config["BLOCK_SIZE_N"] // (config["num_warps"] * limits.warp_size)
    return None if 16 <= values <= 128 else f"{values} codes a thread: wanted 16 to 128"


SPEC = KernelSpec(
    name="transposed-codes",
    axes={
        "BLOCK_SIZE_M": (32, 64, 128),
        "BLOCK_SIZE_N": (32, 64, 128, 256),
        "num_warps": (1, 2, 4, 8),
    },
    default=NamedInts(BLOCK_SIZE_M=64, BLOCK_SIZE_N=128, num_warps=4),
    key=colwise.SPEC.key,
    problems=problems,
    inputs=inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    constrain=constrain,
    unwritten=unwritten,
    interpreted={"M": 157, "K": 301, "G": 3},
    invalid=invalid,
    bytes_moved=lambda shape: 2 * shape["M"] * shape["K"],
    edges=declared(
        edge("one row, huge values", "huge", routing="ragged", M=1, K=48, G=3),
        edge("a block and one more", routing="balanced", M=513, K=144, G=1),
        edge("rows of no group, NaN", "nan", routing="empty", M=277, K=48, G=4),
        edge("empty groups, zeros", "zeros", routing="empty", M=37, K=48, G=3),
        edge("one column", routing="ragged", M=67, K=1, G=2),
        edge("an odd number of columns past an aligned address", offset=1, routing="ragged", M=131, K=129, G=2),
        edge("without scales", routing="empty", M=277, K=80, G=4, shifted=0),
        edge("without scales, NaN", "nan", routing="ragged", M=131, K=48, G=3, shifted=0),
    ),
    routed=True,
    in_dtypes=("float8_e4m3fn", "float8_e4m3fnuz"),
)


def _arguments(
    q: torch.Tensor,
    offs: torch.Tensor,
    scales: torch.Tensor | None,
    row_factors: torch.Tensor | None,
    factors: torch.Tensor | None,
) -> Inputs:
    if q.dim() != 2 or q.dtype not in FP8_DTYPES or not q.is_contiguous():
        raise ValueError(f"q is {q.dtype} of shape {tuple(q.shape)}, strides {q.stride()}, wanted row-major FP8 codes")
    check_offsets(offs, q.device, "q")
    (M, K), G = q.shape, offs.shape[0]
    for name, given, count in (("scales", scales, M), ("row_factors", row_factors, M), ("factors", factors, G * K)):
        if given is None:
            continue
        if scales is None:
            raise ValueError(f"{name} is a tensor, wanted None: without scales codes are not shifted")
        if given.dtype != torch.float32 or given.numel() != count or not given.is_contiguous():
            has = f"{given.dtype} of shape {tuple(given.shape)}, strides {given.stride()}"
            raise ValueError(f"{name} is {has}, wanted {count} contiguous values of torch.float32")
        if given.device != q.device:
            raise ValueError(f"{name} is on {given.device}, wanted {q.device} as q")
    return q, offs, scales, row_factors, factors


def _key(q: torch.Tensor, offs: torch.Tensor, *rest: torch.Tensor | None) -> tuple[int, ...]:
    return bucket(q.shape[0]), q.shape[1], offs.shape[0]


_operator = register(SPEC, transpose_codes, _arguments, _key)
