"""The weights of all experts as the 3D kernels take them: problems, inputs and the check before a launch.

Weights lie in memory as ``(E, N, K)``, row-major. An op takes them as the ``(E, K, N)`` view that a grouped GEMM
multiplies with, strides ``(K*N, 1, K)``: ``weights.transpose(1, 2)``. Shapes are written ``E N K``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ..inputs import dtype_named, random_matrix
from ..runtime.checks import check_weights, fp8_dtype_for
from ..runtime.ops import Inputs
from ..spec import NamedInts, Problem

__all__ = ["KEY", "arguments", "inputs", "key", "problems"]

KEY = ("E", "K", "N")
"""The sizes a table is looked up by: they do not change while a model trains."""


def problems(row: Mapping[str, int]) -> Iterator[NamedInts]:
    """The weights of a row's layer; rows without N have none."""
    yield NamedInts(E=row["E"], N=row["N"], K=row["K"])


def inputs(problem: Problem, device: str) -> Inputs:
    """``(w, float8_dtype, power_of_two)`` of a problem: w is the ``(E, K, N)`` view."""
    E, N, K = (problem.shape[dim] for dim in "ENK")
    w = random_matrix(problem, E * N, K, device).view(E, N, K).transpose(1, 2)
    return w, dtype_named(problem.fp8_dtype), problem.scale_mode == "power-of-two"


def arguments(w: torch.Tensor, float8_dtype: torch.dtype | None, power_of_two: bool) -> Inputs:
    """An operator's arguments -> the inputs of its kernel. Raises ValueError for what a kernel cannot take."""
    check_weights("w", w)
    return w, fp8_dtype_for(w.device, float8_dtype), power_of_two


def key(w: torch.Tensor, float8_dtype: torch.dtype, power_of_two: bool) -> tuple[int, ...]:
    """The values of :data:`KEY`."""
    E, K, N = w.shape
    return E, K, N
