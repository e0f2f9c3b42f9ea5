"""The expert MLP as one differentiable operation: GEMM gate and up, gated activation, GEMM down, all in FP8.

    y   = x @ w13[e].t() + b13[e]             (M, 2N): gate and up
    h   = gated(y) * row_weights              (M, N)        see :mod:`fp8tune_kernels.quantize.gated`
    out = h @ w2[e].t() + b2[e] * row_weights (M, K)

    x            (M, K), row-major: the rows of expert after expert
    w13, w2      (E, 2N, K) and (E, K, N), row-major; or what ``quantize_weights(w, recipe="folded")`` made of them
    offs         (E,), int32: the end row of each expert's group, non-decreasing, at most M; groups of any size
    b13, b2      (E, 2N) and (E, K), or None
    row_weights  (M,), or None: a router's weights
    out          (M, K), bfloat16; zeros in rows past ``offs[-1]``

Every operand is cast once, by rows, in a kernel that reads it once. What a GEMM contracts over rows, and the weights
for the input gradients, are these codes, transposed as bytes. As scales are powers of two, those that a sum cannot
have are factors of the gradients' casts, or exponents of the codes that are transposed (:mod:`.folded_mm`). No h and
no gradient of y is written in bfloat16. Bytes that move for an element, beside what GEMMs read and write:

    x                  3 rowwise-2d, 2 transposed-codes
    weights            3 colwise-3d, 2 transposed-codes-3d
    y                  7 for gate and up: swiglu-rowwise reads both, writes codes of h and of both
    h                  2 transposed-codes
    out's gradient     3 rowwise-factored, 2 transposed-codes
    y's gradient       6 for gate and up: swiglu-gradient reads codes of both and h's gradient, writes codes of both
                       4 transposed-codes

What is held between the passes, in bytes of a row (bfloat16 with a compiled activation holds 2K + 6N):

    ``recompute``   of x     of y    of h
    "none"          K        2N      N
    "h"             K        2N               h is made again, of the codes of y
    "gate-up"       K                         y is multiplied again, to the same bytes, and h made of it

But for "gate-up" the activation's gradient is that at the codes of y. Beside that, codes of both weights, an element a
byte, unless ``keep_weights`` is False: they are then made again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8tune_kernels.gemm import grouped_mm
from fp8tune_kernels.gemm.methods import FP8_ONLY
from fp8tune_kernels.gemm.operands import are_multiples
from fp8tune_kernels.gemm.quantized_weights import QuantizedWeights
from fp8tune_kernels.quantize.colwise_3d import quantize_colwise_3d
from fp8tune_kernels.quantize.gated import ACTIVATIONS, LAYOUTS
from fp8tune_kernels.quantize.row_shifts import shifts_of_rows
from fp8tune_kernels.quantize.rowwise_2d import quantize_rowwise_2d
from fp8tune_kernels.quantize.rowwise_factored import quantize_rowwise_factored
from fp8tune_kernels.quantize.swiglu_gradient import quantize_swiglu_gradient
from fp8tune_kernels.quantize.swiglu_rowwise import quantize_swiglu_rowwise
from fp8tune_kernels.quantize.transposed_codes import transpose_codes
from fp8tune_kernels.quantize.transposed_codes_3d import transpose_codes_3d
from fp8tune_kernels.runtime.checks import check_matrix, check_offsets, check_weights
from fp8tune_kernels.runtime.once import differentiable_once

__all__ = ["RECOMPUTE", "ComposedActivationWarning", "fp8_moe_mlp"]

RECOMPUTE = ("none", "h", "gate-up")
"""What is not held between the passes: see the module."""

COMPOSED: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": torch.nn.functional.gelu,
    "gelu-tanh": lambda gate: torch.nn.functional.gelu(gate, approximate="tanh"),
    "relu": torch.relu,
}
"""Activations of the gate that have no fused kernel."""


class ComposedActivationWarning(UserWarning):
    """An activation without a fused kernel: two GEMMs and torch's operations. Given once for each activation."""


_warned: set[object] = set()


class _Options(NamedTuple):
    """What is no tensor."""

    activation: str
    layout: str
    recompute: str
    keeps_weights: bool
    float8_dtype: torch.dtype | None


