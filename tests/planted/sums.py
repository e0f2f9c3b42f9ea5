"""A scaled product of rows whose "kernel" is plain torch: a spec of each kind of right, with a planted fault a config.

FAULT 0 none · 1 sums its blocks in reverse, which is right · 2 drops the last block · 3 adds to its output · 4 leaves
out the last element · 5 swallows NaN · 6 takes the scale of the neighbour · 7 writes past the end of its output · 8
writes an input · 9 is wrong in one launch of fifty · 10 is off by a little less than the bound · 11 by a little more ·
12 gives a NaN where a number is expected · 13 is wrong from its fifth launch on · 14 counts rows wrongly
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from faults import SPEC as FAULTS

from fp8tune_kernels.edges import declared, edge
from fp8tune_kernels.spec import Problem, Tolerance

BLOCK = 32
BOUND = Tolerance(relative=1e-3, absolute=1e-3)
launches: Counter[int] = Counter()  # FAULT -> launches so far


def inputs(problem: Problem, device: str) -> tuple[Any, ...]:
    M, K = problem.shape["M"], problem.shape["K"]
    if device == "meta":
        return torch.empty(M, K, device=device), torch.empty(K, device=device), torch.empty(M, -(-K // BLOCK))
    generator = torch.Generator().manual_seed(problem.seed)
    x, w = (torch.randn(size, generator=generator).bfloat16().to(device) for size in ((M, K), (K,)))
    return x, w, (1 + torch.rand(M, -(-K // BLOCK), generator=generator)).to(device)


def outputs(x: Any, w: Any, scales: Any) -> tuple[Any, ...]:
    return x.new_empty(len(x), dtype=torch.float32), x.new_empty(1, dtype=torch.int32)


def summed(x: Any, w: Any, scales: Any, dtype: torch.dtype, blocks: list[int]) -> Any:
    total = torch.zeros(len(x), dtype=dtype, device=x.device)
    for block in blocks:
        at = slice(block * BLOCK, (block + 1) * BLOCK)
        total += (x[:, at].to(dtype) * w[at].to(dtype)).sum(1) * scales[:, block].to(dtype)
    return total


def reference(x: Any, w: Any, scales: Any, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    blocks = list(range(scales.shape[1]))
    return summed(x, w, scales, dtype, blocks), torch.full((1,), len(x), dtype=torch.int32, device=x.device)


def launch(config: Mapping[str, int], values: tuple[Any, ...], out: tuple[Any, ...]) -> None:
    (x, w, scales), fault = values, config["FAULT"]
    launches[fault] += 1
    blocks = list(range(scales.shape[1]))
    match fault:
        case 1:
            blocks.reverse()
        case 2:
            blocks.pop()
        case 4:
            x = torch.cat([x[:, :-1], torch.zeros_like(x[:, :1])], 1)
        case 5:
            x, w = (item.where(~item.isnan(), 0) for item in (x, w))
        case 6:
            scales = scales.roll(1, 1)
    total = summed(x, w, scales, torch.float32, blocks)
    match fault:
        case 3:
            total += out[0]
        case 7:
            out[0].as_strided((1,), (1,), out[0].storage_offset() + len(x)).fill_(1)
        case 8:
            values[1][0] += 1
        case 9:
            total[-1] += launches[fault] % 50 == 0
        case 10 | 11:
            total += (0.999 if fault == 10 else 1.001) * (BOUND.absolute + BOUND.relative * total.abs())
        case 12:
            total[0] = float("nan")
        case 13:
            total += launches[fault] > 4
    out[0].copy_(total)
    out[1].fill_(len(x) + (fault == 14))


EXACT = replace(
    FAULTS,
    name="planted-sums",
    axes={"FAULT": tuple(range(15)), "num_warps": (4,)},
    inputs=inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    routed=False,
    edges=declared(
        edge("one of each", M=1, K=1),
        edge("NaN", "nan", M=3, K=97),
        edge("infinity", "infinite", M=3, K=97),
        edge("zeros", "zeros", M=3, K=97),
        edge("tiny", "tiny", M=3, K=97),
        edge("alignment", M=3, K=97, offset=1),
    ),
)
"""Equal bytes: its blocks must be summed in order."""

EXACT_INPUTS = replace(EXACT, check="exact-inputs")
TOLERANCE = replace(
    EXACT, check="tolerance", tolerance=BOUND, reference=lambda *values: reference(*values, dtype=torch.float64)
)
LOOSE = replace(TOLERANCE, tolerance=Tolerance(relative=0.1, absolute=20.0), edges=lambda problem: ())
"""A bound that hides much of what ``exact-inputs`` finds."""


def prepare(values: tuple[Any, ...], out: tuple[Any, ...]) -> None:
    out[0].zero_()


PREPARED = tuple(replace(item, prepare=prepare) for item in (EXACT, EXACT_INPUTS, TOLERANCE))
PREPARED_EXACT, PREPARED_EXACT_INPUTS, PREPARED_TOLERANCE = PREPARED
"""Adding to an output (FAULT 3) is right where zeros are in it."""
