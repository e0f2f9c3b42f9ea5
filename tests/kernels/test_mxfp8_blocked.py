"""The blocked scale layout of sm_100, byte for byte: element by element, on every group layout."""

import pytest
import torch

from fp8tune_kernels.gemm import grouped_mxfp8
from fp8tune_kernels.groups import group_ends
from fp8tune_kernels.spec import ROUTINGS


def codes(*shape: int, device: str = "cpu") -> torch.Tensor:
    """No zeros, so that padding shows."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randint(1, 255, shape, dtype=torch.uint8, device=device, generator=generator)


def blocked_slowly(matrix: list[list[int]]) -> list[int]:
    """The layout as cuBLAS documents it, one element after the other."""
    rows, columns = len(matrix), len(matrix[0]) if matrix else 0
    across = -(-columns // 4)
    result = [0] * (-(-rows // 128) * across * 512)
    for row, values in enumerate(matrix):
        for column, value in enumerate(values):
            tile = row // 128 * across + column // 4
            result[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = value
    return result


def as_groups(blocked: torch.Tensor, groups: list[torch.Tensor]) -> None:
    """The groups' tiles one after the other, then zeros."""
    expected = [value for group in groups for value in blocked_slowly(group.tolist())]
    result = blocked.view(torch.uint8).flatten().tolist()
    assert result[: len(expected)] == expected
    assert not any(result[len(expected) :])


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("M", "C", "G"), [(300, 5, 3), (150, 4, 4), (0, 3, 2)])
def test_groups_of_rows(routing: str, M: int, C: int, G: int, device: str) -> None:
    scales, ends = codes(M, C, device=device), group_ends(routing, M, G, 1)
    offs = torch.tensor(ends, dtype=torch.int32, device=device)
    blocked = grouped_mxfp8.blocked_rows(scales.view(torch.float8_e8m0fnu), offs)
    assert blocked.shape[0] >= M
    assert blocked.shape[1] % 4 == 0
    assert blocked.is_contiguous()
    as_groups(blocked, [scales[start:end] for start, end in zip([0, *ends], ends, strict=False)])


@pytest.mark.parametrize("sizes", [[1, 2, 3], [0, 7, 0], [4, 4], [0], [13, 1, 0, 0, 2]])
@pytest.mark.parametrize("R", [130, 17])
def test_groups_of_columns(sizes: list[int], R: int, device: str) -> None:
    ends = torch.tensor(sizes).cumsum(0).tolist()
    scales = codes(R, ends[-1] + 2, device=device)  # two columns of no group
    offs = torch.tensor([32 * end for end in ends], dtype=torch.int32, device=device)
    blocked = grouped_mxfp8.blocked_columns(scales.view(torch.float8_e8m0fnu), offs)
    assert blocked.shape[0] == -(-R // 128) * 128
    as_groups(blocked, [scales[:, start:end] for start, end in zip([0, *ends], ends, strict=False)])


@pytest.mark.parametrize("shape", [(3, 130, 5), (2, 128, 4), (1, 7, 1)])
def test_experts(shape: tuple[int, int, int], device: str) -> None:
    scales = codes(*shape, device=device)
    blocked = grouped_mxfp8.blocked_experts(scales.view(torch.float8_e8m0fnu))
    E, R, C = shape
    assert blocked.shape == (E, -(-R // 128) * 128 * (-(-C // 4) * 4))
    as_groups(blocked, list(scales))
