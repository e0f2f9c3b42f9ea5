"""Time single kernels beside those of torchao, and its or torch's GEMMs, after a comparison of outputs.

python -m benchmarks.casts --kernel rowwise-2d colwise --shapes starting-line

torchao's MXFP8 kernels need hardware that converts to E8M0. Elsewhere it quantizes in plain torch, under
``torch.compile``.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.contenders import OURS, Call, import_from, measured, report
from fp8tune.measure import edges
from fp8tune.measure.comparing import Rule
from fp8tune.output.text import pairs
from fp8tune.plan import problems, shapes
from fp8tune.records import Problem
from fp8tune_kernels import catalog
from fp8tune_kernels.arches import MXFP8_GEMM_ARCHES
from fp8tune_kernels.runtime.lookup import running_arch
from fp8tune_kernels.spec import KernelSpec

Tensors = tuple[Any, ...]
Read = Callable[[Tensors, Tensors], Tensors]


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


_ROWWISE, _JAGGED = "float8_rowwise.triton_fp8_", "jagged_float8_scales.triton_fp8_per_group_"
FUNCTIONS: dict[str, tuple[str, Read]] = {
    "rowwise-2d": (f"{_ROWWISE}rowwise_2d_scale_and_cast", _as_is),
    "colwise-3d": (f"{_ROWWISE}colwise_3d_scale_and_cast", _as_is),
    "transpose-3d-atomic": (f"{_ROWWISE}rowwise_3d_transpose_rhs", _scale_rows),
    "transpose-3d-reduction": (f"{_ROWWISE}rowwise_3d_transpose_rhs_fused_reduction", _scale_rows),
    "colwise": (f"{_JAGGED}colwise_scales", _rows_of_groups),
    "rowwise": (f"{_JAGGED}rowwise_scales", _columns_of_groups),
    "colwise-dual": (f"{_JAGGED}colwise_scales_dual", _rows_of_groups),
}
MXFP8 = ("mxfp8-dim0", "mxfp8-dim1", "mxfp8-dim1-3d", "mxfp8-dim1-3d-via-2d")
GEMMS = ("grouped-rows", "grouped-contraction")


def of_torchao(kernel: str, inputs: Tensors) -> Call:
    """Return torchao's counterpart of a kernel on its inputs; outputs have our order and shapes."""
    if kernel in GEMMS:
        return _gemm(kernel, inputs)
    if kernel in MXFP8:
        return _mxfp8(kernel, inputs)
    path, read = FUNCTIONS[kernel]
    module, _, name = path.partition(".")
    function = import_from(f"torchao.prototype.moe_training.kernels.{module}", name)
    return Call(functools.partial(function, *inputs), read=lambda results: read(tuple(results), inputs))


def _mxfp8(kernel: str, inputs: Tensors) -> Call:
    x, _, scale_mode = inputs
    is_native, along_rows = running_arch(x.device) in (*MXFP8_GEMM_ARCHES, "gfx950"), kernel == "mxfp8-dim0"
    if is_native and kernel == "mxfp8-dim1-3d":
        quantize = import_from("torchao.prototype.moe_training.kernels.mxfp8", "mxfp8_quantize_cuda_3d")
        call = functools.partial(quantize, x, scaling_mode=scale_mode, blocked_scale_output=False)
        return Call(call, read=lambda results: (results[0], results[1].mT))
    if is_native:
        name, mode = "triton_to_mxfp8_dim0" if along_rows else "triton_to_mxfp8_dim1", scale_mode
        quantize = import_from("torchao.prototype.mx_formats.kernels", name)
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

    is_via_2d = kernel == "mxfp8-dim1-3d-via-2d"
    launch = via_2d if is_via_2d else functools.partial(along, x)

    def read(results: Tensors) -> Tensors:
        if not is_via_2d:
            return tuple(results)
        return results[0], results[1].unflatten(1, (len(x), -1)).transpose(0, 1)  # (K, E * N / 32), ours (E, K, N / 32)

    return Call(launch if is_native else torch.compile(launch, fullgraph=True, dynamic=False), read=read)


def _gemm(kernel: str, inputs: Tensors) -> Call:
    """torch's grouped GEMM, which torchao calls. Its scales are the reciprocals of ours, inverted within the time."""
    a, b, offs, scale_a, scale_b, *rest = inputs
    is_contraction = kernel == "grouped-contraction"
    first, second, ends = (a.t(), b, _aligned_ends(offs, rest[0])) if is_contraction else (a, b.mT, offs)

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
    """Return group ends: each group starts at a multiple of the alignment, and has at least as many rows."""
    if alignment == 1:
        return offs
    sizes = torch.diff(offs, prepend=torch.zeros_like(offs[:1]))
    pieces = torch.div(sizes + alignment - 1, alignment, rounding_mode="floor").clamp(min=1)
    return (pieces * alignment).cumsum(0, dtype=torch.int32)


def fault(spec: KernelSpec, outputs: Tensors, expected: Tensors) -> str:
    """Return how outputs differ by the kernel's own check. E8M0 scales may come as uint8."""
    rule = Rule.from_spec(spec)
    for number, (output, right) in enumerate(zip(outputs, expected, strict=True)):
        if right.dtype == torch.float8_e8m0fnu and output.dtype == torch.uint8:
            right = right.view(torch.uint8)
        if (output.shape, output.dtype) != (right.shape, right.dtype) or rule.difference(output, right):
            return f"wrong output {number}"
    return ""


def rows(spec: KernelSpec, problem: Problem, device: str) -> Any:
    """Return what was measured of one size."""
    inputs = spec.inputs(problem, device)
    contenders = {OURS: lambda: Call(lambda: spec(*inputs)), "torchao": lambda: of_torchao(spec.name, inputs)}  # type: ignore[operator]
    values = edges.exact_values(spec, problem, inputs)
    return measured(contenders, lambda: spec.reference(*inputs), functools.partial(fault, spec), values)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table for each kernel."""
    kernels = (*FUNCTIONS, *MXFP8, *GEMMS)
    parser = argparse.ArgumentParser(prog="benchmarks.casts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kernel", nargs="+", default=kernels, choices=kernels)
    parser.add_argument("--shapes", default="starting-line", help="shape set or TOML file")
    options = parser.parse_args(arguments)
    device, code = "cuda" if torch.cuda.is_available() else "cpu", 0
    selection = shapes.parse(options.shapes)
    for kernel in options.kernel:
        spec = catalog.load(kernel)
        sizes = problems.problems(spec, selection.rows, selection.settings, size=selection.size)
        code |= report(kernel, [(f"{pairs(size.shape)} {size.in_dtype}", rows(spec, size, device)) for size in sizes])
    return code


if __name__ == "__main__":
    sys.exit(main())
