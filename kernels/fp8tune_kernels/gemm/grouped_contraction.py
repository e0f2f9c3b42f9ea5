"""``grouped-contraction``: multiply two matrices group by group, over the rows of each group.

    out[e, n, k] = bfloat16( sum over m in group e of a[m, n] * b[m, k]  * (1 / scale_a[e, n]) * (1 / scale_b[e, k]) )
                   with ``added``: float32 of that, plus added[e, n, k], rounded to the dtype of added

    a        (P, N), strides (1, P): FP8 codes, as ``colwise`` writes them; or (M, N), row-major, bfloat16
    b        (P, K) or (M, K), the same
    offs     (E,), int32: the end row of each group before any alignment; groups have any size, also none
    scale_a  (E*N,), group-major, float32: what codes were multiplied by; None beside bfloat16
    scale_b  (E*K,), the same
    added    (E, N, K), row-major, bfloat16 or float32; or None. It may be ``out``: gradients that are accumulated
    out      (E, N, K), row-major, bfloat16 or as added; zeros for a group without rows

It is the weight gradient of a grouped GEMM: a is the gradient of its output. N and K are multiples of 16.

Groups of codes begin at multiples of ALIGNMENT rows: each is followed by zeros up to the next multiple, and has at
least one such piece (:func:`.grouped_tiles.padded_extents`). The kernel that writes the codes
writes the zeros; tokens are not padded. If pieces of BLOCK_SIZE_K divide the alignment, none holds rows of two groups.
Else, as with alignment 1 and with bfloat16, the last piece of a group is masked, which costs registers: on an H200 1.3
to 1.6 times the time.

Sums are those of :mod:`.grouped_rows`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..edges import at_most, edge
from ..groups import padded_rows, taken_rows
from ..inputs import dtype_named, random_matrix
from ..runtime import declare
from ..runtime.checks import FP8_DTYPES, check_columns, refuse
from ..runtime.declare import Call, Config, Shape
from ..spec import DeviceLimits, NamedInts, Problem
from . import grouped_tiles
from .grouped_tiles import (
    are_multiples,
    check_dtypes,
    check_products,
    in_bands,
    one_of,
    padded_extents,
    piece,
    random_operand,
    random_scales,
    scaled,
    store_masked,
)

ALIGNMENT = 128
"""Rows at whose multiples groups of codes begin: the largest BLOCK_SIZE_K, so that no piece is masked."""


@triton.jit(do_not_specialize=["M", "G"])  # both change every step: neither may recompile anything
def grouped_contraction_kernel(
    a_ptr: tl.tensor,  # (N, M) or, of bfloat16, (M, N), row-major
    b_ptr: tl.tensor,  # (K, M) or (M, K), row-major
    offs_ptr: tl.tensor,  # (G,)
    scale_a_ptr: tl.tensor,  # (G, N); None without scales
    scale_b_ptr: tl.tensor,  # (G, K)
    added_ptr: tl.tensor,  # (G, N, K), row-major, or None; may be out_ptr
    out_ptr: tl.tensor,  # (G, N, K), row-major
    M: tl.tensor,  # rows of a and b, with those between groups
    N: tl.tensor,
    K: tl.tensor,
    G: tl.tensor,
    GROUPS: tl.constexpr,
    ALIGNED: tl.constexpr,  # the alignment
    BLOCK_SIZE_M: tl.constexpr,  # of N
    BLOCK_SIZE_N: tl.constexpr,  # of K
    BLOCK_SIZE_K: tl.constexpr,  # of M
    BAND: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    num_stages: tl.constexpr,
) -> None:
    """Tiles of BLOCK_SIZE_M by BLOCK_SIZE_N of one group's product, one after the other; GROUPS > G."""
    BY_ROWS: tl.constexpr = scale_a_ptr is None  # bfloat16 lies as it is
    # a group of codes that begins anywhere is out of reach: descriptors read from multiples of 16 bytes
    READS: tl.constexpr = DESCRIPTORS > 0 and (BY_ROWS or ALIGNED % 16 == 0)
    if not BY_ROWS and ALIGNED % 16 == 0:
        M = M // 16 * 16  # as it is already: so the compiler knows that loads may be wide
    if READS:
        if BY_ROWS:
            a = tl.make_tensor_descriptor(a_ptr, [M, N], [N, 1], [BLOCK_SIZE_K, BLOCK_SIZE_M])
            b = tl.make_tensor_descriptor(b_ptr, [M, K], [K, 1], [BLOCK_SIZE_K, BLOCK_SIZE_N])
        else:
            a = tl.make_tensor_descriptor(a_ptr, [N, M], [M, 1], [BLOCK_SIZE_M, BLOCK_SIZE_K])
            b = tl.make_tensor_descriptor(b_ptr, [K, M], [M, 1], [BLOCK_SIZE_N, BLOCK_SIZE_K])
    STORES: tl.constexpr = (
        DESCRIPTORS == 2 and out_ptr.dtype.element_ty == tl.bfloat16
    )  # float32 takes twice the memory
    if STORES:
        out = tl.make_tensor_descriptor(
            out_ptr, [G, N, K], [tl.cast(N, tl.int64) * K, K, 1], [1, BLOCK_SIZE_M, BLOCK_SIZE_N]
        )
    groups = padded_extents(offs_ptr, M, G, GROUPS, ALIGNED)
    down, across = tl.cdiv(N, BLOCK_SIZE_M), tl.cdiv(K, BLOCK_SIZE_N)
    IS_WHOLE: tl.constexpr = ALIGNED % BLOCK_SIZE_K == 0  # rows that follow a group's own are zeros
    for tile in tl.range(tl.program_id(0), G * down * across, tl.num_programs(0)):
        group = tile // (down * across)
        is_mine = groups.group == group
        start, end = one_of(groups.start, is_mine), one_of(groups.end, is_mine)
        if not BY_ROWS and ALIGNED % 16 == 0:
            start = start // 16 * 16
        row_tile, column_tile = in_bands(tile % (down * across), down, across, BAND)
        row, column = row_tile * BLOCK_SIZE_M, column_tile * BLOCK_SIZE_N
        rows, columns = row + tl.arange(0, BLOCK_SIZE_M), column + tl.arange(0, BLOCK_SIZE_N)

        total = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32)
        whole = tl.cdiv(end - start, BLOCK_SIZE_K) if IS_WHOLE else (end - start) // BLOCK_SIZE_K
        for step in tl.range(0, whole):
            at = start + step * BLOCK_SIZE_K
            if READS and BY_ROWS:
                a_piece, b_piece = a.load([at, row]).T, b.load([at, column])
            elif READS:
                a_piece, b_piece = a.load([row, at]), b.load([column, at]).T
            else:
                depth = at + tl.arange(0, BLOCK_SIZE_K)
                depth_end = end if BY_ROWS else M
                a_piece, b_piece = _pieces(a_ptr, b_ptr, rows, columns, depth, depth_end, M, N, K, BY_ROWS)
            total = tl.dot(a_piece, b_piece, total)
        if not IS_WHOLE and start + whole * BLOCK_SIZE_K < end:
            depth = start + whole * BLOCK_SIZE_K + tl.arange(0, BLOCK_SIZE_K)
            a_piece, b_piece = _pieces(a_ptr, b_ptr, rows, columns, depth, end, M, N, K, BY_ROWS)
            total = tl.dot(a_piece, b_piece, total)
        if not BY_ROWS:
            total = scaled(total, scale_a_ptr + group * N, rows, N, scale_b_ptr + group * K, columns, K)
        if added_ptr is not None:
            place = group.to(tl.int64) * N * K
            for_all = Sum(added_ptr + place, out_ptr + place, N, K, rows, column)
            left, right = _halves(total)  # in quarters: registers do not hold all of what is added
            _add_half(for_all, left, 0)
            _add_half(for_all, right, BLOCK_SIZE_N // 2)
        else:
            result = total.to(tl.bfloat16)
            if DESCRIPTORS == 2:
                out.store([group, row, column], result.reshape(1, BLOCK_SIZE_M, BLOCK_SIZE_N))
            else:
                store_masked(out_ptr + group.to(tl.int64) * N * K, K, rows, columns, N, K, result)


class Sum(NamedTuple):
    """Destination of one tile's sums, with the matrix that is added to it."""

    added_ptr: tl.tensor  # of the group
    out_ptr: tl.tensor  # of the group
    N: tl.tensor
    K: tl.tensor
    rows: tl.tensor
    column: tl.tensor


@triton.jit
def _halves(tile: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The left and the right columns of a tile, which stay in their threads."""
    return tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1).split()  # type: ignore[no-any-return]


@triton.jit
def _add_half(to: Sum, total: tl.tensor, offset: tl.constexpr) -> None:
    left, right = _halves(total)
    _add(to, left, offset)
    _add(to, right, offset + total.shape[1] // 2)


@triton.jit
def _add(to: Sum, total: tl.tensor, offset: tl.constexpr) -> None:
    columns = to.column + offset + tl.arange(0, total.shape[1])
    total += piece(to.added_ptr, to.K, to.rows, columns, to.N, to.K).to(tl.float32)
    store_masked(to.out_ptr, to.K, to.rows, columns, to.N, to.K, total.to(to.out_ptr.dtype.element_ty))


@triton.jit
def _pieces(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    depth_end: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    BY_ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Both operands of one multiplication by pointers, zero from ``depth_end`` on."""
    if BY_ROWS:
        a_piece = piece(a_ptr, N, depth, rows, depth_end, N).T
        b_piece = piece(b_ptr, K, depth, columns, depth_end, K)
    else:
        a_piece = piece(a_ptr, M, rows, depth, N, depth_end)
        b_piece = piece(b_ptr, M, columns, depth, K, depth_end).T
    return a_piece, b_piece


def launch(config: Config, call: Call) -> None:
    """Launch PROGRAMS programs a multiprocessor."""
    programs, options = grouped_tiles.programs(config, call.device), grouped_tiles.kernel_options(config)
    constants = {"GROUPS": grouped_tiles.groups_constant(call.G), "ALIGNED": call.alignment}
    call.run(grouped_contraction_kernel, programs, options, M=call.P, **constants)


def reference(call: Call) -> None:
    """Multiply in float32 in plain torch; reads ``offs`` on the host."""
    G, N, K = call.G, call.N, call.K
    with torch.autocast(call.a.device.type, enabled=False):  # a caller's would multiply in its own dtype
        for group, (start, end) in enumerate(_places(call)):
            product = call.a[start:end].t().float() @ call.b[start:end].float()
            if call.scale_a is not None:
                of_a, of_b = call.scale_a.view(G, N, 1)[group], call.scale_b.view(G, 1, K)[group]
                product = product * of_a.reciprocal() * of_b.reciprocal()
            call.out[group] = product if call.added is None else product + call.added[group].float()


def _places(call: Call) -> Iterator[tuple[int, int]]:
    """Yield where the rows of each group begin and end among the rows of codes."""
    start, place = 0, 0
    for end in call.offs.tolist():
        yield place, place + end - start
        place += taken_rows(end - start, call.alignment)
        start = end


def inputs(problem: Problem, device: str) -> dict[str, Any]:
    """Return random arguments; ``added`` in the shape is 1 of bfloat16, 2 of float32."""
    M, N, K, G = (problem.shape[dim] for dim in "MNKG")
    alignment, rows, is_fp8 = 1, M, dtype_named(problem.in_dtype) in FP8_DTYPES
    if is_fp8:
        alignment = problem.shape.get("alignment", ALIGNMENT)
        rows = padded_rows(M, G, alignment) if alignment > 1 else padded_rows(M, 0, 16)
    shapes = [(size, rows) if is_fp8 else (rows, size) for size in (N, K)]
    a, b = (random_operand(problem, *shape, device, number) for number, shape in enumerate(shapes))
    added = None
    if number := problem.shape.get("added"):
        dtype = ("bfloat16", "float32")[number - 1]
        added = random_matrix(replace(problem, in_dtype=dtype, seed=problem.seed + 2), G * N, K, device).view(G, N, K)
    scale_a, scale_b = random_scales(problem, (G * N, G * K), device)
    made: dict[str, Any] = {"a": a.t() if is_fp8 else a, "b": b.t() if is_fp8 else b}
    made |= {"scale_a": scale_a, "scale_b": scale_b}
    made |= {"alignment": alignment, "added": added, "offs": declare.OFFSETS.random(problem, device)}
    constrain(Call(**made))
    return made


def constrain(call: Call) -> None:
    """Write zeros between the groups: what the kernel that makes codes writes there."""
    if call.alignment == 1 or call.a.is_meta:
        return
    keep = torch.zeros(len(call.a), dtype=torch.bool, device=call.a.device)
    for start, end in _places(call):
        keep[start:end] = True
    for codes in (call.a, call.b):
        codes.view(torch.uint8)[~keep] = 0


def problems(row: Shape) -> Iterator[NamedInts]:
    """Yield the weight gradient; none of a layer that the kernel refuses."""
    if are_multiples(row["N"], row["K"]):
        yield NamedInts(M=row["M"], N=row["N"], K=row["K"], G=row["E"])


def bytes_moved(shape: Shape) -> int:
    """Return the bytes without those of rows between groups, which no group needs."""
    M, N, K, G = (shape[dim] for dim in "MNKG")
    return M * (N + K) * grouped_tiles.element_size(shape) + 2 * G * N * K


def invalid(config: Config, shape: Shape, limits: DeviceLimits) -> str | None:
    """Return the hardware reason why a config cannot pay, or None: see :mod:`.grouped_tiles`."""
    sizes = shape["G"], shape["N"], shape["K"], shape["M"]
    return grouped_tiles.invalid(config, grouped_tiles.Work(*sizes, "depth", grouped_tiles.element_size(shape)), limits)


def check_first(a: torch.Tensor) -> None:
    """Raise ValueError unless the first operand is one that is multiplied."""
    check_dtypes(a, a)
    check_columns("a", a, a.dtype)


def check(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    alignment: int,
    added: torch.Tensor | None,
    P: int,
    N: int,
    K: int,
    G: int,
) -> None:
    """Raise ValueError for operands that the kernel cannot multiply."""
    check_products(a, b, scale_a, scale_b, G * N, G * K, N=N, K=K)
    if alignment != 1:
        if a.dtype == torch.bfloat16 or alignment < 16 or alignment & (alignment - 1):
            raise ValueError(f"alignment is {alignment}, wanted 1 or, of codes, a power of two from 16 on")
        if P % alignment or alignment * G > P:
            raise ValueError(f"a has {P} rows, wanted a multiple of alignment={alignment} and a piece for each group")
    if added is not None:
        is_right = added.dtype in (torch.bfloat16, torch.float32) and added.is_contiguous() and added.device == a.device
        if not is_right or added.shape != (G, N, K):
            refuse("added", added, f"row-major bfloat16 or float32 {(G, N, K)} on {a.device}")


SPEC = declare.kernel(
    name="grouped-contraction",
    arguments=(
        declare.Argument("a", dims=("P", "N"), check=check_first),
        declare.Argument("b", dims=("P", "K"), check='check_columns("b", b, a.dtype)'),
        declare.OFFSETS,
        declare.Argument("scale_a", "Tensor?"),
        declare.Argument("scale_b", "Tensor?"),
        declare.Argument("alignment", "int"),
        declare.Argument("added", "Tensor?"),
    ),
    defaults={"alignment": 1},
    outputs=(declare.Output("out", ("G", "N", "K"), "torch.bfloat16 if added is None else added.dtype"),),
    sizes={"M": lambda P, G, alignment: P if alignment == 1 else P - alignment * G},  # see padded_rows
    check=check,
    inputs=inputs,
    constrain=constrain,
    launch=launch,
    reference=reference,
    problems=problems,
    bytes_moved=bytes_moved,
    invalid=invalid,
    interpreted={"M": 269, "N": 80, "K": 48, "G": 3},
    edges=(
        edge("one row, huge values", "huge", routing="ragged", M=1, N=48, K=80, G=3),
        edge("a tile and one more", routing="balanced", M=513, N=272, K=144, G=1),
        edge("rows of no group, NaN", "nan", routing="empty", M=277, N=48, K=80, G=4),
        edge("a prime, infinity", "infinite", routing="ragged", M=67, N=80, K=48, G=3),
        edge("empty groups, zeros", "zeros", routing="empty", M=37, N=48, K=48, G=3),
        edge("groups that are not aligned", routing="ragged", M=277, N=48, K=80, G=4, alignment=1),
        edge("a tail that is NaN", "nan", routing="ragged", M=131, N=48, K=48, G=3, alignment=1),
        edge("pieces longer than the alignment", routing="ragged", M=277, N=48, K=80, G=4, alignment=16),
        edge("a long sum", routing="one-giant", M=4099, N=48, K=48, G=2),
        edge("added to bfloat16", routing="empty", M=277, N=48, K=80, G=4, added=1),
        edge("added to float32, rows of no group", routing="empty", M=131, N=144, K=272, G=3, added=2),
        edge("several tiles a program", routing="ragged", N=at_most("N", 1040), K=at_most("K", 1040), M=701, G=24),
    ),
    layout_sizes={"N": 272, "K": 400, "G": 8},
    in_dtypes=("float8_e4m3fn", "float8_e4m3fnuz", "bfloat16"),
    **grouped_tiles.DECLARED,
)

contract_rows = SPEC.define("contract_rows")
