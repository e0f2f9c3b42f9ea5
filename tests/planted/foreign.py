"""A correct FP8 kernel of somebody else: it knows Triton, torch and the spec, and none of our kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from fp8tune_kernels.spec import KernelSpec, NamedInts, Problem


@triton.jit
def cast_kernel(x_ptr, q_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count).to(tl.float32)
    tl.store(q_ptr + at, tl.clamp(x, -448.0, 448.0).to(tl.float8e4nv), mask=at < count)


def inputs(problem: Problem, device: str) -> tuple[Any, ...]:
    generator = torch.Generator("cpu").manual_seed(problem.seed)
    x = torch.randn(problem.shape["M"], problem.shape["K"], dtype=torch.bfloat16, generator=generator)
    return (x.to(device),)


def outputs(x: Any) -> tuple[Any, ...]:
    return (torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device),)


def launch(config: Mapping[str, int], values: tuple[Any, ...], out: tuple[Any, ...]) -> None:
    x = values[0]
    grid = (triton.cdiv(x.numel(), config["BLOCK"]),)
    cast_kernel[grid](x, out[0], x.numel(), BLOCK=config["BLOCK"], num_warps=config["num_warps"])


def reference(x: Any) -> tuple[Any, ...]:
    return (x.float().clamp(-448, 448).to(torch.float8_e4m3fn),)


SPEC = KernelSpec(
    name="foreign-cast",
    axes={"BLOCK": (256, 512), "num_warps": (4,)},
    default=NamedInts(BLOCK=256, num_warps=4),
    key=("K",),
    problems=lambda row: iter([NamedInts(M=row["M"], K=row["K"])]),
    inputs=inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    bytes_moved=lambda shape: 3 * shape["M"] * shape["K"],
    scaled_down=lambda problem: problem,
)
