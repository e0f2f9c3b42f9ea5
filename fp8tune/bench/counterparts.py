"""What torchao has for each kernel: the functions that ``fp8tune bench`` times beside ours, and how outputs are read.
Of the grouped GEMMs it is torch's own, which torchao calls.

Its MXFP8 kernels are for GPUs whose hardware knows E8M0; on others torchao quantizes in plain torch, under
``torch.compile``. Its scales are what values are multiplied by, as ours are; some have another shape.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fp8tune.errors import MachineError

Function = Callable[..., Any]
Inputs = tuple[Any, ...]
"""Of our spec."""
Outputs = tuple[Any, ...]


@dataclass(frozen=True)
class Implementation:
    """What is timed, and how what it returns becomes the outputs of our spec."""

    launch: Callable[[], Any]
    read: Callable[[Any], Outputs] = tuple


@dataclass(frozen=True)
class Counterpart:
    """A function of torchao 0.18.0, or of torch."""

    module: str
    name: str
    call: Callable[[Function, Inputs], Any] = lambda function, inputs: function(*inputs)
    read: Callable[[Outputs, Inputs], Outputs] = lambda outputs, inputs: tuple(outputs)
    """Its outputs in the order and shapes of our spec's; for the check alone."""


# How outputs are read


def _rows_of_groups(outputs: Outputs, inputs: Inputs) -> Outputs:
    """torchao leaves codes of rows that belong to no group unwritten, and no GEMM reads them; ours are zeros."""
    offs = inputs[-3]
    for codes in outputs[::2]:
        codes[int(offs[-1]) :].zero_()
    return tuple(outputs)


def _columns_of_groups(outputs: Outputs, inputs: Inputs) -> Outputs:
    """The same where groups are columns."""
    return _rows_of_groups((outputs[0].t(), outputs[1]), inputs)[0].t(), outputs[1]


def _scale_rows(outputs: Outputs, inputs: Inputs) -> Outputs:
    """Its scales are ``(E, K)``, ours ``(E, 1, K)``."""
    return outputs[0], outputs[1].unsqueeze(1)


def _scales_parted(outputs: Outputs, inputs: Inputs) -> Outputs:
    """Its scales are those of one matrix, ``(K, E * N / 32)``, ours ``(E, K, N / 32)``."""
    codes, scales = outputs
    return codes, scales.unflatten(1, (len(codes), -1)).transpose(0, 1)


# How a function of MXFP8 is called; it writes e4m3fn, whatever the device


def _mx(function: Function, inputs: Inputs) -> Any:
    return function(inputs[0], scaling_mode=inputs[2])


def _mx_3d(function: Function, inputs: Inputs) -> Any:
    return function(inputs[0], scaling_mode=inputs[2], blocked_scale_output=False)


def _mx_3d_via_2d(function: Function, inputs: Inputs) -> Any:
    """All experts as one ``(E*N, K)`` matrix, then a copy that parts them: ``(E, N, K)``, strides ``(N*K, 1, N)``."""
    w, _, scale_mode = inputs
    E, N, K = w.shape
    codes, scales = function(w.view(E * N, K), scaling_mode=scale_mode)
    return codes.t().view(K, E, N).transpose(0, 1).contiguous().transpose(1, 2), scales


def _to_mx(function: Function, inputs: Inputs) -> Any:
    """Codes and scales along the last dim, row-major, in plain torch."""
    import torch
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    x, _, scale_mode = inputs
    scales, codes = function(x, torch.float8_e4m3fn, 32, ScaleCalculationMode(scale_mode))
    return codes, scales


def _to_mx_dim1(function: Function, inputs: Inputs) -> Any:
    """Of a matrix or of each expert's."""
    codes, scales = _to_mx(function, (inputs[0].mT.contiguous(), *inputs[1:]))
    return codes.mT, scales


def _to_mx_via_2d(function: Function, inputs: Inputs) -> Any:
    dtype = inputs[1]
    return _mx_3d_via_2d(lambda flat, scaling_mode: _to_mx_dim1(function, (flat, dtype, scaling_mode)), inputs)


