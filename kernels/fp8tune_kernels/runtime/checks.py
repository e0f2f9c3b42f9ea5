"""The checks before every launch: each raises ValueError with one line that names the argument.

None reads a value of a tensor, but for :func:`check_ends`, which is for tensors on a CPU.
"""

from __future__ import annotations

import functools
from typing import NoReturn

import torch

from .. import interpreter
from ..arches import default_fp8_dtype
from .lookup import running_arch

IN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8_DTYPES = tuple(interpreter.TORCH_DTYPES.values())


def check_matrix(name: str, matrix: torch.Tensor, *, or_transposed: bool = False) -> None:
    """Raise ValueError unless ``matrix`` is a matrix that kernels read: row-major, or ``or_transposed`` its view."""
    if matrix.dim() != 2:
        raise ValueError(f"{name} has shape {tuple(matrix.shape)}, wanted two dimensions")
    if matrix.dtype not in IN_DTYPES:
        _refuse_dtype(name, matrix)
    if not (matrix.is_contiguous() or (or_transposed and matrix.t().is_contiguous())):
        raise ValueError(f"{name} has strides {matrix.stride()}, wanted row-major ({matrix.shape[1]}, 1)")


def check_weights(name: str, w: torch.Tensor, *, as_stored: bool = False, or_row_major: bool = False) -> None:
    """Raise ValueError unless kernels read ``w``: ``weights.transpose(1, 2)``, or ``as_stored`` the weights.

    ``or_row_major``: also what lies as (E, K, N), of which kernels read the transposed view.
    """
    if w.dim() != 3:
        dims = "(E, N, K)" if as_stored else "(E, K, N)"
        raise ValueError(f"{name} has shape {tuple(w.shape)}, wanted three dimensions {dims}")
    if w.dtype not in IN_DTYPES:
        _refuse_dtype(name, w)
    _, rows, columns = w.shape
    if as_stored:
        if not w.is_contiguous():
            raise ValueError(f"{name} has strides {w.stride()}, wanted row-major ({rows * columns}, {columns}, 1)")
    elif w.stride() != (rows * columns, 1, rows) and not w.mT.is_contiguous():  # the view costs more than all else here
        if or_row_major and w.is_contiguous():
            return
        expected = f"({rows * columns}, 1, {rows}): weights that lie as (E, N, K), given as weights.transpose(1, 2)"
        if or_row_major:
            expected += f"; or row-major ({rows * columns}, {columns}, 1)"
        raise ValueError(f"{name} has strides {w.stride()}, wanted {expected}")


def _refuse_dtype(name: str, tensor: torch.Tensor) -> NoReturn:
    raise ValueError(f"{name} is {tensor.dtype}, wanted {', '.join(map(str, IN_DTYPES))}")


def check_offsets(offs: torch.Tensor, device: torch.device, beside: str = "x") -> None:
    """Raise ValueError unless ``offs`` can hold the end rows of one or more groups, on the device of ``beside``."""
    if offs.dim() != 1 or offs.shape[0] == 0:
        raise ValueError(f"offs has shape {tuple(offs.shape)}, wanted (G,): the end row of each of one or more groups")
    if offs.dtype != torch.int32:
        raise ValueError(f"offs is {offs.dtype}, wanted torch.int32")
    if not offs.is_contiguous():
        raise ValueError(f"offs has strides {offs.stride()}, wanted (1,)")
    if offs.device != device:
        raise ValueError(f"offs is on {offs.device}, wanted {device} as {beside}")


def check_alignment(alignment: int) -> None:
    """Raise ValueError unless codes of groups can begin at multiples of ``alignment`` rows; 1 stands for any row."""
    if alignment != 1 and (alignment < 16 or alignment & (alignment - 1)):
        raise ValueError(f"alignment is {alignment}, wanted 1 or a power of two from 16 on")


def check_shape(name: str, operand: torch.Tensor, dims: int) -> None:
    """Raise ValueError unless an operand of a grouped GEMM is row-major and has so many dims."""
    if operand.dim() != dims or not operand.is_contiguous():
        expected = "(M, K)" if dims == 2 else "(E, N, K)"
        layout = f"{tuple(operand.shape)} and strides {operand.stride()}"
        raise ValueError(f"{name} has shape {layout}, wanted row-major {expected}")


def check_columns(name: str, operand: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError unless an operand can be summed over its rows: column-major codes, or row-major bfloat16."""
    if operand.dtype != dtype:
        raise ValueError(f"{name} is {operand.dtype}, wanted {dtype} as a")
    is_fp8 = operand.dtype != torch.bfloat16
    if operand.dim() != 2 or not (operand.t() if is_fp8 else operand).is_contiguous():
        expected = "column-major codes" if is_fp8 else "row-major bfloat16"
        raise ValueError(f"{name} has shape {tuple(operand.shape)} and strides {operand.stride()}, wanted {expected}")


def check_row_numbers(name: str, rows: torch.Tensor, device: torch.device, dims: int = 1) -> None:
    """Raise ValueError unless a tensor holds contiguous int32 numbers of rows or tokens."""
    if rows.dtype != torch.int32 or not rows.is_contiguous() or rows.device != device or rows.dim() != dims:
        layout = f"{rows.dtype} of shape {tuple(rows.shape)} on {rows.device}"
        raise ValueError(f"{name} must be contiguous int32 of {dims} dims on {device}, got {layout}")


def check_ends(offs: torch.Tensor, rows: int) -> None:
    """Raise ValueError unless ``offs`` cuts so many rows into groups. For tensors on a CPU alone."""
    start = 0
    for group, end in enumerate(offs.tolist()):
        if end < start:
            raise ValueError(f"offs ends group {group} at row {end}, before its start at {start}: wanted rising ends")
        if end > rows:
            raise ValueError(f"offs ends group {group} at row {end} of {rows}")
        start = end


@functools.cache
def fp8_dtype_for(device: torch.device, expected: torch.dtype | None) -> torch.dtype:
    """The FP8 dtype to write: ``wanted``, or for None the arch's. Raises ValueError for what no kernel writes."""
    if expected is None:
        dtype: torch.dtype = getattr(torch, default_fp8_dtype(running_arch(device)))
        return dtype
    if expected not in FP8_DTYPES:
        raise ValueError(f"float8_dtype is {expected}, wanted one of {', '.join(map(str, FP8_DTYPES))}")
    if expected == torch.float8_e4m3fnuz and running_arch(device).startswith("sm_"):
        raise ValueError(f"float8_dtype is {expected}, an AMD format, on an NVIDIA GPU: wanted torch.float8_e4m3fn")
    return expected
