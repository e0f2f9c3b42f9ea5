"""Candidates: words of four codes."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from fp8tune_kernels.quantize.arithmetic import (FP8_MAX, canonical_nan, magnitude, magnitude_to_float32, quantize, scale_of)
from fp8tune_kernels.quantize.tiles import stride_of_columns
from fp8tune_kernels.quantize.transposed_codes import rows_at
from fp8tune_kernels.quantize.aligned_blocks import inverse_of
from fp8tune_kernels.runtime.launching import launch_kernel


@triton.jit
def words_of(a, b, c, d):
    """Four tiles of bytes -> one tile of words, the first tile's byte lowest."""
    if is_cuda():
        return tl.inline_asm_elementwise(
            """{ .reg .b32 low, high, low2, high2;
            prmt.b32 low, $4, $5, 0x5140;
            prmt.b32 high, $6, $7, 0x5140;
            prmt.b32 low2, $4, $5, 0x7362;
            prmt.b32 high2, $6, $7, 0x7362;
            prmt.b32 $0, low, high, 0x5410;
            prmt.b32 $1, low, high, 0x7632;
            prmt.b32 $2, low2, high2, 0x5410;
            prmt.b32 $3, low2, high2, 0x7632; }""",
            "=&r,=&r,=&r,=&r,r,r,r,r",
            [a, b, c, d],
            dtype=tl.uint32,
            is_pure=True,
            pack=4,
        )
    else:
        return a.to(tl.uint32) | (b.to(tl.uint32) << 8) | (c.to(tl.uint32) << 16) | (d.to(tl.uint32) << 24)


@triton.jit
def shifted_codes(codes, shift, dtype: tl.constexpr, FP8_MAX: tl.constexpr):
    """Bytes of codes times a power of two, at most 1: exact in float16 but for what rounds to zero in FP8."""
    product = codes.to(dtype, bitcast=True).to(tl.float16) * shift
    return canonical_nan(product, product.to(dtype), FP8_MAX).to(tl.uint8, bitcast=True)


@triton.jit
def row_of_words(from_ptr, rows, is_row, columns, exist, shifts_ptr, K, dtype: tl.constexpr, FP8_MAX: tl.constexpr):
    codes = tl.load(from_ptr + rows[:, None] * K + columns[None, :], mask=is_row[:, None] & exist, other=0)
    return codes


