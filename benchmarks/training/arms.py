"""The arms of the comparison: functions that multiply the rows of experts, or run the experts of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fp8tune_kernels import fp8_grouped_mm, fp8_moe_mlp, moe_layer, mxfp8_grouped_mm
from fp8tune_kernels.moe.permutation import scatter, sort_rows

Product = Callable[..., Tensor]
"""Function of the rows of all experts (M, K), weights (E, K, N) and each expert's end row (E,): (M, N), bfloat16."""


def casting(multiply: Product, **options: object) -> Product:
    """Cast operands to bfloat16 before they are multiplied: the model's weights are float32."""

    def product(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:  # parameters as in transformers
        return multiply(input.bfloat16(), weight.bfloat16(), offs=offs, **options)

    return product


def layer(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Run the experts in a module of transformers, tokens to tokens."""
    return moe_layer(x, module.gate_up_proj, module.down_proj, ids, weights).to(x.dtype)


def mlp(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Run the experts on rows that torch orders."""
    rows, offs, order, place = sort_rows(x, ids, module.num_experts)
    shares = scatter(weights.reshape(-1), place, order)
    out = fp8_moe_mlp(rows, module.gate_up_proj, module.down_proj, offs, row_weights=shares)
    return scatter(out, order, place).view(*ids.shape, out.shape[1]).sum(1).to(x.dtype)


PRODUCTS: Mapping[str, Product] = {
    "bf16": casting(torch._grouped_mm),
    "fp8": casting(fp8_grouped_mm),
    "folded": casting(fp8_grouped_mm, recipe="folded"),
    "auto": casting(fp8_grouped_mm, precision="auto"),
    "mxfp8": casting(mxfp8_grouped_mm, pad_token_groups=True),  # emulated but on sm_100, so its times say nothing
}
EXPERTS: Mapping[str, Callable[..., Tensor]] = {"mlp": mlp, "layer": layer}
ARMS = (*PRODUCTS, *EXPERTS)


@contextmanager
def in_transformers(arm: str) -> Iterator[None]:
    """Let models of transformers with ``grouped_mm`` experts multiply as this arm does."""
    from transformers.integrations import moe

    if arm in EXPERTS:
        with mock.patch.dict(moe.ALL_EXPERTS_FUNCTIONS._local_mapping, {"grouped_mm": EXPERTS[arm]}):
            yield
    else:
        with mock.patch.object(moe, "_grouped_mm", PRODUCTS[arm]):
            yield
