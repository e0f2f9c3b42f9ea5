"""Describe a launch: layout and memory of its tensors, what their values are like, and its grid as a table."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import math
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fp8tune.replay.lazy import torch
from fp8tune.replay.recording import Grid, Tensor, Value, pack
from fp8tune.replay.values import Unrecordable, encoded
from fp8tune_kernels.tuners import is_descriptor, tensor_in

LISTED = 64  # integers that a recording lists one by one; more are packed
MOST_INTEGERS, MOST_PACKED_BYTES, MOST_BYTES_IN_ALL = 1 << 21, 4 << 20, 64 << 20
"""Larger integer tensors are described by their range alone: they would make recordings that nobody can send."""
SAMPLED = 1 << 20  # elements of a floating-point tensor that its statistics are computed of, at most

_packed_bytes = 0


def described(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Describe tensors and descriptors by name, without reading any element. Raises Unrecordable."""
    bases = {name: tensor_in(value) for name, value in tensors.items()}
    first: dict[int, int] = {}  # storage -> its lowest address that an argument has
    for base in bases.values():
        storage = base.untyped_storage().data_ptr()
        first[storage] = min(first.get(storage, base.data_ptr()), base.data_ptr())
    result: dict[str, Tensor] = {}
    for name, base in bases.items():
        value, storage, address = tensors[name], base.untyped_storage().data_ptr(), base.data_ptr()
        offset, rest = divmod(address - first[storage], base.element_size())
        if rest:
            raise Unrecordable(f"argument {name} shares memory with another, not a whole number of elements apart")
        shape, strides, block = base.shape, base.stride(), None
        if is_descriptor(value):
            shape, strides, block = value.shape, value.strides, tuple(value.block_shape)
            if value.padding != "zero" or getattr(value, "round_f32_to_tf32", False):  # not in Triton 3.6
                raise Unrecordable(f"argument {name} is a TensorDescriptor with options, which a recording cannot hold")
        result[name] = Tensor(
            name=name,
            dtype=str(base.dtype).removeprefix("torch."),
            shape=tuple(map(int, shape)),
            strides=tuple(map(int, strides)),
            alignment=min(16, address & -address) if address else 16,
            storage=list(first).index(storage),
            offset=offset,
            descriptor=block,
        )
    return result


def with_values(described: Mapping[str, Tensor], tensors: Mapping[str, Any], stores: bool = True) -> dict[str, Tensor]:
    """Add statistics and, if ``stores``, the elements of integer tensors: one synchronization a tensor."""
    result = dict(described)
    with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
        for name, value in tensors.items():
            base = tensor_in(value)
            if isinstance(base, torch.Tensor) and base.numel():
                with contextlib.suppress(Exception):  # a dtype that torch cannot compute with, such as four-bit floats
                    facts = _floats(base) if base.dtype.is_floating_point else _integers(base, stores)
                    result[name] = replace(result[name], **facts)
    return result


def _integers(tensor: Any, stores: bool) -> dict[str, Any]:
    """Return the range of integers, and all of them if they are few enough to be stored."""
    global _packed_bytes
    flat = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
    count, is_whole = tensor.numel(), tensor.numel() <= (MOST_INTEGERS if stores else LISTED)
    if is_whole:
        flat = flat.reshape(-1).to(torch.int64).cpu()
    least, most = flat.aminmax()
    is_sorted = flat.dim() == 1 and bool((flat[1:] >= flat[:-1]).all())
    facts = {"least": float(least), "most": float(most), "is_sorted": is_sorted}
    if is_whole and count <= LISTED:
        return {"values": tuple(flat.tolist()), **facts}
    if not is_whole or _packed_bytes > MOST_BYTES_IN_ALL:
        return facts
    packed = pack(ctypes.string_at(flat.data_ptr(), 8 * count))  # NumPy may be missing
    _packed_bytes += len(packed)
    return {"packed": packed, **facts} if len(packed) <= MOST_PACKED_BYTES else facts


