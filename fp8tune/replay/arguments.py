"""Arguments of a call by name: tensors and TensorDescriptors, alone or in tuples, and scalars.

Items of a tuple that holds tensors are arguments of their own, named ``parts[0]``. The kinds of scalars are listed in
:mod:`fp8tune.replay.values`.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from fp8tune.replay.recording import Launch, Tensor
from fp8tune.replay.values import Unrecordable, decoded


def is_tensor(value: Any) -> bool:
    """Return True if Triton takes the value as a pointer."""
    return hasattr(value, "data_ptr") and hasattr(value, "dtype")


def is_descriptor(value: Any) -> bool:
    """Return True for a ``TensorDescriptor`` made on the host."""
    module = sys.modules.get("triton.tools.tensor_descriptor")
    return module is not None and isinstance(value, module.TensorDescriptor)


def tensor_in(value: Any) -> Any:
    """Return a tensor, or the one that a TensorDescriptor describes; None for a scalar."""
    if is_descriptor(value):
        return value.base
    return value if is_tensor(value) else None


def flattened(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an argument, or the items of a tuple with tensors under their names. Raises Unrecordable."""
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    if not any(map(_has_memory, items)):
        yield name, value
    elif type(value) is not tuple:
        raise Unrecordable(f"argument {name} is a {type(value).__name__} with tensors: pass them one by one")
    else:
        for index, item in enumerate(value):
            yield from flattened(f"{name}[{index}]", item)


def _has_memory(value: Any) -> bool:
    return tensor_in(value) is not None or (isinstance(value, tuple) and any(map(_has_memory, value)))


def arguments_of(launch: Launch, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a recorded launch by parameter, with these tensors: :func:`flattened` undone."""
    result: dict[str, Any] = {}
    for item in launch.arguments:
        value = _in_memory(item, tensors[item.name]) if isinstance(item, Tensor) else decoded(item.value)
        name, *places = re.findall(r"[^\[\]]+", item.name)
        if not places:
            result[name] = value
            continue
        items: list[Any] = result.setdefault(name, [])
        for place in places[:-1]:  # in their order: a place is the next one, or inside the last
            if len(items) <= int(place):
                items.append([])
            items = items[int(place)]
        items.append(value)
    return {name: _as_tuple(value) for name, value in result.items()}


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _in_memory(argument: Tensor, tensor: Any) -> Any:
    """Return a tensor, or the TensorDescriptor over it that was recorded."""
    if argument.descriptor is None:
        return tensor
    module = importlib.import_module("triton.tools.tensor_descriptor")
    return module.TensorDescriptor(tensor, list(argument.shape), list(argument.strides), list(argument.descriptor))
