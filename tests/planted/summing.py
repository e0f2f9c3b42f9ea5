"""Kernels whose order of sums depends on the config: a matrix product with split K, and a softmax in blocks."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import triton
import triton.language as tl

from fp8tune_kernels.spec import KernelSpec, NamedInts, Problem

N, K = 16, 256


@triton.jit
def split_kernel(x_ptr, w_ptr, part_ptr, M, N: tl.constexpr, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    split, columns = tl.program_id(1), tl.arange(0, N)
    total = tl.zeros((BLOCK_M, N), dtype=tl.float32)
    for start in range(split * BLOCK_K, K, SPLIT_K * BLOCK_K):
        along = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + rows[:, None] * K + along[None, :], mask=rows[:, None] < M, other=0.0)
        total += tl.dot(x, tl.load(w_ptr + along[:, None] * N + columns[None, :]))
    tl.store(part_ptr + (split * M + rows[:, None]) * N + columns[None, :], total, mask=rows[:, None] < M)


def launch_split(config: Any, inputs: Any, outputs: Any) -> None:
    (x, w), (y,), splits = inputs, outputs, config["SPLIT_K"]
    parts = torch.empty(splits, *y.shape, device=x.device)
    blocks = triton.cdiv(len(x), config["BLOCK_M"]), splits
    split_kernel[blocks](x, w, parts, len(x), N, K, config["BLOCK_M"], config["BLOCK_K"], splits)
    y.copy_(parts[0])
    for part in parts[1:]:
        y.add_(part)


@triton.jit
def softmax_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row, most, total = tl.program_id(0), -float("inf"), 0.0
    for start in range(0, N, BLOCK):
        x = tl.load(x_ptr + row * N + start + tl.arange(0, BLOCK))
        most = tl.maximum(most, tl.max(x, 0))
    for start in range(0, N, BLOCK):
        total += tl.sum(tl.exp(tl.load(x_ptr + row * N + start + tl.arange(0, BLOCK)) - most), 0)
    for start in range(0, N, BLOCK):
        at = row * N + start + tl.arange(0, BLOCK)
        tl.store(y_ptr + at, tl.exp(tl.load(x_ptr + at) - most) / total)


def launch_softmax(config: Any, inputs: Any, outputs: Any) -> None:
    softmax_kernel[(len(inputs[0]),)](inputs[0], outputs[0], K, BLOCK=config["BLOCK"])


_launches = itertools.count()


def launch_racing(config: Any, inputs: Any, outputs: Any) -> None:
    """Add the parts of config RACE=1 in another order each time, as atomic additions may."""
    x, order = inputs[0], torch.arange(K)
    if config["RACE"]:
        order = order.roll(next(_launches))
    outputs[0].copy_(x[:, order].sum(1, keepdim=True))


def _spec(name: str, launch: Any, axes: dict[str, tuple[int, ...]], columns: int, reference: Any) -> KernelSpec:
    def inputs(problem: Problem, device: str) -> tuple[torch.Tensor, ...]:
        shapes = [(problem.shape["M"], K), (K, N)][: 1 + (launch is launch_split)]
        if device == "meta":
            return tuple(torch.empty(shape, device=device) for shape in shapes)
        generator = torch.Generator(device).manual_seed(problem.seed)
        return tuple(torch.randn(shape, device=device, generator=generator) for shape in shapes)

    return KernelSpec(
        name=name,
        axes=axes,
        default=NamedInts({axis: values[0] for axis, values in axes.items()}),
        key=("M",),
        problems=lambda row: iter([NamedInts(M=row["M"])]),
        inputs=inputs,
        outputs=lambda *inputs: (inputs[0].new_empty(len(inputs[0]), columns),),
        launch=launch,
        reference=reference,
    )


SPLIT = _spec(
    "split",
    launch_split,
    {"BLOCK_M": (16, 32), "BLOCK_K": (32, 64), "SPLIT_K": (1, 4)},
    N,
    lambda x, w: ((x.double() @ w.double()),),
)
SOFTMAX = _spec("softmax", launch_softmax, {"BLOCK": (256, 128, 32)}, K, lambda x: (x.double().softmax(1),))
RACING = _spec("racing", launch_racing, {"RACE": (0, 1)}, 1, lambda x: (x.double().sum(1, keepdim=True),))
