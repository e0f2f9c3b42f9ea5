"""Choose the experts of each token: the largest logits, and the softmax over them. Differentiable.

    ids[t, k]      expert of token t's k-th largest logit; of equal logits the first
    weights[t, k]  exp(logit k) / sum over the chosen of exp(logit)

It equals ``softmax(logits.topk(top_k))``, which is also the softmax over all experts, normalized over the chosen ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import interpreter
from ..runtime.launching import launch_kernel
from ..runtime.ops import differentiable_once, is_traced, step
from .fp8_steps import Dtype
from .shards import choose_on_shards

interpreter.install()

CONFIG = {"ROWS": 8, "num_warps": 4}

MOST_EXPERTS = 2048
"""A program holds ROWS logits of each expert in registers."""


@triton.jit(do_not_specialize=["T"])  # T changes every step and must not cause a recompilation
def choose_kernel(
    logits_ptr: tl.tensor,  # (T, E), row-major
    ids_ptr: tl.tensor,  # (T, TOP_K)
    weights_ptr: tl.tensor,  # (T, TOP_K)
    T: tl.tensor,
    E: tl.tensor,
    TOP_K: tl.constexpr,
    BINS: tl.constexpr,  # a power of two, at least E
    ROWS: tl.constexpr,
) -> None:
    """Choose the experts of ROWS tokens."""
    tokens, experts = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BINS)[None, :]
    is_token = tokens < T
    at = logits_ptr + tokens.to(tl.int64)[:, None] * E + experts
    logits = tl.load(at, mask=is_token[:, None] & (experts < E), other=-float("inf")).to(tl.float32)
    largest, total, left = tl.max(logits, 1), tl.zeros((ROWS,), tl.float32), logits
    for _ in tl.static_range(TOP_K):
        total += tl.exp(tl.max(left, 1) - largest)
        left = tl.where(experts == tl.argmax(left, 1)[:, None], -float("inf"), left)
    left = logits
    for k in tl.static_range(TOP_K):
        expert = tl.argmax(left, 1)
        tl.store(ids_ptr + tokens * TOP_K + k, expert, mask=is_token)
        tl.store(weights_ptr + tokens * TOP_K + k, tl.exp(tl.max(left, 1) - largest) / total, mask=is_token)
        left = tl.where(experts == expert[:, None], -float("inf"), left)


@triton.jit(do_not_specialize=["T"])
def choose_gradient_kernel(
    ids_ptr: tl.tensor,  # (T, TOP_K)
    weights_ptr: tl.tensor,  # (T, TOP_K)
    grad_ptr: tl.tensor,  # (T, TOP_K)
    out_ptr: tl.tensor,  # (T, E), row-major
    T: tl.tensor,
    E: tl.tensor,
    TOP_K: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Write the gradient of ROWS tokens' logits, zeros of experts that were not chosen."""
    tokens, experts = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BINS)[None, :]
    is_token = tokens < T
    mean = tl.zeros((ROWS,), tl.float32)
    for k in tl.static_range(TOP_K):
        weight = tl.load(weights_ptr + tokens * TOP_K + k, mask=is_token, other=0.0)
        mean += weight * tl.load(grad_ptr + tokens * TOP_K + k, mask=is_token, other=0.0).to(tl.float32)
    out = tl.zeros((ROWS, BINS), tl.float32)
    for k in tl.static_range(TOP_K):
        weight = tl.load(weights_ptr + tokens * TOP_K + k, mask=is_token, other=0.0)
        grad = tl.load(grad_ptr + tokens * TOP_K + k, mask=is_token, other=0.0).to(tl.float32)
        expert = tl.load(ids_ptr + tokens * TOP_K + k, mask=is_token, other=-1)
        out += tl.where(experts == expert[:, None], (weight * (grad - mean))[:, None], 0.0)
    at = out_ptr + tokens.to(tl.int64)[:, None] * E + experts
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=is_token[:, None] & (experts < E))


@choose_on_shards
def choose_experts(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return ``(ids, weights)``, int32 and float32, both (T, top_k), with a gradient from weights to logits.

    ``logits``: (T, E), of any floating-point dtype. Raises ValueError for another rank or dtype, and for ``top_k`` that
    is less than 1 or more than E.
    """
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"logits must be floating-point (T, E), got {logits.dtype} of shape {tuple(logits.shape)}")
    if not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"top_k must be from 1 to {logits.shape[1]}, the number of experts, got {top_k}")
    if logits.shape[1] > MOST_EXPERTS:
        raise ValueError(f"logits must have at most {MOST_EXPERTS} experts, got {logits.shape[1]}")
    ids, weights = _apply(logits, top_k)
    return ids, weights


class _ChooseExperts(torch.autograd.Function):
    """Saves the chosen experts and their weights."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        ids, weights = _choose(logits.contiguous(), top_k)
        ctx.mark_non_differentiable(ids)
        ctx.set_materialize_grads(False)  # zeros for ids would be a launch
        ctx.save_for_backward(ids, weights)
        ctx.experts, ctx.dtype = logits.shape[1], logits.dtype
        return ids, weights

    @staticmethod
    @differentiable_once("choose_experts")
    def backward(ctx: Any, _: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        ids, weights = ctx.saved_tensors
        return _gradient(grad.contiguous(), ids, weights, ctx.experts, ctx.dtype), None


def _run(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Choose on any device; the sorted logits in plain torch where Triton has no GPU."""
    T, E = logits.shape
    if logits.is_cpu and not interpreter.INTERPRETED and not is_traced(logits):
        return reference(logits, top_k)
    ids, weights = logits.new_empty(T, top_k, dtype=torch.int32), logits.new_empty(T, top_k, dtype=torch.float32)
    if not is_traced(logits) and (programs := -(-T // CONFIG["ROWS"])):
        constants = top_k, 1 << (E - 1).bit_length()
        launch_kernel(choose_kernel, programs, (logits, ids, weights), (T, E), constants, CONFIG)
    return ids, weights


def _run_gradient(grad: Tensor, ids: Tensor, weights: Tensor, experts: int, dtype: Dtype) -> Tensor:
    T, top_k = ids.shape
    if grad.is_cpu and not interpreter.INTERPRETED and not is_traced(grad):
        of_chosen = weights * (grad.float() - (weights * grad.float()).sum(1, keepdim=True))
        return of_chosen.new_zeros(T, experts).scatter_(1, ids.long(), of_chosen).to(dtype)
    out = weights.new_empty(T, experts, dtype=dtype)
    if not is_traced(grad) and (programs := -(-T // CONFIG["ROWS"])):
        constants = top_k, 1 << (experts - 1).bit_length()
        launch_kernel(choose_gradient_kernel, programs, (ids, weights, grad, out), (T, experts), constants, CONFIG)
    return out


def reference(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Choose in plain torch."""
    values, ids = logits.float().sort(dim=1, descending=True, stable=True)
    return ids[:, :top_k].int(), values[:, :top_k].softmax(1)


_apply: Callable[..., tuple[Tensor, Tensor]] = _ChooseExperts.apply
_choose = step("choose_experts", _run)
_gradient = step("choose_experts_gradient", _run_gradient)
