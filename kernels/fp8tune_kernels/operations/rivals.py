"""Other implementations of single kernels, for ``fp8tune bench --kernel``: torchao's functions, and plain torch.

torchao's MXFP8 kernels need hardware that converts to E8M0. Elsewhere it quantizes in plain torch, under
``torch.compile``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..arches import MXFP8_GEMM_ARCHES
from ..quantize import rowwise_2d
from ..quantize.arithmetic import reference_cast, reference_scale
from ..quantize.factors import reference_factor
from ..quantize.mxfp8_arithmetic import reference_codes
from ..runtime.lookup import running_arch
from ..spec import KernelSpec
from .operation import Call, Unavailable, import_from

Tensors = tuple[Any, ...]
Function = Callable[..., Any]


def rivals(spec: KernelSpec) -> Mapping[str, Callable[[Tensors], Call]]:
    """Return name -> what makes a call of a kernel's inputs."""
    return {
        "torch.compile": lambda inputs: _of_compiler(spec, inputs),
        "torchao": lambda inputs: _of_torchao(spec.name, inputs),
    }


# torch.compile


def compiled(function: Function) -> Function:
    """Compile a function as one graph, for the sizes that it gets."""
    return torch.compile(function, fullgraph=True, dynamic=False)


def _of_compiler(spec: KernelSpec, inputs: Tensors) -> Call:
    if spec.check != "exact" or spec.recorded:
        raise Unavailable(f"torch.compile has no formula of {spec.name}")
    torch._dynamo.reset()  # no limit of recompilations, no dynamic sizes
    return Call(functools.partial(compiled(_FORMULAS.get(spec.name, spec.reference)), *inputs))


def _by_rows(
    x: Tensor, offs: Tensor, dtype: torch.dtype, power_of_two: bool, alignment: int = 1
) -> tuple[Tensor, Tensor]:
    """Quantize with a scale for each column of each group of rows; without a loop, unlike the references."""
    (M, K), G = x.shape, offs.shape[0]
    rows = torch.arange(M, dtype=torch.int32, device=x.device)
    group = torch.searchsorted(offs, rows, right=True)  # G for rows of no group
    amax = torch.zeros(G + 1, K, dtype=torch.float32, device=x.device)
    amax = amax.scatter_reduce(0, group[:, None].expand(M, K), x.abs().float(), "amax")
    scale = reference_scale(amax[:G], dtype, power_of_two)
    codes = reference_cast(x, scale[group.clamp(max=G - 1)], dtype).view(torch.uint8)
    return codes.masked_fill((group == G)[:, None], 0).view(dtype), scale.flatten()


def _colwise(x: Tensor, offs: Tensor, *options: Any) -> Tensors:
    codes, scales = _by_rows(x, offs, *options)
    return _column_major(codes), scales


def _by_expert(w: Tensor, dim: int, dtype: torch.dtype, power_of_two: bool) -> tuple[Tensor, Tensor]:
    scale = reference_scale(w.abs().amax(dim, keepdim=True).float(), dtype, power_of_two)
    return reference_cast(w, scale, dtype), scale


def _colwise_3d(w: Tensor, *options: Any) -> Tensors:
    codes, scale = _by_expert(w, 1, *options)
    return _column_major(codes), scale


def _transpose_3d(w: Tensor, *options: Any) -> Tensors:
    codes, scale = _by_expert(w, 2, *options)
    return codes.contiguous().mT, scale.mT


def _mxfp8_dim1(x: Tensor, *options: Any) -> Tensors:
    codes, scales = reference_codes(x.mT, *options)
    return _column_major(codes.mT), scales


def _rowwise(x: Tensor, *rest: Any) -> Tensors:
    codes, scales = _by_rows(x.t(), *rest)
    return codes.t().contiguous(), scales


def _rowwise_factored(x: Tensor, offs: Tensor, column_scales: Tensor, *options: Any) -> Tensors:
    group = torch.searchsorted(offs, torch.arange(len(x), device=x.device), right=True)
    factors = reference_factor(column_scales.view(len(offs), -1))
    factors = torch.cat([factors, x.new_ones(1, x.shape[1], dtype=torch.float32)])
    return rowwise_2d.SPEC.reference(x.float() * factors[group], *options)


def _column_major(codes: Tensor) -> Tensor:
    return codes.mT.contiguous().mT


_FORMULAS: dict[str, Function] = {
    "colwise": _colwise,
    "rowwise": _rowwise,
    "colwise-dual": lambda x, y, *rest: (*_colwise(x, *rest), *_colwise(y, *rest)),
    "colwise-3d": _colwise_3d,
    "transpose-3d-atomic": _transpose_3d,
    "transpose-3d-reduction": _transpose_3d,
    "mxfp8-dim0": reference_codes,
    "mxfp8-dim1": _mxfp8_dim1,
    "mxfp8-dim1-3d": _mxfp8_dim1,
    "mxfp8-dim1-3d-via-2d": _mxfp8_dim1,
    "rowwise-factored": _rowwise_factored,
    "transposed-codes-3d": lambda q: (q.contiguous().mT,),
}
"""Kernels whose reference has a loop, copies into a layout step by step, or names E8M0."""


# torchao: what it returns is read in the order and shapes of our outputs


def _of_torchao(kernel: str, inputs: Tensors) -> Call:
    if kernel in ("grouped-rows", "grouped-contraction"):
        return _gemm(kernel, inputs)
    if kernel.startswith("mxfp8"):
        return _mxfp8(kernel, inputs)
    if kernel not in _FUNCTIONS:
        raise Unavailable(f"torchao has no counterpart of {kernel}")
    module, name, read = _FUNCTIONS[kernel]
    function = import_from(f"torchao.prototype.moe_training.kernels.{module}", name)
    return Call(functools.partial(function, *inputs), read=lambda results: read(tuple(results), inputs))


