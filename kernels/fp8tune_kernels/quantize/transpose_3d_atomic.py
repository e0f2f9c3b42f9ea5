"""``transpose-3d-atomic``: quantize and transpose expert weights in panels; the maxima meet in memory.

The contract is in :mod:`.transpose_3d`. All programs work on the same few panels of rows, whose maxima are joined by
atomics (:mod:`.panels`), so that even one small expert fills a GPU.

Scratch: about ``4*E*K`` bytes.
"""

from __future__ import annotations

from ..runtime import declare
from ..runtime.declare import Config, Shape
from ..spec import DeviceLimits
from . import panels, weights
from .transpose_3d import EDGES, OUTPUTS, launch_columns, reference


def invalid(config: Config, shape: Shape, limits: DeviceLimits) -> str | None:
    """Return the hardware reason why a config cannot pay, or None."""
    if config["BLOCK_SIZE_N"] >= 2 * shape["N"]:
        return f"{config['BLOCK_SIZE_N']} rows a tile for {shape['N']}: half of the threads idle"
    named = {**config, "BLOCK_SIZE": config["BLOCK_SIZE_K"], "BLOCK_SIZE_ITER": config["BLOCK_SIZE_N"]}
    return panels.invalid(named, shape["K"], limits)


SPEC = declare.kernel(
    name="transpose-3d-atomic",
    arguments=weights.ARGUMENTS,
    outputs=OUTPUTS,
    launch=launch_columns,
    reference=reference,
    axes={
        "BLOCK_SIZE_N": (64, 128, 256),
        "BLOCK_SIZE_K": (64, 128, 256),
        "LEAD": (64, 192, 512),
        "num_warps": (2, 4, 8),
        "num_stages": (1,),
        "maxnreg": panels.AXES["maxnreg"],
    },
    default={"BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64, "LEAD": 512, "num_warps": 2, "num_stages": 1, "maxnreg": 0},
    key=weights.KEY,
    problems=weights.PROBLEMS,
    interpreted={"E": 2, "N": 523, "K": 101},  # no block divides either; an expert has several pieces
    invalid=invalid,
    edges=EDGES,
)

quantize_transpose_3d_atomic = SPEC.define()
