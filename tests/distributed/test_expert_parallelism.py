"""Expert parallelism on four ranks: the bytes of one device; on two ranks see ``test_two_ranks``."""

from __future__ import annotations

import pytest
import torch

from fp8tune_kernels.moe import expert_parallel


@pytest.mark.slow
def test_three_and_four_ranks_find_what_one_device_gives(results: dict[str, list[dict[str, str]]]) -> None:
    assert results["4"] == [{"experts_over_ranks": ""}] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_are_of_the_rows_of_this_rank(dtype: torch.dtype, device: str) -> None:
    rows = torch.tensor([[1.0], [2.0], [4.0], [torch.nan]]).expand(4, 1040).bfloat16().contiguous().to(device)
    row_of = torch.tensor([[0, 2], [3, 1], [3, 3]], dtype=torch.int32, device=device)
    offs = torch.tensor([2, 2, 3], dtype=torch.int32, device=device)  # the last row is of no expert here
    total = expert_parallel.sum_local_rows(rows, row_of, offs, dtype)
    assert torch.equal(total, torch.tensor([[5.0], [2.0], [0.0]], dtype=dtype, device=device).expand(3, 1040))
