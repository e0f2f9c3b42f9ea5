"""``grouped-contraction``: multiply two matrices group by group, over the rows of each group.

    out[e, n, k] = bfloat16( sum over m in group e of a[m, n] * b[m, k]  * (1 / scale_a[e, n]) * (1 / scale_b[e, k]) )

    a        (P, N), strides (1, P): FP8 codes, as ``colwise`` writes them; or (M, N), row-major, bfloat16
    b        (P, K) or (M, K), the same
    offs     (E,), int32: the end row of each group before any alignment; groups have any size, also none
    scale_a  (E*N,), group-major, float32: what codes were multiplied by; None beside bfloat16
    scale_b  (E*K,), the same
    out      (E, N, K), row-major, bfloat16; zeros for a group without rows

It is the weight gradient of a grouped GEMM: a is the gradient of its output. N and K are multiples of 16.

Groups of codes begin at multiples of ALIGNMENT rows: each is followed by zeros up to the next multiple, and has at
least one such piece (:func:`fp8tune_kernels.gemm.grouped_tiles.padded_extents`). The kernel that writes the codes writes
the zeros; tokens are not padded. If pieces of BLOCK_SIZE_K divide the alignment, none holds rows of two groups. Else,
as with alignment 1 and with bfloat16, the last piece of a group is masked, which costs registers: on an H200 1.3 to
1.6 times the time.

Sums are those of :mod:`.grouped_rows`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import triton
import triton.language as tl

from fp8tune_kernels.edges import declared, edge
from fp8tune_kernels.gemm import grouped_tiles
from fp8tune_kernels.gemm.grouped_rows import AXES
from fp8tune_kernels.gemm.grouped_tiles import in_bands, one_of, padded_extents, piece, reciprocal
from fp8tune_kernels.gemm.operands import (
    check_addresses,
    check_dtypes,
    check_multiples,
    check_scales,
    random_operand,
    random_scales,
)
from fp8tune_kernels.gemm.token_groups import padded_rows
from fp8tune_kernels.inputs import dtype_named, offsets
from fp8tune_kernels.interpreter import INTERPRETED
from fp8tune_kernels.runtime.checks import FP8_DTYPES, check_ends, check_offsets
from fp8tune_kernels.runtime.launching import launch_kernel
from fp8tune_kernels.runtime.lookup import config_for
from fp8tune_kernels.runtime.ops import Inputs, Tensors, define
from fp8tune_kernels.spec import DTYPE_FLAG, DTYPES, DeviceLimits, KernelSpec, NamedInts, Problem, bucket

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
    if READS:
        if BY_ROWS:
            a = tl.make_tensor_descriptor(a_ptr, [M, N], [N, 1], [BLOCK_SIZE_K, BLOCK_SIZE_M])
            b = tl.make_tensor_descriptor(b_ptr, [M, K], [K, 1], [BLOCK_SIZE_K, BLOCK_SIZE_N])
        else:
            a = tl.make_tensor_descriptor(a_ptr, [N, M], [M, 1], [BLOCK_SIZE_M, BLOCK_SIZE_K])
            b = tl.make_tensor_descriptor(b_ptr, [K, M], [M, 1], [BLOCK_SIZE_N, BLOCK_SIZE_K])
    if DESCRIPTORS == 2:
        out = tl.make_tensor_descriptor(
            out_ptr, [G, N, K], [tl.cast(N, tl.int64) * K, K, 1], [1, BLOCK_SIZE_M, BLOCK_SIZE_N]
        )
    groups = padded_extents(offs_ptr, M, G, GROUPS, ALIGNED)
    down, across = tl.cdiv(N, BLOCK_SIZE_M), tl.cdiv(K, BLOCK_SIZE_N)
    for tile in tl.range(tl.program_id(0), G * down * across, tl.num_programs(0)):
        group = tile // (down * across)
        is_mine = groups.group == group
        start, end = one_of(groups.start, is_mine), one_of(groups.end, is_mine)
        row_tile, column_tile = in_bands(tile % (down * across), down, across, BAND)
        row, column = row_tile * BLOCK_SIZE_M, column_tile * BLOCK_SIZE_N
        rows, columns = row + tl.arange(0, BLOCK_SIZE_M), column + tl.arange(0, BLOCK_SIZE_N)

        total = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32)
        IS_WHOLE: tl.constexpr = ALIGNED % BLOCK_SIZE_K == 0  # rows that follow a group's own are zeros
        whole = tl.cdiv(end - start, BLOCK_SIZE_K) if IS_WHOLE else (end - start) // BLOCK_SIZE_K
        for step in tl.range(0, whole):
            at = start + step * BLOCK_SIZE_K
            if READS:
                if BY_ROWS:
                    a_piece, b_piece = a.load([at, row]).T, b.load([at, column])
                else:
                    a_piece, b_piece = a.load([row, at]), b.load([column, at]).T
            else:
                depth = at + tl.arange(0, BLOCK_SIZE_K)
                if BY_ROWS:
                    a_piece = piece(a_ptr, N, depth, rows, end, N).T
                    b_piece = piece(b_ptr, K, depth, columns, end, K)
                else:
                    a_piece = piece(a_ptr, M, rows, depth, N, M)
                    b_piece = piece(b_ptr, M, columns, depth, K, M).T
            total = tl.dot(a_piece, b_piece, total)
        if not IS_WHOLE:
            if start + whole * BLOCK_SIZE_K < end:
                depth = start + whole * BLOCK_SIZE_K + tl.arange(0, BLOCK_SIZE_K)
                if BY_ROWS:
                    a_piece = piece(a_ptr, N, depth, rows, end, N).T
                    b_piece = piece(b_ptr, K, depth, columns, end, K)
                else:
                    a_piece = piece(a_ptr, M, rows, depth, N, end)
                    b_piece = piece(b_ptr, M, columns, depth, K, end).T
                total = tl.dot(a_piece, b_piece, total)
        if not BY_ROWS:
            scale_a = tl.load(scale_a_ptr + group * N + rows, mask=rows < N, other=1.0)
            scale_b = tl.load(scale_b_ptr + group * K + columns, mask=columns < K, other=1.0)
            total = total * reciprocal(scale_a)[:, None] * reciprocal(scale_b)[None, :]
        result = total.to(tl.bfloat16)
        if DESCRIPTORS == 2:
            out.store([group, row, column], result.reshape(1, BLOCK_SIZE_M, BLOCK_SIZE_N))
        else:
            at_out = out_ptr + group.to(tl.int64) * N * K + rows.to(tl.int64)[:, None] * K + columns[None, :]
            tl.store(at_out, result, mask=(rows < N)[:, None] & (columns < K)[None, :])


def contract_rows(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    alignment: int = 1,
) -> torch.Tensor:
    """``a[rows of e].t() @ b[rows of e]`` for every expert e: ``out`` as the module says.

    ``alignment``: of the groups of codes, 1 or a power of two from 16 on; 1 beside bfloat16. Raises ValueError, before
    any launch, for another one, and for other shapes, dtypes, strides or devices.
    """
    return _operator(a, b, offs, scale_a, scale_b, alignment)


def reference(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    alignment: int,
) -> Tensors:
    """The same in plain torch, in float32; reads ``offs`` on the host."""
    (out,) = outputs(a, b, offs, scale_a, scale_b, alignment)
    G, N, K = out.shape
    with torch.autocast(a.device.type, enabled=False):  # a caller's would multiply in its own dtype
        for group, (start, end) in enumerate(_places(offs, alignment)):
            product = a[start:end].t().float() @ b[start:end].float()
            if scale_a is not None and scale_b is not None:
                of_a, of_b = scale_a.view(G, N, 1)[group], scale_b.view(G, 1, K)[group]
                product = product * of_a.reciprocal() * of_b.reciprocal()
            out[group] = product
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
    """``(a, b, offs, scale_a, scale_b, alignment)`` of a problem."""
    M, N, K, G = (problem.shape[dim] for dim in "MNKG")
    alignment = alignment_of(problem)
    if dtype_named(problem.in_dtype) in FP8_DTYPES:
        rows = padded_rows(M, G, alignment) if alignment > 1 else padded_rows(M, 0, 16)
        a, b = (random_operand(problem, size, rows, device, number).t() for number, size in enumerate((N, K)))
    else:
        a, b = (random_operand(problem, M, size, device, number) for number, size in enumerate((N, K)))
    given = (a, b, offsets(problem, device), *random_scales(problem, (G * N, G * K), device), alignment)
    constrain(given)
    return given


def constrain(inputs: Inputs) -> None:
    """Write zeros between the groups: what the kernel that makes codes writes there."""
    a, b, offs, _, _, alignment = inputs
    if alignment == 1 or a.device.type == "meta":
        return
    keep = torch.zeros(len(a), dtype=torch.bool, device=a.device)
    for start, end in _places(offs, alignment):
        keep[start:end] = True
    for codes in (a, b):
        codes.view(torch.uint8)[~keep] = 0


def outputs(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, *rest: object) -> Tensors:
    """Uninitialised ``out``."""
    return (torch.empty(offs.shape[0], a.shape[1], b.shape[1], dtype=torch.bfloat16, device=a.device),)


def launch(config: Mapping[str, int], inputs: Inputs, outputs: Tensors) -> None:
    """One launch, of PROGRAMS programs a multiprocessor."""
    a, b, offs, scale_a, scale_b, alignment = inputs
    (M, N), K, G = a.shape, b.shape[1], offs.shape[0]
    tensors = (a, b, offs, scale_a, scale_b, *outputs)
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
    """The weight gradient."""
    yield NamedInts(M=row["M"], N=row["N"], K=row["K"], G=row["E"])


def invalid(config: Mapping[str, int], shape: Mapping[str, int], limits: DeviceLimits) -> str | None:
    """See :func:`fp8tune_kernels.gemm.grouped_tiles.invalid`."""
    return grouped_tiles.invalid(config, shape, limits, depth=max(1, shape["M"] // shape["G"]))


SPEC = KernelSpec(
    name="grouped-contraction",
    axes=AXES,
    default=NamedInts(
        BLOCK_SIZE_M=128,
        BLOCK_SIZE_N=128,
        BLOCK_SIZE_K=64,
        BAND=8,
        DESCRIPTORS=0,
        PROGRAMS=1,
        num_warps=8,
        num_stages=3,
    ),
    key=("M_bucket", "N", "K", "G", DTYPE_FLAG),
    problems=problems,
    inputs=inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    constrain=constrain,
    invalid=invalid,
    interpreted={"M": 109, "N": 80, "K": 48, "G": 3},
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
    ),
    routed=True,
    in_dtypes=("float8_e4m3fn", "float8_e4m3fnuz", "bfloat16"),
    check="exact-inputs",
    flops=lambda shape: 2 * shape["M"] * shape["N"] * shape["K"],
)


def key(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, rows: int) -> tuple[int, ...]:
    """The lookup key of inputs; ``rows``: those of ``offs``, before any alignment."""
    dtype = DTYPES.index(str(a.dtype).removeprefix("torch."))
    return bucket(rows), a.shape[1], b.shape[1], offs.shape[0], dtype


def run(*inputs: torch.Tensor | int | None) -> torch.Tensor:
    """Launch on the current device what the table says, on inputs that were checked."""
    a, b, offs, _, _, alignment = inputs
    assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and isinstance(offs, torch.Tensor)
    assert isinstance(alignment, int)
    (out,) = outputs(a, b, offs)
    rows = a.shape[0] if alignment == 1 else a.shape[0] - alignment * offs.shape[0]  # see padded_rows
    launch(config_for(SPEC, key(a, b, offs, rows), a.device), inputs, (out,))
    return out


def _check(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    alignment: int,
) -> None:
    for name, operand in (("a", a), ("b", b)):
        lies = operand.t() if scale_a is not None else operand
        if operand.dim() != 2 or not lies.is_contiguous():
            wanted = "column-major codes" if scale_a is not None else "row-major bfloat16"
            raise ValueError(f"{name} has shape {tuple(operand.shape)} and strides {operand.stride()}, wanted {wanted}")
    if a.shape[0] != b.shape[0]:
        raise ValueError(f"b has {b.shape[0]} rows, wanted {a.shape[0]} as a")
    check_offsets(offs, a.device, "a")
    check_dtypes(a, b)
    G, N, K = offs.shape[0], a.shape[1], b.shape[1]
    check_multiples("a and b", N=N, K=K)
    check_scales(a, scale_a, scale_b, G * N, G * K)
    check_addresses(a=a, b=b)
    if alignment != 1 and (alignment < 16 or alignment & (alignment - 1) or a.dtype == torch.bfloat16):
        raise ValueError(f"alignment is {alignment}, wanted 1 or, of codes, a power of two from 16 on")


def _on_gpu(*arguments: torch.Tensor | int | None) -> torch.Tensor:
    _check(*arguments)  # type: ignore[arg-type]
    return run(*arguments)


def _on_cpu(*arguments: torch.Tensor | int | None) -> torch.Tensor:
    _check(*arguments)  # type: ignore[arg-type]
    a, offs = arguments[0], arguments[2]
    assert isinstance(a, torch.Tensor) and isinstance(offs, torch.Tensor)
    check_ends(offs, a.shape[0])
    return run(*arguments) if INTERPRETED else reference(*arguments)[0]  # type: ignore[arg-type]


def _fake(*arguments: torch.Tensor | int | None) -> torch.Tensor:
    _check(*arguments)  # type: ignore[arg-type]
    return outputs(*arguments)[0]  # type: ignore[arg-type]


_operator = define(
    "contract_rows(Tensor a, Tensor b, Tensor offs, Tensor? scale_a, Tensor? scale_b, int alignment) -> Tensor",
    _on_gpu,
    _on_cpu,
    _fake,
    makes_codes=True,
)
