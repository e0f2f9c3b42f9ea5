from gpu_scratch.compiled import go
from gpu_scratch import flat
f = dict(a_ptr="f8", b_ptr="f8", offs_ptr="i32", scale_a_ptr="f32", scale_b_ptr="f32", out_ptr="bf", M="i", N="i", K="i", G="i")
for kernel, extra in ((flat.grouped_contraction_kernel, dict(FLATTEN=False)), (flat.fused_kernel, {})):
  for bn, warps, d, st in ((256, 8, 1, 3), (256, 8, 2, 3), (128, 4, 1, 3)):
    k, s = go(kernel, f, dict(GROUPS=256, ALIGNED=128, BLOCK_SIZE_M=128, BLOCK_SIZE_N=bn, BLOCK_SIZE_K=128, BAND=8, DESCRIPTORS=d, num_stages=st, **extra), dict(num_warps=warps, num_stages=st), unaligned=("M","G"))
    print(s.count("MUFU.RCP"), s.count("CALL"), s.count("FMUL"), s.count("FCHK"))
    open(f"/tmp/perf_{kernel.__name__}_{bn}_{d}.ttgir","w").write(k.asm["ttgir"])
