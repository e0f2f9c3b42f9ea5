"""Each kernel's formulas in plain torch, as one graph: what ``fp8tune bench`` has ``torch.compile`` compile.

The kernels' references go group by group or expert by expert, and read group ends on the host. Here all are done at
once, groups by a search for each row's own and a scattered maximum. Bytes are the reference's for finite inputs. E8M0
scales stay uint8: TorchInductor has no such dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fp8tune.errors import MachineError
from fp8tune_kernels.spec import KernelSpec

Tensors = tuple[Any, ...]


def expression(spec: KernelSpec) -> Callable[..., Tensors]:
    """A kernel's inputs -> its outputs, without a loop and without a wait; the reference, where that is so already.

    Raises MachineError where the reference is in float64: no kernel computes that.
    """
    if spec.check == "tolerance":
        raise MachineError(f"the reference of {spec.name} is in float64: torch.compile would do other work")
    return _EXPRESSIONS.get(spec.name, spec.reference)


def _colwise(x: Any, offs: Any, dtype: Any, power_of_two: bool) -> Tensors:
    codes, scales = _by_group_of_rows(x, offs, dtype, power_of_two)
    return _column_major(codes), scales


def _rowwise(x: Any, offs: Any, dtype: Any, power_of_two: bool) -> Tensors:
    codes, scales = _by_group_of_rows(x.t(), offs, dtype, power_of_two)
    return codes.t().contiguous(), scales


def _colwise_dual(x: Any, y: Any, *rest: Any) -> Tensors:
    return *_colwise(x, *rest), *_colwise(y, *rest)


def _rowwise_colwise(x: Any, offs: Any, dtype: Any, power_of_two: bool) -> Tensors:
    from fp8tune_kernels.quantize import rowwise_2d

    return *rowwise_2d.reference(x, dtype, power_of_two), *_colwise(x, offs, dtype, power_of_two)


def _by_group_of_rows(x: Any, offs: Any, dtype: Any, power_of_two: bool) -> Tensors:
    """``(M, K)`` -> codes of the same shape, in no layout in particular, and scales ``(G * K,)``."""
    import torch

    from fp8tune_kernels.quantize.arithmetic import reference_cast, reference_scale

    (M, K), G = x.shape, offs.shape[0]
    rows = torch.arange(M, dtype=torch.int32, device=x.device)
    group = torch.searchsorted(offs, rows, right=True)  # G in the padding rows
    amax = torch.zeros(G + 1, K, dtype=torch.float32, device=x.device)
    amax = amax.scatter_reduce(0, group[:, None].expand(M, K), x.abs().float(), "amax")
    scale = reference_scale(amax[:G], dtype, power_of_two)
    codes = reference_cast(x, scale[group.clamp(max=G - 1)], dtype).view(torch.uint8)
    return codes.masked_fill((group == G)[:, None], 0).view(dtype), scale.flatten()


def _colwise_3d(w: Any, dtype: Any, power_of_two: bool) -> Tensors:
    codes, scale = _by_experts(w, 1, dtype, power_of_two)
    return _column_major(codes), scale


def _transpose_3d(w: Any, dtype: Any, power_of_two: bool) -> Tensors:
    codes, scale = _by_experts(w, 2, dtype, power_of_two)
    return codes.contiguous().mT, scale.mT


def _by_experts(w: Any, reduced: int, dtype: Any, power_of_two: bool) -> Tensors:
    from fp8tune_kernels.quantize.arithmetic import reference_cast, reference_scale

    scale = reference_scale(w.abs().amax(reduced, keepdim=True).float(), dtype, power_of_two)
    return reference_cast(w, scale, dtype), scale


def _colwise_transpose_3d(*inputs: Any) -> Tensors:
    return *_colwise_3d(*inputs), *_transpose_3d(*inputs)


def _mxfp8_dim0(x: Any, dtype: Any, scale_mode: str) -> Tensors:
    from fp8tune_kernels.quantize.mxfp8_arithmetic import reference_codes

    return reference_codes(x, dtype, scale_mode)


def _mxfp8_dim1(x: Any, dtype: Any, scale_mode: str) -> Tensors:
    """Of a matrix or of each expert's."""
    codes, scales = _mxfp8_dim0(x.mT, dtype, scale_mode)
    return _column_major(codes.mT), scales


def _rowwise_factored(x: Any, offs: Any, column_scales: Any, dtype: Any, power_of_two: bool) -> Tensors:
    import torch

    from fp8tune_kernels.quantize import rowwise_2d
    from fp8tune_kernels.quantize.factors import reference_factor

    G, K = len(offs), x.shape[1]
    group = torch.searchsorted(offs, torch.arange(len(x), device=x.device), right=True)
    factors = torch.cat([reference_factor(column_scales.view(G, K)), x.new_ones(1, K, dtype=torch.float32)])
    return rowwise_2d.reference(x.float() * factors[group], dtype, power_of_two)


