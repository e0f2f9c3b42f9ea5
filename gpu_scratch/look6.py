from gpu_scratch.compiled import go
from fp8tune_kernels.gemm.grouped_contraction import grouped_contraction_kernel as k
f = dict(a_ptr="f8", b_ptr="f8", offs_ptr="i32", scale_a_ptr="f32", scale_b_ptr="f32", added_ptr="bf", out_ptr="bf", M="i", N="i", K="i", G="i")
for dt in (None, "bf", "f32"):
  for bn, warps, d in ((256, 8, 2), (256, 8, 1), (128, 4, 1)):
    t = dict(f); c = dict(GROUPS=256, ALIGNED=128, BLOCK_SIZE_M=128, BLOCK_SIZE_N=bn, BLOCK_SIZE_K=128, BAND=8, DESCRIPTORS=d, num_stages=3)
    if dt is None: c["added_ptr"] = None
    else: t["added_ptr"] = t["out_ptr"] = dt
    go(k, t, c, dict(num_warps=warps, num_stages=3), unaligned=("M", "G"))