class _Wanted(NamedTuple):
    """Which operands get gradients."""

    x: bool
    w13: bool
    w2: bool
    b13: bool
    b2: bool
    row_weights: bool

    def through_h(self) -> bool:
        """Whether the gradient of h is needed."""
        return self.x or self.w13 or self.b13 or self.row_weights


def fp8_moe_mlp(
    x: Tensor,
    w13: Tensor | QuantizedWeights,
    w2: Tensor | QuantizedWeights,
    offs: Tensor,
    *,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    row_weights: Tensor | None = None,
    activation: str | Callable[[Tensor], Tensor] = "swiglu",
    layout: str = "halves",
    recompute: str = "none",
    keep_weights: bool = True,
    float8_dtype: torch.dtype | None = None,
) -> Tensor:
    """The MLP of each expert on its rows, in FP8; differentiable once, in all operands but ``offs``.

    ``activation``: ``"swiglu"``, or ``"gpt-oss"``, whose gate and up are clamped. ``"gelu"``, ``"gelu-tanh"``,
    ``"relu"`` and a function of the gate are composed of two GEMMs and torch's operations, with a
    :class:`ComposedActivationWarning`; ``recompute`` and ``keep_weights`` have no effect there.
    ``layout`` of y, that is of the rows of ``w13``: ``"halves"``, all of the gate and then all of up, or
    ``"interleaved"``, in turn, as gpt-oss has them.
    ``recompute``: ``"none"``, ``"h"`` or ``"gate-up"``; ``keep_weights``: see the module.
    ``float8_dtype`` None is the format of the running arch. Under autocast x and weights are cast to its dtype first.

    Raises ValueError, before any launch, naming the argument: a wrong dtype, rank, stride, size or device; N or K that
    is no multiple of 16; weights quantized for another recipe; an unknown ``layout``, ``recompute`` or ``activation``.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}, wanted {' or '.join(map(repr, LAYOUTS))}")
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute is {recompute!r}, wanted {', '.join(map(repr, RECOMPUTE))}")
    if isinstance(activation, str) and activation not in (*ACTIVATIONS, *COMPOSED):
        known = ", ".join(map(repr, (*ACTIVATIONS, *COMPOSED)))
        raise ValueError(f"activation is {activation!r}, wanted {known} or a function of the gate")
    w13, codes_13, float8_dtype = _given("w13", w13, float8_dtype)
    w2, codes_2, float8_dtype = _given("w2", w2, float8_dtype)
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype)
        w13, w2 = (w if codes else w.to(dtype) for w, codes in ((w13, codes_13), (w2, codes_2)))
    _check(x, w13, w2, offs, b13, b2, row_weights)
    if not isinstance(activation, str) or activation in COMPOSED:
        return _composed(x, w13, w2, offs, b13, b2, row_weights, activation, layout, float8_dtype)
    is_recorded = torch.is_grad_enabled()
    given = (x, w13, w2, b13, b2, row_weights)
    wanted = _Wanted(*(is_recorded and each is not None and each.requires_grad for each in given))
    options = _Options(activation, layout, recompute, keep_weights, float8_dtype)
    return _apply(*given, offs, options, wanted, len(codes_13), *codes_13, *codes_2)


def _given(
    name: str, w: Tensor | QuantizedWeights, float8_dtype: torch.dtype | None
) -> tuple[Tensor, tuple[Tensor, ...], torch.dtype | None]:
    """Weights as they lie, codes of them that were made before, and the dtype of those."""
    if isinstance(w, Tensor):
        return w, (), float8_dtype
    if w.recipe != "folded":
        raise ValueError(f"{name} was quantized for recipe {w.recipe!r}, wanted quantize_weights(w, recipe='folded')")
    if w.layout != "ENK":
        raise ValueError(f"{name} was quantized as {w.layout}, wanted weights that lie as (E, rows, columns)")
    if float8_dtype not in (None, w.float8_dtype):
        raise ValueError(f"float8_dtype is {float8_dtype}, wanted {w.float8_dtype}: {name} was quantized to it")
    return w.weights.transpose(1, 2), w.codes, w.float8_dtype


def _check(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    offs: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    row_weights: Tensor | None,
) -> None:
    check_matrix("x", x)
    check_weights("w13", w13, as_stored=True)
    check_weights("w2", w2, as_stored=True)
    check_offsets(offs, x.device)
    (M, K), (E, C, _) = x.shape, w13.shape
    for name, w, wanted in (("w13", w13, (E, C, K)), ("w2", w2, (E, K, C // 2))):
        if tuple(w.shape) != wanted or C % 2:
            raise ValueError(f"{name} has shape {tuple(w.shape)}, wanted (E, 2N, K) and (E, K, N) beside x of K={K}")
        if w.device != x.device:
            raise ValueError(f"{name} is on {w.device}, wanted {x.device} as x")
    if not are_multiples(C // 2, K):
        raise ValueError(f"w13 has N={C // 2} and K={K}, wanted positive multiples of 16")
    if offs.shape[0] != E:
        raise ValueError(f"offs has {offs.shape[0]} groups, wanted {E}: one for each expert of w13")
    for name, bias, size in (("b13", b13, (E, C)), ("b2", b2, (E, K)), ("row_weights", row_weights, (M,))):
        if bias is not None and (tuple(bias.shape) != size or not bias.is_floating_point() or bias.device != x.device):
            given = f"{bias.dtype} of shape {tuple(bias.shape)} on {bias.device}"
            raise ValueError(f"{name} is {given}, wanted floating-point values of shape {size} on {x.device}")


class _Fp8MoeMLP(torch.autograd.Function):
    """Both passes, by operators. Saves codes and scales."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w13: Tensor,
        w2: Tensor,
        b13: Tensor | None,
        b2: Tensor | None,
        row_weights: Tensor | None,
        offs: Tensor,
        options: _Options,
        wanted: _Wanted,
        codes_of_w13: int,
        *codes: Tensor,
    ) -> Tensor:
        dtype, recompute = options.float8_dtype, options.recompute
        needs_h, needs_y = wanted.w2, wanted.through_h()
        is_again = recompute == "gate-up" and (needs_h or needs_y)
        keeps_y = recompute != "gate-up" and (needs_y or (needs_h and recompute == "h"))
        of_x = quantize_rowwise_2d(x, float8_dtype=dtype)
        of_13 = codes[:codes_of_w13] or _weights(w13, dtype)
        of_2 = codes[codes_of_w13:] or _weights(w2, dtype)
        y = _multiply(of_x, of_13, offs, dtype)
        q_h, scales_h, q_y, scales_y = quantize_swiglu_rowwise(
            y,
            offs,
            None,
            _as(b13, torch.bfloat16),
            _as(row_weights, torch.float32),
            activation=options.activation,
            layout=options.layout,
            keep=keeps_y,
            float8_dtype=dtype,
        )
        del y
        out = _multiply((q_h, scales_h), of_2, offs, dtype)
        if b2 is not None:
            out = torch.addmm(out, _rows_of_groups(offs, len(x), row_weights), b2.to(torch.bfloat16))
        # of weights the transposed codes, if they are given; else what those are made of
        keeps, is_13_given, is_2_given = options.keeps_weights, codes_of_w13 > 0, len(codes) > codes_of_w13
        reads_13 = is_again or (wanted.x and not is_13_given)
        ctx.save_for_backward(
            offs,
            of_x[0] if is_again or wanted.w13 else None,
            of_x[1],
            q_y if keeps_y else None,
            scales_y if keeps_y else None,
            q_h if needs_h and recompute == "none" else None,
            scales_h,
            of_13[0] if reads_13 and (keeps or is_13_given) else None,
            of_13[1],
            of_13[2] if wanted.x and is_13_given else None,
            of_2[0] if needs_y and keeps and not is_2_given else None,
            of_2[1],
            of_2[2] if needs_y and is_2_given else None,
            w13 if reads_13 and not (keeps or is_13_given) else None,
            w2 if needs_y and not (keeps or is_2_given) else None,
            b13,
            b2,
            row_weights,
        )
        ctx.options, ctx.wanted, ctx.sizes = options, wanted, (x.shape[1], w2.shape[2])
        ctx.dtypes = x.dtype, w13.dtype, w2.dtype
        return out

    @staticmethod
    @differentiable_once("fp8_moe_mlp")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (
            offs,
            q_x,
            scales_x,
            q_y,
            scales_y,
            q_h,
            scales_h,
            q_13,
            scales_13,
            transposed_13,
            q_2,
            scales_2,
            transposed_2,
            w13,
            w2,
            b13,
            b2,
            row_weights,
        ) = ctx.saved_tensors
        options, wanted, (K, N) = ctx.options, ctx.wanted, ctx.sizes
        dtype, E = options.float8_dtype, offs.shape[0]
        grad = grad.contiguous()
        ones = scales_2.new_ones(E * max(K, N))  # a GEMM of codes takes scales of both operands
        grads: dict[str, Tensor] = {}
        if b2 is not None:
            _through_bias(grad, b2, offs, row_weights, wanted, grads)
        if w13 is not None:
            q_13, _ = _weights(w13, dtype)
        y, bias = q_y, None
        reads_y = wanted.through_h() or (wanted.w2 and q_h is None)
        if options.recompute == "gate-up" and reads_y:
            y, bias = _multiply((q_x, scales_x), (q_13, scales_13), offs, dtype), _as(b13, torch.bfloat16)
        weights = _as(row_weights, torch.float32)
        names = {"activation": options.activation, "layout": options.layout, "float8_dtype": dtype}
        if wanted.w2 and q_h is None:
            q_h, scales_h, _, _ = quantize_swiglu_rowwise(y, offs, scales_y, bias, weights, **names)
        dh = None
        if wanted.w2 or wanted.through_h():
            q, scales = quantize_rowwise_factored(grad, offs, scales_2, float8_dtype=dtype)
        if wanted.through_h():
            if w2 is not None:
                q_2, _ = _weights(w2, dtype)
            if transposed_2 is None:
                transposed_2 = transpose_codes_3d(q_2)
            dh = _input_gradient(q, scales, transposed_2, ones[: E * N].view(E, 1, N), offs, dtype)
            del q_2, transposed_2
        if wanted.w2:
            found = _weight_gradient(q, scales, scales_2, q_h, scales_h, ones[: E * N], offs, dtype)
            grads["w2"] = found.to(ctx.dtypes[2])
        del q_h
        if dh is not None:
            q, scales, d_weights, d_bias = quantize_swiglu_gradient(
                y, dh, offs, scales_13, scales_y, bias, weights, bias_gradient=wanted.b13, **names
            )
            del dh, y, q_y
            if wanted.x:
                of_K = ones[: E * K].view(E, 1, K)
                if transposed_13 is None:
                    transposed_13 = transpose_codes_3d(q_13)
                grads["x"] = _input_gradient(q, scales, transposed_13, of_K, offs, dtype).to(ctx.dtypes[0])
            if wanted.w13:
                found = _weight_gradient(q, scales, scales_13, q_x, scales_x, ones[: E * K], offs, dtype)
                grads["w13"] = found.to(ctx.dtypes[1])
            if wanted.b13:
                grads["b13"] = d_bias.to(b13.dtype)
            if wanted.row_weights:
                grads["row_weights"] = (grads.get("row_weights", 0) + d_weights).to(row_weights.dtype)
        results = (grads.get(name) for name in _Wanted._fields)
        return *results, *(None for _ in ctx.needs_input_grad[len(_Wanted._fields) :])