def _as_is(results: Tensors, inputs: Tensors) -> Tensors:
    return results


def _rows_of_groups(results: Tensors, inputs: Tensors) -> Tensors:
    """Fill rows of no group, which torchao leaves unwritten and no GEMM reads, with zeros as ours."""
    for codes in results[::2]:
        codes[int(inputs[-3][-1]) :].zero_()
    return results


def _columns_of_groups(results: Tensors, inputs: Tensors) -> Tensors:
    codes, scales = _rows_of_groups((results[0].t(), results[1]), inputs)
    return codes.t(), scales


def _scale_rows(results: Tensors, inputs: Tensors) -> Tensors:
    return results[0], results[1].unsqueeze(1)  # (E, K), ours (E, 1, K)


_FUNCTIONS: dict[str, tuple[str, str, Callable[[Tensors, Tensors], Tensors]]] = {
    "rowwise-2d": ("float8_rowwise", "triton_fp8_rowwise_2d_scale_and_cast", _as_is),
    "colwise-3d": ("float8_rowwise", "triton_fp8_colwise_3d_scale_and_cast", _as_is),
    "transpose-3d-atomic": ("float8_rowwise", "triton_fp8_rowwise_3d_transpose_rhs", _scale_rows),
    "transpose-3d-reduction": (
        "float8_rowwise",
        "triton_fp8_rowwise_3d_transpose_rhs_fused_reduction",
        _scale_rows,
    ),
    "colwise": ("jagged_float8_scales", "triton_fp8_per_group_colwise_scales", _rows_of_groups),
    "rowwise": ("jagged_float8_scales", "triton_fp8_per_group_rowwise_scales", _columns_of_groups),
    "colwise-dual": ("jagged_float8_scales", "triton_fp8_per_group_colwise_scales_dual", _rows_of_groups),
}


def _mxfp8(kernel: str, inputs: Tensors) -> Call:
    x, _, scale_mode = inputs
    is_native = running_arch(x.device) in (*MXFP8_GEMM_ARCHES, "gfx950")
    if is_native and kernel == "mxfp8-dim1-3d":
        quantize = import_from("torchao.prototype.moe_training.kernels.mxfp8", "mxfp8_quantize_cuda_3d")
        call = functools.partial(quantize, x, scaling_mode=scale_mode, blocked_scale_output=False)
        return Call(call, read=lambda results: (results[0], results[1].mT))
    along_rows = kernel == "mxfp8-dim0"
    if is_native:
        name = "triton_to_mxfp8_dim0" if along_rows else "triton_to_mxfp8_dim1"
        quantize, mode = import_from("torchao.prototype.mx_formats.kernels", name), scale_mode
    else:
        quantize = import_from("torchao.prototype.mx_formats.mx_tensor", "to_mx")
        mode = import_from("torchao.prototype.mx_formats.config", "ScaleCalculationMode")(scale_mode)

    def along(x: Tensor) -> Tensors:
        if is_native:
            return tuple(quantize(x, scaling_mode=mode))
        scales, codes = quantize(x if along_rows else x.mT.contiguous(), torch.float8_e4m3fn, 32, mode)
        return (codes if along_rows else codes.mT), scales

    def via_2d() -> Tensors:
        """Quantize all experts as one (E*N, K) matrix, then part them: (E, N, K) with strides (N*K, 1, N)."""
        E, N, K = x.shape
        codes, scales = along(x.view(E * N, K))
        return codes.t().view(K, E, N).transpose(0, 1).contiguous().transpose(1, 2), scales

    launch = via_2d if kernel == "mxfp8-dim1-3d-via-2d" else functools.partial(along, x)

    def read(results: Tensors) -> Tensors:
        if launch is not via_2d:
            return tuple(results)
        return results[0], results[1].unflatten(1, (len(x), -1)).transpose(0, 1)  # (K, E * N / 32), ours (E, K, N / 32)

    return Call(launch if is_native else compiled(launch), read=read)


def _gemm(kernel: str, inputs: Tensors) -> Call:
    """torch's grouped GEMM, which torchao calls. Its scales are the reciprocals of ours, inverted within the time."""
    a, b, offs, scale_a, scale_b = inputs[:5]
    is_contraction = kernel == "grouped-contraction"
    first, second = (a.t(), b) if is_contraction else (a, b.mT)
    ends = _aligned_ends(offs, inputs[5]) if is_contraction else offs

    def launch() -> Tensor:
        if scale_a is None:
            return torch._grouped_mm(first, second, offs=ends)
        inverse_a, inverse_b = torch._foreach_reciprocal([scale_a, scale_b])
        options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        return torch._scaled_grouped_mm(first, second, inverse_a, inverse_b, offs=ends, **options)

    def read(out: Tensor) -> Tensors:
        if not is_contraction:
            out[int(offs[-1]) :] = 0  # rows of no expert
        return (out,)

    return Call(launch, read=read)


def _aligned_ends(offs: Tensor, alignment: int) -> Tensor:
    """Return the ends of groups that begin at multiples of an alignment and have at least one piece of it."""
    if alignment == 1:
        return offs
    sizes = torch.diff(offs, prepend=torch.zeros_like(offs[:1]))
    pieces = torch.div(sizes + alignment - 1, alignment, rounding_mode="floor").clamp(min=1)
    return (pieces * alignment).cumsum(0, dtype=torch.int32)
