import torch
from triton.testing import do_bench
from fp8tune_kernels.gemm import grouped_contraction as c
from fp8tune_kernels.runtime.lookup import config_for
from fp8tune_kernels.spec import NamedInts, Problem
for name, M, N_, K_, G in (("Qwen w13 16384", 131072, 1536, 2048, 128), ("Qwen w13 4096", 32768, 1536, 2048, 128), ("OLMoE w2 16384", 131072, 2048, 1024, 64)):
    a, b, offs, sa, sb, al, _ = c.inputs(Problem("x", NamedInts(M=M, N=N_, K=K_, G=G), "jagged", in_dtype="float8_e4m3fn"), "cuda")
    config = config_for(c.SPEC, c.key(a, b, offs, sa, sb, al, None), a.device)
    us = lambda f: do_bench(f, warmup=5, rep=30, return_mode="median") * 1e3
    (out,) = c.outputs(a, b, offs, sa, sb, al, None)
    plain = us(lambda: c.launch(config, (a, b, offs, sa, sb, al, None), (out,)))
    line = f"{name}: product {plain:.0f} us"
    for dtype in (torch.bfloat16, torch.float32):
        buffer = torch.randn(G, N_, K_, device="cuda").to(dtype)
        inside = us(lambda: c.launch(config, (a, b, offs, sa, sb, al, buffer), (buffer,)))
        beside = us(lambda: (c.launch(config, (a, b, offs, sa, sb, al, None), (out,)), buffer.add_(out)))
        line += f"; added to {dtype}: {inside:.0f}, by add_ {beside:.0f}"
        check = c.reference(a, b, offs, sa, sb, al, z := torch.zeros_like(buffer))[0]
        c.launch(config, (a, b, offs, sa, sb, al, z), (z,))
        line += f" (cosine {torch.nn.functional.cosine_similarity(z.flatten().float()[:10**8], check.flatten().float()[:10**8], 0).item():.6f})"
        del buffer, z, check
    print(line, flush=True)
