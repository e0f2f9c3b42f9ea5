"""``grouped-rows``: multiply each group's rows by the matrix of its expert, with a scale a row and a scale a column.

    out[m, n] = bfloat16( sum over k of a[m, k] * b[e, n, k]  * (1 / scale_a[m]) * (1 / scale_b[e, n]) )   m in group e

    a        (M, K), row-major: FP8 codes, or bfloat16
    b        (E, N, K), row-major, of a's dtype: the memory of ``B_t``, whose view is (E, K, N)
    offs     (E,), int32: the end row of each group, non-decreasing, at most M; groups have any size, also none
    scale_a  (M,), float32: what codes were multiplied by; None beside bfloat16
    scale_b  (E, N), float32
    out      (M, N), row-major, bfloat16; zero in rows past ``offs[-1]``

It is the forward pass of a grouped GEMM and its input gradient. K and N are multiples of 16. No group is padded: a tile
that passes the end of its group computes with rows of the next one, and does not store them.

Sums are float32 in registers. NVIDIA documents no rounding. Of FP8, Hopper's tensor cores align products, and the sum
so far, to the largest of them, and cut off what is below 13 fractional bits (DeepSeek-V3 technical report, sections
3.3.2 and 3.5.2; SageAttention2 saw 13 on Ada too). Of Blackwell's 25 bits were seen (DeepGEMM issue 176). Nothing is
added up outside the tensor cores in between, as with ``use_fast_accum`` of torch's GEMMs. Of bfloat16, V100, T4 and
A100 cut off as well, at 24 bits or more (Fasi et al., Numerical behavior of NVIDIA tensor cores, 2021). Of AMD's matrix
cores nothing is known here: nobody ran the kernels there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from ..edges import at_most, edge
from ..runtime import declare
from ..runtime.declare import Call, Config, Shape
from ..spec import DeviceLimits, NamedInts, Problem
from . import grouped_tiles
from .grouped_tiles import (
    are_multiples,
    check_products,
    extents,
    in_bands,
    one_of,
    piece,
    random_operand,
    random_scales,
    scaled,
    store_masked,
)


@triton.jit(do_not_specialize=["M", "G"])  # both change every step: neither may recompile anything
def grouped_rows_kernel(
    a_ptr: tl.tensor,  # (M, K), row-major
    b_ptr: tl.tensor,  # (G, N, K), row-major
    offs_ptr: tl.tensor,  # (G,)
    scale_a_ptr: tl.tensor,  # (M,); None without scales
    scale_b_ptr: tl.tensor,  # (G, N)
    out_ptr: tl.tensor,  # (M, N), row-major
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    G: tl.tensor,
    GROUPS: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    BAND: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    num_stages: tl.constexpr,
) -> None:
    """Tiles of BLOCK_SIZE_M rows of one group and BLOCK_SIZE_N columns, one after the other; GROUPS > G."""
    if DESCRIPTORS:
        a = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BLOCK_SIZE_M, BLOCK_SIZE_K])
        b = tl.make_tensor_descriptor(b_ptr, [G * N, K], [K, 1], [BLOCK_SIZE_N, BLOCK_SIZE_K])
        if DESCRIPTORS == 2:
            out = tl.make_tensor_descriptor(out_ptr, [M, N], [N, 1], [BLOCK_SIZE_M, BLOCK_SIZE_N])
    groups = extents(offs_ptr, M, G, GROUPS)
    across = tl.cdiv(N, BLOCK_SIZE_N)
    tiles = tl.where(groups.group < G, tl.cdiv(groups.end - groups.start, BLOCK_SIZE_M) * across, 0)
    tiles_end = tl.cumsum(tiles, 0)
    depth_steps = tl.cdiv(K, BLOCK_SIZE_K)
    lanes_m, lanes_n = tl.arange(0, BLOCK_SIZE_M), tl.arange(0, BLOCK_SIZE_N)
    # where nothing branches, the loads of the next tile are under way while this one is stored
    for tile in tl.range(tl.program_id(0), tl.sum(tiles, 0), tl.num_programs(0), flatten=DESCRIPTORS == 1):
        group = tl.sum((tiles_end <= tile).to(tl.int32), 0)
        is_mine = groups.group == group
        start, end = one_of(groups.start, is_mine), one_of(groups.end, is_mine)
        down = tl.cdiv(end - start, BLOCK_SIZE_M)
        row_tile, column_tile = in_bands(tile - one_of(tiles_end, is_mine) + down * across, down, across, BAND)
        row, column = start + row_tile * BLOCK_SIZE_M, column_tile * BLOCK_SIZE_N
        rows, columns = row + lanes_m, column + lanes_n

        total = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32)
        for k in tl.range(0, depth_steps):
            at = k * BLOCK_SIZE_K
            if DESCRIPTORS:
                a_piece, b_piece = a.load([row, at]), b.load([group * N + column, at])
            else:
                depth = at + tl.arange(0, BLOCK_SIZE_K)
                a_piece = piece(a_ptr, K, rows, depth, end, K)
                b_piece = piece(b_ptr + (group * N).to(tl.int64) * K, K, columns, depth, N, K)
            total = tl.dot(a_piece, b_piece.T, total)
        if scale_a_ptr is not None:
            total = scaled(total, scale_a_ptr, rows, end, scale_b_ptr + group * N, columns, N)
        result = total.to(tl.bfloat16)
        if DESCRIPTORS == 2:
            if row + BLOCK_SIZE_M <= end:
                out.store([row, column], result)
            else:
                store_masked(out_ptr, N, rows, columns, end, N, result)
        else:
            store_masked(out_ptr, N, rows, columns, end, N, result)
    zero_rows(out_ptr, one_of(groups.start, groups.group == G), M, N, lanes_m, lanes_n)


@triton.jit
def zero_rows(
    out_ptr: tl.tensor, first: tl.tensor, M: tl.tensor, N: tl.tensor, lanes_m: tl.tensor, lanes_n: tl.tensor
) -> None:
    """Rows of no group, from the first of them on, shared among the programs."""
    across = tl.cdiv(N, lanes_n.shape[0])
    tiles = tl.cdiv(M - first, lanes_m.shape[0]) * across
    zeros = tl.zeros((lanes_m.shape[0], lanes_n.shape[0]), out_ptr.dtype.element_ty)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        rows = first + tile // across * lanes_m.shape[0] + lanes_m
        columns = tile % across * lanes_n.shape[0] + lanes_n
        store_masked(out_ptr, N, rows, columns, M, N, zeros)


def launch(config: Config, call: Call) -> None:
    """Launch PROGRAMS programs a multiprocessor."""
    programs = grouped_tiles.programs(config, call.device) if call.M * call.N else 0
    options = grouped_tiles.kernel_options(config)
    call.run(grouped_rows_kernel, programs, options, GROUPS=grouped_tiles.groups_constant(call.G))


def reference(call: Call) -> None:
    """Multiply in float32 in plain torch; reads ``offs`` on the host."""
    start, a, b, G = 0, call.a, call.b, call.G
    call.out.zero_()
    with torch.autocast(a.device.type, enabled=False):  # a caller's would multiply in its own dtype
        for group, end in enumerate(call.offs.tolist()):
            product = a[start:end].float() @ b[group].float().t()
            if call.scale_a is not None:
                of_rows, of_columns = call.scale_a.view(-1, 1)[start:end], call.scale_b.view(G, -1)[group]
                product = product * of_rows.reciprocal() * of_columns.reciprocal()
            call.out[start:end] = product
            start = end


def inputs(problem: Problem, device: str) -> dict[str, torch.Tensor | None]:
    """Return random operands and scales."""
    M, N, K, G = (problem.shape[dim] for dim in "MNKG")
    scale_a, scale_b = random_scales(problem, (M, (G, N)), device)
    b = random_operand(problem, G * N, K, device, 1).view(G, N, K)
    return {"a": random_operand(problem, M, K, device), "b": b, "scale_a": scale_a, "scale_b": scale_b}


def problems(row: Shape) -> Iterator[NamedInts]:
    """Yield the forward pass, then the input gradient; none of a layer that the kernel refuses."""
    N, K = row["N"], row["K"]
    if are_multiples(N, K):
        yield NamedInts(M=row["M"], N=N, K=K, G=row["E"])
        yield NamedInts(M=row["M"], N=K, K=N, G=row["E"])


def invalid(config: Config, shape: Shape, limits: DeviceLimits) -> str | None:
    """Return the hardware reason why a config cannot pay, or None: see :mod:`.grouped_tiles`."""
    work = grouped_tiles.Work(shape["G"], shape["M"], shape["N"], shape["K"], "down", grouped_tiles.element_size(shape))
    return grouped_tiles.invalid(config, work, limits)


def check(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    N: int,
    K: int,
    G: int,
) -> None:
    """Raise ValueError for operands that the kernel cannot multiply."""
    check_products(a, b, scale_a, scale_b, a.shape[0], G * N, N=N, K=K)


OPERANDS = (
    declare.Argument("a", dims=("M", "K"), check='check_shape("a", a, 2)'),
    declare.Argument("b", dims=("G", "N", "K"), check='check_shape("b", b, 3)'),
)
SCALES = (declare.Argument("scale_a", "Tensor?"), declare.Argument("scale_b", "Tensor?"))
EDGES = (
    edge("one row, huge values", "huge", routing="ragged", M=1, N=48, K=80, G=3),
    edge("a tile and one more", routing="balanced", M=513, N=272, K=144, G=1),
    edge("rows of no group, NaN", "nan", routing="empty", M=277, N=48, K=16, G=4),
    edge("a prime, infinity", "infinite", routing="ragged", M=67, N=80, K=16, G=3),
    edge("the least columns, tiny values", "tiny", routing="ragged", M=67, N=16, K=16, G=2),
    edge("a long sum", routing="ragged", M=67, N=48, K=4112, G=2),
)
DECLARED = {
    **grouped_tiles.DECLARED,
    "problems": problems,
    "invalid": invalid,
    "interpreted": {"M": 157, "N": 80, "K": 144, "G": 3},
}
"""Fields that the kernel shares with the one that gathers its rows."""

SPEC = declare.kernel(
    name="grouped-rows",
    arguments=(*OPERANDS, declare.OFFSETS, *SCALES),
    outputs=(declare.Output("out", ("M", "N"), "torch.bfloat16"),),
    check=check,
    inputs=inputs,
    launch=launch,
    reference=reference,
    edges=(
        *EDGES,
        edge("empty groups, zeros", "zeros", routing="empty", M=37, N=272, K=48, G=3),
        edge("a row less than a tile", routing="balanced", M=510, N=48, K=16, G=2),
        edge("several tiles a program", routing="ragged", M=at_most("M", 8191), N=at_most("N", 2048), K=144, G=5),
    ),
    layout_sizes={"N": 272, "K": 400, "G": 8},
    in_dtypes=("float8_e4m3fn", "float8_e4m3fnuz", "bfloat16"),
    **DECLARED,
)

multiply_rows = SPEC.define("multiply_rows")