def _floats(tensor: Any) -> dict[str, Any]:
    """Return statistics of a sample, and the value of all elements if they are equal."""
    while tensor.numel() > SAMPLED:  # every n-th element of the longest dimension: nothing large is copied
        longest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
        step = min(tensor.shape[longest], -(-tensor.numel() // SAMPLED))
        tensor = tensor[(slice(None),) * longest + (slice(None, None, max(2, step)),)]
    values = tensor.float().double()
    is_finite, first = values.isfinite(), values.flatten()[0]
    share = is_finite.double().mean()
    mean = torch.where(is_finite, values, 0.0).mean() / share
    statistics = {
        "least": torch.where(is_finite, values, torch.inf).min(),
        "most": torch.where(is_finite, values, -torch.inf).max(),
        "mean": mean,
        "deviation": (torch.where(is_finite, values - mean, 0.0).square().mean() / share).sqrt(),
        "zeros": (values == 0).double().mean(),
        "not_finite": 1 - share,
    }
    is_constant = ((values == first) | (values.isnan() & first.isnan())).all()
    *numbers, value, is_constant = torch.stack([*statistics.values(), first, is_constant.double()]).tolist()
    facts = {name: number for name, number in zip(statistics, numbers, strict=True) if math.isfinite(number)}
    return facts | ({"constant": encoded(value, "")} if is_constant else {})


MOST_ENTRIES = 4096
LARGEST_POWER = {1: 16, 2: 13}  # number of axes -> the power of two up to which blocks are widened; 10 for more axes
COUNTS = tuple(range(1, 9))  # values beside the declared ones of any other axis
_BLOCKS = frozenset(2**power for power in range(3, 64))

Heuristics = Mapping[str, Callable[[Any], Any]]


class _Noting(UserDict[str, Any]):
    """Arguments of a launch as a grid gets them; notes which it reads. Heuristics are computed when they are read.

    A grid that unpacks it reads everything.
    """

    def __init__(self, values: Mapping[str, Any], heuristics: Heuristics, read: set[str]) -> None:
        self._heuristics, self._read = heuristics, read
        super().__init__(values)

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        if name not in self.data and name in self._heuristics:
            self.data[name] = self._heuristics[name](self)
        return self.data[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self.data or name in self._heuristics else default

    def __iter__(self) -> Iterator[str]:
        self._read.update(self.data)
        return iter(self.data)


def grid_of(grid: Any, bound: Mapping[str, Any], configs: Sequence[Mapping[str, Any]], heuristics: Heuristics) -> Grid:
    """Return the programs for each config, and for powers of two around the declared values that the grid reads.

    ``bound``: the launch's arguments; ``configs``: what each declared config sets. A config for which the grid raises
    is left out. Raises what the grid raises for all of them, Unrecordable for a value of a config.
    """
    if not callable(grid):
        return Grid((), (((), tuple(map(int, grid))),))
    read, programs = set[str](), list[tuple[Mapping[str, Any], tuple[int, ...]]]()
    failure: Exception | None = None

    def call(config: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(map(int, grid(_Noting({**bound, **config}, heuristics, read))))

    for config in configs:
        try:
            programs.append((config, call(config)))
        except Exception as error:  # a config that this launch never gets, such as one that pruning leaves out
            failure = error
    if not programs and failure is not None:
        raise failure
    axes = tuple(name for name in dict.fromkeys(itertools.chain(*configs)) if name in read)
    table: dict[str, tuple[tuple[Value, ...], tuple[int, ...]]] = {}
    for config, counts in programs:
        values = tuple(encoded(config.get(axis), f"config value {axis}") for axis in axes)
        table[json.dumps(values)] = values, counts
    for combination in itertools.product(*_widened(axes, [config for config, _ in programs])):
        values = tuple(encoded(value, "") for value in combination)
        if (key := json.dumps(values)) not in table:
            with contextlib.suppress(Exception):  # a value that the grid refuses is left out
                table[key] = values, call({**configs[0], **dict(zip(axes, combination, strict=True))})
    return Grid(axes, tuple(table.values()))


def _widened(axes: Sequence[str], configs: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return the values of each axis: as declared, and more as long as the product stays small."""
    declared = [list(dict.fromkeys(config[axis] for config in configs if axis in config)) for axis in axes]
    powers = [2**power for power in range(3, LARGEST_POWER.get(len(axes), 10) + 1)]
    wide = []
    for axis, values in zip(axes, declared, strict=True):
        is_block = "BLOCK" in axis.upper() or all(value in _BLOCKS for value in values)
        are_integers = values and all(type(value) is int for value in values)
        wide.append(list(dict.fromkeys([*values, *((powers if is_block else COUNTS) if are_integers else ())])))
    small = (values for values in (wide, declared) if math.prod(map(len, values)) <= MOST_ENTRIES)
    return next(small, [[]] * len(axes))
