"""Kernels as other libraries write them: under ``triton.autotune``, without a spec; some with a planted fault."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

HOOKED = []
"""The config of each launch that called the hook."""


def _hook(arguments):
    HOOKED.append(arguments["BLOCK"])


def configs(*blocks, **options):
    return [triton.Config({"BLOCK": block}, num_warps=4, **options) for block in blocks]


@triton.autotune(configs=[triton.Config({"ROWS": rows}) for rows in (1, 2)], key=["n_cols"])
@triton.heuristics({"BLOCK": lambda args: triton.next_power_of_2(args["n_cols"])})
@triton.jit
def softmax(x, y, n_rows, n_cols, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0) * ROWS, min(n_rows, (tl.program_id(0) + 1) * ROWS)):
        value = tl.load(x + row * stride + columns, mask=columns < n_cols, other=float("-inf"))
        power = tl.exp(value - tl.max(value, 0))
        tl.store(y + row * stride + columns, power / tl.sum(power, 0), mask=columns < n_cols)


@triton.jit
def bare(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)


hooked = triton.autotune(configs(64, 128, pre_hook=_hook), ["n"])(bare)
hooked_tuner = triton.autotune(
    configs(64, 128),
    ["n"],
    pre_hook=lambda arguments, reset_only=False: _hook(arguments),
    prune_configs_by={"perf_model": lambda **arguments: 1.0, "top_k": 1},
)(bare)


def _set_block_shapes(arguments):
    arguments["x"].block_shape = arguments["y"].block_shape = [arguments["BLOCK"], 64]


@triton.autotune(configs=configs(32, 64, pre_hook=_set_block_shapes), key=[])
@triton.jit
def described(x, y, BLOCK: tl.constexpr):
    y.store([tl.program_id(0) * BLOCK, 0], x.load([tl.program_id(0) * BLOCK, 0]))


@triton.autotune(configs=configs(64, 128), key=["n", "FLAG", "MODE"])
@triton.jit
def keyed(x, y, n, FLAG: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) + FLAG, mask=at < n)


@triton.autotune(configs=configs(64, 128), key=["n"])
@triton.jit
def drops_tail(x, y, n, BLOCK: tl.constexpr):
    """Drop the elements past the last whole block where BLOCK is 128; no round size shows it."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    end = n // BLOCK * BLOCK if BLOCK == 128 else n
    tl.store(y + at, tl.load(x + at, mask=at < end), mask=at < end)


def copied(x):
    return x


def halves(x, n):
    assert n == x.numel()
    return {"y": x / 2}


def softmaxed(x):
    return torch.softmax(x, -1)


@triton.autotune(configs=configs(64, 128), key=["n"])
@triton.jit
def in_blocks(x, y, order, n, BLOCK: tl.constexpr):
    """Copies the blocks in an order that has a number for each block."""
    at = tl.load(order + tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)


def backwards(config, *, x, order, n, **others):
    return {"order": torch.arange(n // config["BLOCK"] - 1, -1, -1, dtype=order.dtype, device=x.device)}
