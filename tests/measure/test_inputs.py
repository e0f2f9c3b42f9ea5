"""Values that checks put into inputs: edge cases between guards, and integers whose sums are exact in any order."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from places import PLANTED

from fp8tune.measure import edges, guards
from fp8tune.measure.checking import is_constant
from fp8tune.records import NamedInts, Problem
from fp8tune.replay.loading import load_spec
from fp8tune_kernels import catalog
from fp8tune_kernels.spec import CONTENTS

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
LAYOUTS = {
    "row-major": lambda: torch.randn(5, 7),
    "a transposed view": lambda: torch.randn(5, 7).t(),
    "a slice": lambda: torch.randn(9)[2:7],
    "expanded": lambda: torch.randn(5, 1).expand(5, 7),
    "no elements": lambda: torch.randn(0, 4),
    "no dims": lambda: torch.tensor(2.5),
    "integers": lambda: torch.arange(5, dtype=torch.int32),
    "float8": lambda: torch.randn(6).to(torch.float8_e4m3fn),
}


def test_an_input_between_guards_keeps_its_values_and_alignment() -> None:
    for (layout, make), offset in itertools.product(LAYOUTS.items(), (0, 1, 3)):
        tensor = make()
        copy = guards.guarded_copy(tensor, offset)
        assert (copy.shape, copy.stride(), copy.dtype) == (tensor.shape, tensor.stride(), tensor.dtype), layout
        assert torch.equal(copy.float(), tensor.float()), layout
        past = (offset + tensor.storage_offset()) * tensor.element_size()
        assert not copy.numel() or (copy.data_ptr() - past) % 64 == 0, layout


@pytest.mark.parametrize("content", CONTENTS)
def test_contents_are_what_they_are_called(content: str) -> None:
    for dtype in DTYPES[:4]:
        tensor = torch.randn(40, 61).to(dtype).t()
        edges.fill(tensor, content)
        values, limits = tensor.float(), torch.finfo(dtype)
        shown = {
            "random": len(values.unique()) > 10 and bool(values.isfinite().all()),
            "zeros": not values.any(),
            "nan": 0 < int(values.isnan().sum()) < values.numel() / 20,
            "infinite": limits.bits == 8 or 0 < int((~values.isfinite()).sum()) < values.numel() / 20,
            "tiny": 0 < float(values.abs().max()) < 8 * limits.smallest_normal
            and bool((values.abs() < limits.smallest_normal).any()),
            "huge": float(values.abs().max()) == limits.max,
            "integers": set(values.unique().tolist()) == {-1, -0.5, 0.5, 1},
        }
        assert shown[content], dtype
    with pytest.raises(ValueError, match="no content is called 'odd'"):
        edges.fill(tensor, "odd")


def test_layouts_are_edges_of_every_kernel_with_groups() -> None:
    spec = load_spec(f"{PLANTED / 'faults.py'}:SPEC")
    cases = edges.edges_of(spec, Problem(spec.name, NamedInts(M=4096, K=8), "balanced"))
    assert {edge.problem.shape["M"] for edge in cases} == {edges.LAYOUT_CHECK_ROWS}
    assert len({edge.problem.routing for edge in cases}) == len(cases) > 2


def test_constant_input_is_seen_in_every_layout_and_no_kernel_has_one() -> None:
    """A GPU takes less power, and so less time, where no bit changes."""
    for fill in (torch.zeros, torch.ones):
        constant = fill(64, 32, dtype=torch.bfloat16)
        assert is_constant(constant)
        assert is_constant(constant.t())
        constant[63, 31] = 2.0
        assert not is_constant(constant)
    assert not any(map(is_constant, (torch.float8_e4m3fn, torch.zeros(1), torch.zeros(4, dtype=torch.int32))))
    for spec in map(catalog.load, catalog.KERNELS):
        shape = next(spec.problems({"M": 64, "K": 128, "N": 128, "E": 2}))
        for in_dtype, scale_mode in itertools.product(spec.in_dtypes, spec.scale_modes or ("power-of-two",)):
            routing = "balanced" if spec.routed else "none"
            problem = Problem(spec.name, shape, routing, in_dtype=in_dtype, scale_mode=scale_mode)
            assert not any(map(is_constant, spec.inputs(problem, "cpu"))), problem


# Integers


@given(st.sampled_from(DTYPES), st.sampled_from(["random", "huge", "tiny"]), st.integers(2, 400), st.randoms())
def test_sums_of_products_of_integers_are_the_same_in_any_order(
    dtype: torch.dtype, content: str, size: int, order: random.Random
) -> None:
    factors = [torch.empty(size, dtype=dtype) for _ in range(2)] + [torch.empty(size) for _ in range(2)]
    for seed, factor in enumerate(factors):
        edges.fill_integers(factor, seed, content if factor.dtype == dtype else "random", is_scale=seed > 1)
        assert not is_constant(factor)
    product = factors[0].float() * factors[1].float() * factors[2] * factors[3]
    assert bool(product.ne(0).all())
    shuffled = list(range(size))
    order.shuffle(shuffled)
    assert float(product.cumsum(0)[-1]) == float(product[shuffled].cumsum(0)[-1])
    assert float(product.double().sum()) == float(product.sum())


def test_integers_stand_between_what_else_an_edge_holds() -> None:
    for content, is_odd in (("nan", torch.isnan), ("infinite", torch.isinf), ("zeros", torch.logical_not)):
        tensor = torch.empty(5, 61, dtype=torch.bfloat16)
        edges.fill_integers(tensor, 0, content)
        odd = is_odd(tensor)
        assert bool(odd.any())
        assert set(tensor[~odd].tolist()) <= {-1, -0.5, 0.5, 1}


def test_integers_of_any_layout_are_seeded() -> None:
    for tensor in (torch.empty(3, 1).expand(3, 5), torch.empty(4, 6).t(), torch.empty(9)[2:7], torch.empty(0)):
        edges.fill_integers(tensor, 3)
        again = torch.empty_like(tensor)
        again.copy_(tensor)
        edges.fill_integers(tensor, 4)
        edges.fill_integers(tensor, 3)
        assert torch.equal(tensor, again)
    e8m0 = torch.empty(8, dtype=torch.float8_e8m0fnu)
    edges.fill_integers(e8m0, 0, is_scale=True)
    assert set(e8m0.float().tolist()) == {0.5, 1}


# Hopper's FP8 tensor cores add 32 products at once and keep 13 fractional bits of the largest

STEP, BITS = 32, 13


def integers(rows: int, terms: int, content: str = "integers") -> tuple[torch.Tensor, torch.Tensor]:
    """Two operands as a check has them, ``(rows, terms)``."""
    pair = tuple(torch.empty(rows, terms, dtype=torch.float8_e4m3fn) for _ in range(2))
    for seed, operand in enumerate(pair):
        edges.fill_integers(operand, seed, content)
    return pair[0].double(), pair[1].double()


def summed(products: torch.Tensor) -> torch.Tensor:
    """The sum of each row as tensor cores compute it: step by step, aligned to the largest, cut off."""
    total = torch.zeros(len(products), 1, dtype=torch.float64)
    for step in products.split(STEP, 1):
        terms = torch.cat([total, step], 1)
        largest = terms.abs().amax(1, keepdim=True)
        unit = torch.exp2(largest.clamp_min(2.0**-100).log2().floor() - BITS)
        total = ((terms / unit).trunc() * unit).sum(1, keepdim=True)
    return total.flatten()


def test_sums_of_a_checks_integers_are_exact_on_hopper() -> None:
    sizes = itertools.product([32, 144, 2**11, 2**14], ["integers", "huge", "tiny"])
    for terms, content in (*sizes, (2**17, "integers")):
        a, b = integers(16, terms, content)
        assert torch.equal(summed(a * b), (a * b).sum(1)), (terms, content)


def test_random_values_are_not_summed_exactly_and_neither_are_integers_of_one_sign() -> None:
    """So the emulation does cut off."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 16, 2**11, generator=generator).mul(64).clamp(-448, 448).to(torch.float8_e4m3fn).double()
    a, b = integers(16, 2**13)
    positive = (a * b).abs()
    for products, is_exact in ((values[0] * values[1], False), (positive[:, : 2**12], True), (positive, False)):
        assert torch.equal(summed(products), products.sum(1)) is is_exact
