"""A mixture-of-experts layer, tokens to tokens, as one differentiable operation in FP8 or bfloat16.

    out[t] = sum over k of weights[t, k] * (gated(x[t] @ w13[e].t() + b13[e]) @ w2[e].t() + b2[e])    e = ids[t, k]

x and the output's gradient are cast once per token; GEMMs and transposes gather their rows. Each FP8 copy is freed
after the last step that reads it: see :mod:`.fp8_steps` and :mod:`.bf16_steps`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..gemm.gathered_weights import GatheredWeights
from ..gemm.grouped_tiles import are_multiples
from ..gemm.passes import rows_of_experts
from ..gemm.precision import PRECISIONS, is_fp8_layer
from ..quantize.gated import ACTIVATIONS, LAYOUTS
from ..quantize.swiglu_gradient import quantize_swiglu_gradient
from ..runtime.checks import check_choice, check_ends, check_matrix, check_offsets, refuse
from ..runtime.ops import differentiable_once
from . import bf16_steps, fp8_steps
from .expert_sort import check_choice as check_experts
from .expert_weights import ExpertWeights, check_stored, of_gathered
from .fp8_steps import Maybe, Order, Rows, Weights
from .shards import layer_on_shards

RECOMPUTE = ("none", "h", "gate-up")

Saved = dict[str, Maybe]
"""Tensors by name: gradients of operands, and what is held between the passes. A step of the backward pass takes out of
the latter what no later one reads."""


class _Options(NamedTuple):
    gate: tuple[str, str]
    """Activation and layout."""
    recompute: str
    keeps_weights: bool
    float8_dtype: torch.dtype | None
    precision: str
    are_transposed: tuple[bool, bool] = False, False
    """Whether w13 and w2 are the views of row-major weights."""


class _Operands(NamedTuple):
    """Operands that may get gradients; or bools, True for those that do."""

    x: Any
    w13: Any
    w2: Any
    b13: Any
    b2: Any
    weights: Any
    """One per token and choice."""

    @property
    def through_h(self) -> bool:
        """True if the gradient of the activation is needed."""
        return bool(self.x or self.w13 or self.b13 or self.weights)


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
    ``activation``: ``"swiglu"`` or ``"gpt-oss"``. ``layout`` of w13's rows: ``"halves"``, all of the gate and then
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
    choice = topk_ids.contiguous(), topk_weights.contiguous()
    check_experts(*choice)
    options = _Options((activation, layout), recompute, keep_weights, float8_dtype, precision)
    return _run(x, (w13, w2), choice, (b13, b2), (grad_w13, grad_w2), options)


def fp8_moe_mlp(
    x: Tensor,
    w13: Tensor | ExpertWeights,
    w2: Tensor | ExpertWeights,
    offs: Tensor,
    *,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    row_weights: Tensor | None = None,
    activation: str = "swiglu",
    layout: str = "halves",
    recompute: str = "none",
    keep_weights: bool = True,
    float8_dtype: torch.dtype | None = None,
) -> Tensor:
    """Run each row through the MLP of its expert in FP8 and return (M, K), bfloat16; zeros past ``offs[-1]``.

    It is :func:`moe_layer` without its order of rows and its sum, for rows as expert parallelism delivers them.
    Differentiable once, in all operands but ``offs``.

    x            (M, K), row-major: the rows of expert after expert
    offs         (E,), int32: the end row of each expert's group, non-decreasing, at most M; groups may be empty
    row_weights  (M,), floating-point: a router's weight for each row; None for ones

    Other arguments are those of ``moe_layer``, and so are its errors. Also raises ValueError for other ``offs`` and
    ``row_weights``, on a CPU for the values of ``offs`` as well.
    """
    check_offsets(offs, x.device)
    if x.is_cpu and not torch.compiler.is_compiling():
        check_ends(offs, x.shape[0])
    experts = (w13 if isinstance(w13, Tensor) else w13.weights).shape[0]
    if offs.shape[0] != experts:
        raise ValueError(f"offs has {offs.shape[0]} groups, wanted {experts}: one for each expert of w13")
    weights = x.new_ones(x.shape[0], dtype=torch.float32) if row_weights is None else row_weights.contiguous()
    if weights.shape != x.shape[:1] or not weights.is_floating_point() or weights.device != x.device:
        refuse("row_weights", weights, f"floating-point values ({x.shape[0]},) on {x.device}")
    ids = offs
    if b2 is not None:  # its gradients need the expert of each row
        rows = torch.arange(x.shape[0], dtype=offs.dtype, device=offs.device)
        ids = torch.searchsorted(offs, rows, right=True, out_int32=True)[:, None]  # past the last expert: of none
        weights = weights[:, None]
    options = _Options((activation, layout), recompute, keep_weights, float8_dtype, "fp8")
    return _run(x, (w13, w2), (ids, weights), (b13, b2), (None, None), options)


def _run(
    x: Tensor,
    both: tuple[Tensor | ExpertWeights, Tensor | ExpertWeights],
    choice: tuple[Tensor, Tensor],
    biases: tuple[Maybe, Maybe],
    buffers: tuple[Maybe, Maybe],
    options: _Options,
) -> Tensor:
    """Run a layer whose ids and weights were checked; ids of one dim: see :func:`.fp8_steps.sorted_by_expert`."""
    (ids, weights), (activation, layout) = choice, options.gate
    check_choice("activation", activation, ACTIVATIONS)
    check_choice("layout", layout, LAYOUTS)
    check_choice("precision", options.precision, PRECISIONS)
    check_choice("recompute", options.recompute, RECOMPUTE)
    (w13, *codes_13), (w2, *codes_2) = _unpacked("w13", both[0]), _unpacked("w2", both[1])
    float8_dtype, precision, is_quantized = options.float8_dtype, options.precision, False
    for name, q in (("w13", codes_13[0]), ("w2", codes_2[0])):
        if q is not None and float8_dtype not in (None, q.dtype):
            raise ValueError(f"float8_dtype must be {q.dtype}, to which {name} was quantized, got {float8_dtype}")
        if q is not None:
            float8_dtype, is_quantized = q.dtype, True
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype)
        w13 = w13 if codes_13[0] is not None else w13.to(dtype)
        w2 = w2 if codes_2[0] is not None else w2.to(dtype)
    _check_operands(x, w13, w2, ids, *biases)
    _check_buffer("grad_w13", buffers[0], w13)
    _check_buffer("grad_w2", buffers[1], w2)
    if precision == "auto":
        (T, K), (E, _, N) = x.shape, w2.shape
        precision = "fp8" if is_quantized or is_fp8_layer(T, K, N, E, ids.shape[1], x.device) else "bf16"
    if precision == "bf16" and is_quantized:
        raise ValueError("precision must be 'fp8' for weights that were quantized before, got 'bf16'")
    are_transposed = not w13.is_contiguous(), not w2.is_contiguous()
    options = options._replace(float8_dtype=float8_dtype, precision=precision, are_transposed=are_transposed)
    operands = _Operands(x, w13, w2, *biases, weights)
    is_recorded = torch.is_grad_enabled()
    needs = _Operands(*[is_recorded and operand is not None and operand.requires_grad for operand in operands])
    return _apply(*operands, ids, *buffers, options, needs, *codes_13, *codes_2)


def _unpacked(name: str, w: Tensor | ExpertWeights) -> tuple[Tensor, Maybe, Maybe, Maybe, Maybe]:
    """Return the fields of :class:`.fp8_steps.Weights`."""
    if isinstance(w, GatheredWeights):
        w = of_gathered(name, w)
    if isinstance(w, Tensor):
        return w, None, None, None, None
    return w.weights, w.codes, w.scales, w.transposed, w.transposed_scales


class _Layer(torch.autograd.Function):
    """Steps of either precision, on the arguments that :func:`_run` gives.

    ``codes``: the fields of both weights past the first.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        operands = _Operands(*arguments[:6])
        ids, grad_w13, grad_w2, options, needs, *codes = arguments[6:]
        forward = _fp8_forward if options.precision == "fp8" else _bf16_forward
        out, order, saved = forward(operands, ids, codes, options, needs)
        saved |= {"b13": operands.b13, "b2": operands.b2, "ids": None, "weights": None}
        if operands.b2 is not None:
            saved |= {"ids": ids, "weights": operands.weights}
        ctx.save_for_backward(*order, *saved.values())
        ctx.names, ctx.options, ctx.needs, ctx.buffers = tuple(saved), options, needs, (grad_w13, grad_w2)
        ctx.dtypes = [None if operand is None else operand.dtype for operand in operands]
        return out

    @staticmethod
    @differentiable_once("moe_layer")
    def backward(ctx: Any, grad: Tensor) -> tuple[Maybe, ...]:
        needs = ctx.needs
        grads: Saved = {}
        offs, row_of, token_of_row, row_weights, *rest = ctx.saved_tensors
        order, saved = Order(offs, row_of, token_of_row, row_weights), dict(zip(ctx.names, rest, strict=True))
        del rest
        if not torch.compiler.is_compiling():  # or all live until this function returns: a third of the peak
            ctx.maybe_clear_saved_tensors()
        grad = grad.contiguous()
        through_bias = _bias_gradients(grads, grad, saved, needs)
        if needs.through_h or needs.w2:
            backward = _fp8_backward if ctx.options.precision == "fp8" else _bf16_backward
            backward(grads, grad, order, saved, ctx.options, needs, ctx.buffers)
        of_weights = grads.get("weights")
        if of_weights is not None:
            of_weights = of_weights.index_select(0, row_of.view(-1)).view(row_of.shape)
            grads["weights"] = of_weights if through_bias is None else of_weights + through_bias
        cast = [
            None if gradient is None else gradient.to(dtype)
            for gradient, dtype in zip(map(grads.get, _Operands._fields), ctx.dtypes, strict=True)
        ]
        return (*cast, *[None] * (len(ctx.needs_input_grad) - len(cast)))


