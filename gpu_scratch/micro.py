import time, torch
from gpu_scratch import host
from fp8tune_kernels import interpreter
import fp8tune_kernels.moe.layer
from fp8tune_kernels.moe import fp8_steps, gathered_rows, expert_sort
from fp8tune_kernels.quantize import rowwise_2d, swiglu_rowwise, gated_rows
from fp8tune_kernels.runtime.ops import run
from fp8tune_kernels.runtime.lookup import config_for
from fp8tune_kernels.spec import bucket
interpreter.INTERPRETED = True
host.patch()
def best(name, f, n=3000):
    f()
    t = 1e9
    for _ in range(n):
        s = time.perf_counter(); f(); t = min(t, time.perf_counter() - s)
    print(f"{name:40s} {t*1e6:.2f} us")
x = torch.randn(64, 64).bfloat16(); dt = torch.float8_e4m3fn; dev = x.device
best("nothing", lambda: None)
best("empty", lambda: torch.empty(64, 64, dtype=dt, device=dev))
best("new_empty", lambda: x.new_empty(64, 64, dtype=dt))
best("empty_like", lambda: torch.empty_like(x, dtype=dt, memory_format=torch.contiguous_format))
best("data_ptr", lambda: x.data_ptr())
best("outputs rowwise", lambda: rowwise_2d.outputs(x, dt, True))
best("config_for", lambda: config_for(rowwise_2d.SPEC, (64, 64), dev))
best("run rowwise", lambda: run(rowwise_2d.SPEC, (bucket(64), 64), (x, dt, True)))
q, s = rowwise_2d.outputs(x, dt, True)
c = config_for(rowwise_2d.SPEC, (64, 64), dev)
best("launch rowwise", lambda: rowwise_2d.launch(c, (x, dt, True), (q, s)))
t = (x, q, s); d = dict(c)
best("fake launch_kernel", lambda: host.fake(rowwise_2d.rowwise_2d_kernel, 10, t, (64, 64), (448.0, True, True), d))
y = torch.randn(128, 96).bfloat16(); offs = torch.tensor([10, 20, 30, 128], dtype=torch.int32); w = torch.ones(128)
best("run swiglu", lambda: fp8_steps._activated(y, offs, None, None, w, "swiglu", "halves", True, dt))
ids = torch.zeros(64, 2, dtype=torch.int32); wt = torch.ones(64, 2)
best("sort", lambda: fp8_steps.sorted_by_expert(ids, wt, 4))
best("step op of nothing", lambda: fp8_steps._of_rows(w, torch.zeros(3, dtype=torch.int64)))
q2, s2 = rowwise_2d.outputs(torch.empty(64, 64), dt, True)
tok = torch.zeros(128, dtype=torch.int32)
b = torch.empty(4, 96, 64, dtype=dt); sb = torch.ones(4 * 96)
best("gathered", lambda: gathered_rows.run_gathered_rows(q2, b, offs, tok, s2, sb))
class N(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *rest):
        ctx.save_for_backward(x); return x.new_empty(64, 64)
    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors; return (g, *[None] * 18)
xr = x.clone().requires_grad_()
g = torch.ones_like(x)
def both():
    torch.autograd.grad(N.apply(xr, *[None] * 18), (xr,), g)
best("autograd function alone", both)
