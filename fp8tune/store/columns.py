"""What a column of the results database may hold: names, one line of text, named integers, packed samples.

Every type refuses anything else when written and when read: a hostile or damaged database is refused here.
"""

from __future__ import annotations

import contextlib
import functools
import json
import keyword
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import BigInteger, Dialect, Double, String
from sqlalchemy.types import TypeDecorator

from fp8tune.errors import DatabaseError
from fp8tune.records import NamedInts
from fp8tune.redaction import redacted
from fp8tune.text import KERNEL_NAME
from fp8tune.text import LINE as LINE
from fp8tune.text import NAME as NAME
from fp8tune.text import WORD as WORD

UNSTATED = "unstated"
"""What a publication does not say: a routing, a scale mode, an FP8 dtype or a whole config."""

LARGEST = 2**63 - 1
"""The largest integer a name may have: what a 64-bit column and a kernel argument hold."""

KERNEL = KERNEL_NAME
ARCH = re.compile(r"[a-z][a-z0-9_]{1,31}")
LARGEST_DIM = 2**31 - 1
"""Group ends (``offs``) are int32."""
LARGEST_NUMBER = 1e18
"""No measured number is larger, and sums and squares of smaller ones are finite."""
LONGEST_US = 1e12
"""A time of more than eleven days is none."""
LARGEST_DOCUMENT = 2**20
"""Bytes of a stored JSON document."""
_INTEGER = re.compile(r"0|[1-9][0-9]{0,18}")


@functools.lru_cache(8192)  # a problem's trials name the same hundred configs thousands of times
def parse_named_ints(text: str) -> NamedInts:
    """``BLOCK_SIZE=32 num_warps=4`` -> NamedInts. Raises ValueError for all but identifiers and integers below 2^63."""
    items: dict[str, int] = {}
    for pair in text.split(" ") if text else ():
        name, equals, value = pair.partition("=")
        if not equals or not NAME.fullmatch(name) or keyword.iskeyword(name) or not _INTEGER.fullmatch(value):
            raise ValueError(f"{pair[:80]!r} is not name=integer")
        if int(value) > LARGEST:
            raise ValueError(f"{name}={value} is larger than 2^63 - 1")
        if name in items:
            raise ValueError(f"{name} is given twice")
        items[name] = int(value)
    return NamedInts(items)


def pack_samples(samples_us: Sequence[float]) -> bytes:
    """Times in us -> zlib over zigzag varints of their differences in ns. Raises DatabaseError for what is no time."""
    packed, previous = bytearray(), 0
    for sample in samples_us:
        if not 0 <= sample <= LONGEST_US:  # not a NaN either
            raise DatabaseError(f"refused {_start_of(sample)}: that is no time of a sample")
        nanoseconds = round(sample * 1000)
        difference, previous = nanoseconds - previous, nanoseconds
        zigzag = 2 * difference if difference >= 0 else -2 * difference - 1
        while zigzag > 127:
            packed.append(zigzag & 127 | 128)
            zigzag >>= 7
        packed.append(zigzag)
    return zlib.compress(bytes(packed), 9) if packed else b""


def unpack_samples(blob: bytes) -> tuple[float, ...]:
    """The inverse of :func:`pack_samples`: microseconds, whole nanoseconds. Raises DatabaseError for other bytes."""
    samples, total, zigzag, shift = [], 0, 0, 0
    try:
        packed = zlib.decompress(blob) if blob else b""
    except (TypeError, zlib.error):
        raise DatabaseError("the samples of a trial are damaged: restore the database from git or a copy") from None
    for byte in packed:
        zigzag |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            total += -(zigzag + 1) // 2 if zigzag & 1 else zigzag // 2
            samples.append(total / 1000)
            zigzag = shift = 0
    return tuple(samples)


@functools.lru_cache(4096)  # a million rows repeat a few names
def _matches(pattern: re.Pattern[str], text: str) -> bool:
    return pattern.fullmatch(text) is not None


def _start_of(value: Any) -> str:
    """The beginning of a value that may be endless, without control characters."""
    return "NULL" if value is None else ascii(str(value)[:80])


class _Checked(TypeDecorator[Any]):
    """A column that raises DatabaseError for any value but its own, when it is written and when it is read."""

    impl: Any = String
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        """Refuse to store what would not be read back."""
        stored = self._stored(value)
        self._read(stored)
        return stored

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        """Refuse to read what fp8tune has not written."""
        return self._read(value)

    def _stored(self, value: Any) -> Any:
        return value

    def _read(self, value: Any) -> Any:
        raise NotImplementedError


class _Plain(_Checked):
    """A value stored as it is."""

    cache_ok = True
    required = False
    """Whether NULL is refused too: set by a column that is not nullable. A damaged file holds NULLs anywhere."""
    expected = ""

    def _read(self, value: Any) -> Any:
        if value is None and not self.required:
            return None
        if value is None or not self._holds(value):
            raise DatabaseError(f"refused {_start_of(value)}: that is no {self.expected}")
        return value

    def _holds(self, value: Any) -> bool:
        raise NotImplementedError