_apply: Callable[..., Tensor] = _Layer.apply


# FP8: saves FP8 values and scales

_FIELDS_13 = tuple(f"{field}_13" for field in Weights._fields)
_FIELDS_2 = tuple(f"{field}_2" for field in Weights._fields)
"""Names of what is held of weights."""


def _fp8_forward(
    operands: _Operands, ids: Tensor, codes: Sequence[Maybe], options: _Options, needs: _Operands
) -> tuple[Tensor, list[Tensor], Saved]:
    """Return the output, the order of rows, and what is held."""
    gate, recompute, keeps_weights, float8_dtype = options[:4]
    x, w13, w2, b13, b2, weights = operands
    repeats_y = recompute == "gate-up" and (needs.w2 or needs.through_h)
    keeps_y = recompute != "gate-up" and (needs.through_h or (needs.w2 and recompute == "h"))
    of_13, of_2 = Weights(w13, *codes[:4]), Weights(w2, *codes[4:])
    is_held_13, is_held_2 = (keeps_weights or w.codes is not None for w in (of_13, of_2))
    transposes_13 = of_13.codes is None and needs.x and keeps_weights and not repeats_y
    transposes_2 = of_2.codes is None and needs.through_h and keeps_weights
    keeps = keeps_y, transposes_13, transposes_2
    out, *made = fp8_steps.forward(x, of_13, of_2, (ids, weights), (b13, b2), gate, keeps, float8_dtype)
    q_x, scales_x, q_h, scales_h, q_y, scales_y = made[4:10]
    new = iter(made[10:])
    of_13 = _with_new(of_13, new, transposes_13, False)
    of_2 = _with_new(of_2, new, transposes_2, True)
    saved = {
        "q_x": q_x if repeats_y or needs.w13 else None,
        "scales_x": scales_x,
        "q_y": q_y if keeps_y else None,
        "scales_y": scales_y if keeps_y else None,
        "q_h": q_h if needs.w2 and recompute == "none" else None,
        "scales_h": scales_h,
    }
    reads_13 = repeats_y or (needs.x and of_13.transposed is None)
    reads_2 = needs.through_h and of_2.transposed is None
    held = _held(of_13, reads_13, is_held_13, needs.x) + _held(of_2, reads_2, is_held_2, needs.through_h)
    saved.update(zip(_FIELDS_13 + _FIELDS_2, held, strict=True))
    return out, made[:4], saved


