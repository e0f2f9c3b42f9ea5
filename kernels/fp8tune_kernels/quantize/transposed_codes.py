"""``transposed-codes``: copy codes of rows to where a GEMM that contracts over rows reads them, each row shifted.

    q_transposed[place[g] + m - start[g], k] = q[m, k]                       for m in group g; without shifts
    q_transposed[place[g] + m - start[g], k] = fp8(float32(q[m, k]) * shifts[m])

    q             (M, K), row-major, FP8, K a multiple of 16: the left operand of a grouped GEMM that contracts over K
    offs          (G,), int32: the end row of each group, non-decreasing, at most M; an empty group has no row
    shifts        M contiguous values of float32, at most 1, or None: see :mod:`.row_shifts`
    q_transposed  (P, K), strides (1, P), P = padded_rows(M, G, 128): the layout of ``colwise``'s codes
                  place[g + 1] = place[g] + max(1, ceil(size[g] / 128)) * 128

Zeros follow a group's codes up to the next multiple of 128; what lies past the last group's is not written. Of rows of
no group nothing is read. Rounded to nearest even; a NaN becomes the one code of :mod:`.arithmetic`, where there are
shifts.

A program copies a tile. Bytes change threads one by one: on an H100 that takes as long as words of two or four codes,
as :mod:`.transposed_codes_3d` has them. Words of shifted codes came out wrong there, by ptxas 12.8.93 of Triton 3.6.0.
It converts two pairs of codes into one register (``F2FP`` with a third operand). Then it reads the second code of the
first pair from another register.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensor
from triton.language.target_info import is_cuda

from ..edges import edge
from ..groups import taken_rows
from ..inputs import dtype_named
from ..runtime import declare
from ..runtime.checks import FP8_DTYPES
from ..runtime.declare import Call, Config
from ..spec import DeviceLimits, Problem
from . import colwise
from .arithmetic import FP8_MAX, canonical_nan, quantize, reference_cast
from .factors import random_powers
from .limits import idle_columns, wrong_tile
from .tiles import stride_of_columns

MULTIPLE = 16
"""Of K, and of the bytes where codes begin: rows are then read 16 bytes at a time."""

ALIGNMENT = 128
"""Of the groups in transposed codes: what ``grouped-contraction`` reads without masks."""

AXES: dict[str, tuple[int, ...]] = {
    "BLOCK_SIZE_M": (32, 64, 128),
    "BLOCK_SIZE_K": (32, 64, 128, 256),
    "num_warps": (1, 2, 4, 8, 16),
    "num_stages": (1,),
}


class Tile(NamedTuple):
    """BLOCK_SIZE_M rows of one group and BLOCK_SIZE_K columns."""

    q_ptr: tl.tensor  # of its first row
    transposed_ptr: tl.tensor  # of its first row in column 0
    shifts_ptr: tl.tensor  # of its first row, or None
    left: tl.tensor  # rows that there are; zeros follow
    column: tl.tensor
    K: tl.tensor
    stride: tl.tensor  # from a column of the transposed codes to the next: a multiple of 16


@triton.jit
def transpose_tile(
    tile: Tile,
    room: tl.tensor,
    FP8_MAX: tl.constexpr,
    PACK: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
) -> None:
    """Codes of PACK rows become one word, and words change places. ``room``: rows to write, a multiple of 16.

    Loads and stores have no eviction policy: with ``evict_first`` both kernels take 3 % longer on an H100.
    """
    words = tl.arange(0, BLOCK_SIZE_M // PACK)
    columns = tile.column + tl.arange(0, BLOCK_SIZE_K)
    exist = (columns < tile.K)[None, :]
    dtype: tl.constexpr = tile.q_ptr.dtype.element_ty
    word: tl.constexpr = tl.uint8 if PACK == 1 else (tl.uint16 if PACK == 2 else tl.uint32)
    from_ptr = tile.q_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    packed = tl.zeros((BLOCK_SIZE_M // PACK, BLOCK_SIZE_K), word)
    for number in tl.static_range(PACK):
        rows = words * PACK + number
        inside = rows < tile.left
        at = from_ptr + (rows[:, None] * tile.K + columns[None, :])
        codes = tl.load(at, mask=inside[:, None] & exist, other=0)
        if tile.shifts_ptr is not None:
            shift = tl.load(tile.shifts_ptr + rows, mask=inside, other=1.0)
            shifted = quantize(codes.to(dtype, bitcast=True), shift[:, None], dtype, FP8_MAX)
            codes = shifted.to(tl.uint8, bitcast=True)
        packed = packed | (codes.to(word) << (8 * number))
    to_ptr = tile.transposed_ptr.to(tl.pointer_type(word), bitcast=True)
    at = to_ptr + words[:, None] + columns.to(tl.int64)[None, :] * (tile.stride // 16 * (16 // PACK))
    whole = words // (16 // PACK) * 16 < room  # constant over 16 bytes, which are then one store
    tl.store(at, packed, mask=whole[:, None] & exist)


@triton.jit(do_not_specialize=["M", "G"])  # both change every step: neither may recompile anything
def transposed_codes_kernel(
    q_ptr: tl.tensor,  # (M, K), row-major
    offs_ptr: tl.tensor,  # (G,)
    shifts_ptr: tl.tensor,  # (M,), or None
    transposed_ptr: tl.tensor,  # (P, K), strides (1, P)
    M: tl.tensor,
    K: tl.tensor,
    G: tl.tensor,
    FP8_MAX: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
) -> None:
    """One program: a tile, those of the same rows side by side. No tile has rows of two groups, as the alignment is a
    multiple of its size."""
    across = tl.cdiv(K, BLOCK_SIZE_K)
    place = tl.program_id(0) // across * BLOCK_SIZE_M
    group, first, left = rows_at(offs_ptr, G, place)
    if group < G:
        transpose_tile(
            Tile(
                q_ptr + first.to(tl.int64) * K,
                transposed_ptr + place,
                None if shifts_ptr is None else shifts_ptr + first,
                left,
                tl.program_id(0) % across * BLOCK_SIZE_K,
                K,
                stride_of_columns(M, G, 128),
            ),
            BLOCK_SIZE_M,
            FP8_MAX,
            1,
            BLOCK_SIZE_M,
            BLOCK_SIZE_K,
        )


@triton.jit
def rows_at(offs_ptr: tl.tensor, G: tl.tensor, place: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the group of a transposed row, its origin, and the rows that are left.

    One maximum finds the last group before it and where that ends: each further one takes a program's warps a barrier.
    """
    last, total = tl.cast(0, tl.int64), 0
    for first in range(0, G, 128):
        groups = first + tl.arange(0, 128)
        ends = tl.load(offs_ptr + groups, mask=groups < G, other=0)
        starts = tl.load(offs_ptr + groups - 1, mask=(groups > 0) & (groups < G), other=0)
        taken = tl.where(groups < G, tl.maximum(tl.cdiv(ends - starts, 128), 1) * 128, 0)
        taken_ends = total + tl.cumsum(taken, 0)
        is_before = (groups < G) & (taken_ends <= place)
        both = (taken_ends.to(tl.int64) << 32) | (groups + 1)
        last = tl.maximum(last, tl.max(tl.where(is_before, both, 0), 0))
        if first + 128 < G:
            total += tl.sum(taken, 0)
    group, begin = (last & 0xFFFFFFFF).to(tl.int32), (last >> 32).to(tl.int32)
    start = tl.load(offs_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(offs_ptr + group, mask=group < G, other=0)
    row = start + place - begin
    return group, row, end - row


# Words of four rows: they change threads together, which takes a quarter of the accesses of bytes


@triton.jit
def words_of_bytes(first: tl.tensor, second: tl.tensor, third: tl.tensor, fourth: tl.tensor) -> tl.tensor:
    """Put four tiles of bytes together, the first tile's lowest.

    On NVIDIA eight permutations make four words of each thread's 16 bytes. The compiler's own code takes three times as
    many, and words of shifted codes came out wrong: see the module.
    """
    if is_cuda():
        return tl.inline_asm_elementwise(
            """{ .reg .b32 low, high, lower, higher;
            prmt.b32 low, $4, $5, 0x5140;
            prmt.b32 high, $6, $7, 0x5140;
            prmt.b32 lower, $4, $5, 0x7362;
            prmt.b32 higher, $6, $7, 0x7362;
            prmt.b32 $0, low, high, 0x5410;
            prmt.b32 $1, low, high, 0x7632;
            prmt.b32 $2, lower, higher, 0x5410;
            prmt.b32 $3, lower, higher, 0x7632; }""",
            "=&r,=&r,=&r,=&r,r,r,r,r",
            [first, second, third, fourth],
            dtype=tl.uint32,
            is_pure=True,
            pack=4,
        )
    else:  # noqa: RET505 - Triton drops a branch only where both are written
        low = first.to(tl.uint32) | (second.to(tl.uint32) << 8)
        return low | (third.to(tl.uint32) << 16) | (fourth.to(tl.uint32) << 24)


@triton.jit
def shifted_bytes(codes: tl.tensor, shift: tl.tensor, dtype: tl.constexpr, FP8_MAX: tl.constexpr) -> tl.tensor:
    """Multiply bytes of FP8 codes by powers of two that are at most 1, rounded to nearest even.

    In float16, which converts two codes at a time: products are exact there, but for those that FP8 has as zeros.
    """
    product = codes.to(dtype, bitcast=True).to(tl.float16) * shift.to(tl.float16)
    return canonical_nan(product, product.to(dtype), FP8_MAX).to(tl.uint8, bitcast=True)


def launch(config: Config, call: Call) -> None:
    """Launch a program per tile."""
    programs = len(call.q_transposed) // config["BLOCK_SIZE_M"] * -(-call.K // config["BLOCK_SIZE_K"])
    call.run(transposed_codes_kernel, programs, config, transposed=call.q_transposed, FP8_MAX=FP8_MAX[call.q.dtype])


def reference(call: Call) -> None:
    """Copy a group at a time in plain torch; reads ``offs`` on the host."""
    transposed = call.q_transposed.view(torch.uint8).zero_()
    start, place = 0, 0
    for end in call.offs.tolist():
        q = call.q[start:end]
        if call.shifts is not None:
            q = reference_cast(q, call.shifts.reshape(-1, 1)[start:end], q.dtype)
        transposed[place : place + end - start] = q.view(torch.uint8)
        start, place = end, place + taken_rows(end - start, ALIGNMENT)


def unwritten(call: Call) -> None:
    """Write zeros past the last group's multiple of 128."""
    colwise.clear_past_the_groups(call.replace(q=call.q_transposed, alignment=ALIGNMENT))


def random_codes(problem: Problem, rows: int, columns: int, device: str) -> torch.Tensor:
    """Return every finite code of the problem's input dtype, zero the likeliest."""
    dtype = dtype_named(problem.in_dtype)
    if torch.device(device).type == "meta":
        return torch.empty(rows, columns, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(problem.seed)
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, device=device, generator=generator)
    codes[codes.view(dtype).isnan()] = 0
    return codes.view(dtype)


def invalid(config: Config, columns: int, limits: DeviceLimits) -> str | None:
    """Return the hardware reason why a config cannot pay on so many columns, or None."""
    tile = config["BLOCK_SIZE_M"] * config["BLOCK_SIZE_K"]
    return wrong_tile(config, tile, limits) or idle_columns(config["BLOCK_SIZE_K"], columns)


def check_codes(q: torch.Tensor) -> None:
    """Raise ValueError unless ``q`` is row-major FP8 of whole words at aligned addresses."""
    if q.dim() != 2 or q.dtype not in FP8_DTYPES or not q.is_contiguous():
        layout = f"{q.dtype} of shape {tuple(q.shape)} and strides {q.stride()}"
        raise ValueError(f"q is {layout}, wanted row-major FP8 codes (M, K)")
    # no GEMM reads other codes, and words of them came out wrong where they were read one by one: see above
    if q.shape[1] % MULTIPLE:
        raise ValueError(f"q has K={q.shape[1]}, wanted a multiple of {MULTIPLE}")
    if q.is_cuda and not isinstance(q, FakeTensor) and q.data_ptr() % MULTIPLE:
        raise ValueError(f"q begins {q.data_ptr() % MULTIPLE} bytes past a multiple of {MULTIPLE}: copy it")


SPEC = declare.kernel(
    name="transposed-codes",
    arguments=(
        declare.Argument(
            "q",
            dims=("M", "K"),
            check=check_codes,
            random=lambda problem, device: random_codes(problem, problem.shape["M"], problem.shape["K"], device),
        ),
        declare.OFFSETS,
        declare.tensor(
            "shifts",
            "M",
            optional=True,
            random=lambda problem, device: random_powers(problem, (problem.shape["M"],), device, -12, 0),
        ),
    ),
    outputs=(declare.Output("q_transposed", ("padded_rows(M, G, 128)", "K"), "q.dtype", transposed=True),),
    launch=launch,
    reference=reference,
    unwritten=unwritten,
    axes=AXES,
    default={"BLOCK_SIZE_M": 128, "BLOCK_SIZE_K": 128, "num_warps": 4, "num_stages": 1},
    key=colwise.KEY,
    problems=colwise.PROBLEMS,
    interpreted={"M": 157, "K": 112, "G": 3},  # no block divides either; several groups stay several
    invalid=lambda config, shape, limits: invalid(config, shape["K"], limits),
    bytes_moved=lambda shape: 2 * shape["M"] * shape["K"],  # rows between groups are this layout's, no group needs them
    edges=(
        edge("one row, huge values", "huge", routing="ragged", M=1, K=48, G=3),
        edge("a block and one more", routing="balanced", M=513, K=144, G=1),
        edge("rows of no group, NaN", "nan", routing="empty", M=277, K=48, G=4),
        edge("a prime, infinity", "infinite", routing="ragged", M=67, K=48, G=3),
        edge("empty groups, zeros", "zeros", routing="empty", M=37, K=48, G=3),
        edge("the fewest columns, tiny values", "tiny", routing="ragged", M=67, K=16, G=2),
        edge("a block of columns and a few more", routing="ragged", M=131, K=144, G=2),
    ),
    in_dtypes=("float8_e4m3fn", "float8_e4m3fnuz"),
)

transpose_codes = SPEC.define("transpose_codes")
