"""Tensors of the current problem and its edges, in the worker that launches on them: one problem at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from functools import cache

from fp8tune.measure import checking
from fp8tune.measure.checking import Tensors
from fp8tune.measure.edges import edges_of
from fp8tune.records import Problem
from fp8tune.replay.lazy import torch
from fp8tune.replay.loading import load_spec
from fp8tune_kernels.spec import Edge

# After memory went back on an H100 (driver 580), a cast took 12 to 20 % longer for 2.5 ms a GiB, as if the driver
# cleared it at 420 GB/s. Twice that time is waited.
SETTLED_BYTES_PER_S = 200e9

_tensors: dict[tuple[str, Problem, bool], Tensors] = {}
_edge_tensors: dict[tuple[str, Edge], Tensors] = {}  # those that the next problem shares stay


def tensors(reference: str, problem: Problem, torch_device: str, *, is_checked: bool = True) -> Tensors:
    """Return the tensors of a problem. The previous problem's are freed first: a large one fills much of a GPU.

    Without ``is_checked``, for configs whose bytes are known to be right, no reference is computed.
    """
    if (reference, problem, is_checked) not in _tensors:
        spec = load_spec(reference)
        clear({(reference, edge) for edge in edges_of(spec, problem)} if is_checked else set())
        use_one_thread()
        build = checking.build if is_checked else checking.build_unchecked
        _tensors[reference, problem, is_checked] = build(spec, Edge("", problem), torch_device)
    return _tensors[reference, problem, is_checked]


def edge_tensors(reference: str, edge: Edge, torch_device: str) -> Tensors:
    """Return the tensors of an edge."""
    if (reference, edge) not in _edge_tensors:
        _edge_tensors[reference, edge] = checking.build(load_spec(reference), edge, torch_device)
    return _edge_tensors[reference, edge]


def clear(keep: Collection[tuple[str, Edge]] = ()) -> None:
    """Free all tensors except those of some edges, and give their memory back."""
    _tensors.clear()
    for name in [name for name in _edge_tensors if name not in keep]:
        del _edge_tensors[name]
    give_back_memory()


def give_back_memory() -> None:
    """Give unused memory of PyTorch back to the device, and return when the device runs at full speed again."""
    if torch.cuda.is_available():
        held_bytes = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        time.sleep((held_bytes - torch.cuda.memory_reserved()) / SETTLED_BYTES_PER_S)


@cache
def use_one_thread() -> None:
    """Let torch use one thread on the interpreter: each core has a worker, and small tensors need no more."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        torch.set_num_threads(1)
