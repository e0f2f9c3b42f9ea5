"""The planted faults for a real GPU: a Triton kernel that doubles its input, with one fault a config.

FAULT 0 none · 1 fails to compile · 2 too much shared memory · 3 out of memory · 4 writes out of bounds · 5 never ends ·
6 crashes the process while compiling · 7 wrong bytes on one group layout only · 8 none, after all of these
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from faults import SPEC as FAKE  # the neighbour: the same problems on the CPU

BLOCK = 1024


@triton.jit
def double_kernel(
    x_ptr,  # (count,), float32
    out_ptr,  # (count,)
    count,
    addend,
    FAULT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if FAULT == 1:
        tl.static_assert(FAULT == 0, "planted")
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < count, other=0.0)
    if FAULT == 2:
        row = tl.arange(0, 128)[:, None] * 128 + tl.arange(0, 128)[None, :]
        product = tl.zeros((128, 128), tl.float32)
        for step in tl.range(0, count, 128 * 128, num_stages=8):  # eight stages of two tiles of 64 KiB
            tile = tl.load(x_ptr + step + row)
            product += tl.dot(tile, tl.load(x_ptr + step + 128 + row))
        x += tl.sum(product) * 0
    if FAULT == 4:
        tl.store(out_ptr + offsets + (1 << 40), x)
    if FAULT == 5:
        while tl.load(out_ptr, volatile=True) != -1.0:
            tl.store(out_ptr, 0.0)
    tl.store(out_ptr + offsets, 2 * x + addend, mask=offsets < count)


def launch(config: Mapping[str, int], values: tuple[Any, ...], out: tuple[Any, ...]) -> None:
    x, routing = values
    fault = config["FAULT"]
    if fault == 3:
        torch.empty(1 << 45, device=x.device)
    if fault == 6 and x.is_meta:
        os.abort()
    addend = float(fault == 7 and routing == "one-giant")
    double_kernel[(triton.cdiv(x.numel(), BLOCK),)](
        x, out[0], x.numel(), addend, FAULT=fault, BLOCK=BLOCK, num_warps=config["num_warps"]
    )


SPEC = replace(FAKE, name="planted-gpu-faults", launch=launch)
