"""What torchao has for each kernel: the functions that ``fp8tune bench`` imports and times beside ours, and how their
outputs are read.

Its FP8 functions take what ours take, in the same order; those for MXFP8 differ in their arguments. Its MXFP8 kernels
are for GPUs whose hardware knows E8M0; on others torchao quantizes in plain torch, under ``torch.compile``. Its scales
are what values are multiplied by, as ours are; some have another shape.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fp8tune.errors import MachineError

Function = Callable[..., Any]
Outputs = tuple[Any, ...]
Call = Callable[[Function, tuple[Any, ...]], Any]
"""(torchao's function, the inputs of our spec) -> its outputs."""
Read = Callable[[Outputs, tuple[Any, ...]], Outputs]
"""(its outputs, the inputs of our spec) -> the same in the order and shapes of our spec's outputs; for the check alone.
"""


@dataclass(frozen=True)
class Implementation:
    """What is timed, and how what it returns becomes the outputs of our spec."""

    launch: Callable[[], Any]
    read: Callable[[Any], Outputs] = tuple


def _as_written(outputs: Outputs, inputs: tuple[Any, ...]) -> Outputs:
    return tuple(outputs)


def _rows_of_groups(outputs: Outputs, inputs: tuple[Any, ...]) -> Outputs:
    """torchao leaves codes of rows that belong to no group unwritten, and no GEMM reads them; ours are zeros."""
    offs = inputs[-3]
    for codes in outputs[::2]:
        codes[int(offs[-1]) :].zero_()
    return tuple(outputs)


def _columns_of_groups(outputs: Outputs, inputs: tuple[Any, ...]) -> Outputs:
    """The same where groups are columns."""
    return _rows_of_groups((outputs[0].t(), outputs[1]), inputs)[0].t(), outputs[1]


def _scale_rows(outputs: Outputs, inputs: tuple[Any, ...]) -> Outputs:
    """Its scales are ``(E, K)``, ours ``(E, 1, K)``."""
    codes, scales = outputs
    return codes, scales.unsqueeze(1)


def _scale_columns(outputs: Outputs, inputs: tuple[Any, ...]) -> Outputs:
    """Its scales are ``(E, N / 32, K)``, ours ``(E, K, N / 32)``."""
    codes, scales = outputs
    return codes, scales.mT


def _scales_parted(outputs: Outputs, inputs: tuple[Any, ...]) -> Outputs:
    """Its scales are those of one matrix, ``(K, E * N / 32)``, ours ``(E, K, N / 32)``."""
    codes, scales = outputs
    return codes, scales.unflatten(1, (len(codes), -1)).transpose(0, 1)


@dataclass(frozen=True)
class Counterpart:
    """A function of torchao 0.18.0."""

    module: str
    name: str
    call: Call
    read: Read = _as_written


def _as_given(function: Function, inputs: tuple[Any, ...]) -> Any:
    return function(*inputs)


def _mx(function: Function, inputs: tuple[Any, ...]) -> Any:
    x, _, scale_mode = inputs  # it writes e4m3fn, whatever the device
    return function(x, scaling_mode=scale_mode)


def _mx_3d(function: Function, inputs: tuple[Any, ...]) -> Any:
    w, _, scale_mode = inputs
    return function(w, scaling_mode=scale_mode, blocked_scale_output=False)


def _mx_3d_via_2d(function: Function, inputs: tuple[Any, ...]) -> Any:
    """All experts as one ``(E*N, K)`` matrix, then a copy that parts them: ``(E, N, K)``, strides ``(N*K, 1, N)``."""
    w, _, scale_mode = inputs
    E, N, K = w.shape
    codes, scales = function(w.view(E * N, K), scaling_mode=scale_mode)
    parted = codes.t().view(K, E, N).transpose(0, 1).contiguous()
    return parted.transpose(1, 2), scales


def _to_mx(function: Function, x: Any, scale_mode: str) -> tuple[Any, Any]:
    """Codes and scales along the last dim of ``x``, row-major, in plain torch."""
    import torch
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    scales, codes = function(x, torch.float8_e4m3fn, 32, ScaleCalculationMode(scale_mode))
    return codes, scales


def _to_mx_dim0(function: Function, inputs: tuple[Any, ...]) -> Any:
    x, _, scale_mode = inputs
    return _to_mx(function, x, scale_mode)


def _to_mx_dim1(function: Function, inputs: tuple[Any, ...]) -> Any:
    """Of a matrix or of each expert's."""
    x, _, scale_mode = inputs
    codes, scales = _to_mx(function, x.mT.contiguous(), scale_mode)
    return codes.mT, scales


def _to_mx_via_2d(function: Function, inputs: tuple[Any, ...]) -> Any:
    w, dtype, scale_mode = inputs
    return _mx_3d_via_2d(
        lambda flat, scaling_mode: _to_mx_dim1(function, (flat, dtype, scaling_mode)), (w, dtype, scale_mode)
    )


_ROWWISE = "torchao.prototype.moe_training.kernels.float8_rowwise"
_JAGGED = "torchao.prototype.moe_training.kernels.jagged_float8_scales"
_MX = "torchao.prototype.mx_formats.kernels"
_MX_MOE = "torchao.prototype.moe_training.kernels.mxfp8"

COUNTERPARTS: dict[str, Counterpart] = {
    "rowwise-2d": Counterpart(_ROWWISE, "triton_fp8_rowwise_2d_scale_and_cast", _as_given),
    "colwise-3d": Counterpart(_ROWWISE, "triton_fp8_colwise_3d_scale_and_cast", _as_given),
    "transpose-3d-atomic": Counterpart(_ROWWISE, "triton_fp8_rowwise_3d_transpose_rhs", _as_given, _scale_rows),
    "transpose-3d-reduction": Counterpart(
        _ROWWISE, "triton_fp8_rowwise_3d_transpose_rhs_fused_reduction", _as_given, _scale_rows
    ),
    "colwise": Counterpart(_JAGGED, "triton_fp8_per_group_colwise_scales", _as_given, _rows_of_groups),
    "rowwise": Counterpart(_JAGGED, "triton_fp8_per_group_rowwise_scales", _as_given, _columns_of_groups),
    "colwise-dual": Counterpart(_JAGGED, "triton_fp8_per_group_colwise_scales_dual", _as_given, _rows_of_groups),
    "mxfp8-dim0": Counterpart(_MX, "triton_to_mxfp8_dim0", _mx),
    "mxfp8-dim1": Counterpart(_MX, "triton_to_mxfp8_dim1", _mx),
    "mxfp8-dim1-3d": Counterpart(_MX_MOE, "mxfp8_quantize_cuda_3d", _mx_3d, _scale_columns),
    "mxfp8-dim1-3d-via-2d": Counterpart(_MX, "triton_to_mxfp8_dim1", _mx_3d_via_2d, _scales_parted),
}
"""Kernel -> what torchao has for it."""


TWO_KERNELS = {
    "rowwise-colwise": ("rowwise-2d", "colwise"),
    "colwise-transpose-3d": ("colwise-3d", "transpose-3d-atomic"),
}
"""What torchao has no one kernel for -> the two whose counterparts are called one after the other."""

_TO_MX = ("torchao.prototype.mx_formats.mx_tensor", "to_mx")

IN_TORCH: dict[str, Counterpart] = {
    "mxfp8-dim0": Counterpart(*_TO_MX, _to_mx_dim0),
    "mxfp8-dim1": Counterpart(*_TO_MX, _to_mx_dim1),
    "mxfp8-dim1-3d": Counterpart(*_TO_MX, _to_mx_dim1),
    "mxfp8-dim1-3d-via-2d": Counterpart(*_TO_MX, _to_mx_via_2d, _scales_parted),
}
"""The same where the GPU has no E8M0: what is called is compiled as a whole."""


def counterpart(kernel: str, inputs: tuple[Any, ...]) -> Implementation:
    """torchao's counterpart of a kernel on the inputs of its spec.

    Raises MachineError where torchao is not installed, cannot be imported or has none.
    """
    if kernel in TWO_KERNELS:
        x, *offs, dtype, mode = inputs
        first, second = TWO_KERNELS[kernel]
        one, other = counterpart(first, (x, dtype, mode)), counterpart(second, (x, *offs, dtype, mode))
        return Implementation(
            lambda: (one.launch(), other.launch()), lambda outputs: (*one.read(outputs[0]), *other.read(outputs[1]))
        )
    if kernel not in COUNTERPARTS:
        raise MachineError(f"torchao has no counterpart of {kernel}")
    in_torch = kernel in IN_TORCH and not _knows_e8m0()
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
    """Whether the hardware converts to E8M0: NVIDIA from Blackwell on, AMD's gfx950."""
    import torch

    if not torch.cuda.is_available():
        return True  # whatever is asked for then is not run
    properties = torch.cuda.get_device_properties()
    if torch.version.hip:
        return str(properties.gcnArchName).startswith("gfx950")
    return bool(properties.major >= 10)
