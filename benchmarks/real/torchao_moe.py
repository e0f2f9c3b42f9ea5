"""torchao 0.18: forward and backward of its FP8 grouped GEMM on the shapes of ``grouped-mm``.

    fp8tune record -o torchao.json -- python -m benchmarks.real.torchao_moe

``--colwise`` adds the column-wise kernel alone, at 16384 x 4096 in even groups: no step of the grouped GEMM calls it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from functools import partial

from benchmarks.real import steps
from fp8tune.plan import shapes
from fp8tune_kernels.groups import group_ends

COLWISE = (16384, 4096)
"""Rows and columns."""
GROUPS = (8, 16)
"""Both are of one key of the autotuner, which has the rows alone."""


def jagged_ends(M: int, E: int) -> list[int]:
    """The first seeded layout without an empty group: torchao's weight gradient takes none."""
    layouts = (group_ends("jagged", M, E, seed) for seed in itertools.count())
    return next(ends for ends in layouts if all(first < second for first, second in itertools.pairwise([0, *ends])))


def one_step(M: int, N: int, K: int, E: int) -> None:
    """A forward and a backward pass on random operands, with groups that end at multiples of 16 rows."""
    import torch
    from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm

    torch.manual_seed(0)
    A = torch.randn(M, K, dtype=torch.bfloat16, device=steps.DEVICE, requires_grad=True)
    B_t = torch.randn(E, N, K, dtype=torch.bfloat16, device=steps.DEVICE).transpose(1, 2).requires_grad_()
    offs = torch.tensor(jagged_ends(M, E), dtype=torch.int32, device=steps.DEVICE)
    out = _to_fp8_rowwise_then_scaled_grouped_mm(A, B_t, offs, pad_token_groups_for_grouped_mm=False)
    torch.autograd.grad(out, (A, B_t), torch.randn_like(out))


def colwise(groups: int) -> None:
    """The column-wise kernel alone, on even groups."""
    import torch
    from torchao.prototype.moe_training.kernels import triton_fp8_per_group_colwise_scales

    torch.manual_seed(0)
    x = torch.randn(*COLWISE, dtype=torch.bfloat16, device=steps.DEVICE)
    offs = torch.tensor(group_ends("balanced", COLWISE[0], groups), dtype=torch.int32, device=steps.DEVICE)
    triton_fp8_per_group_colwise_scales(x, offs, torch.float8_e4m3fn, round_scales_to_power_of_2=True)


def main() -> int:
    """Runs the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--colwise", action="store_true", help="also run the column-wise kernel alone")
    arguments = parser.parse_args()
    # one group of a row is a layer
    layers = dict.fromkeys((row["M"], row["N"], row["K"], row["E"]) for row in shapes.load("grouped-mm").rows)
    named: dict[str, Callable[[], None]] = {
        f"M={M} N={N} K={K} E={E}": partial(one_step, M, N, K, E) for M, N, K, E in layers
    }
    if arguments.colwise:
        named |= {f"colwise in {groups} groups": partial(colwise, groups) for groups in GROUPS}
    return 1 if steps.run(named) else 0


if __name__ == "__main__":
    sys.exit(main())
