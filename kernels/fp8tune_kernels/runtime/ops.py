"""The kernels as operators of ``torch.library``, and the checks that come before every launch.

An operator has one implementation for CUDA and HIP devices, one for the CPU, and a fake one, so that
``torch.compile(fullgraph=True)`` traces it. On the CPU it runs the Triton kernel where Triton interprets
(``TRITON_INTERPRET=1``) and the plain torch reference elsewhere. No check waits for a device: the values in ``offs``
are trusted on a GPU, and checked on a CPU. Codes and scales are not differentiable, whatever the inputs are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fp8tune_kernels import interpreter
from fp8tune_kernels.arches import default_fp8_dtype
from fp8tune_kernels.quantize.arithmetic import FP8_MAX
from fp8tune_kernels.runtime.lookup import config_for, running_arch
from fp8tune_kernels.spec import KernelSpec

__all__ = ["check_ends", "check_matrix", "check_offsets", "fp8_dtype_for", "register"]

IN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_LIBRARY = torch.library.Library("fp8tune", "FRAGMENT")

Prepare = Callable[..., tuple[Any, ...]]


def register(
    spec: KernelSpec, schema: str, prepare: Prepare, key: Callable[..., tuple[int, ...]], *, group_dim: int = 0
) -> Any:
    """Define ``fp8tune::<schema>`` for a kernel and return the callable operator.

    ``prepare``: the operator's arguments -> the spec's inputs; raises ValueError for arguments the kernel cannot take.
    ``key``: the spec's inputs -> the values of ``spec.key``, from sizes alone.
    ``group_dim``: of a routed kernel, the dim of its first input that ``offs`` cuts into groups.
    """

    def launch(*arguments: Any) -> tuple[Any, ...]:
        inputs = prepare(*arguments)
        outputs = spec.outputs(*inputs)
        spec.launch(config_for(spec, key(*inputs), arguments[0].device), inputs, outputs)
        return outputs

    def on_gpu(*arguments: Any) -> tuple[Any, ...]:
        index = arguments[0].device.index
        if index == torch.cuda.current_device():
            return launch(*arguments)
        with torch.cuda.device(index):  # Triton launches on the current device, whatever its arguments live on
            return launch(*arguments)

    def on_cpu(*arguments: Any) -> tuple[Any, ...]:
        inputs = prepare(*arguments)
        if spec.routed:
            check_ends(inputs[-3], inputs[0].shape[group_dim])
        with torch.no_grad():  # autograd would follow the reference, and stumbles over its views
            return launch(*arguments) if interpreter.INTERPRETED else spec.reference(*inputs)

    def fake(*arguments: Any) -> tuple[Any, ...]:
        return spec.outputs(*prepare(*arguments))

    _LIBRARY.define(schema)
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, on_gpu, "CUDA")
    _LIBRARY.impl(name, on_cpu, "CPU")
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")  # its own fallback marks codes as differentiable
    torch.library.register_fake(f"fp8tune::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.fp8tune, name).default


def check_matrix(name: str, matrix: torch.Tensor, *, or_transposed: bool = False) -> None:
    """Raise ValueError unless ``matrix`` is two-dimensional, row-major, and of a dtype that kernels read.

    ``or_transposed``: the ``.t()`` view of a row-major matrix is taken, too.
    """
    if matrix.dim() != 2:
        raise ValueError(f"{name} has shape {tuple(matrix.shape)}, wanted two dimensions")
    if matrix.dtype not in IN_DTYPES:
        raise ValueError(f"{name} is {matrix.dtype}, wanted {', '.join(str(dtype) for dtype in IN_DTYPES)}")
    if not (matrix.is_contiguous() or (or_transposed and matrix.t().is_contiguous())):
        raise ValueError(f"{name} has strides {matrix.stride()}, wanted row-major ({matrix.shape[1]}, 1)")


def check_offsets(offs: torch.Tensor, device: torch.device) -> None:
    """Raise ValueError unless ``offs`` can hold the end rows of at least one group, on the same device."""
    if offs.dim() != 1 or offs.shape[0] == 0:
        raise ValueError(f"offs has shape {tuple(offs.shape)}, wanted (G,): the end row of each of one or more groups")
    if offs.dtype != torch.int32:
        raise ValueError(f"offs is {offs.dtype}, wanted torch.int32")
    if not offs.is_contiguous():
        raise ValueError(f"offs has strides {offs.stride()}, wanted (1,)")
    if offs.device != device:
        raise ValueError(f"offs is on {offs.device}, wanted {device} as x")


def check_ends(offs: torch.Tensor, rows: int) -> None:
    """Raise ValueError unless ``offs`` cuts so many rows into groups. Reads its values: for tensors on a CPU alone."""
    start = 0
    for group, end in enumerate(offs.tolist()):
        if end < start:
            raise ValueError(f"offs ends group {group} at row {end}, before its start at {start}: wanted rising ends")
        if end > rows:
            raise ValueError(f"offs ends group {group} at row {end} of {rows}")
        start = end


@functools.cache
def fp8_dtype_for(device: torch.device, wanted: torch.dtype | None) -> torch.dtype:
    """The FP8 dtype to write: ``wanted``, or for None the one of the device's arch.

    Raises ValueError for a dtype that kernels do not write, and for the fnuz format on an NVIDIA GPU.
    """
    if wanted is None:
        dtype: torch.dtype = getattr(torch, default_fp8_dtype(running_arch(device)))
        return dtype
    if wanted not in FP8_MAX:
        raise ValueError(f"float8_dtype is {wanted}, wanted one of {', '.join(str(dtype) for dtype in FP8_MAX)}")
    if wanted == torch.float8_e4m3fnuz and running_arch(device).startswith("sm_"):
        raise ValueError(f"float8_dtype is {wanted}, an AMD format, on an NVIDIA GPU: wanted torch.float8_e4m3fn")
    return wanted
