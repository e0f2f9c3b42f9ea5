"""Compile candidates for sm_90 without a GPU; print registers, spills, and instruction counts."""
import sys, re, subprocess, tempfile, os
import triton, torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton.language as tl

T = {"u8": "*u8", "f8": "*fp8e4nv", "bf": "*bf16", "f32": "*fp32", "i32": "*i32", "i": "i32"}

def go(kernel, types, constants, options, unaligned=()):
    names = kernel.arg_names
    sig, consts, attrs = {}, {}, {}
    for k, name in enumerate(names):
        if name in constants:
            consts[(k,)] = constants[name]; sig[name] = "constexpr"
        else:
            sig[name] = T[types[name]]
            if name not in unaligned:
                attrs[(k,)] = [["tt.divisibility", 16]]
    src = ASTSource(kernel, sig, consts, attrs)
    c = triton.compile(src, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as f:
        f.write(c.asm["cubin"])
    dis = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
    usage = subprocess.run([dis, "--dump-resource-usage", f.name], capture_output=True, text=True).stdout
    regs = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage)
    ptx = c.asm["ptx"]
    nv = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/nvdisasm")
    sass = subprocess.run([nv, f.name], capture_output=True, text=True).stdout
    ops = {}
    for m in re.finditer(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?\S+ )?([A-Z0-9_.]+)", sass, re.M):
        op = m.group(1)
        if op.startswith(("LDG", "STG", "LDS", "STS", "PRMT", "F2F", "LDL", "STL", "LDGSTS", "SHFL", "BAR", "QGMMA", "LDSM", "STSM", "ATOM", "RED")):
            ops[op] = ops.get(op, 0) + 1
    print(kernel.__name__, options, {k: v for k, v in constants.items() if v is not None}, "shared", c.metadata.shared, regs.group(0) if regs else usage[-200:])
    print("   ", len(re.findall(r"^\s+/\*[0-9a-f]{4}\*/", sass, re.M)), dict(sorted(ops.items())))
    return c, sass
