"""Rows and weights on two ranks give the bytes of one device wherever no scale is over a dim that is sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8tune_kernels import fp8_grouped_mm, quantize_weights

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quantizers_in_plain_torch")]

SQNR_DB = 45.0
"""At least, of the sum of two ranks' results beside one device's: both are about 25 dB from the exact product."""

BYTES = "bytes"

PLACED = {
    "replicated": ("R", BYTES, "R", BYTES, "R", BYTES),
    "rows": ("S(0)", BYTES, "S(0)", BYTES, "P(sum)", BYTES),
    "N": ("S(1)", BYTES, "P(sum)", "sum", "S(1)", BYTES),
    "K": ("P(sum)", "sum", "S(1)", BYTES, "S(2)", BYTES),
    "E": ("P(sum)", BYTES, "P(sum)", BYTES, "S(0)", BYTES),
    "N, rows to gather": ("S(1)", BYTES, "S(0)", "sum", "S(1)", BYTES),
    "K, columns to cut": ("P(sum)", "sum", "R", BYTES, "S(2)", BYTES),
    "offs a DTensor": ("S(0)", BYTES, "S(0)", BYTES, "P(sum)", "sum"),
    "own rows": ("S(0)", BYTES, "S(0)", BYTES, "S(0)", BYTES),
    "own rows, plain offs": ("S(0)", BYTES, "S(0)", BYTES, "S(0)", BYTES),
}
"""Case -> placement and bytes of out, of the gradient of A and of that of the weights (E, N, K)."""

CUT = {**{f"{name}, a group cut": PLACED[name] for name in list(PLACED)[:7]}}
CUT["rows, a group cut"] = ("S(0)", BYTES, "S(0)", BYTES, "P(sum)", "sum")


def assert_as(found: list[Any], wanted: tuple[str, ...], case: str) -> None:
    for (placement, result), placed, expected in zip(found, wanted[::2], wanted[1::2], strict=True):
        assert placement == placed, case
        assert result == BYTES if expected == BYTES else SQNR_DB < result < 100, case


def test_each_placement_gives_the_results_of_one_device(ranks: list[dict[str, Any]]) -> None:
    for found in (rank["placements"] for rank in ranks):
        expected = PLACED | CUT
        assert {case.removeprefix("large: ") for case in found} == expected.keys()  # on GPUs two sizes
        for case, results in found.items():
            assert_as(list(results.values()), expected[case.removeprefix("large: ")], case)


OPERATORS = {
    "rowwise-2d, rows": ("S(0)", BYTES, "S(0)", BYTES),
    "rowwise-2d, columns": ("R", BYTES, "R", BYTES),
    "mxfp8-dim1, columns": ("S(1)", BYTES, "S(0)", BYTES),
    "mxfp8-dim1-3d, K": ("S(2)", BYTES, "S(1)", BYTES),
    "colwise, columns": ("R", BYTES, "R", BYTES),
    "colwise-3d, N": ("S(2)", BYTES, "S(2)", BYTES),
    "transpose-3d, K": ("S(2)", BYTES, "S(2)", BYTES),
    "colwise-transpose-3d, E": ("S(0)", BYTES) * 4,
    "forward, N": ("S(1)", BYTES),
    "forward, K": ("P(sum)", "sum"),
    "forward of codes, N": ("S(1)", BYTES),
    "input gradient, K": ("S(1)", BYTES),
    "input gradient of codes, N": ("P(sum)", "sum"),
    "weight gradient, N": ("S(1)", BYTES),
    "weight gradient, K": ("S(2)", BYTES),
}

LARGE_OPERATORS = {**OPERATORS, "rowwise-2d, columns": ("S(0)", BYTES, "S(0)", BYTES)}
"""Of large operands torch exchanges shards, where it gathers small ones."""


def test_operators_keep_the_shards_they_can(ranks: list[dict[str, Any]]) -> None:
    for found in (rank["operators"] for rank in ranks):
        assert {case.removeprefix("large: ") for case in found} == OPERATORS.keys()  # on GPUs two sizes
        for case, results in found.items():
            wanted = LARGE_OPERATORS if case.startswith("large: ") else OPERATORS
            assert_as(results, wanted[case.removeprefix("large: ")], case)


def test_compiled_calls_give_the_same_bytes(ranks: list[dict[str, Any]]) -> None:
    assert [rank["compiled"] for rank in ranks] == [{"out": True, "grad_A": True, "grad_w": True}] * 2


def test_what_is_no_product_of_shards_is_refused(ranks: list[dict[str, Any]]) -> None:
    for found in (rank["refusals"] for rank in ranks):
        assert found == {
            "A plain": "B_t is a DTensor and A is not: wanted both as DTensors, or both to_local()",
            "B_t plain": "A is a DTensor and B_t is not: wanted both as DTensors, or both to_local()",
            "quantized": "A is a DTensor and B_t is not: wanted both as DTensors, or both to_local()",
            "bias": "bias is a tensor, wanted None beside DTensors: add it to the result",
            "24 columns": "B_t has K=96 and N=24, wanted multiples of 16",
        }


def test_plain_tensors_are_what_they_were() -> None:
    A, w = torch.randn(32, 32).bfloat16(), torch.randn(2, 16, 32).bfloat16()
    offs = torch.tensor([16, 32], dtype=torch.int32)
    out = fp8_grouped_mm(A=A, B_t=w.transpose(1, 2), offs=offs)
    assert torch.equal(out, fp8_grouped_mm(A, quantize_weights(w), offs))
