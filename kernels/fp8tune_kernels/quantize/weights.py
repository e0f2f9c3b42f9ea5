"""The weights of all experts as the 3D kernels take them.

Weights lie in memory as ``(E, N, K)``, row-major. An operator takes them as the ``(E, K, N)`` view that a grouped GEMM
multiplies with, strides ``(K*N, 1, K)``: ``weights.transpose(1, 2)``. Shapes are written ``E N K``.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..runtime import declare
from ..runtime.declare import Shape
from ..spec import NamedInts

ARGUMENTS = (declare.weights(), declare.FLOAT8_DTYPE, declare.POWER_OF_TWO)

KEY = ("E", "K", "N")
"""The sizes a table is looked up by: they do not change while a model trains."""

PROBLEMS = ({"E": "E", "N": "N", "K": "K"},)
"""The weights of a row's layer; rows without N have none."""


def problems_of_16_rows(row: Shape) -> Iterator[NamedInts]:
    """Yield the weights of a row's layer, if N is a multiple of 16."""
    if row["N"] % 16 == 0:
        yield NamedInts(E=row["E"], N=row["N"], K=row["K"])
