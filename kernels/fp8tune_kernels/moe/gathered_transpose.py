"""``gathered-transpose``: copy FP8 rows of tokens to where a GEMM that contracts over rows reads them, each shifted.

    out[place[g] + r - start[g], k] = q[token_of_row[r], k]                       for row r in group g; without shifts
    out[place[g] + r - start[g], k] = fp8(float32(q[token_of_row[r], k]) * shifts[r])

    q             (T, K), row-major, FP8, K a multiple of 16
    offs          (G,), int32: the end row of each group, non-decreasing, at most M
    token_of_row  (M,), int32: see :mod:`.expert_sort`
    shifts        M contiguous values of float32, powers of two that are at most 1, or None: see
                  :mod:`fp8tune_kernels.quantize.row_shifts`
    out           (P, K), strides (1, P): see :mod:`fp8tune_kernels.quantize.transposed_codes`

It is ``transposed-codes`` on rows that were never copied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..edges import edge
from ..quantize import transposed_codes
from ..quantize.arithmetic import FP8_MAX
from ..quantize.factors import random_powers
from ..quantize.tiles import stride_of_columns
from ..quantize.transposed_codes import check_codes, random_codes, rows_at, shifted_bytes, words_of_bytes
from ..runtime import declare
from ..runtime.declare import Call, Config, Shape
from ..spec import DeviceLimits, Problem
from .expert_sort import TOP_K
from .gathered_rows import TOKEN_OF_ROW, random_tokens

HELD = "HELD_MIB"
"""Axis: of the tokens, what programs that run together read. They read all rows in a slab of columns before the next
one: a token is read once for each of its experts, and but for the first time from L2."""


@triton.jit(do_not_specialize=["M", "G", "blocks", "slab"])  # they change every step and must not recompile anything
def gathered_transpose_kernel(
    q_ptr: tl.tensor,  # (T, K), row-major
    offs_ptr: tl.tensor,  # (G,)
    token_of_row_ptr: tl.tensor,  # (M,)
    shifts_ptr: tl.tensor,  # (M,), or None
    out_ptr: tl.tensor,  # (P, K), strides (1, P)
    M: tl.tensor,
    K: tl.tensor,
    G: tl.tensor,
    blocks: tl.tensor,  # of BLOCK_SIZE_M rows
    slab: tl.tensor,  # tiles side by side in a slab
    FP8_MAX: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,  # divides 128, so that no tile has rows of two groups
    BLOCK_SIZE_K: tl.constexpr,
) -> None:
    """Copy one tile, as words of four rows; programs of the same rows in a slab are neighbours."""
    inside = tl.program_id(0) % (blocks * slab)
    place = inside // slab * BLOCK_SIZE_M
    column = (tl.program_id(0) // (blocks * slab) * slab + inside % slab) * BLOCK_SIZE_K
    group, first, left = rows_at(offs_ptr, G, place)
    if (group < G) & (column < K):
        columns = column + tl.arange(0, BLOCK_SIZE_K)
        words = tl.arange(0, BLOCK_SIZE_M // 4)
        tile = _Tile(q_ptr, token_of_row_ptr + first, None if shifts_ptr is None else shifts_ptr + first, left, K)
        packed = words_of_bytes(
            _codes(tile, words * 4, columns, FP8_MAX),
            _codes(tile, words * 4 + 1, columns, FP8_MAX),
            _codes(tile, words * 4 + 2, columns, FP8_MAX),
            _codes(tile, words * 4 + 3, columns, FP8_MAX),
        )
        # a multiple of 128: the compiler learns of 16 of it, for stores of 16 bytes
        stride = stride_of_columns(M, G, 128).to(tl.int64) // 16 * 4
        to_ptr = out_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + place // 4
        at = to_ptr + words[:, None] + columns[None, :] * stride
        tl.store(at, packed, mask=(columns < K)[None, :])  # zeros follow a group's rows


class _Tile(NamedTuple):
    """Rows of one group."""

    q_ptr: tl.tensor
    token_of_row_ptr: tl.tensor  # of its first row
    shifts_ptr: tl.tensor  # of its first row, or None
    left: tl.tensor  # rows that exist
    K: tl.tensor


@triton.jit
def _codes(tile: _Tile, rows: tl.tensor, columns: tl.tensor, FP8_MAX: tl.constexpr) -> tl.tensor:
    """Read some rows of a tile, shifted, as bytes; zeros past its last row."""
    is_row = rows < tile.left
    dtype: tl.constexpr = tile.q_ptr.dtype.element_ty
    tokens = tl.load(tile.token_of_row_ptr + rows, mask=is_row, other=0).to(tl.int64)
    from_ptr = tile.q_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    inside = is_row[:, None] & (columns < tile.K)[None, :]
    codes = tl.load(from_ptr + tokens[:, None] * tile.K + columns[None, :], mask=inside, other=0)
    if tile.shifts_ptr is None:
        return codes
    else:  # noqa: RET505 - Triton drops a branch only where both are written
        shift = tl.load(tile.shifts_ptr + rows, mask=is_row, other=1.0)
        return shifted_bytes(codes, shift[:, None], dtype, FP8_MAX)


def launch(config: Config, call: Call) -> None:
    """Launch one program per tile."""
    if call.K:
        blocks, slab = len(call.out) // config["BLOCK_SIZE_M"], slab_of(config, call.T, call.K)
        programs = blocks * slab * -(-call.K // (config["BLOCK_SIZE_K"] * slab))
        options = {name: value for name, value in config.items() if name != HELD}
        call.run(gathered_transpose_kernel, programs, options, blocks=blocks, slab=slab, FP8_MAX=FP8_MAX[call.q.dtype])


def reference(call: Call) -> None:
    """Copy and transpose in plain torch; read ``offs`` on the host."""
    rows = call.q.view(torch.uint8)[call.token_of_row.long()].view(call.q.dtype)
    transposed_codes.reference(call.replace(q=rows, q_transposed=call.out))


def inputs(problem: Problem, device: str) -> dict[str, Any]:
    """Return random codes of tokens, the order of rows, and shifts."""
    M, K = problem.shape["M"], problem.shape["K"]
    T, offs = -(-M // TOP_K), declare.OFFSETS.random(problem, device)
    tokens, shifts = random_tokens(offs, M, T, problem.seed), random_powers(problem, (M,), device, -12, 0)
    return {"q": random_codes(problem, T, K, device), "offs": offs, "token_of_row": tokens, "shifts": shifts}


def slab_of(config: Config, T: int, K: int) -> int:
    """Return how many tiles side by side are a slab: as many as are held, in slabs of about the same size."""
    across = -(-K // config["BLOCK_SIZE_K"])
    slabs = -(-T * K // ((config[HELD] << 20) or 1))
    return max(1, -(-across // max(slabs, 1)))


def bytes_moved(shape: Shape) -> int:
    """Return the bytes of each token, read once, and of each row, written once."""
    return (-(-shape["M"] // TOP_K) + shape["M"]) * shape["K"]


def invalid(config: Config, shape: Shape, limits: DeviceLimits) -> str | None:
    """Return the hardware reason why a config cannot pay, or None."""
    T, K = -(-shape["M"] // TOP_K), shape["K"]
    for held in (held for held in AXES[HELD] if held < config[HELD]):
        if slab_of({**config, HELD: held}, T, K) == slab_of(config, T, K):
            return f"same slabs as {HELD}={held}"
    return transposed_codes.invalid(config, K, limits)


AXES: dict[str, tuple[int, ...]] = {
    "BLOCK_SIZE_M": (64, 128),
    "BLOCK_SIZE_K": (64, 128, 256),
    HELD: (2, 4, 8, 64),
    "num_warps": (2, 4, 8),
    "num_stages": (1,),
}

SPEC = declare.kernel(
    name="gathered-transpose",
    arguments=(
        declare.Argument("q", dims=("T", "K"), check=check_codes),
        declare.OFFSETS,
        TOKEN_OF_ROW,
        declare.tensor("shifts", "M", optional=True),
    ),
    outputs=(declare.Output("out", ("padded_rows(M, G, 128)", "K"), "q.dtype", transposed=True),),
    inputs=inputs,
    launch=launch,
    reference=reference,
    unwritten=lambda call: transposed_codes.unwritten(call.replace(q_transposed=call.out)),
    axes=AXES,
    default={"BLOCK_SIZE_M": 128, "BLOCK_SIZE_K": 128, HELD: 4, "num_warps": 4, "num_stages": 1},
    key=("M_bucket", "K", "G"),
    problems=({"M": "M", "K": "K", "G": "E"},),  # tokens, and the output's gradient
    interpreted={"M": 157, "K": 112, "G": 3},
    invalid=invalid,
    bytes_moved=bytes_moved,
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

transpose_gathered_codes = SPEC.define("transpose_gathered_codes")
