"""``grouped-contraction-hopper``: :mod:`.grouped_contraction` of FP8 values, by a warp-specialized kernel for Hopper.

Arguments, result and bits are those of ``grouped-contraction``. Its Triton kernel is launched on other GPUs, with GLUON
0, and for groups whose alignment BLOCK_SIZE_K does not divide.
"""

from __future__ import annotations

import torch

from ..edges import at_most, edge
from ..runtime import declare
from ..runtime.declare import Call, Config, Shape
from ..runtime.lookup import config_for
from ..spec import DTYPES, DeviceLimits, bucket
from . import grouped_contraction, grouped_tiles, warp_specialized


def launch(config: Config, call: Call) -> None:
    """Launch the kernel that the config names, or the Triton kernel where no other is right."""
    is_whole = call.alignment % config["BLOCK_SIZE_K"] == 0
    if not config["GLUON"] or not is_whole or not warp_specialized.is_supported(call.device):
        key = bucket(call.M), call.N, call.K, call.G, DTYPES.index(str(call.a.dtype).removeprefix("torch."))
        grouped_contraction.launch(config_for(grouped_contraction.SPEC, key, call.device), call)
        return
    programs, kernel = grouped_tiles.multiprocessors(call.device), warp_specialized.contraction_kernel
    warp_specialized.launch(config, call, kernel, programs, M=call.P, ALIGNED=call.alignment)


def invalid(config: Config, shape: Shape, limits: DeviceLimits) -> str | None:
    """Return the hardware reason why a config cannot pay, or None."""
    return warp_specialized.invalid(config, limits, grouped_contraction.invalid(grouped_tiles.DEFAULT, shape, limits))


def check(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    alignment: int,
    added: torch.Tensor | None,
    P: int,
    N: int,
    K: int,
    G: int,
) -> None:
    """Raise ValueError for operands that the kernel cannot multiply."""
    warp_specialized.check_dtype(a)
    grouped_contraction.check(a, b, scale_a, scale_b, alignment, added, P, N, K, G)


SPEC = declare.kernel(
    name="grouped-contraction-hopper",
    arguments=(
        declare.Argument("a", dims=("P", "N"), check=grouped_contraction.check_first),
        declare.Argument("b", dims=("P", "K"), check='check_columns("b", b, a.dtype)'),
        declare.OFFSETS,
        declare.Argument("scale_a", "Tensor?"),
        declare.Argument("scale_b", "Tensor?"),
        declare.Argument("alignment", "int"),
        declare.Argument("added", "Tensor?"),
    ),
    defaults={"alignment": 1},
    outputs=(declare.Output("out", ("G", "N", "K"), "torch.bfloat16 if added is None else added.dtype"),),
    sizes={"M": lambda P, G, alignment: P if alignment == 1 else P - alignment * G},
    check=check,
    inputs=grouped_contraction.inputs,
    constrain=grouped_contraction.constrain,
    launch=launch,
    reference=grouped_contraction.reference,
    problems=grouped_contraction.problems,
    bytes_moved=grouped_contraction.bytes_moved,
    invalid=invalid,
    interpreted={"M": 269, "N": 80, "K": 48, "G": 3},
    edges=(
        edge("one row, huge values", "huge", routing="ragged", M=1, N=48, K=80, G=3),
        edge("a tile and one more", routing="balanced", M=513, N=272, K=144, G=1),
        edge("rows of no group, NaN", "nan", routing="empty", M=277, N=48, K=80, G=4),
        edge("a prime, infinity", "infinite", routing="ragged", M=67, N=80, K=48, G=3),
        edge("empty groups, zeros", "zeros", routing="empty", M=37, N=48, K=48, G=3),
        edge("a long sum", routing="one-giant", M=4099, N=48, K=48, G=2),
        edge("whole tiles, empty groups", routing="empty", M=640, N=256, K=384, G=5),
        edge("added to bfloat16", routing="empty", M=277, N=48, K=80, G=4, added=1),
        edge("added to float32, rows of no group", routing="empty", M=131, N=144, K=272, G=3, added=2),
        edge("whole tiles added to float32", routing="ragged", M=300, N=256, K=256, G=3, added=2),
        edge("several tiles a program", routing="ragged", N=at_most("N", 1040), K=at_most("K", 1040), M=701, G=24),
    ),
    layout_sizes={"N": 272, "K": 400, "G": 8},
    **{**grouped_tiles.DECLARED, **warp_specialized.DECLARED},
)

contract_rows_hopper = SPEC.define("contract_rows_hopper")
