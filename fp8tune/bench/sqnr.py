"""How far a grouped GEMM's output and gradients are from the exact ones: what ``fp8tune bench --op`` asks of every
contender before its times count.

    SQNR = 10 * log10( sum of right^2 / sum of (got - right)^2 )          dB, in float64, of each group alone

The worst group of the worst of the three results counts: one group of many that was left out would hardly move a mean.
FP8 and MXFP8 give about 28 dB on normal values, bf16 over 45, unrelated values 0 or less. Groups without rows, and rows
of no group, are not compared: what they hold is not specified.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from fp8tune.bench.operation import Operands

LEAST_SQNR_DB = 20.0
"""Less is another result, and not FP8's rounding."""
RESULTS = ("out", "grad_A", "grad_B")


def wrong(sqnr_db: Mapping[str, float]) -> str:
    """``wrong: grad_B has an SQNR of 3.1 dB, wanted 20``, or nothing."""
    name, worst = min(sqnr_db.items(), key=lambda item: item[1])
    return "" if worst >= LEAST_SQNR_DB else f"wrong: {name} has an SQNR of {worst:.1f} dB, wanted {LEAST_SQNR_DB:.0f}"


def sqnr_db(out: torch.Tensor, grad_A: torch.Tensor, grad_B: torch.Tensor, given: Operands) -> dict[str, float]:
    """Of the worst group of each result, infinite where every value is exact.

    Compares ``(M, N)``, ``(M, K)`` and ``(G, K, N)`` with products of the operands in float32, a group at a time.
    """
    import torch

    worst = dict.fromkeys(RESULTS, math.inf)
    with torch.no_grad():
        for group, (start, end) in enumerate(itertools.pairwise([0, *given.offs.tolist()])):
            if end <= start:
                continue
            rows = slice(start, end)
            A, grad, B = (x.float() for x in (given.A[rows], given.grad[rows], given.B_t[group]))
            right = (A @ B, grad @ B.t(), A.t() @ grad)
            got = (out[rows], grad_A[rows], grad_B[group])
            for name, wanted, found in zip(RESULTS, right, got, strict=True):
                worst[name] = min(worst[name], _sqnr_db(found, wanted))
    return worst


def _sqnr_db(got: torch.Tensor, right: torch.Tensor) -> float:
    signal = float(right.double().square().sum())
    noise = float((got.float() - right).double().square().sum())
    if math.isnan(noise):
        return -math.inf
    return 10 * math.log10(signal / noise) if signal and noise else math.inf if not noise else -math.inf
