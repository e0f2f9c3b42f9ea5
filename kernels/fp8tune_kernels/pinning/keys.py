"""Keys of launches and of tables."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..tuners import flattened, is_tensor, tensor_in

_SCALARS = frozenset({int, bool, float, str, type(None)})
_text = functools.cache(str)

Key = tuple[Any, ...]
"""A key as Triton's autotuner makes it: values of the key arguments, then the dtype of each tensor as text."""


def plain(key: Any) -> Key:
    """Return the key with dtypes and the like as text: a table imports neither torch nor Triton."""
    return tuple(item if item is None or isinstance(item, bool | int | float | str) else str(item) for item in key)


def distance_of(key: Key, known: Key) -> float:
    """Return the distance of two keys in powers of two; infinite where they differ in more than numbers."""
    total = 0.0 if len(key) == len(known) else math.inf
    for left, right in zip(key, known, strict=False):
        pair = (left, right)
        if all(isinstance(item, int | float) and type(item) is not bool and math.isfinite(item) for item in pair):
            powers = [math.copysign(math.log2(1 + abs(item)), item) for item in pair]  # for zero and below too
            total += abs(powers[0] - powers[1])
        elif type(left) is not type(right) or left != right:
            return math.inf
    return total


def bare_key(names: Sequence[str], arg_names: Sequence[str], arguments: Mapping[str, Any]) -> Key:
    """Return the key of a bare kernel's launch: values of the named arguments, then the dtype of each tensor."""
    key = [arguments[name] for name in names if name in arguments]
    for name in arg_names:  # at each launch
        value: Any = arguments.get(name)
        if type(value) in _SCALARS:
            continue
        if is_tensor(value):
            key.append(_text(value.dtype))
        else:
            memory = (tensor_in(item) for _, item in flattened(name, value))
            key += [_text(tensor.dtype) for tensor in memory if tensor is not None]
    return tuple(key)
