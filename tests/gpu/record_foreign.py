"""Record programs on a GPU, compiled and under torch.compile, and pin a kernel with a hook: prints what was recorded.

python tests/gpu/record_foreign.py
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fp8tune.replay import program
from fp8tune.replay.spec import repeatable

FOLDER = Path(__file__).parents[1] / "replay"

START = "import torch; torch.set_default_device('cuda'); import foreign_kernels as f; import triton.language as tl\n"

PROGRAMS = {
    "as it is": f"{START}f.main(); f.main(); print('right')",
    "torch.compile": START
    + """
def half(x):
    y = torch.empty_like(x, dtype=torch.float16)
    f.cast[f.blocks(x.numel())](x, y, x.numel(), 0.5, "silu", tl.float16)
    return y
x = torch.rand(50000)
y = torch.compile(half)(x)
print('right', torch.allclose(y.float(), x / 2 * torch.sigmoid(x / 2), atol=1e-3))
""",
    "pinned": START
    + """
import fp8tune
fp8tune.pin({(n, 'torch.float32', 'torch.float32'): {'kwargs': {'B': 256}, 'num_warps': 2}
                           for n in (16000, 160000)}, f.column_sum, unknown='strict')
f.run_column_sum(); print('right', sorted(f.column_sum.cache))
""",
}

if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH", "")]))
    for name, text in PROGRAMS.items():
        ended = program.run([sys.executable, "-c", text], ["fill"])
        print(f"--- {name}: exit code {ended.exit_code}, {ended.recording and ended.recording.device}", flush=True)
        for kernel in ended.recording.kernels if ended.recording else ():
            print(kernel.name, kernel.refusal or f"{len(kernel.configs)} configs, {kernel.tuning_s:.2f} s tuning")
            print("  skipped:", dict(kernel.skipped)) if kernel.skipped else None
            for launch in kernel.launches:
                uses = [f"{one.name}:{'r' * bool(one.is_loaded)}{'w' * bool(one.is_stored)}" for one in launch.tensors]
                kind = "traced" if launch.is_traced else f"{launch.gpu_us} us"
                print(f"  {launch.key} x{launch.count}, {kind}, {uses}, addresses {launch.addresses}")
            if kernel.launches:
                print("  repeatable:", len(repeatable(kernel)[0].launches), "of", len(kernel.launches))
