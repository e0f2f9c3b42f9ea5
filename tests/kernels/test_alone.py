"""The kernels in a process that has nothing else installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fp8tune_kernels

TRAINING = """
import sys
import torch
from fp8tune_kernels import choose_experts, moe_layer

x, router = torch.randn(6, 32).bfloat16().requires_grad_(), torch.randn(2, 32).bfloat16()
w13, w2 = torch.randn(2, 32, 32).bfloat16(), torch.randn(2, 32, 16).bfloat16()
moe_layer(x, w13, w2, *choose_experts(x @ router.t(), 1)).sum().backward()
assert x.grad.isfinite().all()
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"fp8tune", "typer", "rich", "sqlalchemy", "pandas"}))
"""


def test_a_training_step_imports_nothing_of_the_tuner() -> None:
    kernels = Path(fp8tune_kernels.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(kernels), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", TRAINING], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
