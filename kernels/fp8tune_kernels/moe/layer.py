"""A mixture-of-experts layer, tokens to tokens, as one differentiable operation in FP8 or bfloat16.

    out[t] = sum over k of weights[t, k] * (gated(x[t] @ w13[e].t() + b13[e]) @ w2[e].t() + b2[e])    e = ids[t, k]

x and the output's gradient are cast once per token; GEMMs and transposes gather their rows. Each FP8 copy is freed
after the last step that reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..gemm.expert_bias import rows_of_experts
from ..gemm.gathered_weights import GatheredWeights
from ..gemm.operands import are_multiples
from ..gemm.precision import PRECISIONS, is_fp8_layer
from ..quantize.gated import ACTIVATIONS, LAYOUTS
from ..quantize.swiglu_gradient import quantize_swiglu_gradient
from ..runtime.checks import check_matrix
from ..runtime.once import differentiable_once
from . import bf16_steps, fp8_steps
from .expert_sort import check_choice
from .expert_weights import ExpertWeights, check_stored, of_gathered
from .shards import layer_on_shards

__all__ = ["RECOMPUTE", "moe_layer"]

RECOMPUTE = ("none", "h", "gate-up")


class _Options(NamedTuple):
    activation: str
    layout: str
    recompute: str
    keeps_weights: bool
    float8_dtype: torch.dtype | None
    is_13_transposed: bool
    is_2_transposed: bool


class _Needs(NamedTuple):
    """Operands that get gradients."""

    x: bool
    w13: bool
    w2: bool
    b13: bool
    b2: bool
    weights: bool

    @property
    def through_h(self) -> bool:
        """True if the gradient of the activation is needed."""
        return self.x or self.w13 or self.b13 or self.weights


@layer_on_shards
def moe_layer(
    x: Tensor,
    w13: Tensor | ExpertWeights,
    w2: Tensor | ExpertWeights,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str = "swiglu",
    layout: str = "halves",
    precision: str = "fp8",
    recompute: str = "none",
    keep_weights: bool = True,
    grad_w13: Tensor | None = None,
    grad_w2: Tensor | None = None,
    float8_dtype: torch.dtype | None = None,
) -> Tensor:
    """Run each token through its experts and return the weighted sum, (T, K), bfloat16.

    Differentiable once, in x, weights, biases and ``topk_weights``.

    x             (T, K), row-major, bfloat16, float16 or float32
    w13, w2       (E, 2N, K) and (E, K, N), row-major, or ``.mT`` of row-major weights, whose gradients then lie in the
                  same way in FP8; or what ``quantize_gate_up`` and ``quantize_down`` return; or weights under FSDP2
                  that ``quantize_after_all_gather(..., recipe="folded")`` prepared
    topk_ids      (T, top_k), int32 or int64, with or without repetitions; ids that are negative or past the last expert
                  belong to other devices: they add nothing, and the gradients of their weights are zeros
    topk_weights  (T, top_k), floating-point
    b13, b2       (E, 2N) and (E, K), or None

    ``precision``: ``"fp8"``, ``"bf16"``, or ``"auto"``, the one that :mod:`fp8tune_kernels.gemm.precision` expects to
    take less time for these shapes; weights that were quantized before are always multiplied in FP8.
    ``activation``: ``"swiglu"`` or ``"gpt-oss"``. ``layout`` of the rows of w13: ``"halves"``, all of the gate and then
    all of up, or ``"interleaved"``. ``recompute``: ``"none"``; ``"h"``, the activation is made again from FP8 values of
    gate and up; ``"gate-up"``, so are gate and up. ``keep_weights``: hold FP8 values of the weights between the passes.
    In bfloat16 nothing but ``"gate-up"`` has an effect.
    ``grad_w13``, ``grad_w2``: bfloat16 or float32 buffers with the weights' shapes and strides. The backward pass adds
    the gradient to them, in FP8 before it is rounded, and autograd gets None in its place. Not in ``torch.compile``.
    ``float8_dtype`` None is the format of the running arch. Under autocast x and weights are cast to its dtype first.
    Gradients of the output below about 1e-13 lose precision and at 1e-15 vanish: scale the loss by a power of two.
    All operands may be DTensors: see :mod:`.shards`.

    Raises ValueError, before any launch, naming the argument.
    """
    _check_choices(activation=(activation, ACTIVATIONS), layout=(layout, LAYOUTS))
    _check_choices(precision=(precision, PRECISIONS), recompute=(recompute, RECOMPUTE))
    plain_13, codes_13 = _unpacked("w13", w13)
    plain_2, codes_2 = _unpacked("w2", w2)
    for name, codes in (("w13", codes_13[0]), ("w2", codes_2[0])):
        if codes is not None:
            if float8_dtype not in (None, codes.dtype):
                raise ValueError(
                    f"float8_dtype must be {codes.dtype}, to which {name} was quantized, got {float8_dtype}"
                )
            float8_dtype = codes.dtype
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype)
        plain_13 = plain_13 if codes_13[0] is not None else plain_13.to(dtype)
        plain_2 = plain_2 if codes_2[0] is not None else plain_2.to(dtype)
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    _check_operands(x, plain_13, plain_2, topk_ids, topk_weights, b13, b2)
    _check_buffer("grad_w13", grad_w13, plain_13)
    _check_buffer("grad_w2", grad_w2, plain_2)
    are_transposed = (not plain_13.is_contiguous(), not plain_2.is_contiguous())
    options = _Options(activation, layout, recompute, keep_weights, float8_dtype, *are_transposed)
    operands = (x, plain_13, plain_2, b13, b2, topk_weights)
    is_recorded = torch.is_grad_enabled()
    needs = _Needs(*(is_recorded and operand is not None and operand.requires_grad for operand in operands))
    beside = (topk_ids, grad_w13, grad_w2, options, needs)
    is_quantized = codes_13[0] is not None or codes_2[0] is not None
    if precision == "auto":
        (T, K), (E, _, N) = x.shape, plain_2.shape
        is_fp8 = is_quantized or is_fp8_layer(T, K, N, E, topk_ids.shape[1], x.device)
        precision = "fp8" if is_fp8 else "bf16"
    if precision == "fp8":
        return _apply_fp8(*operands, *beside, *codes_13, *codes_2)
    if is_quantized:
        raise ValueError("precision must be 'fp8' for weights that were quantized before, got 'bf16'")
    return _apply_bf16(*operands, *beside)


class _Fp8Layer(torch.autograd.Function):
    """Steps of :mod:`.fp8_steps`. Saves FP8 values and scales."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w13: Tensor,
        w2: Tensor,
        b13: Tensor | None,
        b2: Tensor | None,
        weights: Tensor,
        ids: Tensor,
        grad_w13: Tensor | None,
        grad_w2: Tensor | None,
        options: _Options,
        needs: _Needs,
        q_13: Tensor | None,
        scales_13: Tensor | None,
        transposed_13: Tensor | None,
        _: Tensor | None,
        q_2: Tensor | None,
        scales_2: Tensor | None,
        transposed_2: Tensor | None,
        scales_transposed_2: Tensor | None,
    ) -> Tensor:
        activation, layout, recompute, keeps_weights, float8_dtype = options[:5]
        repeats_y = recompute == "gate-up" and (needs.w2 or needs.through_h)
        keeps_y = recompute != "gate-up" and (needs.through_h or (needs.w2 and recompute == "h"))
        has_13, has_2 = q_13 is not None, q_2 is not None
        transposes_13 = not has_13 and needs.x and keeps_weights and not repeats_y
        transposes_2 = not has_2 and needs.through_h and keeps_weights
        operands = x, w13, w2, ids, weights, b13, b2, q_13, scales_13, q_2, scales_2
        result = fp8_steps.forward(*operands, activation, layout, keeps_y, transposes_13, transposes_2, float8_dtype)
        out, offs, row_of, token_of_row, row_weights, q_x, scales_x, q_h, scales_h, q_y, scales_y, *new = result
        if transposes_13:
            transposed_13, scales_13, *new = new
        elif not has_13:
            q_13, scales_13, *new = new
        if transposes_2:
            transposed_2, scales_2, scales_transposed_2 = new
        elif not has_2:
            q_2, scales_2 = new
        reads_13 = repeats_y or (needs.x and transposed_13 is None)
        reads_2 = needs.through_h and transposed_2 is None
        ctx.save_for_backward(
            ids if b2 is not None else None,
            offs,
            row_of,
            token_of_row,
            row_weights,
            q_x if repeats_y or needs.w13 else None,
            scales_x,
            q_y if keeps_y else None,
            scales_y if keeps_y else None,
            q_h if needs.w2 and recompute == "none" else None,
            scales_h,
            q_13 if reads_13 and (keeps_weights or has_13) else None,
            scales_13,
            transposed_13 if needs.x else None,
            q_2 if reads_2 and (keeps_weights or has_2) else None,
            scales_2,
            transposed_2 if needs.through_h else None,
            scales_transposed_2 if needs.through_h else None,
            w13 if reads_13 and not (keeps_weights or has_13) else None,
            w2 if reads_2 and not (keeps_weights or has_2) else None,
            b13,
            b2,
            weights if b2 is not None else None,
        )
        ctx.options, ctx.needs, ctx.buffers = options, needs, (grad_w13, grad_w2)
        ctx.dtypes = [None if operand is None else operand.dtype for operand in (x, w13, w2, b13, b2, weights)]
        return out

    @staticmethod
    @differentiable_once("moe_layer")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        activation, layout, recompute, _, float8_dtype, is_13_transposed, is_2_transposed = ctx.options
        needs, grads = ctx.needs, _Gradients()
        (
            ids, offs, row_of, token_of_row, row_weights, q_x, scales_x, q_y, scales_y, q_h, scales_h,
            q_13, scales_13, transposed_13, q_2, scales_2, transposed_2, scales_transposed_2, w13, w2,
            b13, b2, weights,
        ) = ctx.saved_tensors  # fmt: skip
        if not torch.compiler.is_compiling():  # or all live until this function returns: a third of the peak
            ctx.maybe_clear_saved_tensors()
        grad = grad.contiguous()
        through_bias = _bias_gradients(grads, grad, ids, weights, b2, needs)
        if not (needs.through_h or needs.w2):
            return grads.returned(ctx)
        y = q_y
        if recompute != "none" and (needs.w2 or q_y is None):
            source = (q_y, scales_y, q_x, scales_x, q_13, scales_13, w13, b13)
            again = fp8_steps.activate_again(offs, token_of_row, row_weights, *source, activation, layout, float8_dtype)
            q_h, scales_h = again[:2]
            y = q_y if q_y is not None else again[2]
            del source, again
        bias = b13 if q_y is None else None  # FP8 values of gate and up include it
        del q_y
        q, scales, *dh = fp8_steps.down_gradient(
            grad, offs, token_of_row, q_2, scales_2, transposed_2, scales_transposed_2, w2, needs.through_h,
            float8_dtype,
        )  # fmt: skip
        del q_2, transposed_2, grad
        if needs.w2:
            of_w2 = q, scales, q_h, scales_h, offs, token_of_row, is_2_transposed
            if ctx.buffers[1] is not None:
                fp8_steps.add_down_weight_gradient(*of_w2, _lying(ctx.buffers[1], is_2_transposed))
            else:
                grads.w2 = _lying(fp8_steps.down_weight_gradient(*of_w2), is_2_transposed)
            del of_w2
        del q_h, q
        if not needs.through_h:
            return grads.returned(ctx)
        bias = None if bias is None else bias.to(torch.bfloat16).contiguous()
        q, scales, d_weights, d_bias = quantize_swiglu_gradient(
            y, dh[0], offs, scales_13, scales_y, bias, row_weights, activation, layout, needs.b13, float8_dtype
        )
        del y, dh
        if needs.b13:
            grads.b13 = d_bias
        if needs.weights:
            grads.weights = _of_pairs(d_weights, row_of, through_bias)
        if needs.x:
            grads.x = fp8_steps.input_gradient(q, scales, offs, row_of, q_13, transposed_13, w13)
        del q_13, transposed_13
        if needs.w13:
            of_w13 = q, scales, scales_13, q_x, scales_x, offs, token_of_row, is_13_transposed
            if ctx.buffers[0] is not None:
                fp8_steps.add_gate_up_weight_gradient(*of_w13, _lying(ctx.buffers[0], is_13_transposed))
            else:
                grads.w13 = _lying(fp8_steps.gate_up_weight_gradient(*of_w13), is_13_transposed)
        return grads.returned(ctx)


