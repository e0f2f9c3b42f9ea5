"""Kernels as other libraries write them: under ``triton.autotune``, without a spec; some with a planted fault."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from foreign_kernels import drops_tail as drops_tail

HOOKED = []  # the config of each launch that called the hook


def _hook(arguments):
    HOOKED.append(arguments["B"])


def configs(*blocks, **options):
    return [triton.Config({"B": block}, num_warps=4, **options) for block in blocks]


@triton.autotune([triton.Config({"ROWS": rows}) for rows in (1, 2)], key=["columns"])
@triton.heuristics({"B": lambda args: triton.next_power_of_2(args["columns"])})
@triton.jit
def softmax(x, y, rows, columns, stride, ROWS: tl.constexpr, B: tl.constexpr):
    at = tl.arange(0, B)
    for row in range(tl.program_id(0) * ROWS, min(rows, (tl.program_id(0) + 1) * ROWS)):
        value = tl.load(x + row * stride + at, mask=at < columns, other=float("-inf"))
        power = tl.exp(value - tl.max(value, 0))
        tl.store(y + row * stride + at, power / tl.sum(power, 0), mask=at < columns)


@triton.jit
def bare(x, y, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)


hooked = triton.autotune(configs(64, 128, pre_hook=_hook), ["n"])(bare)
hooked_tuner = triton.autotune(
    configs(64, 128),
    ["n"],
    pre_hook=lambda arguments, reset_only=False: _hook(arguments),
    prune_configs_by={"perf_model": lambda **arguments: 1.0, "top_k": 1},
)(bare)


def _set_block_shapes(arguments):
    arguments["x"].block_shape = arguments["y"].block_shape = [arguments["B"], 64]


@triton.autotune(configs=configs(32, 64, pre_hook=_set_block_shapes), key=[])
@triton.jit
def described(x, y, B: tl.constexpr):
    y.store([tl.program_id(0) * B, 0], x.load([tl.program_id(0) * B, 0]))


@triton.autotune(configs=configs(64, 128), key=["n", "FLAG", "MODE"])
@triton.jit
def keyed(x, y, n, FLAG: tl.constexpr, MODE: tl.constexpr, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + at, tl.load(x + at, mask=at < n) + FLAG, mask=at < n)


def copied(x):
    return x


def halves(x, n):
    assert n == x.numel()
    return {"y": x / 2}


def softmaxed(x):
    return torch.softmax(x, -1)


@triton.autotune(configs=configs(64, 128), key=["n"])
@triton.jit
def in_blocks(x, y, order, n, B: tl.constexpr):
    """Copies the blocks in an order that has a number for each block."""
    at = tl.load(order + tl.program_id(0)) * B + tl.arange(0, B)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)


def backwards(config, *, x, order, n, **others):
    return {"order": torch.arange(n // config["B"] - 1, -1, -1, dtype=order.dtype, device=x.device)}
