"""MXFP8 grouped GEMM with its gradients: blocks of 32 elements with E8M0 scales, drop-in for ``torch._grouped_mm``.

    forward            out    = A @ B_t           ``mxfp8-dim0`` of A and of the weights: blocks along K
    input gradient     grad_A = grad @ B          ``mxfp8-dim0`` of grad, ``mxfp8-dim1-3d`` of the weights: along N
    weight gradient    grad_B = grad.t() @ A      ``mxfp8-dim1`` of both: along the rows, 32 of one group

Operands are those of :mod:`fp8tune_kernels.gemm.grouped_mm`, but K and N are multiples of 32, and so are group sizes.
:func:`mxfp8_path` names the path of a device. ``native``, on sm_100: ``torch._scaled_grouped_mm`` on blocked scales;
the layout is tested byte for byte, the GEMM has not been run. ``emulated``, anywhere else: codes times scales, exactly,
in bfloat16, and a bfloat16 grouped GEMM, which says nothing of MXFP8's speed. So nothing here is made fast: groups are
padded, and scales laid out, by operations of torch, which do not wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..arches import MXFP8_GEMM_ARCHES
from ..groups import padded_rows
from ..quantize.mxfp8_arithmetic import MX_BLOCK, check_scale_mode
from ..quantize.mxfp8_dim0 import quantize_mxfp8_dim0
from ..quantize.mxfp8_dim1 import quantize_mxfp8_dim1
from ..quantize.mxfp8_dim1_3d import quantize_mxfp8_dim1_3d
from ..runtime.checks import check_ends
from ..runtime.lookup import running_arch
from ..runtime.ops import define, differentiable_once
from .grouped_mm import checked_operands, finished
from .shards import on_shards

Tensors = tuple[Tensor, ...]


@on_shards
def mxfp8_grouped_mm(
    A: Tensor,
    B_t: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    scale_mode: str = "rceil",
    pad_token_groups: bool = False,
) -> Tensor:
    """Return ``A[rows of e] @ B_t[e]`` for every expert e in MXFP8 (e4m3fn); differentiable in A and B_t.

    ``scale_mode``: ``rceil`` (nothing is clamped) or ``floor``. The other arguments and the ValueErrors are those of
    :func:`fp8tune_kernels.fp8_grouped_mm`. ``pad_token_groups`` pads groups to 32 rows, so that no block straddles two.
    """
    A, B_t, offs = checked_operands(A, B_t, offs, bias, out_dtype, MX_BLOCK)
    check_scale_mode(scale_mode)
    rows = A.shape[0]
    ends = _checked_offsets(offs, rows, 0) if offs.is_cpu else offs
    if pad_token_groups:
        count = padded_rows(rows, offs.shape[0], MX_BLOCK)
        places, ends = _padded(offs, rows, MX_BLOCK, 1, count)
        out = _apply(_spread(A, places, count), B_t, ends, scale_mode)
        out = functional.pad(out, (0, 0, 0, 1)).index_select(0, places)
    else:
        out = _apply(A, B_t, ends, scale_mode)
    return finished(out, offs, bias, out_dtype)


def mxfp8_path(device: torch.device) -> str:
    """Return ``native`` or ``emulated``: what :func:`mxfp8_grouped_mm` is on a device, for tables that show it."""
    return "native" if running_arch(device) in MXFP8_GEMM_ARCHES else "emulated"


# As torch.compiler.assume_constant_result does it, which takes two seconds to import.
mxfp8_path._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Mxfp8GroupedMM(torch.autograd.Function):
    """The three GEMMs, for groups whose sizes are positive multiples of 32."""

    @staticmethod
    def forward(ctx: Any, A: Tensor, B_t: Tensor, offs: Tensor, scale_mode: str) -> Tensor:
        ctx.save_for_backward(A, B_t, offs)
        ctx.scale_mode = scale_mode
        return _multiply(*_quantize(quantize_mxfp8_dim0, A, scale_mode), *_along_rows(B_t, scale_mode), offs)

    @staticmethod
    @differentiable_once("mxfp8_grouped_mm")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        A, B_t, offs = ctx.saved_tensors
        grad, mode = grad.contiguous(), ctx.scale_mode
        grad_A = grad_B_t = None
        if ctx.needs_input_grad[0]:
            codes = *_quantize(quantize_mxfp8_dim0, grad, mode), *_along_rows(B_t.mT, mode)
            grad_A = _multiply(*codes, offs).to(A.dtype)
        if ctx.needs_input_grad[1]:
            offs = _checked_offsets(offs, grad.shape[0], MX_BLOCK) if offs.is_cpu else offs
            q_grad, scales_grad = _quantize(quantize_mxfp8_dim1, grad, mode)
            q_A, scales_A = _quantize(quantize_mxfp8_dim1, A, mode)
            if B_t.is_contiguous():  # row-major (E, K, N)
                grad_B_t = _multiply(q_A.t(), scales_A, q_grad, scales_grad, offs).to(B_t.dtype)
            else:
                grad_B_t = _multiply(q_grad.t(), scales_grad, q_A, scales_A, offs).transpose(1, 2).to(B_t.dtype)
        return grad_A, grad_B_t, None, None


_apply: Callable[..., Tensor] = _Mxfp8GroupedMM.apply


def _along_rows(b: Tensor, scale_mode: str) -> tuple[Tensor, Tensor]:
    """Return codes of (E, X, Y) in blocks along X, and their scales (E, Y, X/32), whichever dim is contiguous."""
    if b.is_contiguous():
        return _quantize(quantize_mxfp8_dim1_3d, b, scale_mode)
    E, X, Y = b.shape
    codes, scales = _quantize(quantize_mxfp8_dim0, b.mT.reshape(E * Y, X), scale_mode)
    return codes.view(E, Y, X).mT, scales.view(E, Y, -1)


def _quantize(kernel: Any, x: Tensor, scale_mode: str) -> tuple[Tensor, Tensor]:
    codes, scales = kernel(x, float8_dtype=torch.float8_e4m3fn, scale_mode=scale_mode)
    return codes, scales


def _multiply(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor) -> Tensor:
    """Return the bfloat16 GEMM of each group.

    Rows (M, K), scales (M, K/32), by experts (E, K, N), strides (K*N, 1, K), scales (E, N, K/32) -> (M, N); or,
    contracted over the rows of groups, (N, M), scales (N, M/32), by (M, K), strides (1, M), scales (K, M/32) -> (G, N,
    K).
    """
    if mxfp8_path(a.device) == "emulated":
        return torch._grouped_mm(_values(a, scale_a), _values(b.mT, scale_b).mT, offs=offs)
    if b.dim() == 3:
        scale_a, scale_b = blocked_rows(scale_a, offs), blocked_experts(scale_b)
    else:
        scale_a, scale_b = blocked_columns(scale_a, offs), blocked_columns(scale_b, offs)
    return torch._scaled_grouped_mm(a, b, scale_a, scale_b, offs=offs, out_dtype=torch.bfloat16)


def _values(codes: Tensor, scales: Tensor) -> Tensor:
    """Return codes times the scales of their blocks of 32 along the last dim, row-major bfloat16.

    That is exact, as four bits times a power of two, but where a block is so small or large that bfloat16 ends.
    """
    factors = scales.float().repeat_interleave(MX_BLOCK, -1)[..., : codes.shape[-1]]
    return (codes.float() * factors).to(torch.bfloat16).contiguous()


def _check_offsets(offs: Tensor, rows: int, multiple: int) -> Tensor:
    """Return a copy, as no output of an operator may be its input; raise ValueError for sizes that no GEMM takes."""
    check_ends(offs, rows)
    ends = offs.tolist()
    for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False) if multiple else ()):
        if end <= start or (end - start) % multiple:
            expected = f"a positive multiple of {multiple} for the weight gradient: pad_token_groups=True pads"
            raise ValueError(f"offs gives group {group} {end - start} rows, wanted {expected}")
    return offs.clone()


_checked_offsets: Callable[..., Tensor] = define(  # what is traced has no values yet
    "checked_offsets(Tensor offs, SymInt rows, int multiple) -> Tensor",
    None,
    _check_offsets,
    lambda offs, rows, multiple: torch.empty_like(offs),
)


def _padded(offs: Tensor, rows: int, alignment: int, least: int, last: int) -> tuple[Tensor, Tensor]:
    """Return where each row lies once groups are padded to a multiple of ``alignment``, and where those groups end.

    A group takes at least ``least`` times the alignment. Rows of no group lie at ``last``.
    """
    groups, sizes = offs.shape[0], offs.diff(prepend=offs.new_zeros(1))
    ends = (((sizes + alignment - 1) // alignment).clamp(min=least) * alignment).cumsum(0, dtype=torch.int32)
    row = torch.arange(rows, dtype=offs.dtype, device=offs.device)
    group = torch.searchsorted(offs, row, right=True)
    moved_by = functional.pad(ends, (1, 0)) - functional.pad(offs, (1, 0))
    return torch.where(group < groups, row + moved_by[group], last).long(), ends


def _spread(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """Return so many rows: each at its place, but those at the last, and zeros elsewhere."""
    return rows.new_zeros(count + 1, rows.shape[1]).index_copy(0, places, rows)[:count]


# Scales as block-scaled GEMMs of sm_100 read them. A matrix of scales is cut into tiles of 128 x 4, padded with zeros,
# which follow each other row of tiles by row of tiles; element (r, c) of a tile is byte (r % 32)*16 + (r // 32)*4 + c
# (cuBLAS, "1D Block Scaling Factors Layout"). Each group is a matrix of its own. How much of the result is used only
# the device knows; zeros follow it. Its shape is what torch._scaled_grouped_mm checks, no more: groups begin where the
# one before ends, not at a row of the result.

_ROWS, _COLUMNS = 128, 4


def _up(size: int, unit: int) -> int:
    return (size + unit - 1) // unit * unit


def _tiles(codes: Tensor) -> Tensor:
    """Return the tiles of (..., R, C) bytes, (..., down, across, 512)."""
    R, C = codes.shape[-2:]
    codes = functional.pad(codes, (0, -C % _COLUMNS, 0, -R % _ROWS))
    tiles = codes.unflatten(-2, (-(-R // _ROWS), 4, 32)).unflatten(-1, (-(-C // _COLUMNS), _COLUMNS))
    moved: Tensor = tiles.movedim(-2, -4).transpose(-3, -2)  # (down, across, r % 32, r // 32, c)
    return moved.flatten(-3)


def blocked_experts(scales: Tensor) -> Tensor:
    """Return ``(E, R, C)`` scales of each expert as ``(E, R128*C4)``; R128 and C4 are rounded up to 128 and 4."""
    return _tiles(scales.view(torch.uint8)).flatten(1).view(scales.dtype)


def blocked_rows(scales: Tensor, offs: Tensor) -> Tensor:
    """Return ``(M, C)`` scales of rows in groups as ``(P, C4)``: P is M + 127*G, rounded up to 128."""
    codes, (M, C) = scales.view(torch.uint8), scales.shape
    P = _up(M + (_ROWS - 1) * offs.shape[0], _ROWS)
    places, _ = _padded(offs, M, _ROWS, 0, P)
    return _tiles(_spread(codes, places, P)).reshape(P, _up(C, _COLUMNS)).view(scales.dtype)


def blocked_columns(scales: Tensor, offs: Tensor) -> Tensor:
    """Return ``(R, C)`` scales of columns in groups as ``(R128, P)``: P is C + 3*G, rounded up to 4.

    ``offs`` counts rows of what was quantized, of which 32 are one column.
    """
    codes, (R, C) = scales.view(torch.uint8), scales.shape
    P, down = _up(C + (_COLUMNS - 1) * offs.shape[0], _COLUMNS), -(-R // _ROWS)
    places, ends = _padded(offs // MX_BLOCK, C, _COLUMNS, 0, P)
    tiles = _tiles(_spread(codes.t(), places, P).t())  # (down, P / 4, 512)
    column = torch.arange(P // _COLUMNS, dtype=torch.int32, device=offs.device)  # of tiles
    begins = functional.pad(ends // _COLUMNS, (1, 0))
    group = torch.searchsorted(begins, column, right=True) - 1
    begin = begins[group]
    is_last = group == offs.shape[0]  # zeros after the last group are tiles like any other, column by column
    across = torch.where(is_last, 1, functional.pad(begins[1:], (0, 1))[group] - begin)
    begin = torch.where(is_last, column, begin)
    place = begin * down + torch.arange(down, device=offs.device)[:, None] * across + (column - begin)
    blocked = (
        torch.empty_like(tiles).view(-1, _ROWS * _COLUMNS).index_copy(0, place.flatten().long(), tiles.flatten(0, 1))
    )
    return blocked.view(down * _ROWS, P).view(scales.dtype)
