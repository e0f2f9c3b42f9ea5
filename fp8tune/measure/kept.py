"""The tensors of the problem in hand, kept in the worker that launches on them: of one problem at a time."""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import cache

from fp8tune.measure import checking, memory
from fp8tune.measure.checking import Tensors
from fp8tune.measure.edges import edges_of
from fp8tune.records import Problem
from fp8tune.replay.loading import load_spec
from fp8tune_kernels.spec import Edge

_tensors: dict[tuple[str, Problem, bool], Tensors] = {}
_edge_tensors: dict[tuple[str, Edge], Tensors] = {}
"""Those that the next problem has too stay."""


def tensors(reference: str, problem: Problem, torch_device: str, *, is_checked: bool = True) -> Tensors:
    """The tensors of a problem. The previous problem's are let go first, because a large one fills much of a GPU."""
    if (reference, problem, is_checked) not in _tensors:
        spec = load_spec(reference)
        forget({(reference, edge) for edge in edges_of(spec, problem)} if is_checked else set())
        build = checking.build if is_checked else checking.build_unchecked
        share_cores()
        _tensors[reference, problem, is_checked] = build(spec, problem, torch_device)
    return _tensors[reference, problem, is_checked]


def unchecked_tensors(reference: str, problem: Problem, torch_device: str) -> Tensors:
    """A problem's tensors for configs whose bytes are known to be right: no reference is computed."""
    return tensors(reference, problem, torch_device, is_checked=False)


def edge_tensors(reference: str, edge: Edge, torch_device: str) -> Tensors:
    """The tensors of an edge."""
    if (reference, edge) not in _edge_tensors:
        _edge_tensors[reference, edge] = checking.build_edge(load_spec(reference), edge, torch_device)
    return _edge_tensors[reference, edge]


def forget(but: Collection[tuple[str, Edge]] = ()) -> None:
    """Let all tensors go, but those of some edges, and give their memory back."""
    _tensors.clear()
    for name in [name for name in _edge_tensors if name not in but]:
        del _edge_tensors[name]
    memory.give_back()


@cache
def share_cores() -> None:
    """On the interpreter there is a worker for each core, and tensors are small: threads would only wait."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        import torch

        torch.set_num_threads(1)
