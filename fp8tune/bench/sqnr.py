"""How far a grouped GEMM's output and gradients are from the exact ones: what ``fp8tune bench --op`` asks of every
contender before its times count.

    SQNR = 10 * log10( sum of right^2 / sum of (got - right)^2 )          dB, in float64, of each group alone

The worst group of the worst of the three results counts: one group of many that was left out would hardly move a mean.
FP8 and MXFP8 give about 28 dB on normal values, bf16 over 45, unrelated values 0 or less. Groups without rows, and rows
of no group, are not compared: what they hold is not specified.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from fp8tune.bench.operation import Operands

LEAST_SQNR_DB = 20.0
"""Less is another result, and not FP8's rounding."""

RESULTS = ("out", "grad_A", "grad_B")


@dataclass(frozen=True)
class Accuracy:
    """The SQNR of the worst group of each result, in dB; infinite where every value is exact."""

    sqnr_db: Mapping[str, float]

    @property
    def wrong(self) -> str:
        """``wrong: grad_B has an SQNR of 3.1 dB, wanted 20``, or nothing."""
        name = min(self.sqnr_db, key=lambda name: self.sqnr_db[name])
        worst = self.sqnr_db[name]
        if worst >= LEAST_SQNR_DB:
            return ""
        return f"wrong: {name} has an SQNR of {worst:.1f} dB, wanted {LEAST_SQNR_DB:.0f}"


def accuracy(out: torch.Tensor, grad_A: torch.Tensor, grad_B: torch.Tensor, given: Operands) -> Accuracy:
    """Compare ``(M, N)``, ``(M, K)`` and ``(G, K, N)`` with products of the operands in float32, a group at a time."""
    import torch

    worst = dict.fromkeys(RESULTS, math.inf)
    with torch.no_grad():
        for group, rows in _groups(given.offs):
            A, grad, B = (x.float() for x in (given.A[rows], given.grad[rows], given.B_t[group]))
            right = (A @ B, grad @ B.t(), A.t() @ grad)
            got = (out[rows], grad_A[rows], grad_B[group])
            for name, wanted, found in zip(RESULTS, right, got, strict=True):
                worst[name] = min(worst[name], _sqnr_db(found, wanted))
    return Accuracy(worst)


def _groups(offs: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Every group that has rows."""
    start = 0
    for group, end in enumerate(offs.tolist()):
        if end > start:
            yield group, slice(start, end)
        start = end


def _sqnr_db(got: torch.Tensor, right: torch.Tensor) -> float:
    signal = float(right.double().square().sum())
    noise = float((got.float() - right).double().square().sum())
    if math.isnan(noise):
        return -math.inf
    return 10 * math.log10(signal / noise) if signal and noise else math.inf if not noise else -math.inf
