"""Shifts of rows: what brings codes of rows with scales of their own to one scale of their group.

With ``product[m] = scales[m] * other_scales[m]``, in float32, for a row m of group g:

    least[g] = min over rows m of group g of product[m], of those that are positive and finite; 1 if none is
    shift[m] = least[g] / product[m], rounded to nearest; 1 in rows of no group

So no shift is above 1 but where a product is 0, and then the row has codes that are NaN. Codes that are multiplied by
their shift never overflow. They lose bits where they become subnormal: in rows that weigh as little in a sum over the
group.

A GEMM that sums over the rows of each group divides by a scale a column of either operand. With factors that were
folded into the first one, and the second one's scales in the shifts, they are:

    of_columns[g, n] = least[g] / column_scales[g, n], or least[g] without column scales; and ones

Other scales may be those of tokens, of which ``token_of_row`` says which a row has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import interpreter
from ..runtime.checks import check_ends
from ..runtime.launching import launch_kernel
from ..runtime.ops import is_traced

CONFIG = {"BLOCK_SIZE": 2048, "num_warps": 8}
"""Rows that a program looks at together: 131,072 of one group are 64 times."""


@triton.jit(do_not_specialize=["M", "G", "N", "K"])  # those that change every step may not recompile anything
def shifts_kernel(
    scales_ptr: tl.tensor,  # (M,)
    other_ptr: tl.tensor,  # (M,), or of tokens
    tokens_ptr: tl.tensor,  # (M,), or None
    offs_ptr: tl.tensor,  # (G,)
    shifts_ptr: tl.tensor,  # (M,)
    least_ptr: tl.tensor,  # (G,)
    column_scales_ptr: tl.tensor,  # (G, N), or None: they are 1
    of_columns_ptr: tl.tensor,  # (G, N), or None
    ones_ptr: tl.tensor,  # (G, K), or None
    M: tl.tensor,
    G: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """One program: a group, and a share of rows without a group, which may be most."""
    group, lanes = tl.program_id(0), tl.arange(0, BLOCK_SIZE)
    start = tl.load(offs_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(offs_ptr + group)
    least = tl.full((BLOCK_SIZE,), float("inf"), tl.float32)
    for row in tl.range(start, end, BLOCK_SIZE, num_stages=1):
        product = _product(scales_ptr, other_ptr, tokens_ptr, row + lanes, end)
        least = tl.where((product > 0) & (product < least), product, least)
    smallest = tl.min(least, 0)
    smallest = tl.where(smallest < float("inf"), smallest, 1.0)
    tl.store(least_ptr + group, smallest)
    if of_columns_ptr is not None:
        for column in range(0, N, BLOCK_SIZE):
            columns, inside = group.to(tl.int64) * N + column + lanes, column + lanes < N
            quotient = tl.full((BLOCK_SIZE,), 0.0, tl.float32) + smallest
            if column_scales_ptr is not None:
                quotient = tl.div_rn(quotient, tl.load(column_scales_ptr + columns, mask=inside, other=1.0))
            tl.store(of_columns_ptr + columns, quotient, mask=inside)
        for column in range(0, K, BLOCK_SIZE):
            columns = group.to(tl.int64) * K + column + lanes
            tl.store(ones_ptr + columns, tl.full((BLOCK_SIZE,), 1.0, tl.float32), mask=column + lanes < K)
    for row in tl.range(start, end, BLOCK_SIZE, num_stages=1):
        product = _product(scales_ptr, other_ptr, tokens_ptr, row + lanes, end)
        shift = tl.div_rn(tl.full((BLOCK_SIZE,), 0.0, tl.float32) + smallest, product)
        tl.store(shifts_ptr + row + lanes, shift, mask=row + lanes < end)
    for row in tl.range(tl.load(offs_ptr + G - 1) + group * BLOCK_SIZE, M, G * BLOCK_SIZE):
        tl.store(shifts_ptr + row + lanes, tl.full((BLOCK_SIZE,), 1.0, tl.float32), mask=row + lanes < M)


@triton.jit
def _product(
    scales_ptr: tl.tensor, other_ptr: tl.tensor, tokens_ptr: tl.tensor, rows: tl.tensor, end: tl.tensor
) -> tl.tensor:
    inside, others = rows < end, rows
    if tokens_ptr is not None:
        others = tl.load(tokens_ptr + rows, mask=inside, other=0)
    return tl.load(scales_ptr + rows, mask=inside, other=0.0) * tl.load(other_ptr + others, mask=inside, other=0.0)


def shifts_and_scales(
    scales: Tensor,
    other_scales: Tensor,
    offs: Tensor,
    column_scales: Tensor | None,
    N: int,
    K: int,
    token_of_row: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(shifts, of_columns, ones)`` of one launch, without a dispatcher: (M,), (G*N,) and (G*K,), float32."""
    M, G = scales.numel(), offs.shape[0]
    if is_traced(scales):
        return scales.new_empty(M), scales.new_empty(G * N), scales.new_empty(G * K)
    if scales.is_cpu:
        check_ends(offs, M)
    if scales.is_cpu and not interpreter.INTERPRETED:
        of_rows = other_scales if token_of_row is None else other_scales.view(-1).index_select(0, token_of_row)
        shifts, least = reference_shifts(scales, of_rows, offs)
        divisor = scales.new_ones(G, N) if column_scales is None else column_scales.view(G, N)
        return shifts, (least[:, None] / divisor).view(-1), scales.new_ones(G * K)
    shifts, least = scales.new_empty(M), scales.new_empty(G)
    of_columns, ones = scales.new_empty(G * N), scales.new_empty(G * K)
    tensors = scales, other_scales, token_of_row, offs, shifts, least, column_scales, of_columns, ones
    launch_kernel(shifts_kernel, G, tensors, (M, G, N, K), (), CONFIG)
    return shifts, of_columns, ones


def reference_shifts(scales: Tensor, other_scales: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(shifts, least)``, (M,) and (G,), in plain torch; reads ``offs`` on the host."""
    product = scales.reshape(-1) * other_scales.reshape(-1)
    shifts, least = torch.ones_like(product), scales.new_empty(offs.shape[0])
    start = 0
    for group, end in enumerate(offs.tolist()):
        rows = product[start:end]
        usable = rows[(rows > 0) & rows.isfinite()]
        least[group] = usable.min() if usable.numel() else 1.0
        shifts[start:end] = least[group].expand(len(rows)) / rows
        start = end
    return shifts, least
