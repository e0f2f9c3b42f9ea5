"""FP8 grouped GEMM with its gradients: drop-in for ``torch._grouped_mm`` of token rows and expert weights.

    forward            out    = A @ B_t           ``rowwise-2d`` of A,       ``colwise-3d`` of B_t
    input gradient     grad_A = grad @ B          ``rowwise-2d`` of grad,    ``transpose-3d-atomic`` of B_t
    weight gradient    grad_B = grad.t() @ A      ``colwise-dual`` of both: one scale a column of each group

    A     (M, K), row-major, bfloat16, float16 or float32: the rows of expert after expert
    B_t   (E, K, N), strides (K*N, 1, K): weights that lie as (E, N, K), given as ``weights.transpose(1, 2)``; or
          row-major, as gpt-oss keeps them: no copy is made of them either
    offs  (E,), int32: the end row of each expert's group, non-decreasing, at most M; groups of any size, also none
    out   (M, N), bfloat16; zeros in rows past ``offs[-1]``, as in A's gradient
    bias  (E, N): added to the rows of each expert, in the GEMM's bfloat16 result (:mod:`.expert_bias`)

Each operand is quantized along the dim that its GEMM contracts, with power-of-two scales. Forward and backward are one
operator each (:mod:`.grouped_mm_operators`), which ``torch.compile(fullgraph=True)`` traces and CUDA graphs capture:
none waits for the device.

The backward pass is given A and B_t as they were, or, named in ``keep_fp8``, the codes that it multiplies: one read
quantizes an operand both ways, and grad too where A is kept. Bytes that move in a step, and that are held between the
passes, for an element of bfloat16:

             by default                      where kept                  held by default, where kept
    A        3 rowwise-2d + 3 colwise        4 rowwise-colwise           2, 1
    grad     3 rowwise-2d + 3 colwise        4 rowwise-colwise (of A)    0, 0
    B_t      3 colwise-3d + 3 transpose-3d   4 colwise-transpose-3d      0 as it is the parameter, 1

They hold where L2 (about 32 MiB on an H100) has a whole group or expert: 4 MiB at 1,024 x 2,048, 224 at
16,384 x 7,168. Where it has not, 6 bytes move either way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..catalog import RECIPES
from ..quantize.colwise_transpose_3d import quantize_colwise_transpose_3d
from ..quantize.rowwise_colwise import quantize_rowwise_colwise
from ..runtime.checks import check_matrix, check_offsets, check_weights
from ..runtime.once import differentiable_once
from .expert_bias import add_bias, check_bias
from .folded_mm import folded_grouped_mm
from .grouped_contraction import ALIGNMENT
from .grouped_mm_operators import forward, gradients
from .precision import PRECISIONS, is_fp8_product
from .shards import on_shards

if TYPE_CHECKING:
    from .quantized_weights import QuantizedWeights

__all__ = ["checked_operands", "fp8_grouped_mm"]

GEMM_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
"""What scaled grouped GEMMs multiply: the first on NVIDIA and gfx950, the second on gfx942."""

GEMM_MULTIPLE = 16
"""Of K and N: rows of FP8 then begin at 16 bytes."""

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

Quantized = tuple[Tensor | None, ...]
"""Codes and scales, of rows and of columns, or of the forward pass and of the input gradient; or None four times."""

NONE: Quantized = (None, None, None, None)


@on_shards
def fp8_grouped_mm(
    A: Tensor,
    B_t: Tensor | QuantizedWeights,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    float8_dtype: torch.dtype | None = None,
    pad_token_groups: bool = False,
    keep_fp8: Collection[str] = (),
    precision: str = "fp8",
    recipe: str | None = None,
) -> Tensor:
    """``A[rows of e] @ B_t[e]`` for every expert e, multiplied in FP8; differentiable once, in A and B_t.

    ``B_t`` may be a snapshot by :func:`fp8tune_kernels.quantize_weights`; gradients reach its weights.
    ``pad_token_groups`` is there for callers of older versions, and changes nothing: groups may have any size.
    ``keep_fp8``: which of ``"A"`` and ``"B_t"`` to keep in FP8 for the backward pass, if a gradient asks for it. The
    results are the same bytes.
    ``precision``: ``"fp8"``; ``"bf16"``, by torch's grouped GEMM; ``"auto"``, the one that
    :mod:`fp8tune_kernels.gemm.precision` expects to take less time for these shapes. ``"auto"`` is FP8 for weights that
    were quantized before, operands that are kept, and other dtypes than bfloat16.
    ``recipe``: ``"default"`` gives every operand of every GEMM scales of its own; ``"folded"`` casts A and B_t once,
    and folds their scales into the casts of the gradient (:mod:`.folded_mm`). The result is the same bytes, gradients
    are not. None is what ``B_t`` was quantized for, else the default. In the folded recipe gradients of the output
    below about 1e-13 lose precision and at 1e-15 vanish, by default from 1e-17: scale the loss by a power of two.
    ``float8_dtype`` None is the format of the running arch (e4m3fnuz on gfx942, else e4m3fn). Under autocast A and B_t
    are cast to its dtype first. On a CPU the GEMMs are a loop over groups on the same codes.
    The first five arguments are those of ``torch._grouped_mm``, which refuses a ``bias``, and other dtypes of the
    result than A's. Here ``out_dtype`` None is bfloat16; float16 and float32 are casts of the bfloat16 result.

    Raises ValueError, before any launch, naming the argument: a wrong dtype, rank, stride or device; K or N that is no
    multiple of 16; another number of groups than experts; an ``out_dtype`` or ``float8_dtype`` the GEMM does not have;
    another ``precision`` or ``recipe``; another name in ``keep_fp8``; ``precision="bf16"`` with ``keep_fp8`` or
    quantized weights; a folded recipe with another precision than FP8, ``keep_fp8``, row-major weights or weights
    quantized for another recipe; a ``bias`` of another shape; ``offs`` that
    are None, as for two operands of three dimensions; on a CPU ``offs`` that decrease or pass M.
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
    if _is_folded(recipe, precision, keep_fp8):
        if B_t.is_contiguous():
            raise ValueError("B_t is row-major, wanted weights.transpose(1, 2): the folded recipe has no other kernel")
        return finished(folded_grouped_mm(A, B_t, offs, float8_dtype, *codes_B), offs, bias, out_dtype)
    keep_A, keep_B = _kept(keep_fp8, A, B_t)
    is_fp8 = _is_fp8(precision, A, B_t, bool(keep_fp8), is_quantized)
    if precision == "bf16":
        A, B_t = A.to(torch.bfloat16), B_t.to(torch.bfloat16)
    out = _apply(A, B_t, offs, float8_dtype, is_fp8, keep_A, keep_B, *(codes_B if is_fp8 else ()))
    return finished(out, offs, bias, out_dtype)


