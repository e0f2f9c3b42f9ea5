import time, torch, collections
from gpu_scratch import host
from fp8tune_kernels import interpreter, choose_experts, moe_layer
import fp8tune_kernels.moe.layer as layer
from fp8tune_kernels.moe import fp8_steps
from fp8tune_kernels.runtime import ops
interpreter.INTERPRETED = True
best = collections.defaultdict(lambda: 1e9)
def timed(name, f):
    def g(*a, **k):
        s = time.perf_counter(); r = f(*a, **k); best[name] = min(best[name], time.perf_counter() - s); return r
    return g
real_run = ops.run
def run(spec, key, inputs):
    s = time.perf_counter(); r = real_run(spec, key, inputs); best["  run " + spec.name] = min(best["  run " + spec.name], time.perf_counter() - s); return r
import sys
host.patch()
if "after" in sys.argv: host.after()
if "runs" in sys.argv:
    for name, module in list(sys.modules.items()):
        if name.startswith("fp8tune_kernels") and getattr(module, "run", None) is real_run: module.run = run
for name in ("forward", "down_gradient", "down_weight_gradient", "input_gradient", "gate_up_weight_gradient"):
    setattr(fp8_steps, name, timed("step " + name, getattr(fp8_steps, name)))
layer.quantize_swiglu_gradient = timed("step swiglu_gradient", layer.quantize_swiglu_gradient)
layer._check_operands = timed("check", layer._check_operands)
layer._Fp8Layer.forward = staticmethod(timed("autograd forward", layer._Fp8Layer.forward))
layer._Fp8Layer.backward = staticmethod(timed("autograd backward", layer._Fp8Layer.backward))
layer._apply_fp8 = timed("apply", layer._apply_fp8)
torch.set_num_threads(1)
T, H, I, E, K = 64, 64, 48, 4, 2
x = torch.randn(T, H).bfloat16().requires_grad_()
w13 = torch.randn(E, 2 * I, H).bfloat16().requires_grad_()
w2 = torch.randn(E, H, I).bfloat16().requires_grad_()
logits = torch.randn(T, E).bfloat16().requires_grad_()
grad = torch.randn(T, H).bfloat16()
def forward():
    s = time.perf_counter(); ids, weights = choose_experts(logits, K); best["choose"] = min(best["choose"], time.perf_counter() - s)
    s = time.perf_counter(); r = moe_layer(x, w13, w2, ids, weights); best["moe_layer"] = min(best["moe_layer"], time.perf_counter() - s)
    return r
def step():
    s = time.perf_counter()
    out = forward()
    m = time.perf_counter()
    torch.autograd.grad(out, (x, w13, w2, logits), grad)
    e = time.perf_counter(); best["forward"] = min(best["forward"], m - s); best["backward"] = min(best["backward"], e - m); best["both"] = min(best["both"], e - s)
for _ in range(3000): step()
for k, v in best.items(): print(f"{k:40s} {v*1e6:.0f}")
