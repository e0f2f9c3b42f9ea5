"""Three autotuned kernels at the sizes of decoding: a softmax, an RMS norm and a matrix product of few rows.

fp8tune record -o decode.json -- python -c "from benchmarks.real import decode; decode.main()"
fp8tune sweep --recording decode.json --timing graph --db graph.db
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.real.steps import DEVICE

ROWS, COLUMNS = (1, 64, 512), 4096
SMALL = DEVICE == "cpu"

_TILES = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (4096, 2048, 1024) for warps in (2, 4, 8, 16)]
_PRODUCTS = [
    triton.Config({"BLOCK_N": columns, "BLOCK_K": along}, num_warps=warps, num_stages=stages)
    for columns in (16, 32, 64)
    for along in (128, 256, 512)
    for warps in (2, 4)
    for stages in (2, 4)
]


@triton.autotune(configs=_TILES, key=["M", "N"])  # type: ignore[untyped-decorator]
@triton.jit  # type: ignore[untyped-decorator]
def softmax_kernel(x_ptr: tl.tensor, y_ptr: tl.tensor, M: tl.tensor, N: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Softmax of each row in blocks."""
    row, most, total = tl.program_id(0), -float("inf"), 0.0
    for start in range(0, N, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + at, mask=at < N, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(most, tl.max(x, 0))
        total = total * tl.exp(most - larger) + tl.sum(tl.exp(x - larger), 0)
        most = larger
    for start in range(0, N, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + at, mask=at < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * N + at, tl.exp(x - most) / total, mask=at < N)


@triton.autotune(configs=_TILES, key=["M", "N"])  # type: ignore[untyped-decorator]
@triton.jit  # type: ignore[untyped-decorator]
def rms_norm_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, y_ptr: tl.tensor, M: tl.tensor, N: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """``x / rms(x) * weight`` of each row in blocks."""
    row, squares = tl.program_id(0), 0.0
    for start in range(0, N, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + at, mask=at < N, other=0.0).to(tl.float32)
        squares += tl.sum(x * x, 0)
    scale = tl.rsqrt(squares / N + 1e-6)
    for start in range(0, N, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + at, mask=at < N, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + at, mask=at < N, other=0.0)
        tl.store(y_ptr + row * N + at, x * scale * weight, mask=at < N)


@triton.autotune(configs=_PRODUCTS, key=["M", "N", "K"])  # type: ignore[untyped-decorator]
@triton.jit  # type: ignore[untyped-decorator]
def product_kernel(
    x_ptr: tl.tensor,
    w_ptr: tl.tensor,
    y_ptr: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """``x @ w.T`` of at most 16 rows."""
    rows, columns = tl.arange(0, 16), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((16, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        is_x = (rows[:, None] < M) & (at[None, :] < K)
        is_w = (columns[None, :] < N) & (at[:, None] < K)
        x = tl.load(x_ptr + rows[:, None] * K + at[None, :], mask=is_x, other=0.0)
        total += tl.dot(x, tl.load(w_ptr + columns[None, :] * K + at[:, None], mask=is_w, other=0.0))
    is_y = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(y_ptr + rows[:, None] * N + columns[None, :], total, mask=is_y)


def main() -> None:
    """Run each kernel at its sizes."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float32 if SMALL else torch.bfloat16, device=DEVICE)

    columns, products = (128, 64) if SMALL else (COLUMNS, 1024)
    for rows in ROWS[:2] if SMALL else ROWS:
        x, weight = random(rows, columns), random(columns)
        for kernel, tensors in ((softmax_kernel, (x,)), (rms_norm_kernel, (x, weight))):
            kernel[(rows,)](*tensors, torch.empty_like(x), rows, columns)
    w = random(products, columns)
    for rows in (1, 4, 16):

        def grid(config: Any) -> tuple[int]:
            return (triton.cdiv(products, config["BLOCK_N"]),)

        product_kernel[grid](random(rows, columns), w, random(rows, products), rows, products, columns)
