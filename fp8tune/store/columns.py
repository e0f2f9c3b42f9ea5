"""What a column of the results database may hold: names, one line of text, named integers, packed samples.

Every type refuses anything else when it is written and when it is read, so that a hostile or damaged database is
refused at this border and nothing else has to be on its guard.
"""

from __future__ import annotations

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
    """Times in microseconds -> bytes, exact to 1 ns: zlib over zigzag varints of the differences in nanoseconds."""
    packed, previous = bytearray(), 0
    for sample in samples_us:
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
    except zlib.error:
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


class Text(TypeDecorator[str]):
    """A text column that holds what ``pattern`` matches in full and nothing else, in both directions."""

    impl = String
    cache_ok = True

    def __init__(self, what: str, pattern: re.Pattern[str], length: int = 500) -> None:
        super().__init__(length)
        self.what, self.pattern = what, pattern

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Refuse to store anything else."""
        return self._checked(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        """Refuse to read anything else: the file was not written by fp8tune."""
        return self._checked(value)

    def _checked(self, value: Any) -> str | None:
        if value is None or (isinstance(value, str) and _matches(self.pattern, value)):
            return value
        raise DatabaseError(f"refused {str(value)[:80]!r}: that is no {self.what} (expected {self.pattern.pattern})")


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
        try:
            axes = tuple((str(name), tuple(int(number) for number in values)) for name, values in json.loads(value))
        except (TypeError, ValueError):
            axes = (("", ()),)
        if all(NAME.fullmatch(name) for name, _ in axes):
            return axes
        raise DatabaseError(f"refused {str(value)[:80]!r}: that is no declared grid")


class KeyNames(TypeDecorator[tuple[str, ...]]):
    """The names a table is looked up by, one blank between."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: Sequence[str] | None, dialect: Dialect) -> str:
        """Names -> text."""
        text = " ".join(value or ())
        self.process_result_value(text, dialect)
        return text

    def process_result_value(self, value: Any, dialect: Dialect) -> tuple[str, ...]:
        """Text -> names, each an identifier."""
        names = tuple(str(value).split())
        if all(NAME.fullmatch(name) for name in names):
            return names
        raise DatabaseError(f"refused {str(value)[:80]!r}: that is no list of key names")


class Whole(TypeDecorator[int]):
    """An integer of 64 bits and nothing else: SQLite itself would keep a text."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> int | None:
        """Refuse to store anything else."""
        return self._checked(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> int | None:
        """Refuse to read anything else."""
        return self._checked(value)

    def _checked(self, value: Any) -> int | None:
        if value is None or (isinstance(value, int) and -LARGEST <= value <= LARGEST):
            return value
        raise DatabaseError(f"refused {str(value)[:80]!r}: that is no integer of 64 bits")


class Finite(TypeDecorator[float]):
    """A finite number and nothing else."""

    impl = Double
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> float | None:
        """Refuse to store anything else."""
        return self._checked(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> float | None:
        """Refuse to read anything else."""
        return self._checked(value)

    def _checked(self, value: Any) -> float | None:
        if value is None or (isinstance(value, int | float) and math.isfinite(value)):
            return value
        raise DatabaseError(f"refused {str(value)[:80]!r}: that is no finite number")


class Duration(Finite):
    """A time above 0, in microseconds where its name says so."""

    cache_ok = True

    def _checked(self, value: Any) -> float | None:
        time = super()._checked(value)
        if time is None or time > 0:
            return time
        raise DatabaseError(f"refused {str(value)[:80]!r}: that is no time above 0")
