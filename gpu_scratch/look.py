from gpu_scratch.compiled import go
from gpu_scratch import words, chunked, flat
from fp8tune_kernels.moe import gathered_transpose
g = dict(q_ptr="f8", offs_ptr="i32", token_of_row_ptr="i32", out_ptr="f8", M="i", K="i", G="i", shifts_ptr="f32")
for bm, bk, warps in ((128, 128, 4), (128,64,4)):
    for sh in (False, True):
        t = dict(g); c = dict(FP8_MAX=448.0, BLOCK_SIZE_M=bm, BLOCK_SIZE_K=bk, COUNT=4, num_stages=1)
        if not sh: c["shifts_ptr"] = None
        go(words.gathered_words_kernel, t, c, dict(num_warps=warps, num_stages=1), unaligned=("M", "G"))
        c = dict(c); c.pop("COUNT"); c.pop("num_stages")
        go(gathered_transpose.gathered_transpose_kernel, t, c, dict(num_warps=warps, num_stages=1), unaligned=("M", "G"))
w = dict(x_ptr="bf", q_ptr="f8", transposed_ptr="f8", scales_ptr="f32", of_columns_ptr="f32", state_ptr="i32", E="i", N="i", K="i", unit_rows="i")
for shifted in (False, True):
    c = dict(FP8_MAX=448.0, ROWS=4, WIDTH=2048, BLOCK_SIZE_M=128, BLOCK_SIZE_K=64, LAG=4)
    if not shifted: c["of_columns_ptr"] = None
    go(words.both_copies_kernel, w, c, dict(num_warps=4), unaligned=("E", "unit_rows"))
s = dict(x_ptr="bf", offs_ptr="i32", weights_ptr="f32", q_ptr="f8", scales_ptr="f32", kept_ptr="f8", kept_scales_ptr="f32", M="i", N="i", G="i")
for width, count, rows, warps in ((256,3,4,4),(128,11,4,4)):
    go(chunked.chunked_kernel, s, dict(FP8_MAX=448.0, WIDTH=width, COUNT=count, ROWS=rows, BLOCK_SIZE_M=8, num_stages=1), dict(num_warps=warps), unaligned=("M","G"))
f = dict(a_ptr="f8", b_ptr="f8", offs_ptr="i32", scale_a_ptr="f32", scale_b_ptr="f32", out_ptr="bf", M="i", N="i", K="i", G="i")
for bn, warps, d in ((256, 8, 1), (256, 8, 2), (128, 4, 1)):
    for fl in (False, True):
        go(flat.grouped_contraction_kernel, f, dict(GROUPS=256, ALIGNED=128, BLOCK_SIZE_M=128, BLOCK_SIZE_N=bn, BLOCK_SIZE_K=128, BAND=8, DESCRIPTORS=d, FLATTEN=fl, num_stages=3), dict(num_warps=warps, num_stages=3), unaligned=("M","G"))
