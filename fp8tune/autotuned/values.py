"""Recorded values as Triton and torch take them, and as whole numbers for a key."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Mapping
from typing import Any

from fp8tune.errors import UsageError
from fp8tune.recording import Value

DTYPES = (
    *("float64", "float32", "float16", "bfloat16"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
)
"""A dtype's place here is its number in a key: append only."""


def decoded(value: Value) -> Any:
    """The value itself (imports torch or Triton for a dtype). Raises UsageError for one that does not exist here."""
    if isinstance(value, tuple | list):
        return tuple(map(decoded, value))
    if not isinstance(value, Mapping):
        return value
    ((kind, text),) = value.items()
    if kind == "float":
        return float(text)
    if kind == "tuple":
        return decoded(text)
    where, _, name = text.rpartition(":" if kind == "function" else ".")
    if kind != "function" and where not in ("torch", "tl"):  # a recording may come from elsewhere: import nothing else
        raise UsageError(f"the recording has the dtype {text!r:.80}, which is none of torch or triton.language")
    try:
        module = importlib.import_module("triton.language" if where == "tl" else where)
        if where == "tl" and not hasattr(module, name):
            return module.dtype(name)  # tl.float32 calls itself fp32
        return getattr(module, name)
    except (ImportError, AttributeError, ValueError, AssertionError):
        raise UsageError(f"the recording has the value {text!r}, which cannot be imported here") from None


def has_function(value: Value) -> bool:
    """Whether a value is a function, or a tuple with one: its text differs in every process."""
    if isinstance(value, tuple | list):
        return any(map(has_function, value))
    return isinstance(value, Mapping) and ("function" in value or has_function(value.get("tuple", ())))


def number(value: Value) -> int:
    """A whole number from 0 that is the same in every run: an int or a flag as it is, all else by its text."""
    if isinstance(value, int) and 0 <= value < 2**31:  # as sizes in the database
        return int(value)
    return zlib.crc32(repr(value).encode()) & 0x7FFFFFFF


def dtype_number(dtype: str) -> int:
    """The number of a dtype in a key."""
    return DTYPES.index(dtype) if dtype in DTYPES else number(dtype)
