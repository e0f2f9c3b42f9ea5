"""``grouped-rows-hopper``: :mod:`.grouped_rows` of FP8 values, by a warp-specialized kernel for Hopper.

Arguments, result and bits are those of ``grouped-rows``. Its Triton kernel is launched on other GPUs, and with GLUON 0.
"""

from __future__ import annotations

import torch

from ..edges import at_most, edge
from ..runtime import declare
from ..runtime.declare import Call, Config, Shape
from ..runtime.lookup import config_for
from ..spec import DTYPES, DeviceLimits, bucket
from . import grouped_rows, grouped_tiles, warp_specialized


def launch(config: Config, call: Call) -> None:
    """Launch the kernel that the config names, or the Triton kernel where the device runs no other."""
    if not config["GLUON"] or not warp_specialized.is_supported(call.device):
        key = bucket(call.M), call.N, call.K, call.G, DTYPES.index(str(call.a.dtype).removeprefix("torch."))
        grouped_rows.launch(config_for(grouped_rows.SPEC, key, call.device), call)
        return
    programs = grouped_tiles.multiprocessors(call.device) if call.M else 0
    warp_specialized.launch(config, call, warp_specialized.rows_kernel, programs)


def invalid(config: Config, shape: Shape, limits: DeviceLimits) -> str | None:
    """Return the hardware reason why a config cannot pay, or None."""
    return warp_specialized.invalid(config, limits, grouped_rows.invalid(grouped_tiles.DEFAULT, shape, limits))


def check(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    N: int,
    K: int,
    G: int,
) -> None:
    """Raise ValueError for operands that the kernel cannot multiply."""
    warp_specialized.check_dtype(a)
    grouped_rows.check(a, b, scale_a, scale_b, N, K, G)


SPEC = declare.kernel(
    name="grouped-rows-hopper",
    arguments=(*grouped_rows.OPERANDS, declare.OFFSETS, *grouped_rows.SCALES),
    outputs=(declare.Output("out", ("M", "N"), "torch.bfloat16"),),
    check=check,
    inputs=grouped_rows.inputs,
    launch=launch,
    reference=grouped_rows.reference,
    edges=(
        *grouped_rows.EDGES,
        edge("empty groups, zeros", "zeros", routing="empty", M=37, N=272, K=48, G=3),
        edge("a row less than a tile", routing="balanced", M=510, N=48, K=16, G=2),
        edge("whole tiles", routing="balanced", M=512, N=256, K=256, G=2),
        edge("several tiles a program", routing="ragged", M=at_most("M", 8191), N=at_most("N", 2048), K=144, G=5),
    ),
    layout_sizes={"N": 272, "K": 400, "G": 8},
    **{**grouped_rows.DECLARED, **warp_specialized.DECLARED, "invalid": invalid},
)

multiply_rows_hopper = SPEC.define("multiply_rows_hopper")
