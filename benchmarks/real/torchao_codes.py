"""How many FP8 codes of torchao's column-wise kernel are wrong, config by config and for what its autotuner picks.

    python -m benchmarks.real.torchao_codes codes.json

The expected codes are computed in plain torch. The kernel that reads each group once is tuned by the number of rows
alone, and only configs whose tile holds a group of the call are tried: so calls of other group counts before this one
decide what it launches.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.real.references import colwise
from benchmarks.real.torchao_moe import COLWISE
from fp8tune_kernels.groups import group_ends

HISTORIES: Mapping[str, Sequence[int]] = {
    "8 groups": (8,),
    "8 groups after 16": (16, 8),
    "16 groups": (16,),
    "16 groups after 8": (8, 16),
    "64 groups after 8": (8, 64),
}
"""Even groups of each call of a fresh process; the last one is judged."""
JAGGED = (8, 16, 64)
"""Jagged groups, each in a fresh process."""


def wrong_share(routing: str, groups: int) -> float:
    """The share of codes that differ, of one call. Codes of rows that no group has do not count."""
    import torch
    from torchao.prototype.moe_training.kernels import triton_fp8_per_group_colwise_scales

    torch.manual_seed(0)
    x = torch.randn(*COLWISE, dtype=torch.bfloat16, device="cuda")
    offs = torch.tensor(group_ends(routing, COLWISE[0], groups), dtype=torch.int32, device="cuda")
    got = triton_fp8_per_group_colwise_scales(x, offs, torch.float8_e4m3fn, round_scales_to_power_of_2=True)[0]
    right = colwise(x, offs)["out_ptr"]
    differ = got.contiguous().view(torch.uint8) != right.contiguous().view(torch.uint8)
    return float(differ.float().mean())


def autotuners() -> dict[str, Any]:
    """The two kernels behind the function."""
    from torchao.prototype.moe_training.kernels import jagged_float8_scales as jagged

    names = ("_triton_fp8_per_group_colwise_scales_fused_kernel", "_triton_fp8_per_group_colwise_scales_kernel")
    return {name: getattr(jagged, name) for name in names}


def forget() -> None:
    """Empties what the autotuners remember, as a fresh process has it."""
    for autotuner in autotuners().values():
        autotuner.cache.clear()


def picks() -> dict[str, list[str]]:
    """What the autotuners remember."""
    return {name: [str(config) for config in each.cache.values()] for name, each in autotuners().items() if each.cache}


def judge() -> list[dict[str, object]]:
    """Each history, each jagged layout, and each config that holds a group of 2048 rows alone."""
    from torchao.prototype.moe_training.kernels import jagged_float8_scales as jagged

    found: list[dict[str, object]] = []
    for name, history in HISTORIES.items():
        forget()
        shares = [wrong_share("balanced", groups) for groups in history]
        found.append({"call": name, "wrong": shares[-1], "picks": picks()})
    for groups in JAGGED:
        forget()
        found.append({"call": f"{groups} jagged groups", "wrong": wrong_share("jagged", groups), "picks": picks()})
    declared = list(jagged.kernel_configs_fused)
    for config in declared:
        if config.kwargs["MAX_GROUP_SIZE"] == COLWISE[0] // 8:
            forget()
            jagged.kernel_configs_fused[:] = [config]  # the function tries those of this list that fit
            found.append({"call": "8 groups", "config": str(config), "wrong": wrong_share("balanced", 8)})
    jagged.kernel_configs_fused[:] = declared
    return found


def main() -> int:
    """Prints a line a call and writes all of them."""
    found = judge()
    for each in found:
        print(f"{100 * float(str(each['wrong'])):6.2f} % wrong  {each['call']}  {each.get('config') or each['picks']}")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
