"""Arguments that are no memory, as a recording holds them.

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

Tensors and descriptors, in tuples or alone, are :class:`fp8tune.replay.recording.Tensor`.
"""

from __future__ import annotations

import importlib
import math
import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from fp8tune.errors import UsageError
from fp8tune.replay import naming
from fp8tune.replay.lazy import triton
from fp8tune.replay.recording import Config, Value

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