_apply: Callable[..., Tensor] = _Fp8MoeMLP.apply

Codes = tuple[Tensor, ...]
"""Codes, scales and, of weights that were quantized before, transposed codes."""


def _as(given: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if given is None else given.to(dtype).contiguous()


def _weights(w: Tensor, dtype: torch.dtype | None) -> Codes:
    return quantize_colwise_3d(w.transpose(1, 2), float8_dtype=dtype)


def _multiply(rows: Codes, weights: Codes, offs: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Rows times the weights of their experts, bfloat16."""
    (q, scales), (q_w, scales_w) = rows[:2], weights[:2]
    out: Tensor = torch.ops.fp8tune.grouped_mm_forward(q, q_w, offs, dtype, FP8_ONLY, q, scales, q_w, scales_w)
    return out


def _input_gradient(
    q: Tensor, scales: Tensor, weights: Tensor, ones: Tensor, offs: Tensor, dtype: torch.dtype | None
) -> Tensor:
    found: Tensor = torch.ops.fp8tune.grouped_mm_input_gradient(
        q, None, offs, dtype, FP8_ONLY, q, scales, weights, ones
    )
    return found


def _weight_gradient(
    q: Tensor,
    scales: Tensor,
    factors: Tensor,
    q_rows: Tensor,
    scales_rows: Tensor,
    ones: Tensor,
    offs: Tensor,
    dtype: torch.dtype | None,
) -> Tensor:
    """Of codes of the gradient's rows, cast over ``factors``, and of the rows that were multiplied."""
    shifts, least = shifts_of_rows(scales, scales_rows, offs)
    columns, rows = transpose_codes(q, offs, shifts), transpose_codes(q_rows, offs)
    column_scales = (least[:, None] / factors.view(len(offs), -1)).view(-1)
    found: Tensor = torch.ops.fp8tune.grouped_mm_weight_gradient(
        q, None, offs, dtype, FP8_ONLY, columns, column_scales, rows, ones
    )
    return found


def _groups(offs: Tensor, rows: int) -> Tensor:
    """The group of each row; E for a row of none."""
    return torch.searchsorted(offs, torch.arange(rows, device=offs.device, dtype=offs.dtype), right=True)


def _rows_of_groups(offs: Tensor, rows: int, row_weights: Tensor | None) -> Tensor:
    """(M, E), bfloat16: 1, or a row's weight, where a row is of a group. A GEMM with it adds what groups share."""
    found = (_groups(offs, rows)[:, None] == torch.arange(len(offs), device=offs.device)).to(torch.bfloat16)
    return found if row_weights is None else found * row_weights[:, None].to(torch.bfloat16)


def _through_bias(
    grad: Tensor, b2: Tensor, offs: Tensor, row_weights: Tensor | None, wanted: _Wanted, grads: dict[str, Tensor]
) -> None:
    """What the bias of the GEMM down adds to gradients."""
    if wanted.b2:
        grads["b2"] = (_rows_of_groups(offs, len(grad), row_weights).t() @ grad).to(b2.dtype)
    if wanted.row_weights:
        group = _groups(offs, len(grad))[:, None]
        found = (grad @ b2.to(torch.bfloat16).t()).float().gather(1, group.clamp(max=len(offs) - 1))
        grads["row_weights"] = found.masked_fill(group == len(offs), 0).squeeze(1)


def _composed(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    offs: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    row_weights: Tensor | None,
    activation: str | Callable[[Tensor], Tensor],
    layout: str,
    float8_dtype: torch.dtype | None,
) -> Tensor:
    """The same of an activation without a kernel: two GEMMs by the folded recipe, and torch's operations."""
    name = activation if isinstance(activation, str) else getattr(activation, "__name__", repr(activation))
    if not torch.compiler.is_compiling() and name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"activation {name!r} has no fused kernel: the MLP is composed of two GEMMs and torch's operations",
            ComposedActivationWarning,
            stacklevel=3,
        )
    function = COMPOSED[activation] if isinstance(activation, str) else activation
    y = grouped_mm.fp8_grouped_mm(x, w13.transpose(1, 2), offs, float8_dtype=float8_dtype, recipe="folded")
    if b13 is not None:
        y = torch.addmm(y, _rows_of_groups(offs, len(x), None), b13.to(y.dtype))
    gate, up = y.chunk(2, 1) if layout == "halves" else (y[:, 0::2], y[:, 1::2])
    h = function(gate) * up
    if row_weights is not None:
        h = h * row_weights[:, None].to(h.dtype)
    out = grouped_mm.fp8_grouped_mm(
        h.contiguous(), w2.transpose(1, 2), offs, float8_dtype=float8_dtype, recipe="folded"
    )
    if b2 is not None:
        out = torch.addmm(out, _rows_of_groups(offs, len(x), row_weights), b2.to(out.dtype))
    return out
