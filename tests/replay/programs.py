"""Programs for ``fp8tune record`` to run: kernels in a module, and scripts that launch them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from forked import ended

from fp8tune.replay.recording import Recording, read

KERNELS = '''
import torch
import triton
import triton.language as tl

CONFIGS = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (64, 128) for warps in (1, 4)]


class Cached(triton.runtime.Autotuner):
    """Looks for a config of its own before it launches, as some libraries do."""

    def run(self, *args, **kwargs):
        self.configs = self.configs[:1]
        return super().run(*args, **kwargs)


@triton.jit
def twice(x):
    return x + x


@triton.autotune(CONFIGS, key=["columns"])
@triton.heuristics({"IS_SMALL": lambda args: args["columns"] < 100})
@triton.jit
def softmax(x_ptr, y_ptr, columns, stride, IS_SMALL: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * stride + at, mask=at < columns, other=-float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + tl.program_id(0) * stride + at, e / tl.sum(e, 0), mask=at < columns)


@triton.autotune(CONFIGS, key=["n"])
@triton.jit
def gather(x_ptr, index_ptr, count_ptr, n, scale, DTYPE: tl.constexpr, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(index_ptr + at, mask=at < n, other=0)
    x = tl.load(x_ptr + index, mask=at < n).to(DTYPE)
    tl.store(x_ptr + index, FUNCTION(x) * scale, mask=at < n)
    tl.atomic_add(count_ptr, 1)


@triton.jit
def fill(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 1.0, mask=at < n)


cached = Cached(fill, fill.arg_names, CONFIGS, ["n"], None, None)


def run_softmax(rows, columns):
    x = torch.randn(rows, columns)
    y = torch.empty_like(x)
    softmax[(rows,)](x, y, columns, x.stride(0))
    return y


def run_gather(n, scale=2.0):
    x = torch.ones(2 * n, dtype=torch.bfloat16)
    index = torch.arange(n, dtype=torch.int32)
    count = torch.zeros(1, dtype=torch.int32)
    gather[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](
        x[n:], index, count, n, scale=scale, DTYPE=tl.float32, FUNCTION=twice
    )


def run_fill(n):
    x = torch.empty(n)
    fill[(triton.cdiv(n, 64),)](x, n, BLOCK=64, num_warps=2)
    cached[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, n)
'''

QUICK = """
import triton
import triton.language as tl


def timed(launch, quantiles):
    launch()
    return [1.0, 1.0, 1.0]


@triton.autotune([triton.Config({"BLOCK": block}) for block in (64, 128)], key=["n"], do_bench=timed)
@triton.jit
def quick(n: tl.constexpr, BLOCK: tl.constexpr):
    pass


def run(n):
    quick[lambda meta: (n // meta["BLOCK"],)](n)
"""
"""A module whose kernel takes constants alone, and tunes itself: nothing of it imports torch, which takes seconds."""


class Recorded(NamedTuple):
    """A recording of a program, and how the command ended."""

    recording: Recording | None
    returncode: int
    stdout: str
    stderr: str


def record(folder: Path, *arguments: str, program: tuple[str, ...], **more: str) -> Recorded:
    """``fp8tune record`` in a folder."""
    output = folder / "run.json"
    output.unlink(missing_ok=True)
    command = ("record", "-o", output, *arguments, "--", *program)
    process = ended(*command, cwd=folder, TRITON_INTERPRET="1", **more)
    return Recorded(read(output) if output.exists() else None, *process)


def quick_count(recorded: Recorded) -> int:
    """Return how often the kernel of :data:`QUICK` was launched, all processes together."""
    assert recorded.recording is not None, recorded.stderr
    (kernel,) = recorded.recording.kernels
    assert kernel.name.endswith(":quick")
    return sum(launch.count for launch in kernel.launches)