class _Bf16Layer(torch.autograd.Function):
    """Steps of :mod:`.bf16_steps`. Saves operands, and gate and up."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w13: Tensor,
        w2: Tensor,
        b13: Tensor | None,
        b2: Tensor | None,
        weights: Tensor,
        ids: Tensor,
        grad_w13: Tensor | None,
        grad_w2: Tensor | None,
        options: _Options,
        needs: _Needs,
    ) -> Tensor:
        x_bf16, w13_bf16, w2_bf16 = (operand.to(torch.bfloat16) for operand in (x, w13, w2))
        result = bf16_steps.forward(
            x_bf16, w13_bf16, w2_bf16, ids, weights, b13, b2, options.activation, options.layout
        )
        out, *order, y = result
        needs_y = needs.through_h or needs.w2
        repeats_y = options.recompute == "gate-up" and needs_y
        ctx.save_for_backward(
            ids if b2 is not None else None,
            *order,
            y if needs_y and not repeats_y else None,
            x_bf16 if needs.w13 or repeats_y else None,
            w13_bf16 if needs.x or repeats_y else None,
            w2_bf16 if needs_y else None,
            b13 if repeats_y else None,
            b2,
            weights if b2 is not None else None,
        )
        ctx.options, ctx.needs, ctx.buffers = options, needs, (grad_w13, grad_w2)
        ctx.dtypes = [None if operand is None else operand.dtype for operand in (x, w13, w2, b13, b2, weights)]
        return out

    @staticmethod
    @differentiable_once("moe_layer")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs, grads = ctx.needs, _Gradients()
        ids, offs, row_of, token_of_row, row_weights, y, x, w13, w2, b13, b2, weights = ctx.saved_tensors
        if not torch.compiler.is_compiling():
            ctx.maybe_clear_saved_tensors()
        grad = grad.contiguous()
        through_bias = _bias_gradients(grads, grad, ids, weights, b2, needs)
        if not (needs.through_h or needs.w2):
            return grads.returned(ctx)
        if y is None:
            y = bf16_steps.gate_up(x, w13, b13, offs, token_of_row)
        options = ctx.options.activation, ctx.options.layout
        dy, d_weights, *d_w2 = bf16_steps.activation_gradients(
            grad, y, w2, offs, token_of_row, row_weights, *options, needs.w2
        )
        del y, w2, grad
        if needs.w2:
            grads.w2 = _added(d_w2[0], ctx.buffers[1])
        del d_w2
        if needs.b13:
            grads.b13 = rows_of_experts(dy.shape[0], offs, dy.dtype).t() @ dy
        if needs.weights:
            grads.weights = _of_pairs(d_weights, row_of, through_bias)
        of_tokens = bf16_steps.token_gradients(
            dy, x if needs.w13 else None, w13 if needs.x else None, offs, row_of, token_of_row
        )
        if needs.w13:
            grads.w13 = _added(of_tokens[-1], ctx.buffers[0])
        if needs.x:
            grads.x = of_tokens[0]
        return grads.returned(ctx)


class _Gradients:
    """Gradients of the operands; None where it is not needed, or a buffer got it."""

    x: Tensor | None = None
    w13: Tensor | None = None
    w2: Tensor | None = None
    b13: Tensor | None = None
    b2: Tensor | None = None
    weights: Tensor | None = None

    def returned(self, ctx: Any) -> tuple[Tensor | None, ...]:
        """Return what ``backward`` returns, in the operands' dtypes."""
        gradients = (self.x, self.w13, self.w2, self.b13, self.b2, self.weights)
        cast = [None if grad is None else grad.to(dtype) for grad, dtype in zip(gradients, ctx.dtypes, strict=True)]
        return (*cast, *[None] * (len(ctx.needs_input_grad) - len(cast)))


