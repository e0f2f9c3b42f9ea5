"""The checks before every launch: each raises ValueError with one line that names the argument.

None reads a value of a tensor, but for :func:`check_ends`, which is for tensors on a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NoReturn

import torch

from .. import interpreter
from ..arches import default_fp8_dtype
from .lookup import running_arch

IN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NAMES = ", ".join(map(str, IN_DTYPES))
FP8_DTYPES = tuple(interpreter.TORCH_DTYPES.values())


def refuse(name: str, tensor: torch.Tensor, expected: str) -> NoReturn:
    """Raise ValueError, which says what an argument is and what it should be."""
    layout = f"{tensor.dtype} of shape {tuple(tensor.shape)}, strides {tensor.stride()} on {tensor.device}"
    raise ValueError(f"{name} is {layout}, wanted {expected}")


def check_matrix(name: str, matrix: torch.Tensor, *, or_transposed: bool = False) -> None:
    """Raise ValueError unless ``matrix`` is a matrix that kernels read: row-major, or ``or_transposed`` its view."""
    is_right = matrix.dim() == 2 and matrix.dtype in IN_DTYPES
    if not (is_right and (matrix.is_contiguous() or (or_transposed and matrix.t().is_contiguous()))):
        refuse(name, matrix, f"a row-major matrix of {_NAMES}")


def check_weights(name: str, w: torch.Tensor, *, as_stored: bool = False, or_row_major: bool = False) -> None:
    """Raise ValueError unless kernels read ``w``: ``weights.transpose(1, 2)``, or ``as_stored`` the weights.

    ``or_row_major``: also what lies as (E, K, N), of which kernels read the transposed view.
    """
    if w.dim() == 3 and w.dtype in IN_DTYPES:
        _, rows, columns = w.shape
        if not as_stored and (w.stride() == (rows * columns, 1, rows) or w.mT.is_contiguous()):  # the view costs most
            return
        if (as_stored or or_row_major) and w.is_contiguous():
            return
    layout = "(E, N, K), row-major" if as_stored else "(E, K, N) that lie as (E, N, K): weights.transpose(1, 2)"
    refuse(name, w, f"weights {layout}{'; or row-major' * or_row_major}; of {_NAMES}")


def check_offsets(offs: torch.Tensor, device: torch.device, beside: str = "x") -> None:
    """Raise ValueError unless ``offs`` can hold the end rows of one or more groups, on the device of ``beside``."""
    is_right = offs.dim() == 1 and offs.shape[0] > 0 and offs.dtype == torch.int32 and offs.is_contiguous()
    if not is_right or offs.device != device:
        refuse(
            "offs", offs, f"contiguous int32 (G,) on {device} as {beside}: the end row of each of one or more groups"
        )


def check_alignment(alignment: int) -> None:
    """Raise ValueError unless codes of groups can begin at multiples of ``alignment`` rows; 1 stands for any row."""
    if alignment != 1 and (alignment < 16 or alignment & (alignment - 1)):
        raise ValueError(f"alignment is {alignment}, wanted 1 or a power of two from 16 on")


def check_shape(name: str, operand: torch.Tensor, dims: int) -> None:
    """Raise ValueError unless an operand of a grouped GEMM is row-major and has so many dims."""
    if operand.dim() != dims or not operand.is_contiguous():
        refuse(name, operand, "row-major " + ("(M, K)" if dims == 2 else "(E, N, K)"))


def check_columns(name: str, operand: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError unless an operand can be summed over its rows: column-major codes, or row-major bfloat16."""
    is_fp8 = dtype != torch.bfloat16
    is_right = operand.dtype == dtype and operand.dim() == 2
    if not is_right or not (operand.t() if is_fp8 else operand).is_contiguous():
        refuse(name, operand, f"a {'column' if is_fp8 else 'row'}-major matrix of {dtype} as a")


def check_row_numbers(name: str, rows: torch.Tensor, device: torch.device, dims: int = 1) -> None:
    """Raise ValueError unless a tensor holds contiguous int32 numbers of rows or tokens."""
    if rows.dtype != torch.int32 or not rows.is_contiguous() or rows.device != device or rows.dim() != dims:
        refuse(name, rows, f"contiguous int32 of {dims} dims on {device}")


def check_values(name: str, values: torch.Tensor, count: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError unless a tensor has so many contiguous values of a dtype on a device."""
    if values.dtype != dtype or values.numel() != count or not values.is_contiguous() or values.device != device:
        refuse(name, values, f"{count} contiguous values of {dtype} on {device}")


def check_choice(name: str, value: str, names: Sequence[str]) -> None:
    """Raise ValueError for a name that is none of some."""
    if value not in names:
        raise ValueError(f"{name} is {value!r}, wanted {' or '.join(map(repr, names))}")


def check_size(name: str, size: str, length: int, known: int, first: str) -> None:
    """Raise ValueError for a shape that disagrees with an earlier argument's."""
    if length != known:
        raise ValueError(f"{name} has {size}={length}, wanted {size}={known} as {first}")


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
