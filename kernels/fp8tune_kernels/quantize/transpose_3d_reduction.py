"""``transpose-3d-reduction``: quantize and transpose expert weights in one launch, without atomics.

The contract is in :mod:`.transpose_3d`. A program walks the rows of its own columns twice (:mod:`.panels`); the first
tile stays in registers, and where it holds all rows, they are read once.
"""

from __future__ import annotations

from ..edges import edge, past_half
from ..runtime import declare
from ..runtime.declare import Call, Config, Shape
from ..spec import DeviceLimits
from . import weights
from .limits import idle_columns, too_many_shared_bytes, wrong_tile
from .transpose_3d import OUTPUTS, launch_columns, reference


def launch(config: Config, call: Call) -> None:
    """Launch the kernel with a tile no longer than an expert needs."""
    launch_columns({**config, "BLOCK_SIZE_N": _tile_rows(config, call.N), "LEAD": 0}, call)


def _tile_rows(config: Config, N: int) -> int:
    """Return the rows of a tile: BLOCK_SIZE_N, but at most the next power of two of N."""
    return min(config["BLOCK_SIZE_N"], 1 << max(N - 1, 0).bit_length())


def invalid(config: Config, shape: Shape, limits: DeviceLimits) -> str | None:
    """Return the hardware reason why a config cannot pay, or None."""
    rows, stages = _tile_rows(config, shape["N"]), config["num_stages"]
    tile = rows * config["BLOCK_SIZE_K"]
    if rows >= shape["N"] and stages > 1:
        return "same as num_stages=1: all rows are read once, without a loop"
    return (
        wrong_tile(config, tile, limits, held="two tiles do")
        or too_many_shared_bytes(2 * tile * (stages - 1), "of tiles in flight", limits)
        or idle_columns(config["BLOCK_SIZE_K"], shape["K"])
    )


SPEC = declare.kernel(
    name="transpose-3d-reduction",
    arguments=weights.ARGUMENTS,
    outputs=OUTPUTS,
    launch=launch,
    reference=reference,
    axes={
        "BLOCK_SIZE_N": (128, 256, 512, 1024, 2048),
        "BLOCK_SIZE_K": (16, 32, 64, 128),
        "num_warps": (4, 8, 16),
        "num_stages": (1, 2, 4),
    },
    default={"BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 64, "num_warps": 4, "num_stages": 1},
    key=weights.KEY,
    problems=weights.PROBLEMS,
    interpreted={"E": 2, "N": 1109, "K": 37},  # no block divides either; rows are more than the shorter tiles
    invalid=invalid,
    edges=(
        edge("a block and 16 more, NaN", "nan", E=3, N=past_half("N", 16), K=48),
        edge("a few columns more than a block, infinity", "infinite", E=1, N=past_half("N", 16), K=144),
        edge("zeros", "zeros", E=1, N=past_half("N", 16), K=16),
        edge("one row, huge values", "huge", E=3, N=1, K=37),
        edge("one column, tiny values", "tiny", E=2, N=272, K=1),
        edge("a block and one more past an aligned address", offset=1, E=2, N=past_half("N"), K=17),
    ),
)

quantize_transpose_3d_reduction = SPEC.define()
