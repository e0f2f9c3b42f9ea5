"""The integers of a check are summed exactly by Hopper's FP8 tensor cores too, which keep 13 fractional bits."""

from __future__ import annotations

import math

import pytest
import torch

from fp8tune.measure import edges

STEP = 32
"""Products that a tensor core adds at once."""

BITS = 13
"""Fractional bits that it keeps, of the largest product of a step or of the sum so far."""


def integers(rows: int, terms: int, content: str = "integers") -> tuple[torch.Tensor, torch.Tensor]:
    """Two operands as a check has them, ``(rows, terms)``."""
    pair = tuple(torch.empty(rows, terms, dtype=torch.float8_e4m3fn) for _ in range(2))
    for seed, each in enumerate(pair):
        edges.fill_integers(each, seed, content)
    return pair[0].double(), pair[1].double()


def cut(values: torch.Tensor, largest: torch.Tensor, bits: int) -> torch.Tensor:
    """Values without what lies below so many fractional bits of the largest."""
    unit = torch.exp2(largest.clamp_min(2.0**-100).log2().floor() - bits)
    return (values / unit).trunc() * unit


def summed(products: torch.Tensor, bits: int = BITS) -> torch.Tensor:
    """The sum of each row as tensor cores compute it: step by step, aligned to the largest, cut off."""
    total = torch.zeros(len(products), 1, dtype=torch.float64)
    for step in products.split(STEP, 1):
        terms = torch.cat([total, step], 1)
        total = cut(terms, terms.abs().amax(1, keepdim=True), bits).sum(1, keepdim=True)
    return total.flatten()


@pytest.mark.parametrize("content", ["integers", "huge", "tiny"])
@pytest.mark.parametrize("terms", [32, 144, 2**11, 2**14, 2**17])
def test_sums_of_a_checks_integers_are_exact_on_hopper(terms: int, content: str) -> None:
    a, b = integers(16, terms, content)
    assert torch.equal(summed(a * b), (a * b).sum(1))


def test_random_values_are_not_summed_exactly_and_neither_are_integers_of_one_sign() -> None:
    """So the emulation does cut off."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 16, 2**11, generator=generator).mul(64).clamp(-448, 448).to(torch.float8_e4m3fn).double()
    products = values[0] * values[1]
    assert not torch.equal(summed(products), products.sum(1))
    a, b = integers(16, 2**13)
    assert torch.equal(summed((a * b).abs()[:, : 2**12]), (a * b).abs()[:, : 2**12].sum(1))
    assert not torch.equal(summed((a * b).abs()), (a * b).abs().sum(1))


def test_the_bound_is_18_standard_deviations_away() -> None:
    """``fill_integers`` says so: sums below 2 ** 12 are exact, of which a bit less is left at 2 ** 11."""
    terms = 2**17
    a, b = integers(16, terms)
    products = a * b
    assert set(products.abs().unique().tolist()) == {0.25, 0.5, 1}
    deviation = 0.625 * math.sqrt(terms)
    assert float(products.square().mean().sqrt()) == pytest.approx(0.625, rel=1e-3)
    assert 2**12 / deviation > 18
    assert float(products.cumsum(1).abs().max()) < 5 * deviation < 2**11
    one = torch.full((1, STEP), 0.25, dtype=torch.float64)
    for before, exact in ((2.0**12 - 8, True), (2.0**12, False)):
        products = torch.cat([torch.tensor([[before]], dtype=torch.float64), torch.zeros(1, STEP - 1), one], 1)
        assert (float(summed(products)) == before + STEP / 4) == exact


def test_signs_are_even_and_operands_independent() -> None:
    terms = 2**20
    a, b = integers(1, terms)
    for values in (a.sign(), b.sign(), a.sign() * b.sign()):
        assert abs(float(values.sum())) < 5 * math.sqrt(terms)