def _lying(gradient: Tensor, is_transposed: bool) -> Tensor:
    """Return weights as their transpose lies, or a gradient that lies so as the weights do."""
    return gradient.mT if is_transposed else gradient


def _added(gradient: Tensor, buffer: Tensor | None) -> Tensor | None:
    """Add a gradient to a buffer and return None; without a buffer return the gradient."""
    if buffer is None:
        return gradient
    with torch.no_grad():
        buffer.add_(gradient)
    return None


def _of_pairs(of_rows: Tensor, row_of: Tensor, through_bias: Tensor | None) -> Tensor:
    """Return the gradient of the routing weights, (T, top_k), from that of rows."""
    result = of_rows.index_select(0, row_of.view(-1)).view(row_of.shape)
    return result if through_bias is None else result + through_bias


def _bias_gradients(
    grads: _Gradients, grad: Tensor, ids: Tensor | None, weights: Tensor | None, b2: Tensor | None, needs: _Needs
) -> Tensor | None:
    """Set the gradient of b2, and return what b2 adds to the gradient of the routing weights."""
    if b2 is None or ids is None or weights is None:
        return None
    experts = torch.arange(b2.shape[0], device=ids.device)
    if needs.b2:
        of_experts = weights.new_zeros(ids.shape[0], b2.shape[0], dtype=torch.float32)
        for k in range(ids.shape[1]):  # a scatter would add duplicates in any order
            of_experts = of_experts + torch.where(ids[:, k, None] == experts, weights[:, k, None].float(), 0.0)
        grads.b2 = of_experts.to(grad.dtype).t() @ grad
    if not needs.weights:
        return None
    products = (grad @ b2.to(grad.dtype).t()).float().gather(1, ids.clamp(0, b2.shape[0] - 1).long())
    return products.masked_fill((ids < 0) | (ids >= b2.shape[0]), 0)