@triton.jit(do_not_specialize=["M", "G"])
def gathered_words_kernel(
    q_ptr, offs_ptr, token_of_row_ptr, shifts_ptr, out_ptr, M, K, G,
    FP8_MAX: tl.constexpr, BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_K: tl.constexpr, COUNT: tl.constexpr,
    num_stages: tl.constexpr,
):
    across = tl.cdiv(K, BLOCK_SIZE_K * COUNT)
    place = tl.program_id(0) // across * BLOCK_SIZE_M
    group, first, left = rows_at(offs_ptr, G, place)
    if group < G:
        dtype: tl.constexpr = q_ptr.dtype.element_ty
        words = tl.arange(0, BLOCK_SIZE_M // 4)
        from_ptr = q_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
        r0, r1, r2, r3 = words * 4, words * 4 + 1, words * 4 + 2, words * 4 + 3
        i0, i1, i2, i3 = r0 < left, r1 < left, r2 < left, r3 < left
        at = token_of_row_ptr + first
        p0 = from_ptr + tl.load(at + r0, mask=i0, other=0).to(tl.int64)[:, None] * K
        p1 = from_ptr + tl.load(at + r1, mask=i1, other=0).to(tl.int64)[:, None] * K
        p2 = from_ptr + tl.load(at + r2, mask=i2, other=0).to(tl.int64)[:, None] * K
        p3 = from_ptr + tl.load(at + r3, mask=i3, other=0).to(tl.int64)[:, None] * K
        if shifts_ptr is not None:
            s_at = shifts_ptr + first
            s0 = tl.load(s_at + r0, mask=i0, other=1.0).to(tl.float16)[:, None]
            s1 = tl.load(s_at + r1, mask=i1, other=1.0).to(tl.float16)[:, None]
            s2 = tl.load(s_at + r2, mask=i2, other=1.0).to(tl.float16)[:, None]
            s3 = tl.load(s_at + r3, mask=i3, other=1.0).to(tl.float16)[:, None]
        stride = stride_of_columns(M, G, 128).to(tl.int64) // 16 * 4
        to_ptr = out_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + place // 4
        begin = tl.program_id(0) % across * (BLOCK_SIZE_K * COUNT)
        for number in tl.range(0, COUNT, num_stages=num_stages):
            columns = begin + number * BLOCK_SIZE_K + tl.arange(0, BLOCK_SIZE_K)
            exist = (columns < K)[None, :]
            a = tl.load(p0 + columns[None, :], mask=i0[:, None] & exist, other=0)
            b = tl.load(p1 + columns[None, :], mask=i1[:, None] & exist, other=0)
            c = tl.load(p2 + columns[None, :], mask=i2[:, None] & exist, other=0)
            d = tl.load(p3 + columns[None, :], mask=i3[:, None] & exist, other=0)
            if shifts_ptr is not None:
                a = shifted_codes(a, s0, dtype, FP8_MAX)
                b = shifted_codes(b, s1, dtype, FP8_MAX)
                c = shifted_codes(c, s2, dtype, FP8_MAX)
                d = shifted_codes(d, s3, dtype, FP8_MAX)
            packed = words_of(a, b, c, d)
            tl.store(to_ptr + words[:, None] + columns[None, :] * stride, packed, mask=exist)


def gathered_words(config, inputs, outputs):
    (q, offs, token_of_row, shifts), (out,) = inputs, outputs
    P, K = out.shape
    programs = P // config["BLOCK_SIZE_M"] * -(-K // (config["BLOCK_SIZE_K"] * config["COUNT"]))
    launch_kernel(gathered_words_kernel, programs, (q, offs, token_of_row, shifts, out),
                  (token_of_row.shape[0], K, offs.shape[0]), (FP8_MAX[q.dtype],), config)


# Cast weights and transpose the codes while L2 has them


@triton.jit
def cast_rows(x_ptr, q_ptr, scales_ptr, row, row_end, K, FP8_MAX: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    rows = row + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)[None, :]
    in_rows = rows < row_end
    inside = in_rows[:, None] & (columns < K)
    at = rows.to(tl.int64)[:, None] * K + columns
    x = tl.load(x_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first")
    largest = magnitude_to_float32(tl.max(magnitude(x), 1), x_ptr.dtype.element_ty)
    scale = scale_of(largest, FP8_MAX, True)
    tl.store(scales_ptr + rows, scale, mask=in_rows)
    tl.store(q_ptr + at, quantize(x, scale[:, None], q_ptr.dtype.element_ty, FP8_MAX), mask=inside)
    return tl.where(in_rows & (scale > 0) & (scale < float("inf")), scale, float("inf"))


@triton.jit(do_not_specialize=["E", "unit_rows"])
def both_copies_kernel(
    x_ptr,  # (E, N, K)
    q_ptr,  # (E, N, K)
    transposed_ptr,  # (E, K, N)
    scales_ptr,  # (E, N)
    of_columns_ptr,  # (E, K) or None
    state_ptr,  # 1 + units + E, zeros
    E, N, K, unit_rows,
    FP8_MAX: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr, LAG: tl.constexpr,
):
    units_each = tl.cdiv(N, unit_rows)
    units = E * units_each
    across = tl.cdiv(K, BLOCK_SIZE_K)
    casts = unit_rows // ROWS
    tasks = casts + unit_rows // BLOCK_SIZE_M * across
    ticket = tl.atomic_add(state_ptr, 1)
    step, place = ticket // tasks, ticket % tasks
    before = place * casts // tasks
    if (place + 1) * casts // tasks > before:  # a cast
        if step < units:
            expert = step // units_each
            row = step % units_each * unit_rows + before * ROWS
            begin = expert * N
            scale = cast_rows(x_ptr, q_ptr, scales_ptr, begin + row, begin + tl.minimum((step % units_each + 1) * unit_rows, N), K, FP8_MAX, ROWS, WIDTH)
            if of_columns_ptr is not None:
                bits = 0x7F800000 - tl.min(scale, 0).to(tl.int32, bitcast=True)
                tl.atomic_max(state_ptr + 1 + units + expert, bits, sem="relaxed")
            tl.debug_barrier()
            tl.atomic_add(state_ptr + 1 + step, 1, sem="release")
    else:
        unit = step - LAG
        if unit >= 0:
            done = tl.atomic_add(state_ptr + 1 + unit, 0, sem="acquire")
            while done < casts:
                done = tl.atomic_add(state_ptr + 1 + unit, 0, sem="acquire")
            tl.debug_barrier()
            number = place - before
            expert = (unit // units_each).to(tl.int64)
            row = (unit % units_each * (unit_rows // BLOCK_SIZE_M) + number // across) * BLOCK_SIZE_M
            if row < N:
                columns = number % across * BLOCK_SIZE_K + tl.arange(0, BLOCK_SIZE_K)
                exist = (columns < K)[None, :]
                words = tl.arange(0, BLOCK_SIZE_M // 4)
                dtype: tl.constexpr = q_ptr.dtype.element_ty
                from_ptr = q_ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + (expert * N + row) * K
                r0, r1, r2, r3 = words * 4, words * 4 + 1, words * 4 + 2, words * 4 + 3
                inside = (words * 4 < N - row)[:, None] & exist  # N is a multiple of 16
                a = tl.load(from_ptr + (r0[:, None] * K + columns[None, :]), mask=inside, other=0)
                b = tl.load(from_ptr + (r1[:, None] * K + columns[None, :]), mask=inside, other=0)
                c = tl.load(from_ptr + (r2[:, None] * K + columns[None, :]), mask=inside, other=0)
                d = tl.load(from_ptr + (r3[:, None] * K + columns[None, :]), mask=inside, other=0)
                if of_columns_ptr is not None:
                    bits = 0x7F800000 - tl.load(state_ptr + 1 + units + expert)
                    least = bits.to(tl.float32, bitcast=True)
                    least = tl.where(least < float("inf"), least, 1.0)
                    s_at, is_row = scales_ptr + expert * N + row, words * 4 < N - row
                    a = shifted_codes(a, (inverse_of(tl.load(s_at + r0, mask=is_row, other=1.0)) * least).to(tl.float16)[:, None], dtype, FP8_MAX)
                    b = shifted_codes(b, (inverse_of(tl.load(s_at + r1, mask=is_row, other=1.0)) * least).to(tl.float16)[:, None], dtype, FP8_MAX)
                    c = shifted_codes(c, (inverse_of(tl.load(s_at + r2, mask=is_row, other=1.0)) * least).to(tl.float16)[:, None], dtype, FP8_MAX)
                    d = shifted_codes(d, (inverse_of(tl.load(s_at + r3, mask=is_row, other=1.0)) * least).to(tl.float16)[:, None], dtype, FP8_MAX)
                    if row == 0:
                        of_all = tl.full((BLOCK_SIZE_K,), 0.0, tl.float32) + least
                        tl.store(of_columns_ptr + expert * K + columns, of_all, mask=columns < K)
                packed = words_of(a, b, c, d)
                to_ptr = transposed_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + (expert * K * (N // 16 * 4) + row // 4)
                whole = words // 4 * 16 < N - row
                stride = N // 16 * 4
                tl.store(to_ptr + words[:, None] + columns.to(tl.int64)[None, :] * stride, packed, mask=whole[:, None] & exist)


def both_copies(config, w, outputs, shifted):
    """w (E, N, K) row-major; outputs q, scales, transposed[, of_columns]."""
    E, N, K = w.shape
    q, scales, transposed, of_columns = outputs
    config = dict(config)
    block, rows = config["BLOCK_SIZE_M"], config["ROWS"]
    stripe = config.pop("STRIPES") * block
    unit_rows = -(-N // block) * block if shifted else min(stripe, -(-N // block) * block)
    units = E * -(-N // unit_rows)
    state = torch.zeros(1 + units + E, dtype=torch.int32, device=w.device)
    tasks = unit_rows // rows + unit_rows // block * -(-K // config["BLOCK_SIZE_K"])
    lag = config["LAG"]
    programs = tasks * (units + lag)
    width = 1 << (K - 1).bit_length()
    rest = {name: value for name, value in config.items() if name not in ("ROWS",)}
    launch_kernel(both_copies_kernel, programs, (w, q, transposed, scales, of_columns if shifted else None, state),
                  (E, N, K, unit_rows), (FP8_MAX[q.dtype], rows, width), rest)
