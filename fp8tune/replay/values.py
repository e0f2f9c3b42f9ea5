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
holds some are arguments of their own, named ``parts[0]``. :func:`fp8tune_kernels.tuners.decoded` reads the table.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from fp8tune.errors import UsageError
from fp8tune.replay import naming
from fp8tune.replay.lazy import triton
from fp8tune.replay.recording import Config, Launch, Tensor, Value
from fp8tune_kernels.tuners import decoded as decoded_value
from fp8tune_kernels.tuners import function_name, hook_for

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
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is float:
        return {"float": str(value)}
    if kind is tuple:
        return {"tuple": tuple(encoded(item, what) for item in value)}
    place = kind.__module__.partition(".")[0], kind.__name__
    if place == ("triton", "constexpr"):
        return encoded(value.value, what)
    if place == ("torch", "dtype"):
        return {"dtype": str(value)}
    if place == ("triton", "dtype"):
        names = vars(sys.modules["triton.language"])
        return {"dtype": next(f"tl.{name}" for name, item in names.items() if type(item) is kind and item == value)}
    if hasattr(value, "fn") or (callable(value) and hasattr(value, "__qualname__")):
        if (name := naming.attribute_of(value)) is None:
            raise Unrecordable(f"{what} is the function {function_name(value)}, which cannot be imported")
        return {"function": name}
    kind_name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    raise Unrecordable(f"{what} is of type {kind_name}, which a recording cannot hold")


def decoded(value: Value) -> Any:
    """Return the value itself; imports torch or Triton for a dtype. Raises UsageError for one that is not here."""
    try:
        return decoded_value(value)
    except ValueError as error:
        raise UsageError(f"a value of the recording is not here: {error}") from None


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


def triton_config(config: Config, declared: Sequence[Any]) -> Any:
    """Return a config as Triton has it, with the ``pre_hook`` of its declaration.

    Raises HookUnknownError for a config that is not declared where the hooks of those that are differ.
    """
    kwargs = {name: decoded(value) for name, value in config.kwargs.items()}
    result = triton.Config(kwargs, **{"num_ctas": config.num_ctas, **config.options})
    result.pre_hook = hook_for(result, declared)
    return result


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


def arguments_of(launch: Launch, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a recorded launch by parameter, with these tensors, tuples as they were passed."""
    result: dict[str, Any] = {}
    for item in launch.arguments:
        value = tensors[item.name] if isinstance(item, Tensor) else decoded(item.value)
        if isinstance(item, Tensor) and item.descriptor is not None:
            module = importlib.import_module("triton.tools.tensor_descriptor")
            value = module.TensorDescriptor(value, *map(list, (item.shape, item.strides, item.descriptor)))
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
