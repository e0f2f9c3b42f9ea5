"""Hashes of outputs on one batch of inputs, in the worker that launches: configs with equal ones sum in one order.

The batch is that of the largest problem; a smaller one gets its beginning. A config whose launches differ from each
other, as with atomic additions, has no hash. Values are random, because sums of integers are exact in any order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fp8tune.measure import checking, guards, tensor_cache
from fp8tune.measure.checking import Tensors
from fp8tune.measure.comparing import bits
from fp8tune.measure.edges import in_memory
from fp8tune.measure.guards import is_tensor
from fp8tune.records import NamedInts, Problem
from fp8tune.replay.lazy import torch
from fp8tune.replay.loading import load_spec

LAUNCHES = 8  # that must agree on a GPU: atomic additions come in another order now and then


def output_bits(
    reference: str,
    problem: Problem,
    largest: Problem,
    parts: Mapping[int, Problem],
    configs: Sequence[NamedInts],
    torch_device: str,
) -> dict[NamedInts, dict[int, str]]:
    """Return the hash of each config's output on ``problem``, up to the size of each of ``parts``.

    Raises ValueError if a tensor of the problem is no part of that of the largest one.
    """
    tensor_cache.clear()
    tensor_cache.use_one_thread()
    spec, hashes = load_spec(reference), dict[NamedInts, dict[int, str]]()
    inputs, batch = spec.inputs(problem, torch_device), spec.inputs(largest, torch_device)
    for own, whole in zip(inputs, batch, strict=True):
        # Integers of one shape, such as the ends of groups, say how large the problem is.
        if is_tensor(own) and (own.is_floating_point() or own.shape != whole.shape):
            in_memory(own).copy_(in_memory(_part(whole, own.shape)))
    del batch
    tensors = Tensors(spec, problem, inputs, checking.guarded_outputs(spec, problem, torch_device), ())
    shapes = {
        size: [output.shape for output in spec.outputs(*spec.inputs(part, "meta"))] for size, part in parts.items()
    }
    for config in configs:
        try:
            launches = [_launched(tensors, config, shapes) for _ in range(LAUNCHES if torch_device == "cuda" else 2)]
        except Exception:  # the config's rows say why
            continue
        if all(launch == launches[0] for launch in launches):
            hashes[config] = launches[0]
    return hashes


def _launched(tensors: Tensors, config: NamedInts, shapes: Mapping[int, Sequence[Any]]) -> dict[int, str]:
    for output in tensors.outputs:
        bits(output).zero_()
    tensors.prepare(config)
    tensors.launch(config)
    hashes = {}
    for size, parts in shapes.items():
        own = [_part(output, shape) for output, shape in zip(tensors.written, parts, strict=True)]
        copies = (part.clone(memory_format=torch.contiguous_format) for part in own)  # without the guards
        words = (int(guards.fingerprint(guards.guarded_copy(copy))) % 2**64 for copy in copies)
        hashes[size] = ".".join(f"{word:016x}" for word in words)
    return hashes


def _part(whole: Any, shape: Sequence[int]) -> Any:
    """Return the beginning of a tensor. Raises ValueError for a shape that it does not contain."""
    if len(shape) != whole.ndim or any(size > most for size, most in zip(shape, whole.shape, strict=True)):
        raise ValueError(f"a tensor of shape {tuple(shape)} is no part of one of {tuple(whole.shape)}")
    for dim, size in enumerate(shape):
        whole = whole.narrow(dim, 0, size)
    return whole
