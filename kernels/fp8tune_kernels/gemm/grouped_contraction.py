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
least one such piece (:func:`fp8tune_kernels.gemm.grouped_tiles.padded_extents`). The kernel that writes the codes
writes the zeros; tokens are not padded. If pieces of BLOCK_SIZE_K divide the alignment, none holds rows of two groups.
Else, as with alignment 1 and with bfloat16, the last piece of a group is masked, which costs registers: on an H200 1.3
to 1.6 times the time.

Sums are those of :mod:`.grouped_rows`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..edges import at_most, declared, edge
from ..groups import padded_rows
from ..inputs import dtype_named, offsets, random_matrix
from ..runtime.checks import FP8_DTYPES, check_offsets
from ..runtime.launching import launch_kernel
from ..runtime.ops import Inputs, Tensors, register
from ..spec import DTYPE_FLAG, DTYPES, DeviceLimits, KernelSpec, NamedInts, Problem, bucket
from . import grouped_tiles
from .grouped_tiles import in_bands, one_of, padded_extents, piece, scaled, store_masked
from .grouped_tiles import (
    are_multiples,
    check_addresses,
    check_dtypes,
    check_multiples,
    check_scales,
    random_operand,
    random_scales,
)

__all__ = ["ALIGNMENT", "SPEC", "contract_rows"]

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
    """Destination of a tile of sums, with the matrix that is added to it."""

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