# The grouped GEMMs: scales are what ours are the reciprocals of, inverted as a step inverts them, within the time


def _rows(function: Function, inputs: Inputs) -> Any:
    a, b, offs, scale_a, scale_b = inputs
    return _scaled(function, a, b.mT, scale_a, scale_b, offs)


def _contraction(function: Function, inputs: Inputs) -> Any:
    a, b, offs, scale_a, scale_b, alignment, _ = inputs
    return _scaled(function, a.t(), b, scale_a, scale_b, aligned_ends(offs, alignment))


def _scaled(function: Function, a: Any, b: Any, scale_a: Any, scale_b: Any, offs: Any) -> Any:
    import torch

    inverse = torch._foreach_reciprocal([scale_a, scale_b])
    return function(a, b, *inverse, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=True)


def _rows_in_bfloat16(function: Function, inputs: Inputs) -> Any:
    return function(inputs[0], inputs[1].mT, offs=inputs[2])


def _contraction_in_bfloat16(function: Function, inputs: Inputs) -> Any:
    return function(inputs[0].t(), inputs[1], offs=inputs[2])


def aligned_ends(offs: Any, alignment: int) -> Any:
    """Where groups end whose rows begin at multiples of an alignment, each with a piece at least."""
    import torch

    if alignment == 1:
        return offs
    sizes = torch.diff(offs, prepend=torch.zeros_like(offs[:1]))
    pieces = torch.div(sizes + alignment - 1, alignment, rounding_mode="floor").clamp(min=1)
    return (pieces * alignment).cumsum(0, dtype=torch.int32)


def _rows_of_experts(output: Any, inputs: Inputs) -> Outputs:
    """torch leaves rows that belong to no group unwritten; ours are zeros."""
    output[int(inputs[2][-1]) :] = 0
    return (output,)


_ROWWISE = "torchao.prototype.moe_training.kernels.float8_rowwise"
_JAGGED = "torchao.prototype.moe_training.kernels.jagged_float8_scales"
_MX = "torchao.prototype.mx_formats.kernels"
_MX_MOE = "torchao.prototype.moe_training.kernels.mxfp8"
_TO_MX = ("torchao.prototype.mx_formats.mx_tensor", "to_mx")

COUNTERPARTS: dict[str, Counterpart] = {
    "rowwise-2d": Counterpart(_ROWWISE, "triton_fp8_rowwise_2d_scale_and_cast"),
    "colwise-3d": Counterpart(_ROWWISE, "triton_fp8_colwise_3d_scale_and_cast"),
    "transpose-3d-atomic": Counterpart(_ROWWISE, "triton_fp8_rowwise_3d_transpose_rhs", read=_scale_rows),
    "transpose-3d-reduction": Counterpart(
        _ROWWISE, "triton_fp8_rowwise_3d_transpose_rhs_fused_reduction", read=_scale_rows
    ),
    "colwise": Counterpart(_JAGGED, "triton_fp8_per_group_colwise_scales", read=_rows_of_groups),
    "rowwise": Counterpart(_JAGGED, "triton_fp8_per_group_rowwise_scales", read=_columns_of_groups),
    "colwise-dual": Counterpart(_JAGGED, "triton_fp8_per_group_colwise_scales_dual", read=_rows_of_groups),
    "mxfp8-dim0": Counterpart(_MX, "triton_to_mxfp8_dim0", _mx),
    "mxfp8-dim1": Counterpart(_MX, "triton_to_mxfp8_dim1", _mx),
    "mxfp8-dim1-3d": Counterpart(
        _MX_MOE, "mxfp8_quantize_cuda_3d", _mx_3d, lambda outputs, _: (outputs[0], outputs[1].mT)
    ),
    "mxfp8-dim1-3d-via-2d": Counterpart(_MX, "triton_to_mxfp8_dim1", _mx_3d_via_2d, _scales_parted),
}
"""Kernel -> what torchao has for it."""
GEMMS: dict[str, tuple[Counterpart, Counterpart]] = {
    "grouped-rows": (
        Counterpart("torch", "_scaled_grouped_mm", _rows, _rows_of_experts),
        Counterpart("torch", "_grouped_mm", _rows_in_bfloat16, _rows_of_experts),
    ),
    "grouped-contraction": (
        Counterpart("torch", "_scaled_grouped_mm", _contraction, lambda output, _: (output,)),
        Counterpart("torch", "_grouped_mm", _contraction_in_bfloat16, lambda output, _: (output,)),
    ),
}
"""The same of the grouped GEMMs, in FP8 and in bfloat16."""
TWO_KERNELS = {
    "rowwise-colwise": ("rowwise-2d", "colwise"),
    "colwise-transpose-3d": ("colwise-3d", "transpose-3d-atomic"),
}
"""What torchao has no one kernel for -> the two whose counterparts are called one after the other."""
IN_TORCH: dict[str, Counterpart] = {
    "mxfp8-dim0": Counterpart(*_TO_MX, _to_mx),
    "mxfp8-dim1": Counterpart(*_TO_MX, _to_mx_dim1),
    "mxfp8-dim1-3d": Counterpart(*_TO_MX, _to_mx_dim1),
    "mxfp8-dim1-3d-via-2d": Counterpart(*_TO_MX, _to_mx_via_2d, _scales_parted),
}
"""The same where the GPU has no E8M0: what is called is compiled as a whole."""


