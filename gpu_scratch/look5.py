from gpu_scratch.compiled import go
from fp8tune_kernels.moe import cast_transpose_3d as k, gathered_transpose as g
w = dict(w_ptr="bf", q_ptr="f8", transposed_ptr="f8", scales_ptr="f32", of_columns_ptr="f32", state_ptr="i32", E="i", N="i", K="i", tiles="i")
for shifted in (False, True):
  for rows, width, warps, bk in ((8, 2048, 4, 128), (8, 1024, 4, 128), (8, 2048, 8, 128)):
    c = dict(FP8_MAX=448.0, ROWS=rows, WIDTH=width, ONE_PASS=True, BLOCK_SIZE_M=128, BLOCK_SIZE_K=bk, LAG=8)
    if not shifted: c["of_columns_ptr"] = None
    go(k.cast_transpose_3d_kernel, w, c, dict(num_warps=warps), unaligned=("E", "tiles"))
gg = dict(q_ptr="f8", offs_ptr="i32", token_of_row_ptr="i32", out_ptr="f8", M="i", K="i", G="i", shifts_ptr="f32", blocks="i", slab="i")
for sh in (False, True):
    c = dict(FP8_MAX=448.0, BLOCK_SIZE_M=128, BLOCK_SIZE_K=128)
    if not sh: c["shifts_ptr"] = None
    go(g.gathered_transpose_kernel, gg, c, dict(num_warps=4), unaligned=("M", "G", "blocks", "slab"))
