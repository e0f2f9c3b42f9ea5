"""Seeded random inputs for checking and timing, shared by the kernels. On device ``meta``: shapes and strides only."""

from __future__ import annotations

import torch

from .groups import group_ends
from .spec import Problem


def dtype_named(name: str) -> torch.dtype:
    """Return ``torch.bfloat16`` for ``bfloat16``. Raises ValueError for an unknown name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype is {name!r}, wanted a name such as bfloat16 or float8_e4m3fn")
    return dtype


def random_matrix(problem: Problem, rows: int, columns: int, device: str) -> torch.Tensor:
    """Return standard normal values, ``(rows, columns)`` row-major, of the problem's input dtype and seed."""
    dtype = dtype_named(problem.in_dtype)
    if torch.device(device).type == "meta":
        return torch.empty(rows, columns, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(problem.seed)
    return torch.randn(rows, columns, dtype=dtype, device=device, generator=generator)


def offsets(problem: Problem, device: str) -> torch.Tensor:
    """Return the end rows of the problem's groups: int32 ``(G,)``, the last one M."""
    ends = group_ends(problem.routing, problem.shape["M"], problem.shape["G"], problem.seed)
    return torch.tensor(ends, dtype=torch.int32, device=device)
