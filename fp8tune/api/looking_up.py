"""``fp8tune.lookup``: the config that a launch would use, and why that one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fp8tune import names
from fp8tune.errors import MachineError, UsageError
from fp8tune.filters import WORDS, Filters
from fp8tune.lookups import Lookup as Lookup
from fp8tune.lookups import look_up
from fp8tune.measure import device as machine
from fp8tune.plan import problems
from fp8tune.records import Device, Problem
from fp8tune.replay.loading import load_spec


def lookup(
    kernel: str, size: str | Mapping[str, int | str], *, arch: str | None = None, device: str | None = None
) -> Lookup:
    """Return the config that a launch would use, and which row of which table it comes from.

    Imports torch and the kernel.

    Args:
        kernel: A name, ``module:SPEC`` or ``path.py:SPEC``.
        size: The kernel's own sizes, such as ``"M=16640 K=5120 G=16"``, with ``layout`` and ``dtype`` if they matter.
        arch: Arch of the launch; None for this machine's GPU.
        device: Name of a GPU of that arch; None for rows that hold for all of them.

    Raises:
        UsageError: A name is unknown, or the size lacks what the key needs.
        MachineError: There is no GPU here, and no arch is given.
    """
    if arch is not None:
        names.check_arch(arch)
        where = Device(arch, device or "")
    elif (here := machine.probe()) is not None:
        where = Device(here.arch, here.name if device is None else device)
    else:
        raise MachineError("there is no GPU here to look up a config for: name an arch, such as arch='sm_90'")
    spec, filters = load_spec(kernel), Filters.parse(size)
    facts: dict[str, Any] = {"input_layout": "contiguous", "in_dtype": spec.in_dtypes[0], **filters.words}
    for fact, known in (("input_layout", spec.input_layouts), ("in_dtype", spec.in_dtypes)):
        if facts[fact] not in known:
            word = next(word for word in WORDS if WORDS[word] == fact)
            raise UsageError(f"{spec.name} has no {word} {facts[fact]!r:.80}: it has {', '.join(known)}")
    problem = replace(Problem(spec.name, filters.size), **facts)
    problems.check_shape(spec, problem)
    return look_up(spec, where, spec.lookup_key(problem))
