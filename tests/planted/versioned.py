"""A plain-torch kernel for repositories with a history: each version is this text with other values.

``FACTOR`` is what it computes, ``TOLL`` what it moves: a simulated clock takes the time of those bytes.
"""

from __future__ import annotations

from typing import Any

import torch

from fp8tune_kernels.spec import KernelSpec, NamedInts, Problem

FACTOR = 2
TOLL = 1.0


def inputs(problem: Problem, device: str) -> tuple[Any, ...]:
    M, K = problem.shape["M"], problem.shape["K"]
    return (torch.arange(1, M * K + 1, dtype=torch.float32).view(M, K).to(device),)


def launch(config: Any, values: tuple[Any, ...], out: tuple[Any, ...]) -> None:
    out[0].copy_(FACTOR * values[0])


SPEC = KernelSpec(
    name="versioned",
    axes={"BLOCK_SIZE": (32, 64, 128), "num_warps": (4, 8)},
    default=NamedInts(BLOCK_SIZE=64, num_warps=4),
    key=("K",),
    problems=lambda row: iter([NamedInts(M=row["M"], K=row["K"])]),
    inputs=inputs,
    outputs=lambda x: (torch.empty(x.shape, dtype=x.dtype, device=x.device),),
    launch=launch,
    reference=lambda x: (2 * x,),
    bytes_moved=lambda shape: int(TOLL * 100_000_000),
    scaled_down=lambda problem: problem,
)
