"""A bias of each expert, added to the rows of its group.

A product with a matrix that has a single one in each row: it is exact, its gradient is the sum over each group in one
GEMM, and no value of ``offs`` is read on the host. An index by expert would sort all rows in its backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_bias", "check_bias", "rows_of_experts"]


def check_bias(bias: Tensor, B_t: Tensor) -> None:
    """Raise ValueError unless ``bias`` is (E, N), a floating-point tensor on the device of ``B_t``, (E, K, N)."""
    E, _, N = B_t.shape
    if bias.shape != (E, N):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, wanted ({E}, {N}): a row for each expert of B_t")
    if not bias.is_floating_point():
        raise ValueError(f"bias is {bias.dtype}, wanted a floating-point dtype")
    if bias.device != B_t.device:
        raise ValueError(f"bias is on {bias.device}, wanted {B_t.device} as B_t")


def add_bias(out: Tensor, bias: Tensor, offs: Tensor) -> Tensor:
    """``out`` (M, N) with ``bias`` (E, N), in its dtype, on the rows of each group; rows past the last stay."""
    rows = rows_of_experts(out.shape[0], offs, out.dtype)
    return torch.addmm(out, rows, bias.to(out.dtype)).to(out.dtype)  # autocast may have another


def rows_of_experts(rows: int, offs: Tensor, dtype: torch.dtype) -> Tensor:
    """(rows, E): 1 where a row is of an expert's group, else 0."""
    row = torch.arange(rows, device=offs.device, dtype=offs.dtype).unsqueeze(1)
    starts = torch.nn.functional.pad(offs[:-1], (1, 0))
    return ((row >= starts) & (row < offs)).to(dtype)
