"""Host time of moe_layer with and without replays, on a small layer; contraction with a buffer."""
import cProfile, gc, pstats, statistics, sys, time
import torch
from fp8tune_kernels import choose_experts, moe_layer
from fp8tune_kernels.moe import fp8_steps, choose_experts as ce, layer as L
from fp8tune_kernels.quantize import swiglu_gradient
from fp8tune_kernels.runtime import replay, ops
from benchmarks import moe_layer as B

def recordings(call):
    for cell in call.__closure__ or ():
        v = cell.cell_contents
        if isinstance(v, dict) and (not v or isinstance(next(iter(v)), tuple)): return v
        if callable(v) and getattr(v, "__closure__", None):
            r = recordings(v)
            if r is not None: return r
    return None

T, H, I, E, K = 256, 256, 128, 8, 2
x = torch.randn(T, H, device="cuda").bfloat16().requires_grad_()
w13 = torch.randn(E, 2 * I, H, device="cuda").bfloat16().requires_grad_()
w2 = torch.randn(E, H, I, device="cuda").bfloat16().requires_grad_()
logits = torch.randn(T, E, device="cuda").bfloat16().requires_grad_()
grad = torch.randn(T, H, device="cuda").bfloat16()
def forward():
    return moe_layer(x, w13, w2, *choose_experts(logits, K))
def step():
    torch.autograd.grad(forward(), (x, w13, w2, logits), grad)
class N(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *rest): ctx.save_for_backward(x); return x.view_as(x)
    @staticmethod
    def backward(ctx, g): return (g, *[None] * 18)
def empty():
    torch.autograd.grad(N.apply(x, *[None] * 18), (x,), grad)
def median(f, calls=60, batches=8):
    times = []
    for b in range(batches + 1):
        torch.cuda.synchronize()
        for _ in range(calls):
            s = time.perf_counter(); f(); d = time.perf_counter() - s
            if b: times.append(d)
    return f"{1e6*statistics.median(times):.0f} (min {1e6*min(times):.0f})"
gc.disable()
for name in ("forward", "down_gradient", "down_weight_gradient", "input_gradient", "gate_up_weight_gradient"):
    pass
for _ in range(5): step()
for name in ("forward", "down_gradient", "down_weight_gradient", "input_gradient", "gate_up_weight_gradient"):
    r = recordings(getattr(fp8_steps, name))
    print(name, {k[0]: (v is not None and len(v.instructions)) for k, v in r.items()} if r is not None else "no recordings found")
print("swiglu_gradient", [v is not None for v in recordings(swiglu_gradient._operator).values()], "choose", [v is not None for v in recordings(ce._choose).values()])
print("replayed: forward", median(forward), "step", median(step), "an empty function", median(empty))
with torch.autograd.set_multithreading_enabled(False):
    print("replayed, one thread: step", median(step))
    p = cProfile.Profile(); p.enable()
    for _ in range(300): step()
    p.disable()
torch.cuda.synchronize()
pstats.Stats(p).sort_stats("tottime").print_stats(28)
real = replay._layout
# without replays: every call is a first one
import itertools
def uncached(function): return function
for mod, names in ((fp8_steps, ("forward", "down_gradient", "down_weight_gradient", "input_gradient", "gate_up_weight_gradient")),):
    for name in names:
        setattr(mod, name, getattr(mod, name).operator)
swiglu_gradient._operator = swiglu_gradient._operator.operator
ce._choose, ce._gradient = ce._choose.operator, ce._gradient.operator
counter = itertools.count()
replay.is_hooked = lambda: True
print("neither replayed nor past the dispatcher: forward", median(forward), "step", median(step))
layer = B.random_layer("OLMoE", 256, "cuda")
print("torch's layer, 256 tokens: step", median(lambda: B.torch_layer(layer).backward(layer.grad), 20, 4))

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
