"""FP8 grouped GEMM with its gradients: drop-in for ``torch._grouped_mm`` of token rows and expert weights.

    A     (M, K), row-major, bfloat16, float16 or float32: the rows of expert after expert
    B_t   (E, K, N), strides (K*N, 1, K): weights that lie as (E, N, K), given as ``weights.transpose(1, 2)``; or
          row-major, as gpt-oss keeps them: no copy is made of them either
    offs  (E,), int32: the end row of each expert's group, non-decreasing, at most M; groups of any size, also none
    out   (M, N), bfloat16; zeros in rows past ``offs[-1]``, as in A's gradient
    bias  (E, N): added to the rows of each expert, in the GEMM's bfloat16 result

A recipe says how often an operand is cast. All scales are powers of two. Bytes that move in a step, and that are held
between the passes, for an element of bfloat16:

            by default                      folded
    A       3 rowwise-2d + 3 colwise        3 rowwise-2d + 2 transposed-codes
    grad    3 rowwise-2d + 3 colwise        3 rowwise-factored + 2 transposed-codes
    B_t     3 colwise-3d + 3 transpose-3d   3 colwise-3d + 2 transposed-codes-3d
    held    2 of A, 0 of the parameter      1 of A, 1 of B_t

Casts of columns read a group or expert once from memory only where L2 (about 32 MiB on an H100) has all of it. The
folded recipe casts each operand along its rows: A = Aq / s, B[e] = Bq[e] / w[e], a w an output column, and the
gradient once w is folded into it: grad = Gq / r * w. So

    out    = A @ B_t          = (Aq @ Bq_t) / s / w                      as by default, to the same bytes
    grad_A = grad @ B         = (Gq @ Bq) / r                            Bq: the codes of B_t, transposed
    grad_B = grad.t() @ A     = w / least * (Gq * shift).t() @ Aq        shift = least / (r s): quantize/row_shifts.py

Folding scales is published (inclusionAI/linghe). What it costs: grad_B has a scale a row where the default has one a
group and column. A value that is small in its row, such as in a channel beside outliers, has fewer bits there, and so
have shifted codes that become subnormal. And the casts take no row's largest value for less than 1e-12: of gradients
divided by w, that is one of about 1e-13 undivided.

Forward and backward are one operator each, which ``torch.compile(fullgraph=True)`` traces and CUDA graphs capture: none
waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..catalog import RECIPES
from ..quantize import colwise, colwise_dual, rowwise_2d, rowwise_factored, transposed_codes
from ..quantize.row_shifts import shifts_and_scales
from ..runtime.checks import check_choice, check_ends, check_matrix, check_offsets, check_weights, fp8_dtype_for, refuse
from ..runtime.ops import differentiable_once, is_traced, step
from . import passes
from .grouped_contraction import ALIGNMENT
from .precision import PRECISIONS, is_fp8_product
from .shards import on_shards

if TYPE_CHECKING:
    from .quantized_weights import QuantizedWeights

GEMM_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
"""What scaled grouped GEMMs multiply: the first on NVIDIA and gfx950, the second on gfx942."""

GEMM_MULTIPLE = 16
"""Of K and N: rows of FP8 then begin at 16 bytes."""

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@on_shards
def fp8_grouped_mm(
    A: Tensor,
    B_t: Tensor | QuantizedWeights,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    float8_dtype: torch.dtype | None = None,
    precision: str = "fp8",
    recipe: str | None = None,
) -> Tensor:
    """Return ``A[rows of e] @ B_t[e]`` for every expert e, multiplied in FP8; differentiable once, in A and B_t.

    ``B_t`` may be a snapshot by :func:`fp8tune_kernels.quantize_weights`; gradients reach its weights.
    ``precision``: ``"fp8"``; ``"bf16"``, by torch's grouped GEMM; ``"auto"``, the one that
    :mod:`fp8tune_kernels.gemm.precision` expects to take less time for these shapes. ``"auto"`` is FP8 for weights that
    were quantized before, and for other dtypes than bfloat16.
    ``recipe``: ``"default"`` gives every operand its own scales in every GEMM; ``"folded"`` casts A and B_t once,
    and folds their scales into the casts of the gradient. The result is the same bytes, gradients are not. None is what
    ``B_t`` was quantized for, else the default. In the folded recipe gradients of the output
    below about 1e-13 lose precision and at 1e-15 vanish, by default from 1e-17: scale the loss by a power of two.
    ``float8_dtype`` None is the format of the running arch (e4m3fnuz on gfx942, else e4m3fn). Under autocast A and B_t
    are cast to its dtype first. On a CPU the GEMMs are a loop over groups on the same codes.
    The first five arguments are those of ``torch._grouped_mm``, which refuses a ``bias``, and other dtypes of the
    result than A's. Here ``out_dtype`` None is bfloat16; float16 and float32 are casts of the bfloat16 result.

    Raises ValueError, before any launch, naming the argument: a wrong dtype, rank, stride or device; K or N that is no
    multiple of 16; another number of groups than experts; an ``out_dtype`` or ``float8_dtype`` the GEMM does not have;
    another ``precision`` or ``recipe``; ``precision="bf16"`` with quantized weights; a folded recipe with another
    precision than FP8, row-major weights or weights quantized for another recipe; a ``bias`` of another shape; ``offs``
    that are None, as for two operands of three dimensions; on a CPU ``offs`` that decrease or pass M.
    """
    codes_B: tuple[Tensor, ...] = ()
    is_quantized = not isinstance(B_t, Tensor)  # a compiler does not trace the truth of a tuple
    if not isinstance(B_t, Tensor):
        if float8_dtype not in (None, B_t.float8_dtype):
            raise ValueError(f"float8_dtype is {float8_dtype}, wanted {B_t.float8_dtype}: B_t was quantized to it")
        if recipe not in (None, B_t.recipe):
            raise ValueError(f"recipe is {recipe!r}, wanted {B_t.recipe!r}: B_t was quantized for it")
        float8_dtype, codes_B, recipe, B_t = B_t.float8_dtype, B_t.codes, B_t.recipe, B_t.weights
    A, B_t, offs = checked_operands(A, B_t, offs, bias, out_dtype, GEMM_MULTIPLE, are_weights_read=not is_quantized)
    if float8_dtype not in (None, *GEMM_DTYPES):  # what of it the device decides, the operators check
        raise ValueError(f"float8_dtype is {float8_dtype}, wanted None or {' or '.join(map(str, GEMM_DTYPES))}")
    recipe = _recipe(recipe, precision, A, B_t, is_quantized)
    if recipe == "bf16":
        A, B_t = A.to(torch.bfloat16), B_t.to(torch.bfloat16)
    keeps = recipe == "folded" and torch.is_grad_enabled()
    keeps_a, keeps_b = keeps and B_t.requires_grad, keeps and A.requires_grad
    out = _apply(A, B_t, offs, _Options(recipe, float8_dtype, keeps_a, keeps_b), *codes_B)
    return finished(out, offs, bias, out_dtype)


def _recipe(recipe: str | None, precision: str, A: Tensor, B_t: Tensor, is_quantized: bool) -> str:
    """Return ``default``, ``folded`` or ``bf16``."""
    check_choice("recipe", "default" if recipe is None else recipe, RECIPES)
    check_choice("precision", precision, PRECISIONS)
    if recipe == "folded":
        if precision != "fp8":
            raise ValueError(f"precision is {precision!r}, wanted 'fp8': the folded recipe has no pass in bfloat16")
        if B_t.is_contiguous():
            raise ValueError("B_t is row-major, wanted weights.transpose(1, 2): the folded recipe has no other kernel")
        return recipe
    if precision == "fp8":
        return "default"
    if is_quantized:
        if precision == "bf16":
            raise ValueError("precision is 'bf16', wanted 'fp8' or 'auto' with B_t that was quantized")
        return "default"
    if precision == "auto":
        (M, K), (E, _, N) = A.shape, B_t.shape
        if not A.dtype == B_t.dtype == torch.bfloat16 or is_fp8_product(M, K, N, E, A.device):
            return "default"
    return "bf16"


class _Options(NamedTuple):
    recipe: str
    float8_dtype: torch.dtype | None
    keeps_a: bool
    """Keep FP8 values of A for the weight gradient, as the folded recipe does."""
    keeps_b: bool
    """Likewise those of B_t for the input gradient."""


class _GroupedMM(torch.autograd.Function):
    """Two operators. Saves operands, or FP8 values and scales.

    ``codes_B``: of B_t, for the forward pass and for the input gradient, where they were made before.
    """

    @staticmethod
    def forward(ctx: Any, A: Tensor, B_t: Tensor, offs: Tensor, options: _Options, *codes_B: Tensor) -> Tensor:
        recipe, _, keeps_a, keeps_b = options
        out, *made = _forward(A, B_t, offs, codes_B[:2], *options)
        of_A: Any = (A,)
        of_B: Any = (B_t,)
        if recipe == "folded":
            of_A = made[:2] if keeps_a else ()
            transposed = codes_B[2] if len(codes_B) and keeps_b else None  # a compiler knows no truth of a tuple
            q_B = None if len(codes_B) or not keeps_b else made[-2]
            of_B = q_B, transposed, codes_B[1] if len(codes_B) else made[-1]
        elif len(codes_B):
            of_B = codes_B[2:]
        ctx.save_for_backward(*of_A, *of_B, offs)
        ctx.options, ctx.count, ctx.dtypes = options, len(of_A), (A.dtype, B_t.dtype)
        ctx.is_row_major = B_t.is_contiguous()
        return out

    @staticmethod
    @differentiable_once("fp8_grouped_mm")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wants_A, wants_B, *others = ctx.needs_input_grad
        *saved, offs = ctx.saved_tensors
        recipe, float8_dtype = ctx.options[:2]
        of_A, of_B, wants = saved[: ctx.count], saved[ctx.count :], (wants_A, wants_B)
        gradients = _gradients(grad.contiguous(), of_A, of_B, offs, recipe, float8_dtype, *wants, ctx.is_row_major)
        grad_A = gradients[0].to(ctx.dtypes[0]) if wants_A else None
        grad_B = gradients[-1].to(ctx.dtypes[1]) if wants_B else None
        if grad_B is not None and not ctx.is_row_major:
            grad_B = grad_B.transpose(1, 2)  # the strides of B_t
        return grad_A, grad_B, *(None for _ in others)


_apply: Callable[..., Tensor] = _GroupedMM.apply


def _run_forward(
    A: Tensor,
    B_t: Tensor,
    offs: Tensor,
    codes_B: Sequence[Tensor],
    recipe: str,
    float8_dtype: torch.dtype | None,
    keeps_a: bool,
    keeps_b: bool,
) -> list[Tensor]:
    """Return the product, (M, N); then FP8 values and scales that are kept: of A, and of B_t unless they are given."""
    if offs.is_cpu and not is_traced(offs):
        check_ends(offs, A.shape[0])
    if recipe == "bf16":
        return [passes.multiply_bf16(A, B_t, offs)]
    dtype = fp8_dtype_for(A.device, float8_dtype)
    rows = rowwise_2d.SPEC(A, dtype, True)
    held = [*rows] if keeps_a else []
    if len(codes_B):
        weights = tuple(codes_B)
    else:
        weights = passes.quantize_stored(B_t.mT, dtype)
        held += weights if recipe == "folded" else ()
    return [passes.multiply(rows, weights, offs), *held]


def _run_gradients(
    grad: Tensor,
    of_A: list[Tensor],
    of_B: list[Tensor | None],
    offs: Tensor,
    recipe: str,
    float8_dtype: torch.dtype | None,
    wants_A: bool,
    wants_B: bool,
    is_row_major: bool,
) -> list[Tensor]:
    """Return the gradients that are wanted: of A, (M, K), and of the weights as they lie, (E, N, K) or (E, K, N).

    ``of_A``, ``of_B``: operands, or FP8 values and scales from before.
    """
    if recipe == "folded":
        return _folded_gradients(grad, of_A, of_B, offs, wants_A, wants_B)
    B, gradients = of_B[0], list[Tensor]()
    assert B is not None
    if recipe == "bf16":
        if wants_A:
            gradients.append(passes.multiply_bf16(grad, B.mT, offs))
        if wants_B:
            gradients.append(passes.contract_bf16(*_ordered(grad, of_A[0], is_row_major), offs=offs))
        return gradients
    dtype = fp8_dtype_for(grad.device, float8_dtype)
    if wants_A:
        weights: Any = of_B if len(of_B) == 2 else passes.quantize_stored(B, dtype)
        gradients.append(passes.multiply(rowwise_2d.SPEC(grad, dtype, True), weights, offs))
        del weights  # or the other gradient has them beside its own
    if wants_B:
        aligned = dtype, True, ALIGNMENT
        if of_A[0].dtype == grad.dtype:
            both = colwise_dual.SPEC(grad, of_A[0], offs, *aligned)
            columns, columns_A = both[:2], both[2:]
        else:  # float32 is quantized from float32
            columns, columns_A = colwise.SPEC(grad, offs, *aligned), colwise.SPEC(of_A[0], offs, *aligned)
        gradients.append(passes.contract(*_ordered(columns, columns_A, is_row_major), offs, grad.shape[0]))
    return gradients


def _ordered(of_grad: Any, of_A: Any, is_row_major: bool) -> tuple[Any, Any]:
    return (of_A, of_grad) if is_row_major else (of_grad, of_A)


def _folded_gradients(
    grad: Tensor, of_A: list[Tensor], of_B: list[Tensor | None], offs: Tensor, wants_A: bool, wants_B: bool
) -> list[Tensor]:
    q_B, transposed_B, scales_B = of_B
    assert scales_B is not None
    codes = next(codes for codes in (*of_A[:1], transposed_B, q_B) if codes is not None)
    (M, N), E = grad.shape, offs.shape[0]
    K = codes.shape[2] if codes is transposed_B else codes.shape[1]
    q, scales = rowwise_factored.SPEC(grad, offs, scales_B, codes.dtype, True)
    gradients = []
    if wants_B:
        shifts, of_columns, ones = shifts_and_scales(scales, of_A[1], offs, scales_B, N, K)
    else:
        ones = torch.ones(E * K, device=grad.device)  # a GEMM of codes takes scales of both operands
    if wants_A:
        if transposed_B is None:
            assert q_B is not None
            transposed_B = passes.transpose_stored(q_B)
        gradients.append(passes.multiply((q, scales), (transposed_B, ones.view(E, 1, K)), offs))
        del transposed_B  # what the other gradient would have beside its own
    if wants_B:
        (shifted,), (columns_A,) = transposed_codes.SPEC(q, offs, shifts), transposed_codes.SPEC(of_A[0], offs, None)
        gradients.append(passes.contract((shifted, of_columns), (columns_A, ones), offs, M))
    return gradients


_forward = step("grouped_mm_forward", _run_forward)
_gradients = step("grouped_mm_gradients", _run_gradients)


def checked_operands(
    A: Tensor,
    B_t: Tensor,
    offs: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    multiple: int,
    *,
    are_weights_read: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return A and, if it is read, B_t in the dtype of the autocast region around the call, if any; and ``offs``.

    Raises ValueError, naming the argument, for what no scaled grouped GEMM takes, such as other K and N than multiples.
    """
    if not A.is_meta and torch.is_autocast_enabled(A.device.type):  # no region is of device meta
        dtype = torch.get_autocast_dtype(A.device.type)
        A, B_t = A.to(dtype), B_t.to(dtype) if are_weights_read else B_t
    check_matrix("A", A)
    check_weights("B_t", B_t, or_row_major=True)
    if B_t.device != A.device:
        raise ValueError(f"B_t is on {B_t.device}, wanted {A.device} as A")
    if offs is None:
        raise ValueError("offs is None, wanted (E,): the end row of each expert's group")
    check_offsets(offs, A.device, "A")
    E, K, N = B_t.shape
    if offs.shape[0] != E:
        raise ValueError(f"offs has {offs.shape[0]} groups, wanted {E}: one for each expert of B_t")
    if A.shape[1] != K:
        refuse("A", A, f"(M, {K}): K of B_t, which is {tuple(B_t.shape)}")
    if K % multiple or N % multiple or not K or not N:
        raise ValueError(f"B_t has K={K} and N={N}, wanted multiples of {multiple}")
    if out_dtype not in (None, *OUT_DTYPES):
        raise ValueError(f"out_dtype is {out_dtype}, wanted None, {', '.join(map(str, OUT_DTYPES))}")
    if bias is not None and (bias.shape != (E, N) or not bias.is_floating_point() or bias.device != B_t.device):
        refuse("bias", bias, f"floating-point values ({E}, {N}) on {B_t.device}: a row for each expert of B_t")
    return A, B_t, offs


def finished(out: Tensor, offs: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """Return what a caller gets of the GEMM's bfloat16 result: with the bias added, and cast."""
    if bias is not None:
        out = passes.add_bias(out, bias, offs)
    return out if out_dtype is None else out.to(out_dtype)
