"""A program of five small autotuned kernels with keys of three kinds."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS, COLUMNS = 32, 256

FLAT = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (256, 512, 1024, 2048) for warps in (4, 8)]
BY_ROW = [triton.Config({"BLOCK": COLUMNS}, num_warps=warps) for warps in (1, 2, 4, 8, 16)]
TILES = [triton.Config({"TILE": tile}, num_warps=warps) for tile in (16, 32, 64) for warps in (2, 4)]


@triton.autotune(FLAT, key=["n"])
@triton.jit
def relu(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.maximum(tl.load(x + at, at < n), 0.0), at < n)


@triton.autotune(FLAT, key=["n"])
@triton.jit
def gelu(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < n)
    tl.store(out + at, value / (1 + tl.exp(-1.702 * value)), at < n)


@triton.autotune(FLAT, key=["n"])
@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)


@triton.autotune(BY_ROW, key=["n"])
@triton.jit
def softmax(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * n + tl.arange(0, BLOCK)
    value = tl.load(x + at)
    power = tl.exp(value - tl.max(value, 0))
    tl.store(out + at, power / tl.sum(power, 0))


@triton.autotune(TILES, key=["m", "n"])
@triton.jit
def transpose(x, out, m, n, TILE: tl.constexpr):
    row, column = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1) * TILE + tl.arange(0, TILE)
    tl.store(out + column[None, :] * m + row[:, None], tl.load(x + row[:, None] * n + column[None, :]))


KERNELS = (relu, gelu, add, softmax, transpose)


def step() -> torch.Tensor:
    """Launch each kernel once and return the sum of all outputs."""
    x = torch.linspace(-1, 1, ROWS * COLUMNS).view(ROWS, COLUMNS)
    n, total = x.numel(), torch.zeros(())
    blocks = lambda meta: (triton.cdiv(n, meta["BLOCK"]),)  # noqa: E731
    tiles = lambda meta: (ROWS // meta["TILE"], COLUMNS // meta["TILE"])  # noqa: E731
    for kernel, grid, inputs, sizes in (
        (relu, blocks, (x,), (n,)),
        (gelu, blocks, (x,), (n,)),
        (add, blocks, (x, x.flip(0)), (n,)),
        (softmax, (ROWS,), (x,), (COLUMNS,)),
        (transpose, tiles, (x,), (ROWS, COLUMNS)),
    ):
        out = torch.zeros_like(x)
        kernel[grid](*inputs, out, *sizes)
        total += out.sum()
    return total
