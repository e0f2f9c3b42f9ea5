"""A kernel with neither M nor experts nor FP8: a softmax over rows of two input dtypes, in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fp8tune_kernels.spec import KernelSpec, NamedInts, Problem


def inputs(problem: Problem, device: str) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(problem.seed)
    x = torch.randn(problem.shape["n_rows"], problem.shape["n_cols"], generator=generator)
    return (x.to(getattr(torch, problem.in_dtype)).to(device),)


def outputs(x: Any) -> tuple[Any, ...]:
    return (torch.empty_like(x),)


def reference(x: Any) -> tuple[Any, ...]:
    return (torch.softmax(x.float(), -1).to(x.dtype),)


def launch(config: Mapping[str, int], values: tuple[Any, ...], out: tuple[Any, ...]) -> None:
    out[0].copy_(reference(*values)[0])


SPEC = KernelSpec(
    name="softmax",
    axes={"BLOCK": (256, 512), "num_warps": (4, 8)},
    default=NamedInts(BLOCK=256, num_warps=4),
    key=("n_rows_bucket", "n_cols", "in_dtype"),
    problems=lambda row: iter([NamedInts(n_rows=row["n_rows"], n_cols=row["n_cols"])]),
    inputs=inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    in_dtypes=("bfloat16", "float32"),
    flops=lambda shape: 5 * shape["n_rows"] * shape["n_cols"],
)
