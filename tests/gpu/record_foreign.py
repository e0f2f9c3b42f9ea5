"""Record programs on a GPU, compiled and under torch.compile, pin a kernel with a hook, and time a shared config.

python tests/gpu/record_foreign.py
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from fp8tune.errors import UsageError
from fp8tune.records import Problem
from fp8tune.replay import program
from fp8tune.replay.loading import load_spec
from fp8tune.replay.recording import text_of
from fp8tune.replay.spec import RecordedSpec, repeatable

FOLDER = Path(__file__).parents[1] / "replay"
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

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
                           for n in (1600, 6400)}, f.column_sum, unknown='strict')
f.run_column_sum(); print('right', sorted(f.column_sum.cache))
""",
}


def launch_us(spec: RecordedSpec, problem: Problem, config: Mapping[str, int]) -> float:
    """Return the time of a launch of all that share a config, over 100 launches."""
    inputs = spec.inputs(problem, "cuda")
    outputs = spec.outputs(*inputs)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for index in range(110):
        if index == 10:
            start.record()
        spec.launch(config, inputs, outputs)
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 10


def time_shared_configs() -> None:
    """Print the time of each launch of ``docs/examples/shared_config.py`` alone, and of those that share a config."""
    ended = program.run([sys.executable, "-c", "import shared_config; shared_config.main()"], ["shared_config:*"])
    assert ended.recording is not None
    folder = Path(tempfile.mkdtemp())
    (folder / "layer.json").write_text(text_of(ended.recording))
    text = f"shared_config:expert_mm@{folder}/layer.json?check=tolerance&inputs=shared_config:inputs"
    alone, shared = load_spec(text), load_spec(f"{text}&shared=tokens")
    for spec in (alone, shared):
        assert isinstance(spec, RecordedSpec)
        for problem in spec.recorded:
            for block in (16, 32, 64):
                config = {**spec.default, "BLOCK_M": block}
                print(f"{problem.shape} BLOCK_M={block}: {launch_us(spec, problem, config):.2f} us")


if __name__ == "__main__":
    sys.path.insert(0, str(EXAMPLES))
    paths = [str(FOLDER), str(EXAMPLES), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    time_shared_configs()
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
            try:
                print("  repeatable:", len(repeatable(kernel)[0].launches), "of", len(kernel.launches))
            except UsageError as error:
                print(f"  {error}")
