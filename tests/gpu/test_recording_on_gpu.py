"""Facts of ``record`` that only a GPU shows: times, run-time tuning, the capture of a graph, torch.compile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fp8tune.replay.recording import Tensor, read

PROGRAM = """
import torch, triton, triton.language as tl

@triton.autotune([triton.Config({"BLOCK": block}) for block in (256, 1024)], key=["n"])
@triton.jit
def double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)

def run(x):
    y = torch.empty_like(x)
    double[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())
    return y

if __name__ == "__main__":
    x, small = torch.ones(1 << 20, device="cuda"), torch.ones(1 << 12, device="cuda")
    for _ in range(20):
        run(x)
    run(small[: 1 << 11].clone())
    other = torch.ones(1 << 11, device="cuda", dtype=torch.bfloat16)
    run(other)  # tuned before the capture: its key is the same
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(other.view(2, -1))
    graph.replay()
    torch.cuda.synchronize()
"""


@pytest.mark.gpu
def test_times_tuning_and_captured_launches_are_recorded(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "fp8tune", "record", "-o", "run.json", "--", sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    recording = read(tmp_path / "run.json")
    assert recording.device
    assert recording.arch
    (kernel,) = recording.kernels
    assert (kernel.name, kernel.refusal, dict(kernel.skipped)) == ("program.py:double", "", {})
    assert kernel.tuning_s > 0
    launches = {
        launch.arguments[0].shape: launch for launch in kernel.launches if isinstance(launch.arguments[0], Tensor)
    }
    large = launches[1 << 20,]
    assert large.count == 20
    assert large.gpu_us is not None
    assert 1 < large.gpu_us < 200
    assert large.config in kernel.configs
    x, y = large.arguments[:2]
    assert isinstance(x, Tensor)
    assert isinstance(y, Tensor)
    assert (x.is_loaded, x.is_stored, y.is_loaded, y.is_stored) == (True, False, False, True)
    assert (x.mean, x.deviation) == (1.0, 0.0)
    captured = launches[2, 1 << 10]
    assert captured.in_graph
    assert isinstance(captured.arguments[0], Tensor)
    assert captured.arguments[0].mean is None
