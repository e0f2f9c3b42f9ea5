"""Plain-torch kernels whose launch breaks the process it is in, as an illegal memory access breaks a GPU context.

FAULT 0 none · 1 breaks at the first launch · 2 breaks at the fifth, inside a block · 3 never ends. Once broken, every
launch in the process fails, whatever its config. The module gives the GPU's clock in its process one without a GPU.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

from fp8tune.measure import timing
from fp8tune.records import Outcome, Status
from fp8tune_kernels.spec import KernelSpec, NamedInts, Problem

FAULTS = {64: 0, 128: 1, 256: 2, 512: 3}
"""By K: the fault of the second side, see ``BREAKS``."""
BREAKS = False

_launches = itertools.count(1)
_broken = False


def _block(launch: Any, too_slow_us: float | None = None) -> Outcome:
    for _ in range(3):
        launch()
    return Outcome(Status.OK, 100.5, "", (100.0, 100.0, 101.0, 101.0), 0.032)


timing.block = _block
torch.cuda.synchronize = lambda *_: None


def inputs(problem: Problem, device: str) -> tuple[Any, ...]:
    M, K = problem.shape["M"], problem.shape["K"]
    return (torch.rand(M, K, generator=torch.Generator().manual_seed(problem.seed)).to(device),)


def launch(config: Any, values: tuple[Any, ...], out: tuple[Any, ...]) -> None:
    global _broken, _launches
    fault = FAULTS[values[0].shape[1]] if BREAKS and config["BLOCK_SIZE"] != 32 else 0
    if not fault:
        _launches = itertools.count(1)
    if fault == 3:
        time.sleep(3600)
    if fault == 1 or (fault == 2 and next(_launches) == 5):
        _broken = True
    if _broken:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    out[0].copy_(2 * values[0])


SPEC = KernelSpec(
    name="breaking",
    axes={"BLOCK_SIZE": (32, 64, 128), "num_warps": (4,)},
    default=NamedInts(BLOCK_SIZE=64, num_warps=4),
    key=("K",),
    problems=lambda row: iter([NamedInts(M=row["M"], K=row["K"])]),
    inputs=inputs,
    outputs=lambda x: (torch.empty(x.shape, dtype=x.dtype, device=x.device),),
    launch=launch,
    reference=lambda x: (2 * x,),
    bytes_moved=lambda shape: 8 * shape["M"] * shape["K"],
    scaled_down=lambda problem: problem,
)
