"""Two functions of torch in FP8, with the names of torch's arguments: for code that calls them by keyword.

    torch.nn.functional.grouped_mm(mat_a, mat_b, *, offs, bias, out_dtype)    :func:`grouped_mm`
    torch._grouped_mm(input, mat2, offs, bias, out_dtype)                     :func:`_grouped_mm`

Both are ``fp8_grouped_mm``, whose messages call the operands A and B_t. They take its options as well, which
``functools.partial`` can set. The result is bfloat16 unless ``out_dtype`` says otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .gemm.grouped_mm import fp8_grouped_mm

__all__ = ["_grouped_mm", "grouped_mm"]


def grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> Tensor:
    """Do as ``torch.nn.functional.grouped_mm``: rows ``mat_a`` (M, K), weights ``mat_b`` (E, K, N) -> (M, N).

    Raises what ``fp8_grouped_mm`` raises.
    """
    return fp8_grouped_mm(mat_a, mat_b, offs, bias, out_dtype, **options)


def _grouped_mm(
    input: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> Tensor:
    """Do as ``torch._grouped_mm``: rows ``input`` (M, K), weights ``mat2`` (E, K, N) -> (M, N).

    Raises what ``fp8_grouped_mm`` raises.
    """
    return fp8_grouped_mm(input, mat2, offs, bias, out_dtype, **options)