def contract_rows(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    alignment: int = 1,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """``a[rows of e].t() @ b[rows of e]`` for every expert e: ``out`` as the module says.

    ``alignment``: of the groups of codes, 1 or a power of two from 16 on; 1 beside bfloat16. ``added``: what the
    products are added to; it stays as it is. Raises ValueError, before any launch, for another alignment, and for other
    shapes, dtypes, strides or devices.
    """
    return _operator(a, b, offs, scale_a, scale_b, alignment, added)


def reference(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    alignment: int,
    added: torch.Tensor | None = None,
) -> Tensors:
    """The same in plain torch, in float32; reads ``offs`` on the host."""
    (out,) = outputs(a, b, offs, scale_a, scale_b, alignment, added)
    G, N, K = out.shape
    with torch.autocast(a.device.type, enabled=False):  # a caller's would multiply in its own dtype
        for group, (start, end) in enumerate(_places(offs, alignment)):
            product = a[start:end].t().float() @ b[start:end].float()
            if scale_a is not None and scale_b is not None:
                of_a, of_b = scale_a.view(G, N, 1)[group], scale_b.view(G, 1, K)[group]
                product = product * of_a.reciprocal() * of_b.reciprocal()
            out[group] = product if added is None else product + added[group].float()
    return (out,)


def _places(offs: torch.Tensor, alignment: int) -> Iterator[tuple[int, int]]:
    """Where the rows of each group begin and end among the rows of codes."""
    start, place = 0, 0
    for end in offs.tolist():
        yield place, place + end - start
        place += end - start if alignment == 1 else max(1, -(-(end - start) // alignment)) * alignment
        start = end


def alignment_of(problem: Problem) -> int:
    """Of a problem's groups: ``alignment`` of its shape, if it says one; bfloat16 has none."""
    is_fp8 = dtype_named(problem.in_dtype) in FP8_DTYPES
    return problem.shape.get("alignment", ALIGNMENT) if is_fp8 else 1


def inputs(problem: Problem, device: str) -> Inputs:
    """``(a, b, offs, scale_a, scale_b, alignment, added)``; ``added`` in the shape: 1 of bfloat16, 2 of float32."""
    M, N, K, G = (problem.shape[dim] for dim in "MNKG")
    alignment = alignment_of(problem)
    if dtype_named(problem.in_dtype) in FP8_DTYPES:
        rows = padded_rows(M, G, alignment) if alignment > 1 else padded_rows(M, 0, 16)
        a, b = (random_operand(problem, size, rows, device, number).t() for number, size in enumerate((N, K)))
    else:
        a, b = (random_operand(problem, M, size, device, number) for number, size in enumerate((N, K)))
    added = None
    if number := problem.shape.get("added"):
        dtype = ("bfloat16", "float32")[number - 1]
        added = random_matrix(replace(problem, in_dtype=dtype, seed=problem.seed + 2), G * N, K, device).view(G, N, K)
    given = (a, b, offsets(problem, device), *random_scales(problem, (G * N, G * K), device), alignment, added)
    constrain(given)
    return given


def constrain(inputs: Inputs) -> None:
    """Write zeros between the groups: what the kernel that makes codes writes there."""
    a, b, offs, _, _, alignment, _ = inputs
    if alignment == 1 or a.device.type == "meta":
        return
    keep = torch.zeros(len(a), dtype=torch.bool, device=a.device)
    for start, end in _places(offs, alignment):
        keep[start:end] = True
    for codes in (a, b):
        codes.view(torch.uint8)[~keep] = 0


def outputs(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, *rest: object) -> Tensors:
    """Uninitialised ``out``."""
    added = rest[-1]
    dtype = added.dtype if isinstance(added, torch.Tensor) else torch.bfloat16
    return (torch.empty(offs.shape[0], a.shape[1], b.shape[1], dtype=dtype, device=a.device),)


def launch(config: Mapping[str, int], inputs: Inputs, outputs: Tensors) -> None:
    """One launch, of PROGRAMS programs a multiprocessor."""
    a, b, offs, scale_a, scale_b, alignment, added = inputs
    (M, N), K, G = a.shape, b.shape[1], offs.shape[0]
    tensors = (a, b, offs, scale_a, scale_b, added, *outputs)
    constants = (grouped_tiles.groups_constant(G), alignment)
    launch_kernel(
        grouped_contraction_kernel,
        grouped_tiles.programs(config, a.device),
        tensors,
        (M, N, K, G),
        constants,
        grouped_tiles.kernel_options(config),
    )


def problems(row: Mapping[str, int]) -> Iterator[NamedInts]:
    """The weight gradient; none of a layer that the kernel refuses."""
    if are_multiples(row["N"], row["K"]):
        yield NamedInts(M=row["M"], N=row["N"], K=row["K"], G=row["E"])


def bytes_moved(shape: Mapping[str, int]) -> int:
    """Rows between groups are not counted: they are this layout's, and no group needs them."""
    M, N, K, G = (shape[dim] for dim in "MNKG")
    return M * (N + K) * grouped_tiles.element_size(shape) + 2 * G * N * K


def invalid(config: Mapping[str, int], shape: Mapping[str, int], limits: DeviceLimits) -> str | None:
    """See :mod:`fp8tune_kernels.gemm.grouped_tiles`."""
    work = grouped_tiles.Work(
        shape["G"], shape["N"], shape["K"], shape["M"], "depth", grouped_tiles.element_size(shape)
    )
    return grouped_tiles.invalid(config, work, limits)


SPEC = KernelSpec(
    name="grouped-contraction",
    axes=grouped_tiles.AXES,
    configs=grouped_tiles.CONFIGS,
    default=grouped_tiles.DEFAULT,
    key=("M_bucket", "N", "K", "G", DTYPE_FLAG),
    problems=problems,
    inputs=inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    constrain=constrain,
    bytes_moved=bytes_moved,
    invalid=invalid,
    interpreted={"M": 269, "N": 80, "K": 48, "G": 3},
    edges=declared(
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
    routed=True,
    layout_sizes={"N": 272, "K": 400, "G": 8},
    in_dtypes=("float8_e4m3fn", "float8_e4m3fnuz", "bfloat16"),
    check="exact-inputs",
    flops=lambda shape: 2 * shape["M"] * shape["N"] * shape["K"],
)


def key(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, *rest: Any) -> tuple[int, ...]:
    """The lookup key of inputs. M counts as rounded up to the alignment: ``offs`` is not read."""
    *_, alignment, _ = rest
    rows = a.shape[0] if alignment == 1 else a.shape[0] - alignment * offs.shape[0]  # see padded_rows
    dtype = DTYPES.index(str(a.dtype).removeprefix("torch."))
    return bucket(rows), a.shape[1], b.shape[1], offs.shape[0], dtype


def _arguments(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    alignment: int = 1,  # torch leaves out what is the schema's default
    added: torch.Tensor | None = None,
) -> Inputs:
    check_dtypes(a, b)
    is_fp8 = a.dtype != torch.bfloat16
    for name, operand in (("a", a), ("b", b)):
        lies = operand.t() if is_fp8 and operand.dim() == 2 else operand
        if operand.dim() != 2 or not lies.is_contiguous():
            wanted = "column-major codes" if is_fp8 else "row-major bfloat16"
            raise ValueError(f"{name} has shape {tuple(operand.shape)} and strides {operand.stride()}, wanted {wanted}")
    if a.shape[0] != b.shape[0]:
        raise ValueError(f"b has {b.shape[0]} rows, wanted {a.shape[0]} as a")
    check_offsets(offs, a.device, "a")
    G, N, K = offs.shape[0], a.shape[1], b.shape[1]
    check_multiples("a and b", N=N, K=K)
    check_scales(a, scale_a, scale_b, G * N, G * K)
    check_addresses(a=a, b=b)
    _check_alignment(alignment, is_fp8, a.shape[0], G)
    if added is not None:
        is_right = added.dtype in (torch.bfloat16, torch.float32) and added.is_contiguous() and added.device == a.device
        if not is_right or added.shape != (G, N, K):
            layout = f"{added.dtype} of shape {tuple(added.shape)} and strides {added.stride()} on {added.device}"
            raise ValueError(f"added must be row-major bfloat16 or float32 {(G, N, K)} on {a.device}, got {layout}")
    return a, b, offs, scale_a, scale_b, alignment, added


def _check_alignment(alignment: int, is_fp8: bool, rows: int, groups: int) -> None:
    """Raise ValueError unless so many rows hold groups of an alignment."""
    if alignment == 1:
        return
    if not is_fp8 or alignment < 16 or alignment & (alignment - 1):
        raise ValueError(f"alignment is {alignment}, wanted 1 or, of codes, a power of two from 16 on")
    if rows % alignment or rows < alignment * groups:
        raise ValueError(f"a has {rows} rows, wanted a multiple of alignment={alignment} and a piece for each group")


_operator = register(SPEC, contract_rows, _arguments, key)
