from gpu_scratch.compiled import go
from gpu_scratch import words, chunked, flat
import re
w = dict(x_ptr="bf", q_ptr="f8", transposed_ptr="f8", scales_ptr="f32", of_columns_ptr="f32", state_ptr="i32", E="i", N="i", K="i", unit_rows="i")
c = dict(FP8_MAX=448.0, ROWS=4, WIDTH=2048, BLOCK_SIZE_M=128, BLOCK_SIZE_K=64, LAG=4)
c["of_columns_ptr"] = None
k, s = go(words.both_copies_kernel, w, c, dict(num_warps=4), unaligned=("E", "unit_rows"))
print(re.findall(r"st\.global\S* .*", k.asm["ptx"])[:6])
print([l for l in k.asm["ttgir"].splitlines() if "tt.store" in l or "#blocked" in l and "= #ttg" in l])
f = dict(a_ptr="f8", b_ptr="f8", offs_ptr="i32", scale_a_ptr="f32", scale_b_ptr="f32", out_ptr="bf", M="i", N="i", K="i", G="i")
k, s = go(flat.grouped_contraction_kernel, f, dict(GROUPS=256, ALIGNED=128, BLOCK_SIZE_M=128, BLOCK_SIZE_N=256, BLOCK_SIZE_K=128, BAND=8, DESCRIPTORS=1, FLATTEN=True, num_stages=3), dict(num_warps=8, num_stages=3), unaligned=("M","G"))
open("/tmp/perf_flat.ttir","w").write(k.asm["ttir"]); open("/tmp/perf_flat.ttgir","w").write(k.asm["ttgir"])