def _with_new(w: Weights, new: Iterator[Tensor], is_transposed: bool, one_scale: bool) -> Weights:
    """Return weights with the FP8 values that the forward step made of them, which come next in ``new``."""
    if w.codes is not None:
        return w
    codes, scales = next(new), next(new)
    if not is_transposed:
        return Weights(w.plain, codes, scales)
    return Weights(w.plain, None, scales, codes, next(new) if one_scale else None)


def _held(w: Weights, is_read: bool, is_held: bool, is_wanted: bool) -> tuple[Maybe, ...]:
    """Return of weights what the backward pass reads: as they are, unless FP8 values are held."""
    plain, codes = (None, w.codes) if is_held else (w.plain, None)
    transposed = (w.transposed, w.transposed_scales) if is_wanted else (None, None)
    return plain if is_read else None, codes if is_read else None, w.scales, *transposed


def _fp8_backward(
    grads: Saved,
    grad: Tensor,
    order: Order,
    saved: Saved,
    options: _Options,
    needs: _Operands,
    buffers: tuple[Maybe, Maybe],
) -> None:
    """Set all gradients but that of b2."""
    gate, recompute, _, float8_dtype = options[:4]
    y: Any
    scales_13: Any
    w13, w2 = Weights(*map(saved.pop, _FIELDS_13)), Weights(*map(saved.pop, _FIELDS_2))
    y, scales_y, bias, q_h, scales_h = map(saved.pop, ("q_y", "scales_y", "b13", "q_h", "scales_h"))
    is_repeated, scales_13, rows = y is None, w13.scales, Rows(order.offs, order.token_of_row)
    if recompute != "none" and (needs.w2 or y is None):
        of_x = saved["q_x"], saved["scales_x"]
        again = fp8_steps.activate_again(scales_13, order, (y, scales_y), of_x, w13, bias, gate, float8_dtype)
        q_h, scales_h = again[:2]
        y = again[2] if y is None else y
        del again, of_x
    q, scales, *dh = fp8_steps.down_gradient(grad, rows, w2, needs.through_h, float8_dtype)
    del w2, grad
    if needs.w2:
        of_w2 = q, scales, q_h, scales_h, rows, options.are_transposed[1]
        grads["w2"] = fp8_steps.down_weight_gradient(*of_w2, buffer=buffers[1])
        del of_w2
    del q_h, q
    if not needs.through_h:
        return
    # FP8 values of gate and up include the bias
    bias = None if bias is None or not is_repeated else bias.to(torch.bfloat16).contiguous()
    of_y: Any = dh[0], order.offs, scales_13, scales_y, bias, order.row_weights, *gate, needs.b13, float8_dtype
    q, scales, d_weights, d_bias = quantize_swiglu_gradient(y, *of_y)
    del y, dh, of_y
    grads["b13"] = d_bias if needs.b13 else None
    grads["weights"] = d_weights if needs.weights else None
    if needs.x:
        grads["x"] = fp8_steps.input_gradient(q, scales, (order.offs, order.row_of), w13)
    del w13
    if needs.w13:
        of_w13 = q, scales, scales_13, saved.pop("q_x"), saved.pop("scales_x"), rows, options.are_transposed[0]
        grads["w13"] = fp8_steps.gate_up_weight_gradient(*of_w13, buffer=buffers[0])