class Text(_Plain):
    """A text that ``pattern`` matches in full."""

    cache_ok = True

    def __init__(self, what: str, pattern: re.Pattern[str]) -> None:
        super().__init__()
        self.what, self.pattern, self.expected = what, pattern, f"{what} (expected {pattern.pattern})"

    def _holds(self, value: Any) -> bool:
        return isinstance(value, str) and _matches(self.pattern, value)


class Whole(_Plain):
    """An integer of 64 bits and nothing else: SQLite itself would keep a text."""

    impl = BigInteger
    cache_ok = True
    expected = "integer of 64 bits"
    low = -LARGEST

    def _holds(self, value: Any) -> bool:
        return isinstance(value, int) and self.low <= value <= LARGEST


class Count(Whole):
    """How many of something, or of how many bytes."""

    cache_ok = True
    expected = "number of 0 or more"
    low = 0


class Finite(_Plain):
    """A finite number."""

    impl = Double
    cache_ok = True
    expected = f"number between {-LARGEST_NUMBER:g} and {LARGEST_NUMBER:g}"
    low, high = -LARGEST_NUMBER, LARGEST_NUMBER

    def _holds(self, value: Any) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high


class Duration(Finite):
    """A time above 0, in microseconds where its name says so."""

    cache_ok = True
    expected = f"time above 0, up to {LONGEST_US:g}"
    low, high = math.ulp(0.0), LONGEST_US


class Share(Finite):
    """A share of something."""

    cache_ok = True
    expected = "share between 0 and 1"
    low, high = 0.0, 1.0


class NamedIntsText(_Checked):
    """Named integers, in the order given; ``unstated`` stands for None, so that a unique index can hold it."""

    cache_ok = True

    def _stored(self, value: Mapping[str, int] | None) -> str:
        return UNSTATED if value is None else " ".join(f"{name}={number}" for name, number in value.items())

    def _read(self, text: Any) -> NamedInts | None:
        if text == UNSTATED:
            return None
        try:
            return parse_named_ints(str(text))
        except ValueError as error:
            raise DatabaseError(f"refused a shape, config or lookup key: {error}") from None


class ShapeText(NamedIntsText):
    """The sizes of a problem; none for a recorded launch that takes no integer."""

    cache_ok = True

    def _read(self, text: Any) -> NamedInts | None:
        shape = super()._read(text)
        if shape is None:
            raise DatabaseError("refused a shape: it is unstated")
        try:
            _check_each(shape)
        except ValueError as error:
            raise DatabaseError(f"refused a shape: {error}") from None
        return shape


def check_sizes(shape: NamedInts) -> None:
    """Raise ValueError for a shape without a dim, a dim that no tensor has, or dims whose product passes 64 bits."""
    if not shape:
        raise ValueError("the shape is empty: write it as name=value pairs, such as M=16640 K=5120 G=64")
    _check_each(shape)
    if math.prod(shape.values()) > LARGEST:
        raise ValueError(f"the product of {shape} is larger than 2^63 - 1")


def _check_each(shape: NamedInts) -> None:
    for name, size in shape.items():
        if not 0 <= size <= LARGEST_DIM:
            raise ValueError(f"{name}={size} is larger than {LARGEST_DIM}")


class AxesJson(_Checked):
    """The declared grid in declaration order, as JSON: ``[["BLOCK_SIZE", [32, 64]], ...]``."""

    cache_ok = True

    def _stored(self, value: Any) -> str:
        return json.dumps(value, separators=(",", ":"))

    def _read(self, text: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
        with contextlib.suppress(TypeError, ValueError, RecursionError):  # brackets may be nested without end
            axes = tuple((name, tuple(values)) for name, values in json.loads(text))
            if all(NAME.fullmatch(name) and all(map(_is_axis_value, values)) for name, values in axes):
                return axes
        raise DatabaseError(f"refused {_start_of(text)}: that is no declared grid")


def _is_axis_value(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST  # a bool is an int, and no size


class KeyNames(_Checked):
    """The names a table is looked up by, one blank between."""

    cache_ok = True

    def _stored(self, value: Sequence[str] | None) -> str:
        text = " ".join(value or ())
        if tuple(text.split()) != tuple(value or ()):
            raise DatabaseError(f"refused {_start_of(text)}: a key name holds a blank")
        return text

    def _read(self, text: Any) -> tuple[str, ...]:
        names = tuple(text.split()) if isinstance(text, str) else ("",)
        if all(NAME.fullmatch(name) for name in names):
            return names
        raise DatabaseError(f"refused {_start_of(text)}: that is no list of key names")


class DocumentText(_Checked):
    """The text of a JSON object of at most :data:`LARGEST_DOCUMENT` bytes."""

    cache_ok = True

    def _read(self, text: Any) -> str:
        if not isinstance(text, str) or len(text.encode(errors="replace")) > LARGEST_DOCUMENT:
            raise DatabaseError(f"refused {_start_of(text)}: that is no text of at most {LARGEST_DOCUMENT} bytes")
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(json.loads(text), dict):
                return text
        raise DatabaseError(f"refused {_start_of(text)}: that is no JSON object")


class CommandLine(_Checked):
    """A command as it was typed, without the passwords of database URLs: neither written nor read with one."""

    cache_ok = True

    def _read(self, value: Any) -> str | None:
        return None if value is None else redacted(str(value))

    _stored = _read
