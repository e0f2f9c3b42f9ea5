"""Host time of choose_experts + moe_layer forward and backward on a CPU, launches replaced by what they do before a launch."""
import cProfile, pstats, statistics, sys, time
import torch
import fp8tune_kernels
from fp8tune_kernels import choose_experts, moe_layer, interpreter
from fp8tune_kernels.runtime import launching

COUNT = {"launches": 0}
class _Run:
    compiled = None
KEYS = {}
real = launching.launch_kernel
import inspect

def fake(kernel, programs, tensors, sizes, constants, config):
    """What launch_kernel does from the second call on, but for the launch."""
    COUNT["launches"] += 1
    first = tensors[0]
    if kernel.fn.__name__ == "place_kernel":
        for t in tensors[1:]:
            if t is not None and t.dtype == torch.int32: t.zero_()
    (getattr(launching, "_hooked", None) or launching.is_hooked)()
    device = first.get_device()
    pointers, kinds = [], []
    for tensor in tensors:
        if tensor is None:
            pointers.append(None); kinds.append(None)
        else:
            pointers.append(pointer := tensor.data_ptr())
            kinds.append((tensor.dtype,) if pointer & 15 else tensor.dtype)
    key = (kernel.fn, device, sizes, constants, *config, *config.values(), *kinds)
    rest = KEYS.get(key)
    if rest is None:
        rest = KEYS[key] = (*constants, *config.values())
    recorder = getattr(getattr(launching, "recorders", None), "current", None)
    if recorder is not None:
        recorder.launched((nothing, None, None, rest), programs, tensors, sizes)
    return nothing(programs, 1, 1, 0, None, None, None, None, None, *pointers, *sizes, *rest)

def nothing(*arguments):
    return None

def after():
    from fp8tune_kernels.runtime.replay import replayed
    from fp8tune_kernels.moe import fp8_steps, choose_experts as c
    from fp8tune_kernels.quantize import swiglu_gradient as sg
    from fp8tune_kernels.runtime.lookup import config_for
    plain = (torch.Tensor, torch.nn.Parameter)
    def emulate(function):
        function = replayed(function)
        def call(*arguments):
            if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack():
                raise AssertionError
            first = arguments[0]
            if (first.is_cuda or True) and type(first) in plain and arguments[0].device.index is None:
                return function(*arguments)
        return call
    for name in ("forward", "down_gradient", "down_weight_gradient", "input_gradient", "gate_up_weight_gradient"):
        setattr(fp8_steps, name, emulate(getattr(fp8_steps, "_" + name)))
    def launch(*arguments):
        inputs = sg._arguments(*arguments)
        outputs = sg.outputs(*inputs)
        sg.launch(config_for(sg.SPEC, sg._key(*inputs), arguments[0].device), inputs, outputs)
        return outputs
    sg._operator = emulate(launch)
    c._choose, c._gradient = emulate(c._run), emulate(c._run_gradient)

def patch():
    for name, module in list(sys.modules.items()):
        if name.startswith("fp8tune_kernels"):
            if getattr(module, "launch_kernel", None) is real and module is not launching:
                module.launch_kernel = fake
            if hasattr(module, "check_ends"):
                module.check_ends = lambda offs, rows: None

def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    T, H, I, E, K = 64, 64, 48, 4, 2
    x = torch.randn(T, H).bfloat16().requires_grad_()
    w13 = torch.randn(E, 2 * I, H).bfloat16().requires_grad_()
    w2 = torch.randn(E, H, I).bfloat16().requires_grad_()
    logits = torch.randn(T, E).bfloat16().requires_grad_()
    grad = torch.randn(T, H).bfloat16()
    interpreter.INTERPRETED = True
    import fp8tune_kernels.moe.layer  # noqa
    patch()
    if "--after" in sys.argv: after()
    def forward():
        ids, weights = choose_experts(logits, K)
        return moe_layer(x, w13, w2, ids, weights)
    def step():
        out = forward()
        torch.autograd.grad(out, (x, w13, w2, logits), grad)
    def median(f, calls=1500):
        for _ in range(30): f()
        times = []
        for _ in range(calls):
            s = time.perf_counter(); f(); times.append(time.perf_counter() - s)
        return 1e6 * statistics.median(times), 1e6 * min(times)
    COUNT["launches"] = 0
    step(); step(); COUNT["launches"] = 0; step()
    print("launches", COUNT["launches"])
    print("forward %.0f (min %.0f) us, step %.0f (min %.0f) us" % (*median(forward), *median(step)))
    if "--profile" in sys.argv:
        p = cProfile.Profile(); p.enable()
        for _ in range(300): step()
        p.disable()
        s = pstats.Stats(p); s.sort_stats("tottime").print_stats(45)
if __name__ == "__main__":
    main()