# bfloat16: saves operands, and gate and up


def _bf16_forward(
    operands: _Operands, ids: Tensor, _: Sequence[Maybe], options: _Options, needs: _Operands
) -> tuple[Tensor, list[Tensor], Saved]:
    """Return the output, the order of rows, and what is held."""
    x, w13, w2 = (operand.to(torch.bfloat16) for operand in operands[:3])
    choice, biases = (ids, operands.weights), (operands.b13, operands.b2)
    out, *order, y = bf16_steps.forward(x, w13, w2, choice, biases, options.gate)
    needs_y = needs.through_h or needs.w2
    repeats_y = options.recompute == "gate-up" and needs_y
    saved = {
        "y": y if needs_y and not repeats_y else None,
        "x": x if needs.w13 or repeats_y else None,
        "w13": w13 if needs.x or repeats_y else None,
        "w2": w2 if needs_y else None,
    }
    return out, order, saved


def _bf16_backward(
    grads: Saved,
    grad: Tensor,
    order: Order,
    saved: dict[str, Any],
    options: _Options,
    needs: _Operands,
    buffers: tuple[Maybe, Maybe],
) -> None:
    """Set all gradients but that of b2."""
    x, w13, y, offs = saved["x"], saved["w13"], saved.pop("y"), order.offs
    if y is None:
        y = bf16_steps.gate_up(x, w13, saved["b13"], offs, order.token_of_row)
    dy, d_weights, *d_w2 = bf16_steps.activation_gradients(grad, y, saved.pop("w2"), order, options.gate, needs.w2)
    del y, grad
    if needs.w2:
        grads["w2"] = _added(d_w2[0], buffers[1])
    del d_w2
    grads["b13"] = rows_of_experts(dy.shape[0], offs, dy.dtype).t() @ dy if needs.b13 else None
    grads["weights"] = d_weights if needs.weights else None
    of_tokens = bf16_steps.token_gradients(dy, x if needs.w13 else None, w13 if needs.x else None, order)
    if needs.w13:
        grads["w13"] = _added(of_tokens[-1], buffers[0])
    if needs.x:
        grads["x"] = of_tokens[0]


