"""A program of twelve small autotuned kernels, as a transformer layer has them, for the time to its first step.

TRITON_INTERPRET=1 python -m benchmarks.real.twelve_kernels     # without a GPU
"""
# ruff: noqa: D103
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

ROWS, COLUMNS = 32, 256
if torch.cuda.is_available():
    ROWS, COLUMNS = 4096, 2048

FLAT = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (256, 512, 1024, 2048) for warps in (4, 8)]
BY_ROW = [triton.Config({"BLOCK": COLUMNS}, num_warps=warps) for warps in (1, 2, 4, 8, 16)]
TILES = [triton.Config({"TILE": tile}, num_warps=warps) for tile in (16, 32, 64) for warps in (2, 4)]

flat = triton.autotune(FLAT, key=["n"])
by_row = triton.autotune(BY_ROW, key=["n"])
tiled = triton.autotune(TILES, key=["m", "n"])


@flat
@triton.jit
def scale(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * 0.5, at < n)


@flat
@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)


@flat
@triton.jit
def relu(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.maximum(tl.load(x + at, at < n), 0.0), at < n)


@flat
@triton.jit
def silu(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < n)
    tl.store(out + at, value / (1 + tl.exp(-value)), at < n)


@flat
@triton.jit
def swiglu(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + at, at < n)
    tl.store(out + at, gate / (1 + tl.exp(-gate)) * tl.load(y + at, at < n), at < n)


@flat
@triton.jit
def gelu(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < n)
    tl.store(out + at, value / (1 + tl.exp(-1.702 * value)), at < n)


@by_row
@triton.jit
def softmax(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * n + tl.arange(0, BLOCK)
    value = tl.load(x + at)
    power = tl.exp(value - tl.max(value, 0))
    tl.store(out + at, power / tl.sum(power, 0))


@by_row
@triton.jit
def rms_norm(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * n + tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.store(out + at, value / tl.sqrt(tl.sum(value * value, 0) / n + 1e-6))


@by_row
@triton.jit
def layer_norm(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * n + tl.arange(0, BLOCK)
    value = tl.load(x + at)
    value -= tl.sum(value, 0) / n
    tl.store(out + at, value / tl.sqrt(tl.sum(value * value, 0) / n + 1e-6))


@by_row
@triton.jit
def row_max(x, out, n, BLOCK: tl.constexpr):
    tl.store(out + tl.program_id(0), tl.max(tl.load(x + tl.program_id(0) * n + tl.arange(0, BLOCK)), 0))


@tiled
@triton.jit
def transpose(x, out, m, n, TILE: tl.constexpr):
    row, column = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1) * TILE + tl.arange(0, TILE)
    tl.store(out + column[None, :] * m + row[:, None], tl.load(x + row[:, None] * n + column[None, :]))


@tiled
@triton.jit
def gram(x, out, m, n, TILE: tl.constexpr):
    row, column = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, n, TILE):
        at = start + tl.arange(0, TILE)
        left, right = tl.load(x + row[:, None] * n + at[None, :]), tl.load(x + column[None, :] * n + at[:, None])
        total = tl.dot(left, right, total)
    tl.store(out + row[:, None] * m + column[None, :], total)


KERNELS = (scale, add, relu, silu, swiglu, gelu, softmax, rms_norm, layer_norm, row_max, transpose, gram)

Launch = Callable[..., Any]


def step(launch: Callable[[Any, Any], Launch] = lambda kernel, grid: kernel[grid], device: str = "") -> torch.Tensor:
    """Launch each kernel once and return the sum of all outputs. ``launch(kernel, grid)`` is for ``kernel[grid]``."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.linspace(-1, 1, ROWS * COLUMNS, device=device).view(ROWS, COLUMNS)
    y, n, total = x.flip(0), ROWS * COLUMNS, torch.zeros((), device=device)

    def programs(meta: Mapping[str, int]) -> tuple[int, ...]:
        return (triton.cdiv(n, meta["BLOCK"]),)

    def tiles(meta: Mapping[str, int]) -> tuple[int, ...]:
        return triton.cdiv(ROWS, meta["TILE"]), triton.cdiv(COLUMNS, meta["TILE"])

    for kernel in KERNELS:
        out = torch.zeros_like(x)
        if kernel in (add, swiglu):
            launch(kernel, programs)(x, y, out, n)
        elif kernel in (softmax, rms_norm, layer_norm, row_max):
            launch(kernel, (ROWS,))(x, out, COLUMNS)
        elif kernel is transpose:
            launch(kernel, tiles)(x, out, ROWS, COLUMNS)
        elif kernel is gram:
            out = torch.zeros((ROWS, ROWS), device=device)
            launch(kernel, lambda meta: (triton.cdiv(ROWS, meta["TILE"]),) * 2)(x, out, ROWS, COLUMNS)
        else:
            launch(kernel, programs)(x, out, n)
        total += out.sum()
    return total


def main() -> None:
    """Run one step, on each of the ranks of ``torchrun`` if it started this, and print the configs of all kernels."""
    if "RANK" in os.environ:
        devices = torch.cuda.device_count()
        torch.distributed.init_process_group("nccl" if devices >= int(os.environ["WORLD_SIZE"]) else "gloo")
        if devices:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % devices)
    total = step()
    configs = [str(kernel.best_config) for kernel in KERNELS]
    print(f"rank {os.environ.get('RANK', '0')}: {float(total):.6g}, {configs}", flush=True)
    if "RANK" in os.environ:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
