"""``transpose-3d-reduction``: quantize and transpose expert weights in one launch, without atomics.

The contract is in :mod:`.transpose_3d`. A program walks the rows of its own columns twice (:mod:`.panels`); the first
tile stays in registers, and where it holds all rows, they are read once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..catalog import SPANS
from ..edges import declared, edge, past_half
from ..runtime.ops import Inputs, Tensors, register
from ..spec import SCALE_MODES, DeviceLimits, KernelSpec, NamedInts
from . import weights
from .limits import idle_columns, too_many_shared_bytes, wrong_tile
from .transpose_3d import launch_columns, outputs, reference

__all__ = ["SPEC", "quantize_transpose_3d_reduction"]


def quantize_transpose_3d_reduction(
    w: torch.Tensor, *, float8_dtype: torch.dtype | None = None, power_of_two: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize and transpose each expert's ``w``; returns ``(q, scales)`` of :mod:`.transpose_3d`."""
    return _operator(w, float8_dtype, power_of_two)


def launch(config: Mapping[str, int], inputs: Inputs, outputs: Tensors) -> None:
    """One launch, of a tile no longer than the expert needs."""
    N = inputs[0].shape[2]
    launch_columns({**config, "BLOCK_SIZE_N": _tile_rows(config, N), "LEAD": 0}, inputs, outputs)


def invalid(config: Mapping[str, int], shape: Mapping[str, int], limits: DeviceLimits) -> str | None:
    """The hardware reason why a config cannot pay, or None. No tile is launched longer than the expert needs."""
    rows, stages = _tile_rows(config, shape["N"]), config["num_stages"]
    tile = rows * config["BLOCK_SIZE_K"]
    if rows >= shape["N"] and stages > 1:
        return "same as num_stages=1: all rows are read once, without a loop"
    return (
        wrong_tile(config, tile, limits, held="two tiles do")
        or too_many_shared_bytes(2 * tile * (stages - 1), "of tiles in flight", limits)
        or idle_columns(config["BLOCK_SIZE_K"], shape["K"])
    )


def _tile_rows(config: Mapping[str, int], N: int) -> int:
    """Rows of the tile that is launched: BLOCK_SIZE_N, but no more than the next power of two of the expert's."""
    return min(config["BLOCK_SIZE_N"], 1 << max(N - 1, 0).bit_length())


SPEC = KernelSpec(
    name="transpose-3d-reduction",
    axes={
        "BLOCK_SIZE_N": (128, 256, 512, 1024, 2048),
        "BLOCK_SIZE_K": (16, 32, 64, 128),
        "num_warps": (4, 8, 16),
        "num_stages": (1, 2, 4),
    },
    default=NamedInts(BLOCK_SIZE_N=256, BLOCK_SIZE_K=64, num_warps=4, num_stages=1),
    key=weights.KEY,
    span=SPANS["transpose-3d-reduction"],
    problems=weights.problems,
    inputs=weights.inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    interpreted={"E": 2, "N": 1109, "K": 37},  # no block divides either; rows are more than the shorter tiles
    invalid=invalid,
    edges=declared(
        edge("a block and 16 more, NaN", "nan", E=3, N=past_half("N", 16), K=48),
        edge("a few columns more than a block, infinity", "infinite", E=1, N=past_half("N", 16), K=144),
        edge("zeros", "zeros", E=1, N=past_half("N", 16), K=16),
        edge("one row, huge values", "huge", E=3, N=1, K=37),
        edge("one column, tiny values", "tiny", E=2, N=272, K=1),
        edge("a block and one more past an aligned address", offset=1, E=2, N=past_half("N"), K=17),
    ),
    uses_fp8=True,
    scale_modes=SCALE_MODES,
)

_operator = register(SPEC, quantize_transpose_3d_reduction, weights.arguments, weights.key)
