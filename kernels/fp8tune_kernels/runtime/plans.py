"""Launch a pass again, without working out again what to launch.

A pass casts its operands and multiplies the codes: a few launches, whose programs, sizes and scratch memory follow from
the shapes of its operands. The second time that a pass sees them it is recorded as a plan: the binaries, what they are
given besides pointers, and where each pointer lies in an operand, in the result or in scratch memory. From then on a
call allocates the result and all scratch memory at once, and launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8tune_kernels.runtime import launching, lookup

__all__ = ["planned"]

MOST_PLANS = 512
"""Rows may differ in every step: all plans are forgotten beyond it."""

BOUNDARY = 256
"""Bytes: where each piece of scratch memory begins, as torch's allocator has it."""

Key = tuple[Any, ...]
Pass = Callable[[], Tensor]


class Plan(NamedTuple):
    """What a pass launches."""

    shape: tuple[int, ...]
    """Of the result, bfloat16."""
    scratch: int
    """Bytes."""
    zeros: int
    """Bytes of scratch that begin as zeros."""
    launches: tuple[tuple[launching.Launch, tuple[tuple[int, int], ...]], ...]
    """Each with its pointers: a place in what a call has, and an offset."""


_plans: dict[Key, Plan | None] = {}
"""None: seen once."""

lookup.caches.append(_plans.clear)


def planned(key: Key, operands: Sequence[Tensor], run: Pass) -> Tensor:
    """``run()``, or what it launches on ``operands``, which ``key`` tells all about but where they lie.

    All launches are by :func:`.launching.launch_kernel`, on the operands, the result and what was allocated between.
    """
    pointers = [operand.data_ptr() for operand in operands]
    if any(pointer & 15 for pointer in pointers) or not launching.remembers():
        return run()
    key = (operands[0].get_device(), *key)
    plan = _plans.get(key)
    if plan is not None:
        return _launch(plan, pointers, operands[0].device)
    if key not in _plans:
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        _plans[key] = None
        return run()
    with launching.recording() as recorded:
        result = run()
    plan = _plan_of(recorded, pointers, result)
    if plan is not None:
        _plans[key] = plan
    return result


def _launch(plan: Plan, pointers: list[int], device: torch.device) -> Tensor:
    result = torch.empty(plan.shape, dtype=torch.bfloat16, device=device)
    scratch = torch.empty(plan.scratch, dtype=torch.uint8, device=device)
    places = [*pointers, result.data_ptr(), scratch.data_ptr()]
    if plan.zeros:
        zeros = torch.zeros(plan.zeros, dtype=torch.uint8, device=device)
        places.append(zeros.data_ptr())
    for launch, given in plan.launches:
        launch([None if place < 0 else places[place] + offset for place, offset in given])
    return result


def _plan_of(recorded: launching.Recorded, pointers: list[int], result: Tensor) -> Plan | None:
    """None if a binary was compiled meanwhile, or if an address has two meanings."""
    known = [*pointers, result.data_ptr()]
    if recorded.is_partial or len(set(known)) < len(known):
        return None
    places = {pointer: (place, 0) for place, pointer in enumerate(known)}
    ends = [0, 0]  # of scratch, and of zeros
    for tensor in recorded.tensors:
        pointer = tensor.data_ptr()
        if pointer not in places:
            which = int(pointer in recorded.zeros)
            places[pointer] = len(known) + which, ends[which]
            ends[which] += -(-tensor.untyped_storage().nbytes() // BOUNDARY) * BOUNDARY
    launches = tuple(
        (launch, tuple((-1, 0) if pointer is None else places[pointer] for pointer in given))
        for launch, given in recorded.launches
    )
    return Plan(tuple(result.shape), ends[0], ends[1], launches)
