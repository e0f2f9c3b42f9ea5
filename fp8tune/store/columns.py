"""What a column of the results database may hold: names, one line of text, named integers, packed samples.

Every type refuses anything else when it is written and when it is read, so that a hostile or damaged database is
refused at this border and nothing else has to be on its guard.
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
_INTEGER = re.compile(r"0|[1-9][0-9]{0,18}")


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
    """Times in microseconds -> bytes, exact to 1 ns: zlib over zigzag varints of the differences in nanoseconds.

    Raises DatabaseError for a sample that is no time.
    """
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


class _Checked(TypeDecorator[Any]):
    """A column that takes and gives back one kind of value and refuses any other with a DatabaseError."""

    impl: Any = String
    cache_ok = True
    required = False
    """Whether NULL is refused too: set by a column that is not nullable. A damaged file holds NULLs anywhere."""

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        """Refuse to store what would not be read back."""
        return self._checked(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        """Refuse to read anything else: the file was not written by fp8tune."""
        return self._checked(value)

    def _checked(self, value: Any) -> Any:
        if value is None and not self.required:
            return None
        if value is None or not self._holds(value):
            raise DatabaseError(f"refused {_start_of(value)}: that is no {self._expected()}")
        return value

    def _holds(self, value: Any) -> bool:
        raise NotImplementedError

    def _expected(self) -> str:
        raise NotImplementedError


def _start_of(value: Any) -> str:
    """The beginning of a value that may be endless, without control characters."""
    return "NULL" if value is None else ascii(str(value)[:80])


class Text(_Checked):
    """A text column that holds what ``pattern`` matches in full and nothing else, in both directions."""

    cache_ok = True

    def __init__(self, what: str, pattern: re.Pattern[str]) -> None:
        super().__init__()
        self.what, self.pattern = what, pattern

    def _holds(self, value: Any) -> bool:
        return isinstance(value, str) and _matches(self.pattern, value)

    def _expected(self) -> str:
        return f"{self.what} (expected {self.pattern.pattern})"


class Whole(_Checked):
    """An integer of 64 bits and nothing else: SQLite itself would keep a text."""

    impl = BigInteger
    cache_ok = True

    def _holds(self, value: Any) -> bool:
        return isinstance(value, int) and -LARGEST <= value <= LARGEST

    def _expected(self) -> str:
        return "integer of 64 bits"


class Count(Whole):
    """How many of something, or of how many bytes: 0 or more."""

    cache_ok = True

    def _holds(self, value: Any) -> bool:
        return super()._holds(value) and bool(value >= 0)

    def _expected(self) -> str:
        return "number of 0 or more"


class Finite(_Checked):
    """A finite number and nothing else."""

    impl = Double
    cache_ok = True

    def _holds(self, value: Any) -> bool:
        return isinstance(value, int | float) and -LARGEST_NUMBER <= value <= LARGEST_NUMBER

    def _expected(self) -> str:
        return f"number between {-LARGEST_NUMBER:g} and {LARGEST_NUMBER:g}"


class Duration(Finite):
    """A time above 0, in microseconds where its name says so."""

    cache_ok = True

    def _holds(self, value: Any) -> bool:
        return super()._holds(value) and 0 < value <= LONGEST_US

    def _expected(self) -> str:
        return f"time above 0, up to {LONGEST_US:g}"


class Share(Finite):
    """A share of something: 0 to 1."""

    cache_ok = True

    def _holds(self, value: Any) -> bool:
        return super()._holds(value) and 0 <= value <= 1

    def _expected(self) -> str:
        return "share between 0 and 1"


class NamedIntsText(TypeDecorator[NamedInts]):
    """Named integers as text, in the order given; ``unstated`` stands for None, so that a unique index can hold it."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: Mapping[str, int] | None, dialect: Dialect) -> str:
        """NamedInts -> text, refusing names and numbers that would not read back."""
        text = UNSTATED if value is None else " ".join(f"{name}={number}" for name, number in value.items())
        self._parsed(text)
        return text

    def process_result_value(self, value: str | None, dialect: Dialect) -> NamedInts | None:
        """Text -> NamedInts, or None where a publication names no config."""
        return self._parsed(value)

    def _parsed(self, text: Any) -> NamedInts | None:
        if text == UNSTATED:
            return None
        try:
            return parse_named_ints(str(text))
        except ValueError as error:
            raise DatabaseError(f"refused a shape, config or lookup key: {error}") from None


class ShapeText(NamedIntsText):
    """The sizes of a problem: what :func:`check_sizes` lets pass."""

    cache_ok = True

    def _parsed(self, text: Any) -> NamedInts | None:
        shape = super()._parsed(text)
        try:
            check_sizes(shape or NamedInts())
        except ValueError as error:
            raise DatabaseError(f"refused a shape: {error}") from None
        return shape


def check_sizes(shape: NamedInts) -> None:
    """Raise ValueError for a shape without a dim, a dim that no tensor has, or dims whose product passes 64 bits."""
    if not shape:
        raise ValueError("the shape is empty: write it as name=value pairs, such as M=16640 K=5120 G=64")
    for name, size in shape.items():
        if not 0 <= size <= LARGEST_DIM:
            raise ValueError(f"{name}={size} is larger than {LARGEST_DIM}")
    if math.prod(shape.values()) > LARGEST:
        raise ValueError(f"the product of {shape} is larger than 2^63 - 1")


class AxesJson(TypeDecorator[tuple[tuple[str, tuple[int, ...]], ...]]):
    """The declared grid in declaration order, as JSON: ``[["BLOCK_SIZE", [32, 64]], ...]``."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str:
        """Axes -> JSON."""
        text = json.dumps(value, separators=(",", ":"))
        self.process_result_value(text, dialect)
        return text

    def process_result_value(self, value: Any, dialect: Dialect) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """JSON -> axes; names are identifiers, values integers."""
        with contextlib.suppress(TypeError, ValueError, RecursionError):  # brackets may be nested without end
            axes = tuple((name, tuple(values)) for name, values in json.loads(value))
            if all(NAME.fullmatch(name) and all(map(_is_axis_value, values)) for name, values in axes):
                return axes
        raise DatabaseError(f"refused {_start_of(value)}: that is no declared grid")


def _is_axis_value(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST  # a bool is an int, and no size


class KeyNames(TypeDecorator[tuple[str, ...]]):
    """The names a table is looked up by, one blank between."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: Sequence[str] | None, dialect: Dialect) -> str:
        """Names -> text."""
        text = " ".join(value or ())
        if self.process_result_value(text, dialect) != tuple(value or ()):
            raise DatabaseError(f"refused {_start_of(text)}: a key name holds a blank")
        return text

    def process_result_value(self, value: Any, dialect: Dialect) -> tuple[str, ...]:
        """Text -> names, each an identifier."""
        names = tuple(value.split()) if isinstance(value, str) else ("",)
        if all(NAME.fullmatch(name) for name in names):
            return names
        raise DatabaseError(f"refused {_start_of(value)}: that is no list of key names")


class CommandLine(TypeDecorator[str]):
    """A command as it was typed, without the passwords of database URLs: neither written nor read with one."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Store no password, wherever the command comes from."""
        return None if value is None else redacted(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> str | None:
        """Read none either: old versions stored them."""
        return None if value is None else redacted(str(value))
