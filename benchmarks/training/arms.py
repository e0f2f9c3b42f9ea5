"""The arms of the comparison: functions that multiply the rows of experts, or run the experts of a layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.moe_layer import mlp
from fp8tune_kernels import fp8_grouped_mm, moe_layer, mxfp8_grouped_mm

GroupedMM = Callable[[Tensor, Tensor, Tensor], Tensor]
"""rows of expert after expert (M, K), weights (E, K, N), end row of each expert (E,) -> (M, N), bfloat16"""


def in_bf16(rows: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
    """PyTorch's own."""
    return torch._grouped_mm(rows.bfloat16(), weights.bfloat16(), offs=offs)


def _of_bf16(multiply: Callable[..., Tensor], **options: object) -> GroupedMM:
    """Cast to bfloat16 what an arm quantizes: the model's weights are float32."""

    def in_fp8(rows: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
        return multiply(rows.bfloat16(), weights.bfloat16(), offs, **options)

    return in_fp8


def moe_layer_experts(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Run the experts of a module of transformers, tokens to tokens."""
    return moe_layer(x, module.gate_up_proj, module.down_proj, ids, weights).to(x.dtype)


def moe_mlp_experts(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Run the experts on rows that torch orders."""
    return mlp(x, module.gate_up_proj, module.down_proj, ids, weights, module.num_experts).to(x.dtype)


PRODUCTS: Mapping[str, GroupedMM] = {
    "bf16": in_bf16,
    "fp8": _of_bf16(fp8_grouped_mm),
    "folded": _of_bf16(fp8_grouped_mm, recipe="folded"),
    "auto": _of_bf16(fp8_grouped_mm, precision="auto"),
    "mxfp8": _of_bf16(mxfp8_grouped_mm, pad_token_groups=True),
}
"""Name -> function that multiplies. ``mxfp8`` is emulated everywhere but on sm_100, so its times say nothing."""

EXPERTS: Mapping[str, Callable[..., Tensor]] = {"mlp": moe_mlp_experts, "layer": moe_layer_experts}
"""Name -> function of a module of experts, tokens, their experts and weights."""

ARMS = (*PRODUCTS, *EXPERTS)


@contextmanager
def in_transformers(arm: str) -> Iterator[None]:
    """Within, models of transformers with ``grouped_mm`` experts multiply as this arm does."""
    from transformers.integrations import moe

    if arm in EXPERTS:
        with mock.patch.dict(moe.ALL_EXPERTS_FUNCTIONS._local_mapping, {"grouped_mm": EXPERTS[arm]}):
            yield
    else:
        with mock.patch.object(moe, "_grouped_mm", functools.partial(_called, PRODUCTS[arm])):
            yield


def _called(multiply: GroupedMM, input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """With the names of transformers' parameters."""
    return multiply(input, weight, offs)
