"""What torchao has for each kernel: the functions that ``fp8tune bench`` imports and times beside ours.

Its FP8 functions take what ours take, in the same order; those for MXFP8 differ in their arguments.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from fp8tune.errors import MachineError

__all__ = ["COUNTERPARTS", "counterpart"]

Function = Callable[..., Any]
Call = Callable[[Function, tuple[Any, ...]], Any]
"""(torchao's function, the inputs of our spec) -> its outputs."""


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


_ROWWISE = "torchao.prototype.moe_training.kernels.float8_rowwise"
_JAGGED = "torchao.prototype.moe_training.kernels.jagged_float8_scales"
_MX = "torchao.prototype.mx_formats.kernels"
_MX_MOE = "torchao.prototype.moe_training.kernels.mxfp8"

COUNTERPARTS: dict[str, tuple[str, str, Call]] = {
    "rowwise-2d": (_ROWWISE, "triton_fp8_rowwise_2d_scale_and_cast", _as_given),
    "colwise-3d": (_ROWWISE, "triton_fp8_colwise_3d_scale_and_cast", _as_given),
    "transpose-3d-atomic": (_ROWWISE, "triton_fp8_rowwise_3d_transpose_rhs", _as_given),
    "transpose-3d-reduction": (_ROWWISE, "triton_fp8_rowwise_3d_transpose_rhs_fused_reduction", _as_given),
    "colwise": (_JAGGED, "triton_fp8_per_group_colwise_scales", _as_given),
    "rowwise": (_JAGGED, "triton_fp8_per_group_rowwise_scales", _as_given),
    "colwise-dual": (_JAGGED, "triton_fp8_per_group_colwise_scales_dual", _as_given),
    "mxfp8-dim0": (_MX, "triton_to_mxfp8_dim0", _mx),
    "mxfp8-dim1": (_MX, "triton_to_mxfp8_dim1", _mx),
    "mxfp8-dim1-3d": (_MX_MOE, "mxfp8_quantize_cuda_3d", _mx_3d),
    "mxfp8-dim1-3d-via-2d": (_MX, "triton_to_mxfp8_dim1", _mx_3d_via_2d),
}
"""Kernel -> module and function of torchao 0.18.0, and how it is called."""


def counterpart(kernel: str, inputs: tuple[Any, ...]) -> Callable[[], Any]:
    """What runs torchao's counterpart of a kernel on the inputs of its spec.

    Raises MachineError where torchao is not installed, cannot be imported or has none.
    """
    if kernel not in COUNTERPARTS:
        raise MachineError(f"torchao has no counterpart of {kernel}")
    module, name, call = COUNTERPARTS[kernel]
    try:
        function: Function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torchao":
            raise MachineError("torchao is not installed: pip install 'fp8tune[bench]'") from None
        raise MachineError(f"torchao's {name} cannot be imported: {error}") from error
    return lambda: call(function, inputs)
