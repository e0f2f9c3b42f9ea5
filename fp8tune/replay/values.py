"""Arguments of a launch: memory by name, and everything else as a recording holds it.

===================================  ================================  =====================
in the program                       in a recording                    as a size in a key
===================================  ================================  =====================
None, bool, int, str, finite float   the value                         itself or its number
NaN and infinities                   ``{"float": "nan"}``              its number
tuple                                ``{"tuple": [...]}``              its number
torch.dtype, tl.dtype                ``{"dtype": "tl.float32"}``       its number
tl.constexpr                         the value inside                  as the value
function, Triton kernel              ``{"function": "module:name"}``   none
===================================  ================================  =====================

Tensors and TensorDescriptors, alone or in tuples, are :class:`fp8tune.replay.recording.Tensor`. Items of a tuple that
holds some are arguments of their own, named ``parts[0]``.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fp8tune.errors import UsageError
from fp8tune.replay import naming
from fp8tune.replay.lazy import triton
from fp8tune.replay.recording import Config, Launch, Tensor, Value

DTYPES = (
    *("float64", "float32", "float16", "bfloat16"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
)
"""A dtype's place here is its number in a key: append only."""


class Unrecordable(Exception):  # noqa: N818 - concerns a launch, is no fault of the user
    """A part of a launch that a recording cannot hold; the text names it."""


def encoded(value: Any, what: str) -> Value:
    """Return a scalar, constexpr or option as a recording holds it. Raises Unrecordable, which names ``what``."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if kind is tuple:
        return {"tuple": tuple(encoded(item, what) for item in value)}
    module = kind.__module__
    if module == "torch" and kind.__name__ == "dtype":
        return {"dtype": str(value)}
    if module.startswith("triton.") and kind.__name__ == "constexpr":
        return encoded(value.value, what)
    if module.startswith("triton.") and kind.__name__ == "dtype":
        names = vars(sys.modules["triton.language"])
        return {"dtype": next(f"tl.{name}" for name, item in names.items() if type(item) is kind and item == value)}
    if hasattr(value, "fn") or (callable(value) and hasattr(value, "__qualname__")):
        if (name := naming.attribute_of(value)) is None:
            function = naming.function_name(value)
            raise Unrecordable(f"{what} is the function {function}, which cannot be imported")
        return {"function": name}
    kind_name = f"{module}.{kind.__qualname__}".removeprefix("builtins.")
    raise Unrecordable(f"{what} is of type {kind_name}, which a recording cannot hold")


def config_of(config: Any) -> Config:
    """Return a ``triton.Config`` as a recording holds it. Raises Unrecordable."""
    if getattr(config, "ir_override", None):
        raise Unrecordable("a config overrides the IR")
    return Config(
        {name: encoded(value, f"config value {name}") for name, value in config.kwargs.items()},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        num_ctas=getattr(config, "num_ctas", None) or 1,
        maxnreg=getattr(config, "maxnreg", None),
        has_pre_hook=config.pre_hook is not None,
    )


def decoded(value: Value) -> Any:
    """Return the value itself; imports torch or Triton for a dtype. Raises UsageError for one that is not here."""
    if isinstance(value, tuple | list):
        return tuple(map(decoded, value))
    if not isinstance(value, Mapping):
        return value
    ((kind, text),) = value.items()
    if kind == "float":
        return float(text)
    if kind == "tuple":
        return decoded(text)
    module_name, _, name = text.rpartition(":" if kind == "function" else ".")
    if kind != "function" and module_name not in (
        "torch",
        "tl",
    ):  # a recording may come from elsewhere: import nothing else
        raise UsageError(f"the recording has the dtype {text!r:.80}, which is none of torch or triton.language")
    try:
        module = importlib.import_module("triton.language" if module_name == "tl" else module_name)
        if module_name == "tl" and not hasattr(module, name):
            return module.dtype(name)  # tl.float32 calls itself fp32
        return naming.resolved(module, name)
    except (ImportError, AttributeError, LookupError, ValueError, AssertionError):
        raise UsageError(f"the recording has the value {text!r}, which cannot be imported here") from None


def decoded_items(values: Mapping[str, Value]) -> dict[str, Any]:
    """Return values by name, decoded."""
    return {name: decoded(value) for name, value in values.items()}


class UnknownHookError(Exception):
    """A config that nobody declared, of a kernel whose configs have different hooks."""


def triton_config(config: Config, declared: Sequence[Any]) -> Any:
    """Return a config as Triton has it, with the ``pre_hook`` of the declared one that it comes from.

    Raises UnknownHookError for a config that is not declared where the hooks of those that are differ.
    """
    result = triton.Config(decoded_items(config.kwargs), **{"num_ctas": config.num_ctas, **config.options})
    result.pre_hook = hook_for(result, declared)
    return result


def hook_for(config: Any, declared: Sequence[Any]) -> Any:
    """Return the ``pre_hook`` of a Triton config: that of the same declared config, else the one that all have."""
    same = [item for item in declared if item.all_kwargs() == config.all_kwargs()]
    equal_kwargs = [item for item in declared if item.kwargs == config.kwargs]
    hooks = [item.pre_hook for item in same[:1] or equal_kwargs or declared]
    if len(set(map(_behaviour, hooks))) > 1:
        raise UnknownHookError("its pre_hook is unknown: it is not declared, and the pre_hooks of the declared differ")
    return next(iter(hooks), None)


def _behaviour(hook: Any) -> Any:
    """Return what two hooks have in common that do the same: a lambda for each config is made of one code."""
    if not hasattr(hook, "__code__"):
        return hook
    cells = tuple(id(cell.cell_contents) for cell in hook.__closure__ or ())
    return hook.__code__, cells, hook.__defaults__, id(hook.__globals__)


def number(value: Value) -> int:
    """Return a whole number from 0 that is the same in every run: a small int itself, a hash of any other value."""
    if isinstance(value, int) and 0 <= value < 2**31:  # as sizes in the database
        return int(value)
    return zlib.crc32(repr(value).encode()) & 0x7FFFFFFF


def dtype_number(dtype: str) -> int:
    """Return the number of a dtype in a key."""
    return DTYPES.index(dtype) if dtype in DTYPES else number(dtype)


def text_of(value: Value) -> str:
    """Return a value as people write it: ``silu``, ``float16``, ``0.125``, ``(2, 3)``."""
    if isinstance(value, Mapping) and len(value) == 1:
        ((kind, inner),) = value.items()
        return text_of(inner) if kind == "tuple" else str(inner).removeprefix("torch.").removeprefix("tl.")
    return f"({', '.join(map(text_of, value))})" if isinstance(value, tuple | list) else str(value)


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
