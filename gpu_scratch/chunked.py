"""Candidate: swiglu, halves, bfloat16 in, no bias, weights, codes kept; rows in chunks of a power of two."""
import torch, triton
import triton.language as tl
from fp8tune_kernels.quantize.aligned_blocks import largest_of_rows, scale_of_bits
from fp8tune_kernels.quantize.arithmetic import FP8_MAX, quantize
from fp8tune_kernels.quantize.gated import gated
from fp8tune_kernels.runtime.launching import launch_kernel


@triton.jit(do_not_specialize=["M", "G"])
def chunked_kernel(
    x_ptr, offs_ptr, weights_ptr, q_ptr, scales_ptr, kept_ptr, kept_scales_ptr, M, N, G,
    FP8_MAX: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE_M: tl.constexpr,
    num_stages: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK_SIZE_M
    last = tl.load(offs_ptr + G - 1)
    lanes, columns = tl.arange(0, ROWS), tl.arange(0, WIDTH)[None, :]
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    for number in tl.range(0, BLOCK_SIZE_M // ROWS, num_stages=num_stages):
        row = first + number * ROWS
        in_rows = row + lanes < M
        is_read = in_rows & (row + lanes < last)
        x_rows = x_ptr + row.to(tl.int64) * (2 * N) + lanes[:, None] * (2 * N) + columns
        weights = tl.load(weights_ptr + row + lanes, mask=is_read, other=0.0)[:, None]
        gates = ()
        ups = ()
        for chunk in tl.static_range(COUNT):
            inside = is_read[:, None] & (chunk * WIDTH + columns < N)
            gates = gates + (tl.load(x_rows + chunk * WIDTH, mask=inside, other=0.0, eviction_policy="evict_first"),)
            ups = ups + (tl.load(x_rows + N + chunk * WIDTH, mask=inside, other=0.0, eviction_policy="evict_first"),)
        hs = ()
        most_h = tl.zeros((ROWS, WIDTH), tl.float32)
        most_x = tl.zeros((ROWS, WIDTH), tl.float32)
        for chunk in tl.static_range(COUNT):
            gate, up = gates[chunk].to(tl.float32), ups[chunk].to(tl.float32)
            h = gated(gate, up, 0) * weights
            hs = hs + (h,)
            most_h = tl.maximum(most_h, tl.abs(h), propagate_nan=tl.PropagateNan.ALL)
            most_x = tl.maximum(most_x, tl.maximum(tl.abs(gate), tl.abs(up), propagate_nan=tl.PropagateNan.ALL), propagate_nan=tl.PropagateNan.ALL)
        kept_scale = scale_of_bits(largest_of_rows(most_x), FP8_MAX)
        scale = scale_of_bits(largest_of_rows(most_h), FP8_MAX)
        tl.store(kept_scales_ptr + row + lanes, kept_scale, mask=in_rows)
        tl.store(scales_ptr + row + lanes, scale, mask=in_rows)
        kept_rows = kept_ptr + row.to(tl.int64) * (2 * N) + lanes[:, None] * (2 * N) + columns
        q_rows = q_ptr + row.to(tl.int64) * N + lanes[:, None] * N + columns
        for chunk in tl.static_range(COUNT):
            inside = in_rows[:, None] & (chunk * WIDTH + columns < N)
            gate, up = gates[chunk].to(tl.float32), ups[chunk].to(tl.float32)
            tl.store(kept_rows + chunk * WIDTH, quantize(gate, kept_scale[:, None], dtype, FP8_MAX), mask=inside)
            tl.store(kept_rows + N + chunk * WIDTH, quantize(up, kept_scale[:, None], dtype, FP8_MAX), mask=inside)
            tl.store(q_rows + chunk * WIDTH, quantize(hs[chunk], scale[:, None], dtype, FP8_MAX), mask=inside)


def chunked(config, inputs, outputs):
    x, offs, _, _, weights, *_ = inputs
    q, scales, kept, kept_scales = outputs
    M, N = q.shape
    config = dict(config)
    width = config.pop("WIDTH")
    count = -(-N // width)
    launch_kernel(chunked_kernel, -(-M // config["BLOCK_SIZE_M"]), (x, offs, weights, q, scales, kept, kept_scales),
                  (M, N, offs.shape[0]), (FP8_MAX[q.dtype], width, count), config)