_apply_fp8: Callable[..., Tensor] = _Fp8Layer.apply
_apply_bf16: Callable[..., Tensor] = _Bf16Layer.apply


# Checks


def _unpacked(name: str, w: Tensor | ExpertWeights) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return weights, and their FP8 values and scales for both passes."""
    if isinstance(w, GatheredWeights):
        w = of_gathered(name, w)
    if isinstance(w, Tensor):
        return w, (None, None, None, None)
    return w.weights, (w.codes, w.scales, w.transposed, w.transposed_scales)


def _check_choices(**arguments: tuple[str, tuple[str, ...]]) -> None:
    for name, (value, choices) in arguments.items():
        if value not in choices:
            raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}")


def _check_operands(
    x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, b13: Tensor | None, b2: Tensor | None
) -> None:
    """Raise ValueError, naming the argument, unless the operands are those of one layer."""
    check_matrix("x", x)
    check_stored("w13", w13)
    check_stored("w2", w2)
    check_choice(ids, weights)
    (T, K), (E, C, _) = x.shape, w13.shape
    if C % 2 or not are_multiples(C // 2, K) or E < 1:
        raise ValueError(f"w13 must be (E, 2N, K) with N and K multiples of 16, got {tuple(w13.shape)} and K={K} of x")
    for name, w, shape in (("w13", w13, (E, C, K)), ("w2", w2, (E, K, C // 2))):
        if tuple(w.shape) != shape or w.device != x.device:
            raise ValueError(f"{name} must have shape {shape} on {x.device}, got {tuple(w.shape)} on {w.device}")
    if ids.shape[0] != T or ids.device != x.device:
        raise ValueError(f"topk_ids must have {T} rows on {x.device}, got {ids.shape[0]} on {ids.device}")
    for name, bias, columns in (("b13", b13, C), ("b2", b2, K)):
        if bias is not None and (bias.shape != (E, columns) or not bias.is_floating_point() or bias.device != x.device):
            layout = f"{bias.dtype} of shape {tuple(bias.shape)} on {bias.device}"
            raise ValueError(f"{name} must be floating-point values {(E, columns)} on {x.device}, got {layout}")


def _check_buffer(name: str, buffer: Tensor | None, w: Tensor) -> None:
    if buffer is None:
        return
    if torch.compiler.is_compiling():
        raise ValueError(f"{name} must be None in torch.compile, which cannot change a tensor in a backward pass")
    is_one = buffer.shape == w.shape and buffer.stride() == w.stride() and buffer.device == w.device
    if not is_one or buffer.dtype not in (torch.bfloat16, torch.float32) or buffer.requires_grad:
        wanted = f"bfloat16 or float32 {tuple(w.shape)} with strides {w.stride()} on {w.device}"
        layout = f"{buffer.dtype} {tuple(buffer.shape)} with strides {buffer.stride()} on {buffer.device}"
        raise ValueError(f"{name} must be {wanted}, got {layout}")
