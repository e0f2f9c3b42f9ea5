"""Warp-specialized grouped GEMMs of FP8 values for Hopper, in Gluon.

A persistent program has a producer warp, which loads pieces of both operands into a ring by TMA, and two warpgroups
that take tiles in turn, each with its own sums: one multiplies while the other scales and stores ("ping-pong"). Tiles
are stored by TMA, those that pass the end of a group or a matrix by pointers. Sums are added up in the order of the
Triton kernels, and so have the same bits.

Each warp walks over the groups on its own, because the tiles of a program ascend: no other launch prepares a list.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .. import interpreter
from ..runtime.declare import Call, Config
from ..runtime.lookup import running_arch
from ..spec import DeviceLimits, NamedInts

load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # names of Triton 3.9, and before it
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def _next(row_tile: gl.tensor, column_tile: gl.tensor, hop_down: gl.tensor, hop: gl.tensor, across: gl.tensor) -> Any:
    """The next tile of a program, as if all tiles were of one group: see :func:`_walk`."""
    is_past = (column_tile + hop >= across).to(gl.int32)
    return row_tile + hop_down + is_past, column_tile + hop - is_past * across


@gluon.jit
def _walk(
    row_tile: gl.tensor,
    group: gl.tensor,
    start: gl.tensor,
    begin: gl.tensor,
    end: gl.tensor,
    following: gl.tensor,
    offs_ptr: gl.tensor,
    sizes: gl.tuple,
    BLOCK_SIZE_M: gl.constexpr,
    ALIGNED: gl.constexpr,
) -> Any:
    """Advance from a group to the one that has a row tile, or to G, without a division: the producer must not be late.

    ``row_tile``: counted from the group's first. ``begin``, ``end``: rows of the group by ``offs``; ``start``: where
    they lie. ``following``: the next group's end, which is loaded ahead.
    """
    M, N, _, G = sizes
    down = gl.cdiv(N if ALIGNED else end - begin, BLOCK_SIZE_M)
    while (row_tile >= down) & (group < G):
        row_tile -= down
        if ALIGNED:
            start += gl.maximum(gl.cdiv(end - begin, ALIGNED), 1) * ALIGNED
        begin = end
        end = gl.minimum(following, M)
        group += 1
        following = gl.load(offs_ptr + gl.minimum(group + 1, G - 1))
        if not ALIGNED:
            down = gl.cdiv(end - begin, BLOCK_SIZE_M)
    return row_tile, group, start, begin, end, following


@gluon.jit
def _produce(
    descriptors: gl.tuple,
    pointers: gl.tuple,
    buffers: gl.tuple,
    barriers: gl.tuple,
    sizes: gl.tuple,
    ALIGNED: gl.constexpr,
) -> None:
    a, b, _, _ = descriptors
    offs_ptr, _, _, _ = pointers
    a_pieces, b_pieces, _ = buffers
    full, empty, _, _ = barriers
    M, N, K, G = sizes
    BLOCK_SIZE_M: gl.constexpr = a_pieces.shape[1]
    BLOCK_SIZE_N: gl.constexpr = b_pieces.shape[1]
    BLOCK_SIZE_K: gl.constexpr = a_pieces.shape[2]
    STAGES: gl.constexpr = a_pieces.shape[0]
    across = gl.cdiv(K if ALIGNED else N, BLOCK_SIZE_N)
    piece = 0
    row_tile, column_tile = gl.program_id(0) // across, gl.program_id(0) % across
    hop_down, hop = gl.num_programs(0) // across, gl.num_programs(0) % across
    group, start, begin, end = 0, 0, 0, gl.minimum(gl.load(offs_ptr), M)
    following = gl.load(offs_ptr + gl.minimum(1, G - 1))
    row_tile, group, start, begin, end, following = _walk(
        row_tile, group, start, begin, end, following, offs_ptr, sizes, BLOCK_SIZE_M, ALIGNED
    )
    while group < G:
        column = column_tile * BLOCK_SIZE_N
        if ALIGNED:
            row, row_b, deep, steps = row_tile * BLOCK_SIZE_M, column, start, gl.cdiv(end - begin, BLOCK_SIZE_K)
        else:
            row, row_b, deep, steps = begin + row_tile * BLOCK_SIZE_M, group * N + column, 0, gl.cdiv(K, BLOCK_SIZE_K)
        for step in range(steps):
            stage = piece % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), ((piece // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, a.block_type.nbytes + b.block_type.nbytes)
            load_tile(a, [row, deep + step * BLOCK_SIZE_K], bar, a_pieces.index(stage))
            load_tile(b, [row_b, deep + step * BLOCK_SIZE_K], bar, b_pieces.index(stage))
            piece += 1
        row_tile, column_tile = _next(row_tile, column_tile, hop_down, hop, across)
        row_tile, group, start, begin, end, following = _walk(
            row_tile, group, start, begin, end, following, offs_ptr, sizes, BLOCK_SIZE_M, ALIGNED
        )


@gluon.jit
def _consume(
    descriptors: gl.tuple,
    pointers: gl.tuple,
    buffers: gl.tuple,
    barriers: gl.tuple,
    sizes: gl.tuple,
    ALIGNED: gl.constexpr,
    MINE: gl.constexpr,
) -> None:
    _, _, out, added = descriptors
    offs_ptr, scale_a_ptr, scale_b_ptr, out_ptr = pointers
    a_pieces, b_pieces, results = buffers
    full, empty, order, ready = barriers
    M, N, K, G = sizes
    BLOCK_SIZE_M: gl.constexpr = a_pieces.shape[1]
    BLOCK_SIZE_N: gl.constexpr = b_pieces.shape[1]
    BLOCK_SIZE_K: gl.constexpr = a_pieces.shape[2]
    STAGES: gl.constexpr = a_pieces.shape[0]
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_SIZE_N, 32])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // BLOCK_SIZE_N, BLOCK_SIZE_N // 8], [4, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lanes_m = gl.arange(0, BLOCK_SIZE_M, gl.SliceLayout(1, wide))
    lanes_n = gl.arange(0, BLOCK_SIZE_N, gl.SliceLayout(0, wide))
    result = results.index(MINE)
    width = K if ALIGNED else N
    across = gl.cdiv(width, BLOCK_SIZE_N)
    piece, turn = 0, 0
    total = gl.zeros([BLOCK_SIZE_M, BLOCK_SIZE_N], gl.float32, sums)  # the first step of a tile does not read it
    row_tile, column_tile = gl.program_id(0) // across, gl.program_id(0) % across
    hop_down, hop = gl.num_programs(0) // across, gl.num_programs(0) % across
    group, start, begin, end = 0, 0, 0, gl.minimum(gl.load(offs_ptr), M)
    following = gl.load(offs_ptr + gl.minimum(1, G - 1))
    row_tile, group, start, begin, end, following = _walk(
        row_tile, group, start, begin, end, following, offs_ptr, sizes, BLOCK_SIZE_M, ALIGNED
    )
    while group < G:
        column = column_tile * BLOCK_SIZE_N
        if ALIGNED:
            row, row_end, steps = group * N + row_tile * BLOCK_SIZE_M, group * N + N, gl.cdiv(end - begin, BLOCK_SIZE_K)
        else:
            row, row_end, steps = begin + row_tile * BLOCK_SIZE_M, end, gl.cdiv(K, BLOCK_SIZE_K)
        if turn % 2 == MINE:
            rows = row + gl.arange(0, BLOCK_SIZE_M, gl.SliceLayout(1, sums))
            columns = column + gl.arange(0, BLOCK_SIZE_N, line)
            scale_a = gl.load(scale_a_ptr + rows, mask=rows < row_end, other=1.0)
            scale_b = gl.load(scale_b_ptr + group * width + columns, mask=columns < width, other=1.0)
            if added is not None:
                tma.store_wait(0)
                mbarrier.expect(ready.index(MINE), added.block_type.nbytes)
                load_tile(added, [row, column], ready.index(MINE), result)
            # Wait until the other warpgroup has waited for all pieces before these: a barrier tells the parity of a
            # phase alone, and two phases ahead an older piece would be taken for this one.
            mbarrier.wait(order.index(MINE), ((turn // 2) & 1) ^ (1 - MINE))
            for step in range(steps):
                stage = piece % STAGES
                mbarrier.wait(full.index(stage), (piece // STAGES) & 1)
                b_piece = b_pieces.index(stage).permute((1, 0))
                total = warpgroup_mma(a_pieces.index(stage), b_piece, total, use_acc=step > 0, is_async=True)
                total = warpgroup_mma_wait(1, deps=(total,))
                mbarrier.arrive(empty.index((piece + STAGES - 1) % STAGES), count=1, pred=step > 0)
                piece += 1
            mbarrier.arrive(order.index(1 - MINE), count=1)
            total = warpgroup_mma_wait(0, deps=(total,))
            mbarrier.arrive(empty.index((piece + STAGES - 1) % STAGES), count=1, pred=steps > 0)
            factor_a = gl.div_rn(gl.full([BLOCK_SIZE_M], 1.0, gl.float32, gl.SliceLayout(1, sums)), scale_a)
            factor_b = gl.div_rn(gl.full([BLOCK_SIZE_N], 1.0, gl.float32, line), scale_b)
            factor_b = gl.convert_layout(factor_b, gl.SliceLayout(0, sums))
            if ALIGNED:
                total = gl.where(steps > 0, total, 0.0)  # else it is that of another tile
            total = total * gl.expand_dims(factor_a, 1) * gl.expand_dims(factor_b, 0)
            if added is not None:
                mbarrier.wait(ready.index(MINE), (turn // 2) & 1)
                total += result.load(sums).to(gl.float32)
            tma.store_wait(0)
            result.store(total.to(out.dtype))
            if row + BLOCK_SIZE_M <= row_end:
                fence_async_shared()
                store_tile(out, [row, column], result)
            else:
                m, n = row + lanes_m, column + lanes_n
                at = out_ptr + gl.expand_dims(m.to(gl.int64) * width, 1) + gl.expand_dims(n, 0)
                gl.store(at, result.load(wide), mask=gl.expand_dims(m < row_end, 1) & gl.expand_dims(n < width, 0))
        else:
            piece += steps
        turn += 1
        row_tile, column_tile = _next(row_tile, column_tile, hop_down, hop, across)
        row_tile, group, start, begin, end, following = _walk(
            row_tile, group, start, begin, end, following, offs_ptr, sizes, BLOCK_SIZE_M, ALIGNED
        )
    tma.store_wait(0)
    if not ALIGNED:  # rows of no group are zeros
        zeros = gl.zeros([BLOCK_SIZE_M, BLOCK_SIZE_N], out.dtype, wide)
        tiles = gl.cdiv(M - begin, BLOCK_SIZE_M) * across
        for tile in range(gl.program_id(0) * 2 + MINE, tiles, gl.num_programs(0) * 2):
            m, n = begin + tile // across * BLOCK_SIZE_M + lanes_m, tile % across * BLOCK_SIZE_N + lanes_n
            at = out_ptr + gl.expand_dims(m.to(gl.int64) * width, 1) + gl.expand_dims(n, 0)
            gl.store(at, zeros, mask=gl.expand_dims(m < M, 1) & gl.expand_dims(n < width, 0))


@gluon.jit
def _consume_first(
    descriptors: gl.tuple,
    pointers: gl.tuple,
    buffers: gl.tuple,
    barriers: gl.tuple,
    sizes: gl.tuple,
    ALIGNED: gl.constexpr,
) -> None:
    _consume(descriptors, pointers, buffers, barriers, sizes, ALIGNED, 0)


@gluon.jit
def _consume_second(
    descriptors: gl.tuple,
    pointers: gl.tuple,
    buffers: gl.tuple,
    barriers: gl.tuple,
    sizes: gl.tuple,
    ALIGNED: gl.constexpr,
) -> None:
    _consume(descriptors, pointers, buffers, barriers, sizes, ALIGNED, 1)


@gluon.jit
def _multiply(
    a: tma.tensor_descriptor,
    b: tma.tensor_descriptor,
    out: tma.tensor_descriptor,
    added: tma.tensor_descriptor,
    pointers: gl.tuple,
    sizes: gl.tuple,
    ALIGNED: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Share the work of a program among its warps."""
    pieces: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    a_pieces = gl.allocate_shared_memory(a.dtype, [STAGES, a.block_type.shape[0], a.block_type.shape[1]], pieces)
    b_pieces = gl.allocate_shared_memory(b.dtype, [STAGES, b.block_type.shape[0], b.block_type.shape[1]], pieces)
    results = gl.allocate_shared_memory(out.dtype, [2, out.block_type.shape[0], out.block_type.shape[1]], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(2):
        mbarrier.init(order.index(number), count=1)
        mbarrier.init(ready.index(number), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    descriptors, buffers, barriers = (a, b, out, added), (a_pieces, b_pieces, results), (full, empty, order, ready)
    # The tuples of arguments have no name, because a name would make tensors of their constants.
    gl.warp_specialize(
        [
            (_consume_first, (descriptors, pointers, buffers, barriers, sizes, ALIGNED)),
            (_consume_second, (descriptors, pointers, buffers, barriers, sizes, ALIGNED)),
            (_produce, (descriptors, pointers, buffers, barriers, sizes, ALIGNED)),
        ],
        [4, 1],
        [232, 40],
    )


@gluon.jit
def _described(
    ptr: gl.tensor, rows: gl.tensor, columns: gl.tensor, BLOCK_ROWS: gl.constexpr, BLOCK_COLUMNS: gl.constexpr
) -> Any:
    """A descriptor of a row-major matrix."""
    bits: gl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMASharedLayout(128, bits, 2)
    return tma.make_tensor_descriptor(ptr, [rows, columns], [columns, 1], [BLOCK_ROWS, BLOCK_COLUMNS], layout)


@gluon.jit(do_not_specialize=["M", "G"])  # both change every step: neither may recompile anything
def rows_kernel(
    a_ptr: gl.tensor,  # (M, K), row-major
    b_ptr: gl.tensor,  # (G, N, K), row-major
    offs_ptr: gl.tensor,  # (G,)
    scale_a_ptr: gl.tensor,  # (M,)
    scale_b_ptr: gl.tensor,  # (G, N)
    out_ptr: gl.tensor,  # (M, N), row-major
    M: gl.tensor,
    N: gl.tensor,
    K: gl.tensor,
    G: gl.tensor,
    BLOCK_SIZE_M: gl.constexpr,
    BLOCK_SIZE_N: gl.constexpr,
    BLOCK_SIZE_K: gl.constexpr,
    num_stages: gl.constexpr,
) -> None:
    """Product as ``grouped_rows_kernel``."""
    a = _described(a_ptr, M, K, BLOCK_SIZE_M, BLOCK_SIZE_K)
    b = _described(b_ptr, G * N, K, BLOCK_SIZE_N, BLOCK_SIZE_K)
    out = _described(out_ptr, M, N, BLOCK_SIZE_M, BLOCK_SIZE_N)
    pointers = offs_ptr, scale_a_ptr, scale_b_ptr, out_ptr
    _multiply(a, b, out, None, pointers, (M, N, K, G), 0, num_stages)


@gluon.jit(do_not_specialize=["M", "G"])
def contraction_kernel(
    a_ptr: gl.tensor,  # (N, M), row-major
    b_ptr: gl.tensor,  # (K, M), row-major
    offs_ptr: gl.tensor,  # (G,)
    scale_a_ptr: gl.tensor,  # (G, N)
    scale_b_ptr: gl.tensor,  # (G, K)
    added_ptr: gl.tensor,  # (G, N, K), row-major, or None; may be out_ptr
    out_ptr: gl.tensor,  # (G, N, K), row-major
    M: gl.tensor,  # rows of a and b, with those between groups
    N: gl.tensor,
    K: gl.tensor,
    G: gl.tensor,
    ALIGNED: gl.constexpr,
    BLOCK_SIZE_M: gl.constexpr,  # of N
    BLOCK_SIZE_N: gl.constexpr,  # of K
    BLOCK_SIZE_K: gl.constexpr,  # of M
    num_stages: gl.constexpr,
) -> None:
    """Product as ``grouped_contraction_kernel``, of groups whose alignment BLOCK_SIZE_K divides."""
    a = _described(a_ptr, N, M, BLOCK_SIZE_M, BLOCK_SIZE_K)
    b = _described(b_ptr, K, M, BLOCK_SIZE_N, BLOCK_SIZE_K)
    out = _described(out_ptr, G * N, K, BLOCK_SIZE_M, BLOCK_SIZE_N)
    added = None if added_ptr is None else _described(added_ptr, G * N, K, BLOCK_SIZE_M, BLOCK_SIZE_N)
    pointers = offs_ptr, scale_a_ptr, scale_b_ptr, out_ptr
    _multiply(a, b, out, added, pointers, (M, N, K, G), ALIGNED, num_stages)


# Configs

ARCH = "sm_90"

AXES: dict[str, tuple[int, ...]] = {
    "BLOCK_SIZE_M": (64, 128),
    "BLOCK_SIZE_N": (128, 256),
    "BLOCK_SIZE_K": (128,),
    "GLUON": (0, 1),
    "num_warps": (4,),
    "num_stages": (4, 5),
}
"""GLUON: 0 launches the Triton kernel, with the config of its own table. num_warps: of a warpgroup."""

CONFIGS = tuple(
    NamedInts(dict(zip(AXES, values, strict=True)))
    for values in (
        (128, 128, 128, 1, 4, 5),
        (128, 128, 128, 1, 4, 4),
        (64, 256, 128, 1, 4, 4),
        (128, 128, 128, 0, 4, 5),
    )
)
"""The grid. Slower on 24 products of six models on an H200: tiles of 64 x 128, by 9 to 62 %; one tile for both
warpgroups, of 128 x 128 or 128 x 256, by 4 to 55 %."""

DEFAULT = CONFIGS[0]

REGISTERS = 168
"""Of a thread, before warpgroups share them anew: what 12 warps can have."""

SHARED_BYTES = 224 << 10
"""Of pieces and results, beside which there are barriers and what a warpgroup exchanges."""


def is_supported(device: torch.device) -> bool:
    """Return True if a device runs the kernels."""
    return running_arch(device) == ARCH and not interpreter.INTERPRETED


VARIABLE = "FP8TUNE_GLUON"
"""Environment variable: with ``1``, layers run the kernels."""

# One of 150 launches in a row gave wrong outputs, once, while eight processes tested on an H200. Since then none of
# 282,888 launches at that problem by eight processes did. Until the cause is known, layers run the Triton kernels.
# Triton 3.7 to 3.9 compile to other machine code, which nobody has run.
IS_REQUESTED = os.environ.get(VARIABLE) == "1" and triton.__version__.startswith("3.6.")


def is_requested(device: torch.device) -> bool:
    """Return True if products of a layer run the kernels: the user asks for them, and the device and Triton can."""
    return IS_REQUESTED and is_supported(device)


def launch(config: Config, call: Call, kernel: Any, programs: int, **values: int) -> None:
    """Launch a program on each multiprocessor, with as many stages as fit beside results of the output's dtype."""
    rows, columns, deep = (config[f"BLOCK_SIZE_{dim}"] for dim in "MNK")
    left = SHARED_BYTES - 2 * rows * columns * call.out.element_size()
    options = {name: value for name, value in config.items() if name != "GLUON"}
    options |= {"num_stages": min(config["num_stages"], left // ((rows + columns) * deep)), "maxnreg": REGISTERS}
    call.run(kernel, programs, options, **values)


def invalid(config: Config, limits: DeviceLimits, reason: str | None) -> str | None:
    """Return the hardware reason why a config cannot pay, or None. ``reason``: that of the Triton kernel's default."""
    if limits.arch == ARCH or config == DEFAULT:
        return reason
    return f"GLUON={config['GLUON']}: {limits.arch} runs the Triton kernel in any case"


def check_dtype(a: torch.Tensor) -> None:
    """Raise ValueError for operands that are no FP8 values of NVIDIA's format."""
    if a.dtype != torch.float8_e4m3fn:
        raise ValueError(f"a is {a.dtype}, wanted torch.float8_e4m3fn")


DECLARED: dict[str, Any] = {"axes": AXES, "configs": CONFIGS, "default": DEFAULT, "in_dtypes": ("float8_e4m3fn",)}
"""Fields that both kernels share."""
