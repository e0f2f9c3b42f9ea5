"""The order of rows that the benchmark of SGLang's kernel makes for a config."""

import pytest
import torch

from benchmarks.real.sglang_moe import align, expert_of_each_row


@pytest.mark.parametrize("rows", [1, 4, 50])
@pytest.mark.parametrize("block", [16, 64])
def test_each_row_has_one_place_in_a_block_of_its_expert(rows: int, block: int) -> None:
    expert_of_row = torch.randint(5, (rows,), generator=torch.Generator().manual_seed(rows)).int()
    places, experts, used = align(expert_of_row, 5, block)
    assert int(used) == sum(-(-int(count) // block) * block for count in torch.bincount(expert_of_row))
    assert len(experts) == -(-len(places) // block)
    assert len(places) >= int(used)
    assert sorted(places[places < rows].tolist()) == list(range(rows))
    for place, row in enumerate(places.tolist()):
        assert row == rows or experts[place // block] == expert_of_row[row]
    assert torch.equal(expert_of_each_row(places, experts, rows), expert_of_row)
