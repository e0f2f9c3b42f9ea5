"""A spec outside the package whose "kernel" is plain torch, with one planted fault a config: the tests' fake device.

FAULT 0 none · 1 fails to compile · 2 too much shared memory · 3 out of memory · 4 illegal memory access · 5 never
ends · 6 crashes the process · 7 wrong bytes on one group layout only · 8 leaves its last row unwritten
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import torch

from fp8tune_kernels.spec import KernelSpec, NamedInts, Problem


def inputs(problem: Problem, device: str) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(problem.seed)
    x = torch.randn(problem.shape["M"], problem.shape["K"], generator=generator)
    return x.to(device), problem.routing


def outputs(x: Any, routing: str) -> tuple[Any, ...]:
    return (torch.empty_like(x),)


def reference(x: Any, routing: str) -> tuple[Any, ...]:
    return (2 * x,)


def launch(config: Mapping[str, int], values: tuple[Any, ...], out: tuple[Any, ...]) -> None:
    x, routing = values
    match config["FAULT"]:
        case 1:
            raise SyntaxError("planted: no such operation")
        case 2:
            from triton.runtime.errors import OutOfResources

            raise OutOfResources(300_000, 232_448, "shared memory")
        case 3:
            raise torch.cuda.OutOfMemoryError("planted: tried to allocate 1 TiB")
        case 4:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        case 5:
            time.sleep(3600)
        case 6:
            os.abort()
        case 7:
            out[0].copy_(2 * x + (routing == "one-giant"))
        case 8:
            out[0][:-1].copy_(2 * x[:-1])
        case _:
            out[0].copy_(2 * x)


SPEC = KernelSpec(
    name="planted-faults",
    axes={"FAULT": tuple(range(9)), "num_warps": (4,)},
    default=NamedInts(FAULT=0, num_warps=4),
    key=("K", "M_bucket"),
    problems=lambda row: iter([NamedInts(M=row["M"], K=row["K"])]),
    inputs=inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    bytes_moved=lambda shape: 8 * shape["M"] * shape["K"],
    scaled_down=lambda problem: problem,
    routed=True,
)
