from gpu_scratch.compiled import go
from fp8tune_kernels.moe.gathered_rows import gathered_rows_kernel
f = dict(a_ptr="f8", b_ptr="f8", offs_ptr="i32", token_of_row_ptr="i32", scale_a_ptr="f32", scale_b_ptr="f32", out_ptr="bf", M="i", N="i", K="i", G="i")
k, s = go(gathered_rows_kernel, f, dict(GROUPS=256, IS_EVEN=True, BLOCK_SIZE_M=128, BLOCK_SIZE_N=256, BLOCK_SIZE_K=128, BAND=8, DESCRIPTORS=1, num_stages=3), dict(num_warps=8, num_stages=3), unaligned=("M","G"))
open("/tmp/perf_g.ttgir","w").write(k.asm["ttgir"])
