"""Comparison of outputs on one small input, in a worker that has the kernels of one checkout.

Each side is compared with its own reference. The first side's worker also hands over what its reference gives, and the
second side's outputs are compared with that: a change of the reference then hides no change of the kernel.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import replace
from functools import lru_cache
from typing import Any

from fp8tune.measure import checking, tensor_cache
from fp8tune.measure.arms import KernelArm
from fp8tune.measure.checking import Tensors
from fp8tune.measure.edges import edges_of, place
from fp8tune.measure.guards import is_tensor
from fp8tune.measure.trial import guarded
from fp8tune.records import NamedInts, Outcome, Problem, Status, is_recorded
from fp8tune.replay.case import Case, bits
from fp8tune.replay.lazy import torch
from fp8tune.replay.loading import load_spec
from fp8tune.replay.spec import RecordedSpec
from fp8tune_kernels.spec import Edge

CONTENTS = ("zeros", "nan", "infinite")  # of inputs, where a specification declares no edge cases


def inputs_of(arm: KernelArm, torch_device: str) -> dict[Edge, bool]:
    """Return the inputs of each comparison; True for those whose outputs have to be right.

    These are the arm's problem on a small size, and the edge cases that the kernel declares. Edge cases that nobody
    declared tell nothing where the first side fails on them; neither do those of a recorded kernel. A recorded launch
    that is too large for Triton's interpreter has none.
    """
    spec = load_spec(arm.reference)
    is_whole = isinstance(spec, RecordedSpec) and is_recorded(arm.problem)
    if torch_device == "cpu" and is_whole and not spec.is_small(arm.problem):  # type: ignore[attr-defined]
        return {}
    small, declared = spec.scaled_down(arm.problem), edges_of(spec, arm.problem)
    undeclared = [] if [*spec.edges(arm.problem)] else [Edge(name, small, name) for name in CONTENTS]
    if undeclared and not isinstance(spec, RecordedSpec):
        undeclared.append(Edge("odd sizes", _with_odd_sizes(small)))
    result = {Edge("", small): True} | dict.fromkeys(declared, not isinstance(spec, RecordedSpec))
    return result | dict.fromkeys(undeclared, False)


def _with_odd_sizes(problem: Problem) -> Problem:
    shape = [(dim, size - 1 if size > 1 and size % 2 == 0 else size) for dim, size in problem.shape.items()]
    return replace(problem, shape=NamedInts(shape))


@guarded
def check(arm: KernelArm, torch_device: str, edge: Edge) -> Outcome | None:
    """Compare the outputs on an input with those of this side's reference."""
    # In the interpreter programs run in order, so a second launch shows nothing new.
    launches = range(1 if torch_device == "cpu" else checking.LAUNCHES)
    fault = _tensors(arm.reference, edge, torch_device).check(arm.config, launches)
    return Outcome(Status.WRONG, reason=fault) if fault else None


def expected(reference: str, edge: Edge, torch_device: str) -> bytes:
    """Return the expected outputs of the second side on an input: those of this side's reference."""
    tensors = _tensors(reference, edge, torch_device)
    right = [output.cpu() for output in tensors.expected]
    unwritten = {index: mask.cpu() for index, mask in _unwritten(tensors).items()}
    file = io.BytesIO()
    torch.save((_inputs_hash(tensors), tensors.rule, _forms(tensors), right, unwritten), file)
    return file.getvalue()


@guarded
def compare(arm: KernelArm, torch_device: str, edge: Edge, before: bytes, name: str) -> Outcome | None:
    """Compare the outputs with those of this side's reference, then with ``before``, which revision ``name`` expects.

    An outcome that is ``ok`` with a reason says why the sides cannot be compared with each other.
    """
    if (failed := check(arm, torch_device, edge)).status is not Status.OK:
        return failed
    tensors = _tensors(arm.reference, edge, torch_device)
    inputs_hash, rule, forms, right, unwritten = torch.load(
        io.BytesIO(before), map_location=torch_device, weights_only=False
    )
    if inputs_hash != _inputs_hash(tensors):
        return Outcome(Status.OK, reason=f"the inputs are not those of {name}, so its outputs cannot be compared")
    if forms != _forms(tensors):
        return Outcome(Status.WRONG, reason=f"outputs are {_listed(_forms(tensors))}, those of {name} {_listed(forms)}")
    for index, (output, before_output) in enumerate(zip(tensors.written, right, strict=True)):
        missing = _unwritten(tensors).get(index, torch.zeros((), dtype=torch.bool, device=torch_device))
        if count := int((missing & ~unwritten.get(index, torch.zeros_like(missing))).sum()):
            fault = f"{count:,} of {output.numel():,} elements are no longer written"
        elif difference := rule.difference(output, before_output):
            fault = difference
        else:
            continue
        return Outcome(Status.WRONG, reason=f"output {index} is not what {name} expects: {fault} on {place(edge)}")
    return None


@lru_cache(maxsize=1)
def _tensors(reference: str, edge: Edge, torch_device: str) -> Tensors:
    tensor_cache.use_one_thread()
    return checking.build(load_spec(reference), edge, torch_device)


def _unwritten(tensors: Tensors) -> dict[int, Any]:
    """Return masks of the elements that the first config of a recorded kernel leaves unwritten, by output."""
    case = tensors.inputs[-1] if tensors.inputs else None
    return case.untouched if isinstance(case, Case) else {}


def _forms(tensors: Tensors) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    return [(str(output.dtype), tuple(output.shape), output.stride()) for output in tensors.outputs]


def _listed(forms: list[tuple[str, tuple[int, ...], tuple[int, ...]]]) -> str:
    return ", ".join(f"{dtype} of shape {shape} and strides {strides}" for dtype, shape, strides in forms)


def _inputs_hash(tensors: Tensors) -> str:
    """Hash the values and forms of all inputs."""
    digest = hashlib.sha256()
    for value in tensors.inputs:
        is_plain = isinstance(value, int | float | str | bool | tuple | None)
        form = (value.dtype, value.shape, value.stride()) if is_tensor(value) else value if is_plain else type(value)
        digest.update(repr(form).encode())
        if is_tensor(value):
            digest.update(bits(value).cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
