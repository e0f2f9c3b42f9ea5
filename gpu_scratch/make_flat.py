import re
text = open("kernels/fp8tune_kernels/gemm/grouped_contraction.py").read()
begin = text.index("@triton.jit(do_not"); end = text.index("def contract_rows")
body = text[begin:end]
body = body.replace("    DESCRIPTORS: tl.constexpr,\n    num_stages: tl.constexpr,\n", "    DESCRIPTORS: tl.constexpr,\n    FLATTEN: tl.constexpr,\n    num_stages: tl.constexpr,\n")
body = body.replace("tl.num_programs(0)):", "tl.num_programs(0), flatten=FLATTEN):")
head = '''import torch, triton
import triton.language as tl
from fp8tune_kernels.gemm import grouped_tiles
from fp8tune_kernels.gemm.grouped_tiles import in_bands, one_of, padded_extents, piece, scaled, store_masked
from fp8tune_kernels.runtime.launching import launch_kernel


'''
tail = '''
def contract(config, inputs, outputs):
    a, b, offs, scale_a, scale_b, alignment = inputs
    (M, N), K, G = a.shape, b.shape[1], offs.shape[0]
    tensors = (a, b, offs, scale_a, scale_b, *outputs)
    launch_kernel(grouped_contraction_kernel, grouped_tiles.programs(config, a.device), tensors, (M, N, K, G),
                  (grouped_tiles.groups_constant(G), alignment), grouped_tiles.kernel_options(config))
'''
open("gpu_scratch/flat.py", "w").write(head + body + tail)
