"""A spec whose "kernel" is plain torch, with faults that one look at the outputs of one launch does not show.

FAULT 0 none · 1 adds to its output · 2 keeps a maximum in it · 3 takes maxima from memory that it never cleared · 4 is
wrong from its second launch on · 5 is wrong in each launch after the fourth · 6 writes an input · 7 writes beside an
input · 8 reads past the end of an input · 9 leaves its last element to chance · 10 writes an input and puts it back
beside itself · 11 is wrong on infinity · 12 is wrong on one row · 13 is wrong where an input begins unaligned
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from faults import SPEC as FAULTS

from fp8tune_kernels.spec import Edge, NamedInts, Problem

launches: Counter[int] = Counter()  # FAULT -> launches so far

EDGES = (
    Edge("one row", Problem("planted-launches", NamedInts(M=1, K=5))),
    Edge("infinity", Problem("planted-launches", NamedInts(M=4, K=63)), "infinite"),
    Edge("alignment", Problem("planted-launches", NamedInts(M=4, K=63)), offset=1),
)


def inputs(problem: Problem, device: str) -> tuple[Any, ...]:
    if device == "meta":
        return (torch.empty(problem.shape["M"], problem.shape["K"], device=device),)
    generator = torch.Generator().manual_seed(problem.seed)
    return (torch.randn(problem.shape["M"], problem.shape["K"], generator=generator).to(device),)


def outputs(x: Any) -> tuple[Any, ...]:
    return x.new_empty(len(x)), x.new_empty(len(x), dtype=torch.float8_e4m3fn)


def reference(x: Any) -> tuple[Any, ...]:
    largest = x.abs().amax(1)
    return largest, largest.to(torch.float8_e4m3fn)


def launch(config: Mapping[str, int], values: tuple[Any, ...], out: tuple[Any, ...]) -> None:
    x, fault = values[0], config["FAULT"]
    launches[fault] += 1
    largest, codes = reference(x)
    match fault:
        case 1:
            largest = largest + out[0]
        case 2:
            largest = torch.maximum(largest, out[0])
        case 3:
            scratch = torch.empty(len(x), device=x.device)
            largest = torch.where(scratch > 1e30, scratch, largest)
        case 4 | 5:
            largest = largest + (launches[fault] > (1 if fault == 4 else 4))
        case 6:
            x[0, 0] += 1
        case 7:
            x.as_strided((1,), (1,), x.storage_offset() + x.numel()).fill_(1)
        case 8:
            beside = x.as_strided((1,), (1,), x.storage_offset() + x.numel())
            largest = torch.maximum(largest, beside.nan_to_num(0, 0, 0).abs())
        case 10:
            x.copy_(x.roll(1, 0))
        case 11:
            largest = largest.nan_to_num(posinf=3e38)
        case 12:
            largest = largest * (len(x) > 1)
        case 13:
            largest = largest * (x.data_ptr() % 16 == 0)
    keep = -1 if fault == 9 else None
    out[0][:keep].copy_(largest[:keep])
    out[1].copy_(codes)


SPEC = replace(
    FAULTS,
    name="planted-launches",
    axes={"FAULT": tuple(range(14)), "num_warps": (4,)},
    inputs=inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    edges=lambda problem: EDGES,
    routed=False,
)
WITHOUT_EDGES = replace(SPEC, edges=lambda problem: ())
