"""Layers of DTensors give one device's results, and layers under FSDP2 train to one device's bytes."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quantizers_in_plain_torch")]

SUM_DB = 45.0
"""Signal to noise of a sum of two ranks' results beside one device's: partial sums are rounded to bfloat16."""

PLACED = {
    "replicated": {"out": "R", "x": "R", "logits": "R", "w13": "R", "w2": "R", "b13": "R", "b2": "R"},
    "rows": {"out": "S(0)", "x": "S(0)", "logits": "S(0)", "w13": "P", "w2": "P", "b13": "P", "b2": "P"},
    "rows of the router": {"out": "S(0)", "x": "S(0)", "logits": "R", "w13": "P", "w2": "P", "b13": "P", "b2": "P"},
    "experts": {"out": "P", "x": "P", "logits": "R", "w13": "S(0)", "w2": "S(0)", "b13": "S(0)", "b2": "S(0)"},
    "experts, rows to gather": {
        "out": "P", "x": "S(0)", "logits": "S(0)", "w13": "S(0)", "w2": "R", "b13": "R", "b2": "R",
    },
    "columns": {"out": "P", "x": "P", "logits": "R", "w13": "S(1)", "w2": "S(2)", "b13": "S(1)"},
}  # fmt: skip
PLACED |= {"no tokens": PLACED["rows"], "no rows on a rank": PLACED["experts"]}
"""Placement of the output and of each gradient. A gradient goes back to where its operand was."""

CUT = {
    "rows": {"w13", "w2", "b13", "b2"},
    "rows of the router": {"w13", "w2", "b13", "b2"},
    "experts": {"out", "x", "logits"},
    "experts, rows to gather": {"out", "x", "logits"},
    "columns": {"out", "x", "logits", "w13"},
    "no rows on a rank": {"out", "x", "logits"},
}
"""Results that are a sum over ranks, or read one."""


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize("case", PLACED)
def test_each_placement_gives_the_results_of_one_device(case: str, precision: str, ranks: list[dict[str, Any]]) -> None:
    for found in (rank["layers"][f"{case}, {precision}"] for rank in ranks):
        assert {name: placement.removesuffix("(sum)") for name, (placement, _) in found.items()} == PLACED[case]
        for name, (_, result) in found.items():
            assert result == "bytes" or (name in CUT.get(case, ()) and result > SUM_DB), (name, result)


def test_a_compiled_layer_of_dtensors_gives_the_same_bytes(ranks: list[dict[str, Any]]) -> None:
    names = ("out", "x", "logits", "w13", "w2", "b13", "b2")
    assert [rank["compiled_layer"] for rank in ranks] == [dict.fromkeys(names, True)] * 2


def test_what_is_no_layer_of_dtensors_is_refused(ranks: list[dict[str, Any]]) -> None:
    for found in (rank["refused_layers"] for rank in ranks):
        assert found == {
            "plain x": "x must be a DTensor as w13, got a plain operand: or give all to_local()",
            "plain bias": "b13 must be a DTensor as x, got a plain operand: or give all to_local()",
            "halves": "w13 must not be sharded on its rows beside layout 'halves', whose shards part gate and up: "
            "give all operands to_local()",
            "b2": "w13 must not be sharded on its rows beside b2, which each rank would add: give all operands "
            "to_local()",
            "buffer": "grad_w2 must be None beside DTensors: their gradients may be partial sums",
        }


WEIGHTS, STEPS = 4, 2

QUANTIZED = {
    "fp8": 0,
    "bf16": 0,
    "checkpointed": 0,
    "accumulated": 0,
    "accumulated, resharded": 0,
    "quantized after the gather": 2 * WEIGHTS * STEPS,  # for each of two micro-batches
    "quantized after the gather, checkpointed": 2 * WEIGHTS * STEPS,  # before each pass
}
"""Case -> how often weights were quantized after an all-gather."""


def test_training_under_fsdp_is_that_of_one_device(ranks: list[dict[str, Any]]) -> None:
    for found in (rank["trained_layers"].copy() for rank in ranks):
        assert found.pop("not requantized")[:2] == [False, False]  # the check sees values older than the weights
        assert found == {case: [True, True, times] for case, times in QUANTIZED.items()}
