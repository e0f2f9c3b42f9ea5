"""Operators, products and layers of DTensors, and training under FSDP2, on two ranks: what one device gives."""

from __future__ import annotations

import pytest

CHECKS = (
    "operators",
    "placements",
    "compiled",
    "refusals",
    "layers",
    "compiled_layer",
    "refused_layers",
    "experts_over_ranks",
    "experts_under_fsdp",
    "layers_under_fsdp",
)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_each_rank_finds_what_one_device_gives(check: str, ranks: list[dict[str, str]]) -> None:
    assert [rank[check] for rank in ranks] == ["", ""]


@pytest.mark.slow
def test_no_check_is_left_out(ranks: list[dict[str, str]]) -> None:
    assert set(ranks[0]) == set(CHECKS)
