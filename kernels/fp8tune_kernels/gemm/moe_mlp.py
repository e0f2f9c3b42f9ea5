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
no gradient of y is written in bfloat16. Each pass is one operator (:mod:`.moe_mlp_passes`). Bytes that move for an
element, beside what GEMMs read and write:

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

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..quantize.gated import ACTIVATIONS, LAYOUTS
from ..runtime.once import differentiable_once
from .moe_mlp_checks import check_layer, given_weights
from .moe_mlp_composed import COMPOSED, ComposedActivationWarning, composed_mlp
from .moe_mlp_passes import RECOMPUTE, mlp_backward, mlp_forward
from .quantized_weights import QuantizedWeights

__all__ = ["RECOMPUTE", "ComposedActivationWarning", "fp8_moe_mlp"]


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
    Gradients of the output below about 1e-13 lose precision and at 1e-15 vanish: scale the loss by a power of two.

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
    w13, codes_13, float8_dtype = given_weights("w13", w13, float8_dtype)
    w2, codes_2, float8_dtype = given_weights("w2", w2, float8_dtype)
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype)
        w13, w2 = (w if codes else w.to(dtype) for w, codes in ((w13, codes_13), (w2, codes_2)))
    check_layer(x, w13, w2, offs, b13, b2, row_weights)
    if not isinstance(activation, str) or activation in COMPOSED:
        return composed_mlp(x, w13, w2, offs, b13, b2, row_weights, activation, layout, float8_dtype)
    is_recorded = torch.is_grad_enabled()
    given = (x, w13, w2, b13, b2, row_weights)
    wanted = _Wanted(*(is_recorded and each is not None and each.requires_grad for each in given))
    options = _Options(activation, layout, recompute, keep_weights, float8_dtype)
    return _apply(*given, offs, options, wanted, len(codes_13), *codes_13, *codes_2)


class _Fp8MoeMLP(torch.autograd.Function):
    """Two operators. Saves codes and scales."""

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
        recompute, keeps = options.recompute, options.keeps_weights
        needs_h, needs_y = wanted.w2, wanted.through_h()
        is_again = recompute == "gate-up" and (needs_h or needs_y)
        keeps_y = recompute != "gate-up" and (needs_y or (needs_h and recompute == "h"))
        q_13 = scales_13 = transposed_13 = q_2 = scales_2 = transposed_2 = None
        is_13_given, is_2_given = codes_of_w13 > 0, len(codes) > codes_of_w13
        if is_13_given:
            q_13, scales_13, transposed_13 = codes[:codes_of_w13]
        if is_2_given:
            q_2, scales_2, transposed_2 = codes[codes_of_w13:]
        given = (x, w13, w2, offs, b13, b2, row_weights, q_13, scales_13, q_2, scales_2)
        found = mlp_forward(*given, options.activation, options.layout, keeps_y, options.float8_dtype)
        out, q_x, scales_x, q_h, scales_h, q_y, scales_y = found[:7]
        if not is_13_given:
            q_13, scales_13 = found[7:9]
        if not is_2_given:
            q_2, scales_2 = found[-2:]
        # of weights the transposed codes, if they are given; else what those are made of
        reads_13 = is_again or (wanted.x and not is_13_given)
        ctx.save_for_backward(
            offs,
            q_x if is_again or wanted.w13 else None,
            scales_x,
            q_y if keeps_y else None,
            scales_y if keeps_y else None,
            q_h if needs_h and recompute == "none" else None,
            scales_h,
            q_13 if reads_13 and (keeps or is_13_given) else None,
            scales_13,
            transposed_13 if wanted.x else None,
            q_2 if needs_y and keeps and not is_2_given else None,
            scales_2,
            transposed_2 if needs_y else None,
            w13 if reads_13 and not (keeps or is_13_given) else None,
            w2 if needs_y and not (keeps or is_2_given) else None,
            b13,
            b2,
            row_weights,
        )
        ctx.options, ctx.wanted = options, wanted
        ctx.dtypes = [None if each is None else each.dtype for each in (x, w13, w2, b13, b2, row_weights)]
        return out

    @staticmethod
    @differentiable_once("fp8_moe_mlp")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        options, wanted = ctx.options, ctx.wanted
        how = (options.activation, options.layout, options.recompute, list(wanted), options.float8_dtype)
        found = mlp_backward(grad.contiguous(), *ctx.saved_tensors, *how)
        grads: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        number = 0
        for place, is_wanted in enumerate(wanted):
            if is_wanted:
                grads[place] = found[number].to(ctx.dtypes[place])
                number += 1
        return tuple(grads)


_apply: Callable[..., Tensor] = _Fp8MoeMLP.apply
