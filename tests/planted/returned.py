"""A spec whose "kernel" is plain torch and returns outputs of its own, with the faults that this allows.

FAULT 0 none · 1 writes into the outputs it is given · 2 is wrong in its last element · 3 returns another shape · 4
another dtype · 5 None for an output · 6 one output too few · 7 from its second launch on what it returned before · 8
other strides · 9 a list, and so nothing · 10 is wrong in each launch after the fourth
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import launches as launches_spec  # the neighbour: the same inputs

launches: Counter[int] = Counter()  # FAULT -> launches so far

stored: dict[int, tuple[Any, ...]] = {}  # data pointer of the input -> what fault 7 returned for it


def outputs(x: Any) -> tuple[Any, ...]:
    return x.new_empty(x.shape), x.new_empty(len(x))


def reference(x: Any) -> tuple[Any, ...]:
    return 2 * x, x.amax(1)


def launch(config: Mapping[str, int], values: tuple[Any, ...], out: tuple[Any, ...]) -> Any:
    x, fault = values[0], config["FAULT"]
    launches[fault] += 1
    doubled, largest = reference(x)
    match fault:
        case 1:
            out[0].copy_(doubled)
            out[1].copy_(largest)
            return None
        case 2:
            doubled[-1, -1] += 1
        case 3:
            largest = largest[:, None]
        case 4:
            largest = largest.double()
        case 5:
            return doubled, None
        case 6:
            return (doubled,)
        case 7:
            return stored.setdefault(x.data_ptr(), (doubled, largest))
        case 8:
            doubled = doubled.t().contiguous().t()
        case 9:
            return [doubled, largest]
        case 10:
            largest = largest + (launches[fault] > 4)
    return doubled, largest


SPEC = replace(
    launches_spec.WITHOUT_EDGES,
    name="planted-returned",
    axes={"FAULT": tuple(range(11)), "num_warps": (4,)},
    outputs=outputs,
    launch=launch,
    reference=reference,
)
