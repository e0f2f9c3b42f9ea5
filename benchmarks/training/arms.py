"""The arms of the comparison: which function multiplies the rows of experts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from fp8tune_kernels import fp8_grouped_mm, mxfp8_grouped_mm

GroupedMM = Callable[[Tensor, Tensor, Tensor], Tensor]
"""rows of expert after expert (M, K), weights (E, K, N), end row of each expert (E,) -> (M, N), bfloat16"""


def in_bf16(rows: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
    """PyTorch's own."""
    return torch._grouped_mm(rows.bfloat16(), weights.bfloat16(), offs=offs)


def _of_bf16(multiply: Callable[..., Tensor], **options: object) -> GroupedMM:
    """What is quantized is bfloat16 in each arm: the model's weights are float32."""

    def in_fp8(rows: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
        return multiply(rows.bfloat16(), weights.bfloat16(), offs, **options)

    return in_fp8


ARMS: Mapping[str, GroupedMM] = {
    "bf16": in_bf16,
    "fp8": _of_bf16(fp8_grouped_mm),
    "folded": _of_bf16(fp8_grouped_mm, recipe="folded"),
    "auto": _of_bf16(fp8_grouped_mm, precision="auto"),
    "mxfp8": _of_bf16(mxfp8_grouped_mm, pad_token_groups=True),
}
"""Name -> function. ``mxfp8`` is emulated everywhere but on sm_100, so its times say nothing."""


@contextmanager
def in_transformers(multiply: GroupedMM) -> Iterator[None]:
    """Within, the grouped GEMMs of a model of transformers with ``grouped_mm`` experts are this function."""
    from transformers.integrations import moe

    kept = moe._grouped_mm
    moe._grouped_mm = functools.partial(_called, multiply)
    try:
        yield
    finally:
        moe._grouped_mm = kept


def _called(multiply: GroupedMM, input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """With the names of transformers' parameters."""
    return multiply(input, weight, offs)
