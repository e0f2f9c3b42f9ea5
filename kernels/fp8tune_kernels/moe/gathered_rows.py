"""``gathered-rows``: a grouped GEMM that gathers its rows while it loads them.

    out[r, n] = bfloat16( sum over k of a[token_of_row[r], k] * b[e, n, k] * (1 / scale_a[token_of_row[r]])
                          * (1 / scale_b[e, n]) )                                        for row r in group e

    a             (T, K), row-major: FP8 values
    b             (E, N, K), row-major, of a's dtype
    offs          (E,), int32: the end row of each group, non-decreasing, at most M
    token_of_row  (M,), int32: see :mod:`.expert_sort`
    scale_a       (T,), float32: what FP8 values were multiplied by
    scale_b       (E, N), float32
    out           (M, N), row-major, bfloat16; zeros in rows past ``offs[-1]``

It is :mod:`fp8tune_kernels.gemm.grouped_rows` on rows that were never copied: pieces of ``a`` come by pointers
(``cp.async``), those of ``b`` by tensor descriptors (TMA), in one pipelined loop. K and N are multiples of 16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..edges import at_most, edge
from ..gemm import grouped_rows, grouped_tiles
from ..gemm.grouped_tiles import (
    check_products,
    extents,
    in_bands,
    one_of,
    piece,
    random_operand,
    random_scales,
    store_masked,
)
from ..quantize.aligned_blocks import inverse_of
from ..runtime import declare
from ..runtime.declare import Call, Config, Shape
from ..spec import Problem
from .expert_sort import TOP_K


@triton.jit(do_not_specialize=["M", "G"])  # both change every step and must not cause a recompilation
def gathered_rows_kernel(
    a_ptr: tl.tensor,  # (T, K), row-major
    b_ptr: tl.tensor,  # (G, N, K), row-major
    offs_ptr: tl.tensor,  # (G,)
    token_of_row_ptr: tl.tensor,  # (M,)
    scale_a_ptr: tl.tensor,  # (T,); None without scales
    scale_b_ptr: tl.tensor,  # (G, N)
    out_ptr: tl.tensor,  # (M, N), row-major
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    G: tl.tensor,
    GROUPS: tl.constexpr,
    IS_EVEN: tl.constexpr,  # BLOCK_SIZE_K divides K
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    BAND: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    num_stages: tl.constexpr,
) -> None:
    """Compute tiles of BLOCK_SIZE_M rows of one group and BLOCK_SIZE_N columns, one after the other; GROUPS > G."""
    if DESCRIPTORS:
        b = tl.make_tensor_descriptor(b_ptr, [G * N, K], [K, 1], [BLOCK_SIZE_N, BLOCK_SIZE_K])
        if DESCRIPTORS == 2:
            out = tl.make_tensor_descriptor(out_ptr, [M, N], [N, 1], [BLOCK_SIZE_M, BLOCK_SIZE_N])
    groups = extents(offs_ptr, M, G, GROUPS)
    across = tl.cdiv(N, BLOCK_SIZE_N)
    tiles = tl.where(groups.group < G, tl.cdiv(groups.end - groups.start, BLOCK_SIZE_M) * across, 0)
    tiles_end = tl.cumsum(tiles, 0)
    depth_steps = tl.cdiv(K, BLOCK_SIZE_K)
    lanes_m, lanes_n, lanes_k = tl.arange(0, BLOCK_SIZE_M), tl.arange(0, BLOCK_SIZE_N), tl.arange(0, BLOCK_SIZE_K)
    # flattened, the loads of the next tile are under way while this one is stored
    for tile in tl.range(tl.program_id(0), tl.sum(tiles, 0), tl.num_programs(0), flatten=DESCRIPTORS == 1):
        group = tl.sum((tiles_end <= tile).to(tl.int32), 0)
        is_mine = groups.group == group
        start, end = one_of(groups.start, is_mine), one_of(groups.end, is_mine)
        down = tl.cdiv(end - start, BLOCK_SIZE_M)
        row_tile, column_tile = in_bands(tile - one_of(tiles_end, is_mine) + down * across, down, across, BAND)
        row, column = start + row_tile * BLOCK_SIZE_M, column_tile * BLOCK_SIZE_N
        rows, columns = row + lanes_m, column + lanes_n
        tokens = tl.load(token_of_row_ptr + rows, mask=rows < end, other=0)  # past the group: computed, not stored
        a_rows = a_ptr + tokens.to(tl.int64)[:, None] * K + lanes_k[None, :]

        total = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32)
        for k in tl.range(0, depth_steps):
            at = k * BLOCK_SIZE_K
            if IS_EVEN:
                a_piece = tl.load(a_rows + at)
            else:  # what follows in memory may be NaN, and b's piece has zeros there
                a_piece = tl.load(a_rows + at, mask=(at + lanes_k < K)[None, :], other=0.0)
            if DESCRIPTORS:
                b_piece = b.load([group * N + column, at])
            else:
                b_piece = piece(b_ptr + (group * N).to(tl.int64) * K, K, columns, at + lanes_k, N, K)
            total = tl.dot(a_piece, b_piece.T, total)
        if scale_a_ptr is not None:
            scale_a = tl.load(scale_a_ptr + tokens)
            scale_b = tl.load(scale_b_ptr + group * N + columns, mask=columns < N, other=1.0)
            total = total * inverse_of(scale_a)[:, None] * inverse_of(scale_b)[None, :]
        result = total.to(tl.bfloat16)
        if DESCRIPTORS == 2:
            if row + BLOCK_SIZE_M <= end:
                out.store([row, column], result)
            else:
                store_masked(out_ptr, N, rows, columns, end, N, result)
        else:
            store_masked(out_ptr, N, rows, columns, end, N, result)
    grouped_rows.zero_rows(out_ptr, one_of(groups.start, groups.group == G), M, N, lanes_m, lanes_n)


def launch(config: Config, call: Call) -> None:
    """Launch PROGRAMS programs a multiprocessor."""
    programs = grouped_tiles.programs(config, call.device) if call.M * call.N else 0
    constants = {"GROUPS": grouped_tiles.groups_constant(call.G), "IS_EVEN": call.K % config["BLOCK_SIZE_K"] == 0}
    call.run(gathered_rows_kernel, programs, grouped_tiles.kernel_options(config), **constants)


def reference(call: Call) -> None:
    """Multiply copied rows in plain torch; read ``offs`` on the host."""
    tokens = call.token_of_row.long()
    rows = call.a.view(torch.uint8)[tokens].view(call.a.dtype)
    scales = call.scale_a.view(-1)[tokens], call.scale_b
    call.out.copy_(grouped_rows.SPEC.reference(rows, call.b, call.offs, *scales)[0])


def inputs(problem: Problem, device: str) -> dict[str, torch.Tensor | None]:
    """Return random operands and scales of tokens; a row's token is random, ascending in its group."""
    M, N, K, G = (problem.shape[dim] for dim in "MNKG")
    T, offs = -(-M // TOP_K), declare.OFFSETS.random(problem, device)
    scale_a, scale_b = random_scales(problem, (T, (G, N)), device)
    made = {"a": random_operand(problem, T, K, device), "offs": offs, "scale_a": scale_a, "scale_b": scale_b}
    b = random_operand(problem, G * N, K, device, 1).view(G, N, K)
    return {**made, "b": b, "token_of_row": random_tokens(offs, M, T, problem.seed)}


def random_tokens(offs: torch.Tensor, M: int, T: int, seed: int) -> torch.Tensor:
    """Return the tokens of M rows, int32, ascending in each group as a stable sort leaves them."""
    if offs.is_meta:
        return offs.new_empty(M)
    generator = torch.Generator(offs.device).manual_seed(seed + 5)
    tokens = torch.randint(0, max(T, 1), (M,), device=offs.device, generator=generator)
    rows = torch.arange(M, device=offs.device, dtype=torch.int32)
    group = torch.searchsorted(offs, rows, right=True)
    return (group * max(T, 1) + tokens).sort().values.sub_(group * max(T, 1)).int()


def bytes_moved(shape: Shape) -> int:
    """Return the bytes of each token, of the weights and of the output, once."""
    M, N, K, G = (shape[dim] for dim in "MNKG")
    return (-(-M // TOP_K) + G * N) * K * grouped_tiles.element_size(shape) + 2 * M * N


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
    if a.dtype == torch.bfloat16:  # its tiles take twice the shared memory of those that were measured
        raise ValueError(f"a must be FP8 values, got {a.dtype}")


TOKEN_OF_ROW = declare.Argument(
    "token_of_row", dims=("M",), check='check_row_numbers("token_of_row", token_of_row, device)'
)

SPEC = declare.kernel(
    name="gathered-rows",
    arguments=(
        declare.Argument("a", dims=("T", "K"), check='check_shape("a", a, 2)'),
        grouped_rows.OPERANDS[1],
        declare.OFFSETS,
        TOKEN_OF_ROW,
        *grouped_rows.SCALES,
    ),
    outputs=(declare.Output("out", ("M", "N"), "torch.bfloat16"),),
    check=check,
    inputs=inputs,
    launch=launch,
    reference=reference,
    bytes_moved=bytes_moved,
    edges=(
        *grouped_rows.EDGES,
        edge("empty groups, zeros", "zeros", routing="empty", M=37, N=272, K=128, G=3),
        edge("a row less than a tile", routing="balanced", M=510, N=48, K=256, G=2),
        edge("several tiles a program", routing="ragged", M=at_most("M", 8191), N=at_most("N", 2048), K=128, G=5),
    ),
    layout_sizes={"N": 272, "K": 384, "G": 8},  # of K a multiple of each block: the binary that is timed
    in_dtypes=("float8_e4m3fn", "float8_e4m3fnuz"),
    **grouped_rows.DECLARED,
)

multiply_gathered_rows = SPEC.define("multiply_gathered_rows")
