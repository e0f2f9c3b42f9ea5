"""Both GEMMs of an expert layer share a config, and the order of their rows depends on it.

    cd docs/examples
    TRITON_INTERPRET=1 fp8tune record --kernel 'shared_config:*' -o layer.json -- python shared_config.py
    fp8tune sweep --grid BLOCK_M=16,32 --grid BLOCK_N=32,64 --kernel \\
        'shared_config.py:expert_mm@layer.json?check=tolerance&shared=tokens&inputs=shared_config.py:inputs'

``shared=tokens``: launches with equal ``tokens`` are timed one after the other, and get one config. ``inputs``: the
function that sorts the rows for a config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

CONFIG = {"BLOCK_M": 16, "BLOCK_N": 32}


@triton.jit
def expert_mm(x, w, y, rows, experts, tokens, N, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """``y[row] = x[row] @ w[expert].T``: each block has ``BLOCK_M`` rows of one expert, -1 for none."""
    row = tl.load(rows + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    k = tl.arange(0, K)
    a = tl.load(x + row * K + k[None, :], mask=(row >= 0) & (row < tokens), other=0.0)
    b = tl.load(w + expert * N * K + column * K + k[:, None], mask=column < N, other=0.0)
    tl.store(y + row * N + column, tl.dot(a, b), mask=(row >= 0) & (row < tokens) & (column < N))


def sort_rows(expert_of_row: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows by expert, each expert filled up with -1 to whole blocks, and the expert of each block."""
    rows, experts = [], []
    for expert in expert_of_row.unique().tolist():
        (own,) = torch.where(expert_of_row == expert)
        rows.append(torch.nn.functional.pad(own, (0, -len(own) % block), value=-1))
        experts += [expert] * (len(rows[-1]) // block)
    device = expert_of_row.device
    return torch.cat(rows).int(), torch.tensor(experts, dtype=torch.int32, device=device)


def inputs(config: Mapping[str, Any], *, rows: Any, experts: Any, tokens: int, N: int, **_: Any) -> dict[str, Any]:
    """Return the arguments of ``expert_mm`` that depend on the config, and the grid that goes with them."""
    expert_of_place = experts.repeat_interleave(len(rows) // len(experts))
    expert_of_row = torch.zeros(tokens, dtype=experts.dtype, device=rows.device)
    expert_of_row[rows[rows >= 0].long()] = expert_of_place[rows >= 0]
    rows, experts = sort_rows(expert_of_row, config["BLOCK_M"])
    return {"rows": rows, "experts": experts, "grid": (len(experts), triton.cdiv(N, config["BLOCK_N"]))}


def layer(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, expert_of_row: torch.Tensor) -> torch.Tensor:
    """Return ``relu(x @ up.T) @ down.T``, for each row with the weights of its expert."""
    rows, experts = sort_rows(expert_of_row, CONFIG["BLOCK_M"])
    for w in (up, down):
        y = x.new_empty(len(x), w.shape[1])
        blocks = len(experts)
        expert_mm[lambda config, w=w, blocks=blocks: (blocks, triton.cdiv(w.shape[1], config["BLOCK_N"]))](
            x, w, y, rows, experts, len(x), w.shape[1], K=w.shape[2], **CONFIG
        )
        x = y.relu() if w is up else y
    return x


def main() -> None:
    """Run the layer on two batches, and compare it with torch."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    up, down = torch.randn(4, 64, 32, device=device) / 8, torch.randn(4, 32, 64, device=device) / 8
    for tokens in (60, 120):
        x, expert_of_row = torch.randn(tokens, 32, device=device), torch.arange(tokens, device=device) % 4
        hidden = torch.einsum("tk,tnk->tn", x, up[expert_of_row]).relu()
        expected = torch.einsum("tk,tnk->tn", hidden, down[expert_of_row])
        torch.testing.assert_close(layer(x, up, down, expert_of_row), expected, rtol=2e-2, atol=2e-2)
        print(f"{tokens} tokens: right")


if __name__ == "__main__":
    main()
