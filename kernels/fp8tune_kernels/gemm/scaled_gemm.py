"""torch's scaled grouped GEMM on what the quantization kernels write.

    rows in groups          out[m, n]    = sum over k of a[m, k] * b[g, k, n]        * inverse_a[m]    * inverse_b[g, n]
    contraction in groups   out[g, n, k] = sum over m in g of a[n, m] * b[m, k]      * inverse_a[g, n] * inverse_b[g, k]

    a          (M, K), row-major; or (N, M), row-major: the ``.t()`` view of ``colwise``'s codes
    b          (E, K, N), strides (K*N, 1, K); or (M, K), strides (1, M rounded up to 16)
    inverse_a  (M,), or (G*N,) group-major, float32: reciprocals of what the kernels multiplied by
    inverse_b  (E, N), or (G*K,) group-major, float32
    offs       (G,), int32: the end row of each group
    out        bfloat16, accumulated in float32; what the rows past ``offs[-1]`` hold is not specified on a GPU

It contracts over groups only if their sizes are positive multiples of 16, and asserts that on the device. On the CPU a
loop over groups multiplies the same codes in float32, by the same rule.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..runtime.checks import check_ends
from ..runtime.ops import define

__all__ = ["GROUP_ALIGNMENT", "checked_offsets", "multiply"]

GROUP_ALIGNMENT = 16
"""Rows: the groups of a contraction start at 16 bytes of FP8."""


def _out(a: Tensor, b: Tensor, *others: Tensor) -> Tensor:
    offs = others[-1]
    shape = (len(offs), a.shape[0], b.shape[1]) if b.dim() == 2 else (a.shape[0], b.shape[2])
    return torch.empty(shape, dtype=torch.bfloat16, device=a.device)


def multiply(a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, offs: Tensor) -> Tensor:
    """The GEMM alone, on the reciprocals of scales."""
    if a.device.type == "cpu":
        return _multiply_on_cpu(a, b, inverse_a, inverse_b, offs)
    if b.dim() == 2:  # whole groups end at a multiple of 16 rows, which the GEMM wants to see in the shape
        rows = b.shape[0] // GROUP_ALIGNMENT * GROUP_ALIGNMENT
        a, b = a[:, :rows], b[:rows]
    # fast: Hopper's partial sums stay in a shorter format, with errors far below those of FP8 codes
    return torch._scaled_grouped_mm(
        a, b, inverse_a, inverse_b, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _multiply_on_cpu(a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, offs: Tensor) -> Tensor:
    out, start = _out(a, b, offs).zero_(), 0
    check_ends(offs, a.shape[0] if b.dim() == 3 else b.shape[0])
    if b.dim() == 2:
        check_sizes(offs, GROUP_ALIGNMENT)
    with torch.autocast("cpu", enabled=False):  # else a caller's autocast multiplies in its own dtype
        for group, end in enumerate(offs.tolist()):
            if b.dim() == 3:
                product = a[start:end].float() @ b[group].float()
                out[start:end] = product * inverse_a[start:end, None] * inverse_b[group]
            else:
                product = a[:, start:end].float() @ b[start:end].float()
                out[group] = product * inverse_a.view(len(offs), -1, 1)[group] * inverse_b.view(len(offs), -1)[group]
            start = end
    return out


def check_sizes(offs: Tensor, multiple: int) -> None:
    """Raise ValueError unless all groups can be contracted over. For tensors on a CPU alone."""
    ends = offs.tolist()
    for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if end <= start or (end - start) % multiple:
            wanted = f"a positive multiple of {multiple} for the weight gradient: pad_token_groups=True pads"
            raise ValueError(f"offs gives group {group} {end - start} rows, wanted {wanted}")


def checked_offsets(offs: Tensor, rows: int, multiple: int = 0) -> Tensor:
    """``offs``, on a CPU after :func:`check_ends` and, with a multiple, :func:`check_sizes`."""
    if offs.device.type != "cpu":
        return offs
    return _checked_offsets(offs, rows, multiple)


def _check_offsets(offs: Tensor, rows: int, multiple: int) -> Tensor:
    check_ends(offs, rows)
    if multiple:
        check_sizes(offs, multiple)
    return offs.clone()  # no output of an operator may be its input


_checked_offsets: Callable[..., Tensor] = define(  # what is traced has no values yet
    "checked_offsets(Tensor offs, SymInt rows, int multiple) -> Tensor",
    None,
    _check_offsets,
    lambda offs, rows, multiple: torch.empty_like(offs),
)