def _is_folded(recipe: str | None, precision: str, keep_fp8: Collection[str]) -> bool:
    """Whether the recipe is the folded one."""
    if recipe not in (None, *RECIPES):
        raise ValueError(f"recipe is {recipe!r}, wanted {' or '.join(map(repr, RECIPES))}")
    if recipe != "folded":
        return False
    if precision != "fp8":
        raise ValueError(f"precision is {precision!r}, wanted 'fp8': the folded recipe has no pass in bfloat16")
    if keep_fp8:
        raise ValueError("keep_fp8 has names, wanted none: the folded recipe keeps all it needs in FP8")
    return True


def _kept(keep_fp8: Collection[str], A: Tensor, B_t: Tensor) -> tuple[bool, bool]:
    """Whether to keep codes of A for the weight gradient, and of B_t for the input gradient."""
    if not keep_fp8:
        return False, False
    if unknown := set(keep_fp8) - {"A", "B_t"}:
        raise ValueError(f"keep_fp8 has {', '.join(map(repr, sorted(unknown)))}, wanted 'A' and 'B_t', either or none")
    if not torch.is_grad_enabled():
        return False, False
    return "A" in keep_fp8 and B_t.requires_grad, "B_t" in keep_fp8 and A.requires_grad


def _is_fp8(precision: str, A: Tensor, B_t: Tensor, are_kept: bool, is_quantized: bool) -> bool:
    """Decide in which precision to multiply."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}, wanted {' or '.join(map(repr, PRECISIONS))}")
    if precision == "auto":
        if is_quantized or are_kept or not A.dtype == B_t.dtype == torch.bfloat16:
            return True
        (M, K), (E, _, N) = A.shape, B_t.shape
        return is_fp8_product(M, K, N, E, A.device)
    if precision == "bf16" and (is_quantized or are_kept):
        name = "B_t that was quantized" if is_quantized else "keep_fp8"
        raise ValueError(f"precision is 'bf16', wanted 'fp8' or 'auto' with {name}")
    return precision == "fp8"


class _Fp8GroupedMM(torch.autograd.Function):
    """The three passes. Saves operands, or codes and scales.

    ``codes_B``: of B_t, for the forward pass and for the input gradient, where they were made before.
    """

    @staticmethod
    def forward(
        ctx: Any,
        A: Tensor,
        B_t: Tensor,
        offs: Tensor,
        float8_dtype: torch.dtype | None,
        is_fp8: bool,
        keep_A: bool,
        keep_B: bool,
        *codes_B: Tensor,
    ) -> Tensor:
        of_A: Quantized = NONE
        of_B: Quantized = codes_B if len(codes_B) else NONE  # a compiler knows no truth of a tuple of tensors
        if keep_B and not len(codes_B):
            of_B = _both_ways(B_t, float8_dtype)
        if keep_A:
            of_A = quantize_rowwise_colwise(A, offs, float8_dtype=float8_dtype, alignment=ALIGNMENT)
        held_B = None if of_B[2] is not None else B_t
        ctx.save_for_backward(None if keep_A else A, *of_A[2:], held_B, *of_B[2:], offs)
        ctx.float8_dtype, ctx.is_fp8 = float8_dtype, is_fp8
        ctx.dtypes, ctx.is_row_major = (A.dtype, B_t.dtype), B_t.is_contiguous()
        return forward(A, B_t, offs, float8_dtype, is_fp8, *of_A[:2], *of_B[:2])

    @staticmethod
    @differentiable_once("fp8_grouped_mm")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wants_A, wants_B, *others = ctx.needs_input_grad
        options = ctx.float8_dtype, ctx.is_fp8, wants_A, wants_B, ctx.is_row_major
        found = gradients(grad.contiguous(), *ctx.saved_tensors, *options)
        dtype_A, dtype_B = ctx.dtypes
        grad_A = _as(found[0], dtype_A) if wants_A else None
        grad_B = _as(found[-1], dtype_B) if wants_B else None
        if grad_B is not None and not ctx.is_row_major:
            grad_B = grad_B.transpose(1, 2)  # the strides of B_t
        return grad_A, grad_B, *(None for _ in others)


def _both_ways(B_t: Tensor, float8_dtype: torch.dtype | None) -> Quantized:
    """Return FP8 values and scales for the forward pass and for the input gradient, by one read."""
    if not B_t.is_contiguous():
        return quantize_colwise_transpose_3d(B_t, float8_dtype=float8_dtype)
    along_N, scales_N, along_K, scales_K = quantize_colwise_transpose_3d(B_t.mT, float8_dtype=float8_dtype)
    return along_K, scales_K, along_N, scales_N


def _as(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    return gradient if dtype == torch.bfloat16 else gradient.to(dtype)


_apply: Callable[..., Tensor] = _Fp8GroupedMM.apply


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
    """A and, if it is read, B_t in the dtype of the autocast region around the call, if there is one; and ``offs``.

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
        raise ValueError(f"A has shape {tuple(A.shape)}, wanted (M, {K}): K of B_t, which is {tuple(B_t.shape)}")
    if K % multiple or N % multiple or not K or not N:
        raise ValueError(f"B_t has K={K} and N={N}, wanted multiples of {multiple}")
    if out_dtype not in (None, *OUT_DTYPES):
        raise ValueError(f"out_dtype is {out_dtype}, wanted None, {', '.join(map(str, OUT_DTYPES))}")
    if bias is not None:
        check_bias(bias, B_t)
    return A, B_t, offs


def finished(out: Tensor, offs: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """What a caller gets of the GEMM's bfloat16 result: with the bias added, and cast."""
    if bias is not None:
        out = add_bias(out, bias, offs)
    return out if out_dtype is None else out.to(out_dtype)
