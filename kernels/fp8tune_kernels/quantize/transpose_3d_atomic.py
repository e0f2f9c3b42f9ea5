"""``transpose-3d-atomic``: quantize and transpose expert weights in panels; the maxima meet in memory.

The contract is in :mod:`.transpose_3d`. All programs work on the same few panels of rows, whose maxima are joined by
atomics (:mod:`.panels`), so that even one small expert fills a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..runtime.ops import register
from ..spec import SCALE_MODES, DeviceLimits, KernelSpec, NamedInts
from . import panels, weights
from .transpose_3d import edges, launch_columns, outputs, reference

__all__ = ["SPEC", "quantize_transpose_3d_atomic"]


def quantize_transpose_3d_atomic(
    w: torch.Tensor, *, float8_dtype: torch.dtype | None = None, power_of_two: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize and transpose each expert's ``w``; returns ``(q, scales)`` of :mod:`.transpose_3d`.

    Scratch: about ``4*E*K`` bytes.
    """
    return _operator(w, float8_dtype, power_of_two)


def invalid(config: Mapping[str, int], shape: Mapping[str, int], limits: DeviceLimits) -> str | None:
    """The hardware reason why a config cannot pay, or None."""
    if config["BLOCK_SIZE_N"] >= 2 * shape["N"]:
        return f"{config['BLOCK_SIZE_N']} rows a tile for {shape['N']}: half of the threads idle"
    return panels.invalid(
        {**config, "BLOCK_SIZE": config["BLOCK_SIZE_K"], "BLOCK_SIZE_ITER": config["BLOCK_SIZE_N"]}, shape["K"], limits
    )


SPEC = KernelSpec(
    name="transpose-3d-atomic",
    axes={
        "BLOCK_SIZE_N": (64, 128, 256),
        "BLOCK_SIZE_K": (64, 128, 256),
        "LEAD": (64, 192, 512),
        "num_warps": (2, 4, 8),
        "num_stages": (1,),
        "maxnreg": panels.AXES["maxnreg"],
    },
    default=NamedInts(BLOCK_SIZE_N=128, BLOCK_SIZE_K=64, LEAD=512, num_warps=2, num_stages=1, maxnreg=0),
    key=weights.KEY,
    problems=weights.problems,
    inputs=weights.inputs,
    outputs=outputs,
    launch=launch_columns,
    reference=reference,
    interpreted={"E": 2, "N": 523, "K": 101},  # no block divides either; an expert has several pieces
    invalid=invalid,
    edges=edges,
    uses_fp8=True,
    scale_modes=SCALE_MODES,
)

_operator = register(SPEC, quantize_transpose_3d_atomic, weights.arguments, weights.key)
