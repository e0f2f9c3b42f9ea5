"""Padding token groups on the device and back: every layout, the plain torch reference, gradients, refusals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8tune.measure.comparing import bits
from fp8tune_kernels.gemm import token_groups
from fp8tune_kernels.groups import group_ends
from fp8tune_kernels.spec import ROUTINGS

SIZES = [(157, 24, 5), (0, 24, 3), (64, 700, 2), (7, 1, 1)]
"""M, K, G: rows that no alignment divides, none, more columns than one program copies, one group."""


def random_rows(M: int, K: int, device: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(M, K, device=device, generator=torch.Generator(device).manual_seed(seed)).to(dtype)


def offsets(ends: list[int], device: str) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=device)


@pytest.mark.parametrize("alignment", [16, 32])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("sizes", SIZES)
def test_kernels_write_what_the_reference_does(
    sizes: tuple[int, int, int], routing: str, alignment: int, device: str
) -> None:
    M, K, G = sizes
    x, offs = random_rows(M, K, device), offsets(group_ends(routing, M, G, 1), device)
    padded, padded_offs = token_groups.pad(x, offs, alignment)
    right, right_offs = token_groups.reference_pad(x, offs, alignment)
    assert torch.equal(bits(padded), bits(right))
    assert torch.equal(padded_offs, right_offs)
    garbage = random_rows(len(padded), K, device, seed=1)
    garbage[int(padded_offs[-1]) :] = float("nan")
    unpadded = token_groups.unpad(garbage, offs, M, alignment)
    assert torch.equal(bits(unpadded), bits(token_groups.reference_unpad(garbage, offs, M, alignment)))


def test_more_groups_than_one_scan_holds(device: str) -> None:
    test_kernels_write_what_the_reference_does((40, 8, 130), "jagged", 16, device)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(0, 40), st.sampled_from([16, 32]))
def test_the_reference_keeps_every_row_and_fits(sizes: list[int], left_over: int, alignment: int) -> None:
    ends = torch.tensor(sizes).cumsum(0).tolist()
    M = ends[-1] + left_over
    x, offs = torch.arange(1, M + 1).float()[:, None], offsets(ends, "cpu")
    padded, padded_offs = token_groups.reference_pad(x, offs, alignment)
    padded_sizes = padded_offs.diff(prepend=padded_offs.new_zeros(1))
    assert (padded_sizes % alignment == 0).all()
    assert (padded_sizes >= alignment).all()
    assert len(padded) >= int(padded_offs[-1]) + left_over
    assert len(padded) % alignment == 0
    for size, end, padded_end, padded_size in zip(
        sizes, ends, padded_offs.tolist(), padded_sizes.tolist(), strict=True
    ):
        group = padded[padded_end - padded_size : padded_end]
        assert torch.equal(group[:size], x[end - size : end])
        assert not group[size:].any()
    unpadded = token_groups.reference_unpad(padded, offs, M, alignment)
    assert torch.equal(unpadded[: ends[-1]], x[: ends[-1]])
    assert not unpadded[ends[-1] :].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_each_is_the_gradient_of_the_other(dtype: torch.dtype, device: str) -> None:
    offs = offsets([3, 3, 40], device)
    x = random_rows(45, 8, device, dtype=dtype).requires_grad_()
    padded, padded_offs = token_groups.pad(x, offs)
    assert not padded_offs.requires_grad
    grad = random_rows(len(padded), 8, device, seed=1, dtype=dtype)
    padded.backward(grad)
    assert torch.equal(x.grad, token_groups.unpad(grad, offs, 45))
    y = grad.clone().requires_grad_()
    token_groups.unpad(y, offs, 45).backward(x.detach())
    assert torch.equal(y.grad, padded)


def test_the_operators_are_what_torch_library_expects(device: str) -> None:
    x, offs = random_rows(45, 8, device), offsets([3, 3, 40], device)
    padded, _ = token_groups.pad(x, offs)
    for operator, arguments in (("pad", (x, offs, 16)), ("unpad", (padded, offs, 45, 16))):
        torch.library.opcheck(getattr(torch.ops.fp8tune, f"{operator}_token_groups"), arguments)
        arguments[0].requires_grad_()
        torch.library.opcheck(getattr(torch.ops.fp8tune, f"{operator}_token_groups"), arguments)


def test_wrong_arguments_are_refused(device: str) -> None:
    x, offs = random_rows(45, 8, device), offsets([3, 3, 40], device)
    with pytest.raises(ValueError, match=r"^x has strides .*wanted row-major"):
        token_groups.pad(x.t(), offs)
    with pytest.raises(ValueError, match=r"^offs is torch\.int64, wanted torch\.int32$"):
        token_groups.pad(x, offs.long())
    with pytest.raises(ValueError, match=r"^padded has 45 rows, wanted 96: 45 rows in 3 groups$"):
        token_groups.unpad(x, offs, 45)


# What torch's GEMMs leave undone


@pytest.mark.parametrize("ends", [[3, 3, 40], [0, 0, 0], [45, 45, 45], [1, 1, 45]])
def test_rows_past_the_last_group_and_groups_without_rows_become_zeros(ends: list[int], device: str) -> None:
    offs = offsets(ends, device)
    x = torch.full((45, 208), float("nan"), dtype=torch.bfloat16, device=device)
    token_groups.zero_rows(x, offs)
    assert not x[ends[-1] :].any()
    assert x[: ends[-1]].isnan().all()
    x = torch.full((3, 112, 48), float("nan"), dtype=torch.bfloat16, device=device)
    token_groups.zero_empty_groups(x, offs)
    for start, end, group in zip([0, *ends], ends, x, strict=False):
        assert group.isnan().all() if end > start else not group.any()


@pytest.mark.parametrize("groups", [1, 3, 130])
def test_padded_ends_are_those_of_padding(groups: int, device: str) -> None:
    offs = torch.tensor(group_ends("jagged", 400, groups, 1), dtype=torch.int32, device=device)
    x = torch.zeros(400, 1, device=device)
    for alignment in (16, 128):
        assert torch.equal(token_groups.padded_ends(offs, alignment), token_groups.reference_pad(x, offs, alignment)[1])
