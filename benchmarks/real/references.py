"""References for kernels of other libraries, in plain torch, for ``fp8tune sweep --reference``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def colwise(input_ptr: torch.Tensor, offsets_ptr: torch.Tensor) -> dict[str, torch.Tensor]:
    """torchao's column-wise quantizing: a power-of-two scale for each column of each group.

    ``input_ptr`` is ``(rows, columns)``, ``offsets_ptr`` the end row of each group. Gives the codes, float8_e4m3fn
    ``(rows, columns)`` with strides ``(1, rows)``, and the scales, float32 ``(groups * columns,)``. Codes of rows that
    no group has are zeros. As on a GPU, a maximum ignores NaN, and what is NaN after scaling becomes -448.
    """
    import torch

    rows, columns = input_ptr.shape
    codes = torch.zeros(columns, rows, dtype=torch.uint8, device=input_ptr.device).view(torch.float8_e4m3fn).t()
    scales, start = [], 0
    for end in offsets_ptr.tolist():
        part = input_ptr[start:end].float()
        largest = part.abs().nan_to_num(nan=0.0, posinf=math.inf).amax(0) if end > start else part.new_zeros(columns)
        ratio = (448.0 / largest.double().clamp(min=1e-12)).float()
        scales.append(torch.exp2(torch.floor(torch.log2(ratio))))
        scaled = (part * scales[-1]).nan_to_num(nan=-448.0, posinf=448.0, neginf=-448.0)
        codes[start:end] = scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        start = end
    return {"out_ptr": codes, "scales_ptr": torch.cat(scales)}
