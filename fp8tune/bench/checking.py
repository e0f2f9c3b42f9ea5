"""What a contender of ``fp8tune bench`` writes, compared with our reference as the kernel's spec says what is right.

A rival with other bytes has done other work, so its time is in no ratio. Their share stands beside it: a handful may
be another rounding (``torch.compile`` may contract a product and a sum), most of them are a fault.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fp8tune.measure.comparing import EXACT, Rule, bits

CHUNK_ELEMENTS = 1 << 28
"""Compared at once: what a comparison allocates stays far below the outputs of the largest problems."""
FEW_SHARE = 1e-4
"""A smaller share is printed as a count."""


@dataclass(frozen=True)
class Part:
    """Elements of the codes, or of the scales, of all outputs of a kernel."""

    wrong: int = 0
    total: int = 0

    @property
    def share(self) -> float | None:
        """None where a kernel writes no such output."""
        return self.wrong / self.total if self.total else None

    def __add__(self, other: Part) -> Part:
        return Part(self.wrong + other.wrong, self.total + other.total)

    def said(self, name: str) -> str:
        """``84 % of codes``; never 100 % for less than all, nor 0 % for more than none."""
        share = self.share or 0.0
        if 0 < share < FEW_SHARE:
            return f"{self.wrong:,} of {self.total:,} {name}"
        digits = 0 if 0.01 <= share <= 0.99 or share in (0, 1) else 2
        return f"{math.floor(100 * share * 10**digits) / 10**digits:.{digits}f} % of {name}"


@dataclass(frozen=True)
class Checked:
    """How a contender's outputs compare with the reference's, bit for bit."""

    codes: Part = Part()
    scales: Part = Part()
    mismatch: str = ""
    """A shape or dtype that is not the reference's: nothing was compared then."""

    @property
    def wrong(self) -> str:
        """``wrong: 84 % of codes, 31 % of scales``, or nothing where all bytes are right."""
        if self.mismatch:
            return f"wrong: {self.mismatch}"
        if not self.codes.wrong and not self.scales.wrong:
            return ""
        parts = {"codes": self.codes, "scales" if self.codes.total else "elements": self.scales}
        return "wrong: " + ", ".join(part.said(name) for name, part in parts.items() if part.total)


def compared(
    outputs: Sequence[Any], expected: Sequence[Any], rule: Rule = EXACT, at_once: int = CHUNK_ELEMENTS
) -> Checked:
    """Compare outputs in the order and layout of the reference; what is no FP8 code is a scale.

    E8M0 scales may come as the uint8 they are in memory. Any NaN equals any NaN in float32, as in a sweep's check.
    """
    import torch

    checked = Checked()
    if len(outputs) != len(expected):
        return Checked(mismatch=f"{len(outputs)} outputs, wanted {len(expected)}")
    for index, (output, right) in enumerate(zip(outputs, expected, strict=True)):
        if said := _mismatch(output, right, rule):
            return Checked(mismatch=f"output {index} {said}")
        part = Part(_unequal(output, right, rule, at_once if rule == EXACT else at_once // 16), right.numel())
        if output.itemsize == 1 and output.is_floating_point() and right.dtype != torch.float8_e8m0fnu:
            checked = replace(checked, codes=checked.codes + part)
        else:
            checked = replace(checked, scales=checked.scales + part)
    return checked


def spoil(outputs: Sequence[Any], expected: Sequence[Any], rule: Rule = EXACT) -> None:
    """Fill outputs with what cannot be right: no launch is right because memory held the answer."""
    for output, right in zip(outputs, expected, strict=True):
        rule.spoil(output, right)


def spoil_free_memory(expected: Sequence[Any]) -> None:
    """The same for outputs that a contender allocates: it is likely to be given the memory that is freed here."""
    for right in expected:
        (~bits(right)).clone()


def _mismatch(output: Any, right: Any, rule: Rule) -> str:
    import torch

    if output.shape != right.shape:
        return f"has shape {tuple(output.shape)}, wanted {tuple(right.shape)}"
    is_e8m0 = right.dtype == torch.float8_e8m0fnu and output.dtype == torch.uint8
    return (
        "" if output.dtype == right.dtype or is_e8m0 or rule.tolerance else f"is {output.dtype}, wanted {right.dtype}"
    )


def _unequal(output: Any, right: Any, rule: Rule, at_once: int) -> int:
    """How many elements differ."""
    if not right.numel():
        return 0
    rows = max(1, at_once // (right.numel() // len(right)))
    right = right.view(output.dtype) if right.itemsize == output.itemsize == 1 else right  # E8M0 as uint8
    return sum(int(rule.wrong(*pieces).sum()) for pieces in zip(output.split(rows), right.split(rows), strict=True))