def counterpart(kernel: str, inputs: Inputs, is_e8m0_known: bool | None = None) -> Implementation:
    """torchao's counterpart of a kernel on the inputs of its spec.

    ``is_e8m0_known``: whether the hardware converts to E8M0; None: this GPU's. Raises MachineError where torchao is not
    installed, cannot be imported or has none.
    """
    if kernel in TWO_KERNELS:
        x, *offs, dtype, mode = inputs
        first, second = TWO_KERNELS[kernel]
        one, other = counterpart(first, (x, dtype, mode)), counterpart(second, (x, *offs, dtype, mode))
        return Implementation(
            lambda: (one.launch(), other.launch()), lambda outputs: (*one.read(outputs[0]), *other.read(outputs[1]))
        )
    if kernel in GEMMS:
        gemm = GEMMS[kernel][inputs[0].itemsize > 1]
        multiply = of_torchao(gemm.module, gemm.name)
        return Implementation(lambda: gemm.call(multiply, inputs), lambda output: gemm.read(output, inputs))
    if kernel not in COUNTERPARTS:
        raise MachineError(f"torchao has no counterpart of {kernel}")
    in_torch = kernel in IN_TORCH and not (_knows_e8m0() if is_e8m0_known is None else is_e8m0_known)
    theirs = (IN_TORCH if in_torch else COUNTERPARTS)[kernel]
    function = of_torchao(theirs.module, theirs.name)

    def launch() -> Any:
        return theirs.call(function, inputs)

    return Implementation(compiled(launch) if in_torch else launch, lambda outputs: theirs.read(outputs, inputs))


def of_torchao(module: str, name: str) -> Function:
    """A function of torchao's. Raises MachineError where it cannot be imported."""
    try:
        function: Function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torchao":
            raise MachineError("torchao is not installed: pip install 'fp8tune[bench]'") from None
        raise MachineError(f"torchao's {name} cannot be imported: {error}") from None
    return function


def compiled(call: Callable[[], Any]) -> Callable[[], Any]:
    """A call under ``torch.compile``, for the sizes it has and as one graph: what breaks it is an error."""
    import torch
    from torch._inductor import config as inductor

    logging.disable(logging.CRITICAL)  # a refusal comes with pages of its intermediate code
    inductor.compile_threads = 1  # a kernel or two, in one of the processes that share the cores
    whole: Callable[[], Any] = torch.compile(call, fullgraph=True, dynamic=False)
    return whole


def _knows_e8m0() -> bool:
    """True if the hardware converts to E8M0: NVIDIA from Blackwell on, AMD's gfx950."""
    import torch

    properties = torch.cuda.get_device_properties()
    if torch.version.hip:
        return str(properties.gcnArchName).startswith("gfx950")
    return bool(properties.major >= 10)