def _transposed_codes(q: Any, offs: Any, shifts: Any) -> Tensors:
    """Rows of no group go to a row more, which is left out."""
    import torch

    from fp8tune_kernels.groups import padded_rows
    from fp8tune_kernels.quantize.arithmetic import reference_cast

    (M, K), G = q.shape, len(offs)
    P = padded_rows(M, G, 128)
    rows = torch.arange(M, device=q.device)
    sizes = offs.diff(prepend=offs.new_zeros(1))
    taken = ((sizes + 127) // 128).clamp(min=1) * 128
    group = torch.searchsorted(offs, rows, right=True)
    moved_by = torch.cat([(taken.cumsum(0) - taken) - (offs - sizes), offs.new_zeros(1)])
    places = torch.where(group < G, rows + moved_by[group], P)
    codes = q if shifts is None else reference_cast(q, shifts[:, None], q.dtype)
    transposed = torch.zeros(K, P + 1, dtype=torch.uint8, device=q.device)
    transposed[:, places] = codes.view(torch.uint8).t()
    return (transposed[:, :P].contiguous().view(q.dtype).t(),)


def _transposed_codes_3d(q: Any) -> Tensors:
    return (q.contiguous().mT,)


def _grouped_rows(a: Any, b: Any, offs: Any, scale_a: Any, scale_b: Any) -> Tensors:
    """What codes stand for, in bfloat16, which holds them times a power of two; torch's GEMM."""
    import torch

    if scale_a is not None:
        a, b = _decoded(a, scale_a.view(-1, 1)), _decoded(b, scale_b.view(*b.shape[:2], 1))
    rows = torch.arange(len(a), device=a.device)
    return (torch._grouped_mm(a, b.mT, offs=offs).masked_fill((rows >= offs[-1])[:, None], 0),)


def _grouped_contraction(a: Any, b: Any, offs: Any, scale_a: Any, scale_b: Any, alignment: int, added: Any) -> Tensors:
    """Multiply as above, with scales of the output's rows and columns, and nothing to add to."""
    import torch

    from fp8tune.bench.counterparts import aligned_ends

    (G,), N, K = offs.shape, a.shape[1], b.shape[1]
    if scale_a is None:
        return (torch._grouped_mm(a.t(), b, offs=offs),)
    a, b = (codes.to(torch.bfloat16) for codes in (a, b))
    out = torch._grouped_mm(a.t(), b, offs=aligned_ends(offs, alignment))
    return (_decoded(_decoded(out, scale_a.view(G, N, 1)), scale_b.view(G, 1, K)),)


def _decoded(codes: Any, scale: Any) -> Any:
    import torch

    return (codes.float() * scale.reciprocal()).to(torch.bfloat16)


def _column_major(codes: Any) -> Any:
    """In the layout of a kernel's output wherever M is a multiple of 16; else the columns are not padded."""
    return codes.mT.contiguous().mT


def _gathered_rows(a: Any, b: Any, offs: Any, tokens: Any, scale_a: Any, scale_b: Any) -> Tensors:
    return _grouped_rows(_gathered(a, tokens), b, offs, None if scale_a is None else scale_a.view(-1)[tokens], scale_b)


def _gathered_transpose(q: Any, offs: Any, tokens: Any, shifts: Any) -> Tensors:
    return _transposed_codes(_gathered(q, tokens), offs, shifts)


def _gathered(rows: Any, tokens: Any) -> Any:
    """Rows by number, as bytes: torch gathers no FP8."""
    import torch

    return rows[tokens] if rows.itemsize > 1 else rows.view(torch.uint8)[tokens].view(rows.dtype)


_EXPRESSIONS: dict[str, Callable[..., Tensors]] = {
    "colwise": _colwise,
    "rowwise": _rowwise,
    "colwise-dual": _colwise_dual,
    "rowwise-colwise": _rowwise_colwise,
    "colwise-3d": _colwise_3d,
    "transpose-3d-atomic": _transpose_3d,
    "transpose-3d-reduction": _transpose_3d,
    "colwise-transpose-3d": _colwise_transpose_3d,
    "mxfp8-dim0": _mxfp8_dim0,
    "mxfp8-dim1": _mxfp8_dim1,
    "mxfp8-dim1-3d": _mxfp8_dim1,
    "mxfp8-dim1-3d-via-2d": _mxfp8_dim1,
    "rowwise-factored": _rowwise_factored,
    "transposed-codes": _transposed_codes,
    "transposed-codes-3d": _transposed_codes_3d,
    "grouped-rows": _grouped_rows,
    "grouped-contraction": _grouped_contraction,
    "gathered-rows": _gathered_rows,
    "gathered-transpose": _gathered_transpose,
}
"""Kernels whose reference has a loop, copies into a layout step by step, or names E8M0."""