def _added(gradient: Tensor, buffer: Maybe) -> Maybe:
    """Add a gradient to a buffer and return None; without a buffer return the gradient."""
    if buffer is None:
        return gradient
    with torch.no_grad():
        buffer.add_(gradient)
    return None


def _bias_gradients(grads: Saved, grad: Tensor, saved: Saved, needs: _Operands) -> Maybe:
    """Set the gradient of b2, and return what b2 adds to the gradient of the routing weights."""
    ids, weights, b2 = saved["ids"], saved["weights"], saved["b2"]
    if b2 is None or ids is None or weights is None:
        return None
    experts = torch.arange(b2.shape[0], device=ids.device)
    if needs.b2:
        of_experts = weights.new_zeros(ids.shape[0], b2.shape[0], dtype=torch.float32)
        for k in range(ids.shape[1]):  # a scatter would add duplicates in any order
            of_experts = of_experts + torch.where(ids[:, k, None] == experts, weights[:, k, None].float(), 0.0)
        grads["b2"] = of_experts.to(grad.dtype).t() @ grad
    if not needs.weights:
        return None
    products = (grad @ b2.to(grad.dtype).t()).float().gather(1, ids.clamp(0, b2.shape[0] - 1).long())
    return products.masked_fill((ids < 0) | (ids >= b2.shape[0]), 0)


# Checks


def _check_operands(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, b13: Maybe, b2: Maybe) -> None:
    """Raise ValueError, naming the argument, unless the operands are those of one layer."""
    check_matrix("x", x)
    check_stored("w13", w13)
    check_stored("w2", w2)
    (T, K), (E, C, _) = x.shape, w13.shape
    if C % 2 or not are_multiples(C // 2, K) or E < 1:
        raise ValueError(f"w13 must be (E, 2N, K) with N and K multiples of 16, got {tuple(w13.shape)} and K={K} of x")
    for name, w, shape in (("w13", w13, (E, C, K)), ("w2", w2, (E, K, C // 2))):
        if tuple(w.shape) != shape or w.device != x.device:
            refuse(name, w, f"shape {shape} on {x.device}")
    if ids.shape[0] != (T if ids.dim() == 2 else E) or ids.device != x.device:
        refuse("topk_ids", ids, f"{T} rows on {x.device}")
    for name, bias, columns in (("b13", b13, C), ("b2", b2, K)):
        if bias is not None and (bias.shape != (E, columns) or not bias.is_floating_point() or bias.device != x.device):
            refuse(name, bias, f"floating-point values {(E, columns)} on {x.device}")


def _check_buffer(name: str, buffer: Maybe, w: Tensor) -> None:
    if buffer is None:
        return
    if torch.compiler.is_compiling():
        raise ValueError(f"{name} must be None in torch.compile, which cannot change a tensor in a backward pass")
    is_one = buffer.shape == w.shape and buffer.stride() == w.stride() and buffer.device == w.device
    if not is_one or buffer.dtype not in (torch.bfloat16, torch.float32) or buffer.requires_grad:
        expected = f"bfloat16 or float32 {tuple(w.shape)}, strides {w.stride()} on {w.device}, without a gradient"
        refuse(name, buffer, expected)
