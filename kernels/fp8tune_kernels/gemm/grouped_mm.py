"""FP8 grouped GEMM with its gradients: drop-in for ``torch._grouped_mm`` of token rows and expert weights.

    forward            out    = A @ B_t           ``rowwise-2d`` of A,       ``colwise-3d`` of B_t
    input gradient     grad_A = grad @ B          ``rowwise-2d`` of grad,    ``transpose-3d-atomic`` of B_t
    weight gradient    grad_B = grad.t() @ A      ``colwise-dual`` of both: one scale a column of each group

    A     (M, K), row-major, bfloat16, float16 or float32: the rows of expert after expert
    B_t   (E, K, N), strides (K*N, 1, K): weights that lie as (E, N, K), given as ``weights.transpose(1, 2)``
    offs  (E,), int32: the end row of each expert's group, non-decreasing, at most M
    out   (M, N), bfloat16

Each operand is quantized along the dim that its GEMM contracts, with power-of-two scales, by operators that
``torch.compile(fullgraph=True)`` traces and CUDA graphs capture: none waits for the device.

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

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8tune_kernels.gemm import token_groups
from fp8tune_kernels.gemm.scaled_gemm import GROUP_ALIGNMENT, scaled_grouped_gemm
from fp8tune_kernels.quantize.colwise import quantize_colwise
from fp8tune_kernels.quantize.colwise_3d import quantize_colwise_3d
from fp8tune_kernels.quantize.colwise_dual import quantize_colwise_dual
from fp8tune_kernels.quantize.colwise_transpose_3d import quantize_colwise_transpose_3d
from fp8tune_kernels.quantize.rowwise_2d import quantize_rowwise_2d
from fp8tune_kernels.quantize.rowwise_colwise import quantize_rowwise_colwise

# us on an H100, atomic / reduction: 67 / 88 at one expert of 8192 x 5120, 801 / 1,131 at 16, 254 / 247 at 64 small ones
from fp8tune_kernels.quantize.transpose_3d_atomic import quantize_transpose_3d_atomic as quantize_transposed
from fp8tune_kernels.runtime.checks import check_matrix, check_offsets, check_weights
from fp8tune_kernels.runtime.once import differentiable_once

__all__ = ["checked_operands", "fp8_grouped_mm", "quantize_transposed"]

GEMM_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
"""What scaled grouped GEMMs multiply: the first on NVIDIA and gfx950, the second on gfx942."""


def fp8_grouped_mm(
    A: Tensor,
    B_t: Tensor,
    offs: Tensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    float8_dtype: torch.dtype | None = None,
    pad_token_groups: bool = False,
    keep_fp8: Collection[str] = (),
) -> Tensor:
    """``A[rows of e] @ B_t[e]`` for every expert e, multiplied in FP8; differentiable once, in A and B_t.

    ``pad_token_groups``: pad each group to a positive multiple of 16 rows on the device, and take the padding out of
    the result; rows past ``offs[-1]`` come out as zeros. Without it the weight gradient wants groups of such sizes (a
    GPU asserts it), and rows past ``offs[-1]`` are unspecified in out and in A's gradient.
    ``keep_fp8``: which of ``"A"`` and ``"B_t"`` to keep in FP8 for the backward pass, if a gradient asks for it. The
    results are the same bytes.
    ``float8_dtype`` None is the format of the running arch (e4m3fnuz on gfx942, else e4m3fn). Under autocast A and B_t
    are cast to its dtype first. ``bias`` and ``out_dtype`` are there for ``torch._grouped_mm``'s callers: None, or for
    the dtype bfloat16. On a CPU the GEMMs are a loop over groups on the same codes.

    Raises ValueError, before any launch, naming the argument: a wrong dtype, rank, stride or device; K or N that is no
    multiple of 16; another number of groups than experts; an ``out_dtype`` or ``float8_dtype`` the GEMM does not have;
    another name in ``keep_fp8``; a ``bias``; on a CPU ``offs`` that decrease or pass M.
    """
    A, B_t = checked_operands(A, B_t, offs, bias, out_dtype, GROUP_ALIGNMENT)
    if float8_dtype not in (None, *GEMM_DTYPES):  # what of it the device decides, the quantization kernels check
        raise ValueError(f"float8_dtype is {float8_dtype}, wanted None or {' or '.join(map(str, GEMM_DTYPES))}")
    kept = _kept(keep_fp8, A, B_t)

    def multiply(A: Tensor, offs: Tensor) -> Tensor:
        return _apply(A, B_t, offs, float8_dtype, *kept)

    return token_groups.multiply_padded(multiply, A, offs, GROUP_ALIGNMENT) if pad_token_groups else multiply(A, offs)


def _kept(keep_fp8: Collection[str], A: Tensor, B_t: Tensor) -> tuple[bool, bool]:
    """Whether to keep codes of A for the weight gradient, and of B_t for the input gradient."""
    if unknown := set(keep_fp8) - {"A", "B_t"}:
        raise ValueError(f"keep_fp8 has {', '.join(map(repr, sorted(unknown)))}, wanted 'A' and 'B_t', either or none")
    if not torch.is_grad_enabled():
        return False, False
    return "A" in keep_fp8 and B_t.requires_grad, "B_t" in keep_fp8 and A.requires_grad


Quantized = Sequence[Tensor]
"""Codes and scales of one operand of one GEMM; or nothing."""


class _Fp8GroupedMM(torch.autograd.Function):
    """The three GEMMs, for groups whose sizes are positive multiples of 16. Saves operands, or codes and scales."""

    @staticmethod
    def forward(
        ctx: Any, A: Tensor, B_t: Tensor, offs: Tensor, float8_dtype: torch.dtype | None, keep_A: bool, keep_B: bool
    ) -> Tensor:
        kept_A: Quantized = (A,)
        kept_B: Quantized = (B_t,)
        if keep_A:
            of_A, kept_A = _halves(quantize_rowwise_colwise(A, offs, float8_dtype=float8_dtype))
        else:
            of_A = quantize_rowwise_2d(A, float8_dtype=float8_dtype)
        if keep_B:
            of_B, kept_B = _halves(quantize_colwise_transpose_3d(B_t, float8_dtype=float8_dtype))
        else:
            of_B = quantize_colwise_3d(B_t, float8_dtype=float8_dtype)
        ctx.save_for_backward(offs, *kept_A, *kept_B)
        ctx.float8_dtype, ctx.keep_A, ctx.keep_B = float8_dtype, keep_A, keep_B
        ctx.dtypes = A.dtype, B_t.dtype
        return _multiply_rows(of_A, of_B, offs)

    @staticmethod
    @differentiable_once("fp8_grouped_mm")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        offs, *saved = ctx.saved_tensors
        kept_A, kept_B = saved[: 1 + ctx.keep_A], saved[1 + ctx.keep_A :]
        grad, dtype = grad.contiguous(), ctx.float8_dtype
        grad_A = grad_B_t = None
        rows, columns = _halves(())
        if ctx.keep_A and all(ctx.needs_input_grad[:2]):
            rows, columns = _halves(quantize_rowwise_colwise(grad, offs, float8_dtype=dtype))
        if ctx.needs_input_grad[0]:
            experts = kept_B if ctx.keep_B else quantize_transposed(kept_B[0], float8_dtype=dtype)
            grad_A = _multiply_rows(rows or quantize_rowwise_2d(grad, float8_dtype=dtype), experts, offs)
            grad_A = grad_A.to(ctx.dtypes[0])
            del experts
        del rows  # codes that the other gradient would have beside its own
        if ctx.needs_input_grad[1]:
            if ctx.keep_A:
                columns = columns or quantize_colwise(grad, offs, float8_dtype=dtype)
            elif grad.dtype == kept_A[0].dtype:
                columns, kept_A = _halves(quantize_colwise_dual(grad, kept_A[0], offs, float8_dtype=dtype))
            else:  # A in float32 is quantized from float32
                columns = quantize_colwise(grad, offs, float8_dtype=dtype)
                kept_A = quantize_colwise(kept_A[0], offs, float8_dtype=dtype)
            (q_grad, scales_grad), (q_A, scales_A) = columns, kept_A
            del columns
            grad_B = scaled_grouped_gemm(q_grad.t(), q_A, scales_grad, scales_A, offs)
            grad_B_t = grad_B.transpose(1, 2).to(ctx.dtypes[1])  # strides (K*N, 1, K), as B_t has them
        return grad_A, grad_B_t, None, None, None, None


_apply: Callable[..., Tensor] = _Fp8GroupedMM.apply


def _halves(both_ways: Quantized) -> tuple[Quantized, Quantized]:
    """Codes and scales by rows, and by columns, of what was quantized in one read."""
    return both_ways[:2], both_ways[2:]


def _multiply_rows(of_A: Quantized, of_B: Quantized, offs: Tensor) -> Tensor:
    """``A @ B_t`` of each expert, from codes and scales: (M, K) and (E, K, N) -> (M, N)."""
    (q_A, scales_A), (q_B, scales_B) = of_A, of_B
    return scaled_grouped_gemm(q_A, q_B, scales_A.squeeze(1), scales_B.squeeze(1), offs)


def checked_operands(
    A: Tensor, B_t: Tensor, offs: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None, multiple: int
) -> tuple[Tensor, Tensor]:
    """A and B_t in the dtype of the autocast region around the call, if there is one.

    Raises ValueError, naming the argument, for what no scaled grouped GEMM takes, such as other K and N than multiples.
    """
    if not A.is_meta and torch.is_autocast_enabled(A.device.type):  # no region is of device meta
        dtype = torch.get_autocast_dtype(A.device.type)
        A, B_t = A.to(dtype), B_t.to(dtype)
    check_matrix("A", A)
    check_weights("B_t", B_t)
    if B_t.device != A.device:
        raise ValueError(f"B_t is on {B_t.device}, wanted {A.device} as A")
    check_offsets(offs, A.device, "A")
    E, K, N = B_t.shape
    if offs.shape[0] != E:
        raise ValueError(f"offs has {offs.shape[0]} groups, wanted {E}: one for each expert of B_t")
    if A.shape[1] != K:
        raise ValueError(f"A has shape {tuple(A.shape)}, wanted (M, {K}): K of B_t, which is {tuple(B_t.shape)}")
    if K % multiple or N % multiple or not K or not N:
        raise ValueError(f"B_t has K={K} and N={N}, wanted multiples of {multiple}")
    if out_dtype not in (None, torch.bfloat16):
        raise ValueError(f"out_dtype is {out_dtype}, wanted torch.bfloat16: the scaled grouped GEMM writes no other")
    if bias is not None:  # torch's grouped GEMM has the argument and takes none either
        raise ValueError("bias is a tensor, wanted None: no grouped GEMM adds one, so add it to the result")
    return A, B_t
