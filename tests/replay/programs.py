"""Programs for ``fp8tune record`` to run: kernels in a module, and scripts that launch them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from forked import ended

from fp8tune.replay.recording import Recording, read

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
