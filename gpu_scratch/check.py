import os
import torch
from fp8tune_kernels.moe import gathered_transpose, shifted_transpose_3d
from fp8tune_kernels.quantize import colwise_3d, transposed_codes_3d
from fp8tune_kernels.spec import Problem, NamedInts
from gpu_scratch import words
eq = lambda a, b: torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
for M, K, G in ((157, 112, 3), (277, 48, 4), (513, 144, 1)):
    p = Problem("x", NamedInts(M=M, K=K, G=G), routing="ragged", in_dtype="float8_e4m3fn")
    q, offs, t, s = gathered_transpose.inputs(p, "cpu")
    for sh in (s, None):
        ref, = gathered_transpose.reference(q, offs, t, sh)
        for bm, bk, cnt in ((128, 64, 2), (64, 128, 1), (32, 32, 3)):
            out, = gathered_transpose.outputs(q, offs, t, sh); out.view(torch.uint8).zero_()
            words.gathered_words(dict(BLOCK_SIZE_M=bm, BLOCK_SIZE_K=bk, COUNT=cnt, num_stages=1, num_warps=4), (q, offs, t, sh), (out,))
            print("gathered", M, K, G, sh is not None, eq(ref, out))
for E, N, K in ((2, 144, 101), (3, 272, 80), (2, 48, 272)):
    w = torch.randn(E, N, K).mul_(torch.randn(E, N, 1).exp2()).bfloat16()
    w[0, 3] = 0
    w[1, 5, 7] = float("inf"); w[1, 6, 7] = float("nan")
    q, sc = colwise_3d.reference(w.mT, torch.float8_e4m3fn, True)
    t, = transposed_codes_3d.reference(q)
    t1, c1 = shifted_transpose_3d.reference(q, sc)
    for cfg in (dict(ROWS=8, BLOCK_SIZE_M=64, BLOCK_SIZE_K=64, LAG=2, STRIPES=1, num_warps=4), dict(ROWS=4, BLOCK_SIZE_M=128, BLOCK_SIZE_K=32, LAG=1, STRIPES=2, num_warps=4)):
        for shifted in (False, True):
            q2, s2 = colwise_3d.outputs(w.mT, torch.float8_e4m3fn, True)
            t2, c2 = shifted_transpose_3d.outputs(q, sc)
            words.both_copies(cfg, w, (q2, s2, t2, c2), shifted)
            print("both", E, N, K, shifted, eq(q.mT, q2.mT), eq(sc, s2), eq((t1 if shifted else t).mT, t2.mT), (not shifted) or torch.equal(c1, c2))
