"""A spec that imports neither torch nor Triton until it is launched, which a simulated GPU never does.

Children on made-up GPUs begin in half the time, so that tests can have many of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8tune_kernels.spec import KernelSpec, NamedInts, Problem


def inputs(problem: Problem, device: str) -> tuple[Any, ...]:
    import torch

    return (torch.ones(problem.shape["M"], problem.shape["K"], device=device),)


def outputs(x: Any) -> tuple[Any, ...]:
    return (x.clone(),)


def reference(x: Any) -> tuple[Any, ...]:
    return (2 * x,)


def launch(config: Mapping[str, int], values: tuple[Any, ...], out: tuple[Any, ...]) -> None:
    out[0].copy_(2 * values[0])


SPEC = KernelSpec(
    name="planted-untouched",
    axes={"BLOCK_SIZE": (32, 64, 128, 256), "num_warps": (4, 8)},
    default=NamedInts(BLOCK_SIZE=64, num_warps=4),
    key=("K", "M_bucket"),
    problems=lambda row: iter([NamedInts(M=row["M"], K=row["K"])]),
    inputs=inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    bytes_moved=lambda shape: 8 * shape["M"] * shape["K"],
    scaled_down=lambda problem: problem,
)
