"""Expert parallelism on four ranks: the bytes of one device; on two ranks see ``test_two_ranks``."""

from __future__ import annotations

import pytest
import torch

from fp8tune_kernels.moe import expert_parallel


@pytest.mark.slow
def test_three_and_four_ranks_find_what_one_device_gives(results: dict[str, list[dict[str, str]]]) -> None:
    assert results["4"] == [{"experts_over_ranks": ""}] * 4


def test_ids_and_weights_travel_behind_tokens(device: str) -> None:
    T, K, top_k = 3, 48, 2  # of the second rank the last token is missing
    x = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0]]).expand(5, K).bfloat16().contiguous().to(device)
    ids = torch.tensor([[2, 0], [3, 2], [-1, 1], [1 << 40, 2], [2, 3]], device=device)
    weights = torch.arange(10.0, device=device).view(5, 2)
    rows = expert_parallel._rows_with_words(T, 1 + 2 * top_k, K)
    sent = [
        expert_parallel.outgoing(x[part], ids[part], weights[part], T, rows, torch.float8_e4m3fn)
        for part in (slice(0, 3), slice(3, 5))
    ]
    received = torch.cat([part.view(torch.uint8) for part in sent]).view(torch.float8_e4m3fn)
    scales, offs, row_of, tokens, row_weights = expert_parallel.arrange(received, T, rows, top_k, 2, 2)
    places = [0, 1, rows, rows + 1]
    assert tokens[: offs[-1]].tolist() == [*places, 1, rows + 1]
    assert row_weights[: offs[-1]].tolist() == [0.0, 3.0, 7.0, 8.0, 2.0, 9.0]
    assert row_of[places].lt(offs[-1]).tolist() == [[True, False], [True, True], [False, True], [True, True]]
    assert torch.equal(received.float()[tokens[:4], 0] / scales[tokens[:4]], x[[0, 1, 3, 4], 0].float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_are_of_the_rows_of_this_rank(dtype: torch.dtype, device: str) -> None:
    rows = torch.tensor([[1.0], [2.0], [4.0], [torch.nan]]).expand(4, 1040).bfloat16().contiguous().to(device)
    row_of = torch.tensor([[0, 2], [9, 9], [3, 1], [9, 9]], dtype=torch.int32, device=device)  # two ranks of a token
    offs = torch.tensor([2, 2, 3], dtype=torch.int32, device=device)  # the last row is of no expert here
    values = torch.tensor([0.5, 0.25, 0.125, torch.nan], device=device)
    sums = expert_parallel._sum_local_rows(rows, values, row_of, offs, 1, 2, dtype)
    assert sums[::2, :5].tolist() == [[5.0] * 5, [2.0] * 5]
    total = expert_parallel.sum_of_ranks(sums, 2, 1)
    assert torch.equal(total, torch.full((1, 1040), 7.0, dtype=torch.bfloat16, device=device))
    assert expert_parallel._words_of_ranks(sums, 2, 1)[:, :2].tolist() == [[0.5, 0.125], [0.0, 0.25]]
    assert expert_parallel._sum_local_rows(rows[:2], None, row_of, offs, 1, 2, dtype).isnan().all()
