"""What the specs of the kernels share that cast a gated activation, or its gradient, row by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..edges import edge, past_half
from ..spec import DTYPE_FLAG, DTYPES, DeviceLimits, NamedInts, bucket
from .limits import too_many_shared_bytes, wrong_tile
from .whole_rows import shared_bytes, tile_of

__all__ = [
    "AXES",
    "EDGES",
    "INTERPRETED",
    "IN_DTYPES",
    "KEY",
    "blocks_of_rows",
    "ends_within",
    "key",
    "problems",
    "wrong_rows",
]

AXES: dict[str, tuple[int, ...]] = {
    "BLOCK_SIZE_M": (8, 16, 32, 64),
    "TILE": (2048, 4096, 8192),
    "num_warps": (4, 8, 16, 32),
    "num_stages": (1, 3, 4),
}
"""With two stages a program waits for what it has just asked for: on an H100 slower than with three everywhere."""

KEY = ("M_bucket", "N", "G", DTYPE_FLAG)

IN_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz")

_FLAGS = {getattr(torch, name): place for place, name in enumerate(DTYPES)}

INTERPRETED = {"M": 157, "N": 83, "G": 3}

EDGES = (
    edge("one row, huge values", "huge", routing="ragged", M=1, N=48, G=3),
    edge("a block and one more", routing="balanced", M=513, N=144, G=1),
    edge("rows of no group, NaN", "nan", routing="empty", M=277, N=48, G=4),
    edge("a prime, infinity", "infinite", routing="ragged", M=67, N=48, G=3),
    edge("empty groups, zeros", "zeros", routing="empty", M=37, N=48, G=3),
    edge("one column, tiny values", "tiny", routing="ragged", M=67, N=1, G=2),
    edge("an odd number of columns past an aligned address", offset=1, routing="ragged", M=131, N=129, G=2),
    edge("a tail of columns", routing="ragged", M=67, N=past_half("N", 16), G=2),
)


VALUES_AT_ONCE = 1 << 26
"""Of the (M, N) that a reference is computed on. It holds up to 83 bytes for each, most of them in float64: 75 GB and
more for all of 131,072 x 8,192, which left too little of an H100's 80."""


def blocks_of_rows(M: int, N: int) -> Iterator[slice]:
    """All rows of a matrix, so many at a time as a reference is computed on."""
    rows = max(1, VALUES_AT_ONCE // max(1, N))
    return (slice(first, min(first + rows, M)) for first in range(0, M, rows))


def ends_within(offs: torch.Tensor, rows: slice) -> torch.Tensor:
    """The end rows (G,) of the groups within a block of rows, counted from its first."""
    ends: torch.Tensor = (offs - rows.start).clamp(0, rows.stop - rows.start)
    return ends


def wrong_rows(config: Mapping[str, int], shape: Mapping[str, int], limits: DeviceLimits, matrices: int) -> str | None:
    """The hardware reason why a config cannot pay, or None. ``matrices``: how many (M, N) a program reads."""
    width, _, rows = tile_of(config, shape["N"])
    least = min(AXES["TILE"])
    if least < config["TILE"] and rows == tile_of({**config, "TILE": least}, shape["N"])[2]:
        return f"same binary as TILE={least}: one row at a time"
    if config["num_stages"] > 1 and limits.arch.startswith("sm_"):
        count = shared_bytes(config, shape["N"], matrices)
        if reason := too_many_shared_bytes(count, f"of rows in {config['num_stages']} stages", limits):
            return reason
    return wrong_tile(config, width * rows, limits, least=8, too_few="too few loads under way", held="gate and up do")


def problems(row: Mapping[str, int]) -> Iterator[NamedInts]:
    """The activation that a GEMM down reads: its K is N here. Which rows of a set are such GEMMs no row says."""
    N = row["K"]
    row["N"]  # KeyError: a row without weights has no MLP
    yield NamedInts(M=row["M"], N=N, G=row["E"])


def key(x: torch.Tensor, offs: torch.Tensor, *rest: Any) -> tuple[int, ...]:
    """The lookup key of inputs, of which x (M, 2N) is the first and offs (G,) the second."""
    return bucket(x.shape[0]), x.shape[1] // 2, offs.shape[0], _FLAGS[x.dtype]
