"""How values of many rows become few bytes, and come back bit for bit: columns, byte planes, zlib.

A packed text is zlib (level 9) of one JSON line and the bytes of the columns that it lists, in its order. For each the
line says ``[name, form, scale, width, values, nulls, choices]``. First come ``nulls`` bits, if there are any, the most
significant first: 1 where a row has no value. Then come the values that are there:

- ``i`` integers, ``d`` each less the one before. ``f`` numbers, times ``10**scale`` if that is 0 or more, else times
  ``2**-scale``: integers too. Each integer is stored in zigzag (0, -1, 1, -2 ... are 0, 1, 2, 3 ...) in ``width``
  bytes: the lowest byte of all values, then the next.
- ``r`` any finite numbers: the 8 bytes of float64, in such planes.
- ``c`` values that repeat: integers as above, the places of each in the list ``choices``.

The samples of timed blocks are packed in multiples of the timer's step: see :func:`pack_blocks`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8tune.errors import DatabaseError
from fp8tune.store.columns import LARGEST, LONGEST_US

Value = int | float | str | None

LARGEST_PACKED = 2**28
"""Bytes that a packed text may come to: a larger one is refused before it fills the memory."""

MOST_VALUES = 2**24
"""Values of one column."""

_DECIMALS = (0, 3, 6)
_BINARY = range(20, 63)
_LARGEST_EXACT = 2.0**53
_LEVEL = 9
_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]

_DAMAGES = (AttributeError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError, zlib.error)
"""What reading bytes that nobody packed may raise."""

DAMAGED = "packed values are damaged: restore the database from git or a copy"


def pack(columns: Mapping[str, Sequence[Value]]) -> bytes:
    """Columns of integers, finite numbers or texts as bytes. Raises DatabaseError for what is none of them.

    A column holds values of one type, and None where there is none.
    """
    heads, bodies = [], []
    for name, values in columns.items():
        present = [value for value in values if value is not None]
        nulls = len(values) if len(present) < len(values) else 0
        mask = np.packbits([value is None for value in values]).tobytes() if nulls else b""
        form, scale, width, choices, body = _packed(present)
        heads.append([name, form, scale, width, len(present), nulls, choices])
        bodies.append(mask + body)
    line = json.dumps(heads, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    return zlib.compress(line + b"".join(bodies), _LEVEL)


class Columns:
    """What :func:`pack` packed; each column is unpacked when it is asked for."""

    def __init__(self, blob: bytes) -> None:
        """Raise DatabaseError for bytes that :func:`pack` did not make."""
        self._heads: dict[str, list[Any]] = {}
        self._starts: dict[str, int] = {}
        with _telling_of_damage():
            self._bytes = _decompressed(blob)
            start = self._bytes.index(b"\n") + 1
            for head in json.loads(self._bytes[:start]):
                name, form, _, width, count, nulls, _ = head
                if not (0 <= width <= 8 and 0 <= count <= MOST_VALUES and 0 <= nulls <= MOST_VALUES):
                    raise ValueError("too large")
                self._heads[name], self._starts[name] = head, start
                start += -(-nulls // 8) + count * (8 if form == "r" else width)
            if start != len(self._bytes):
                raise ValueError("cut off")

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that there are."""
        return tuple(self._heads)

    def values(self, name: str) -> list[Any]:
        """The values of one column, None where there is none. Raises DatabaseError for damage or another name."""
        return self.with_extremes(name)[0]

    def with_extremes(self, name: str) -> tuple[list[Any], list[Any]]:
        """The values of one column, and what bounds them: each choice, or the least and the largest number."""
        try:
            return self._values(name)
        except _DAMAGES:
            raise DatabaseError(DAMAGED) from None

    def _values(self, name: str) -> tuple[list[Any], list[Any]]:
        _, form, scale, width, count, nulls, choices = self._heads[name]
        start = self._starts[name]
        if not nulls:
            return self._present(form, scale, width, count, choices, start)
        if not count:
            return [None] * nulls, []
        size = -(-nulls // 8)
        mask = np.unpackbits(np.frombuffer(self._bytes, np.uint8, size, start), count=nulls).tolist()
        if sum(mask) != nulls - count:
            raise ValueError("nulls")
        present, extremes = self._present(form, scale, width, count, choices, start + size)
        rest = iter(present)
        return [None if is_null else next(rest) for is_null in mask], extremes

    def _present(
        self, form: str, scale: int, width: int, count: int, choices: list[Any] | None, start: int
    ) -> tuple[list[Any], list[Any]]:
        if choices is not None:
            if not width:
                return [choices[0]] * count if count else [], choices
            places = _from_zigzag(_from_planes(self._bytes, start, count, width))
            if int(places.min()) < 0:
                raise ValueError("no place")
            return [choices[place] for place in places.tolist()], choices
        if not count:
            return [], []
        numbers: NDArray[Any]
        if form == "r":
            numbers = _from_planes(self._bytes, start, count, 8).view(np.float64)
            if not np.isfinite(numbers).all():
                raise ValueError("not finite")
        else:
            numbers = _from_zigzag(_from_planes(self._bytes, start, count, width))
            if form == "d":
                numbers = np.cumsum(numbers)
            elif form == "f":
                numbers = _unscaled(numbers, scale)
            elif form != "i":
                raise ValueError(form)
        return numbers.tolist(), [numbers.min().item(), numbers.max().item()]


def pack_blocks(blocks: Sequence[Sequence[float]]) -> bytes:
    """The samples of timed blocks, in us. Raises DatabaseError for what is no time of a sample.

    Columns: ``counts``, the samples of each block; ``step``, the largest step in ns that all are multiples of;
    ``medians`` of the blocks and ``differences`` from them, in steps. Samples that are no whole ns: ``samples``.
    """
    flat = np.array(list(itertools.chain.from_iterable(blocks)), dtype=np.float64)
    if not ((flat >= 0) & (flat <= LONGEST_US)).all():  # not a NaN either
        raise DatabaseError("refused to pack what is no time of a sample")
    counts = [len(block) for block in blocks]
    nanoseconds = np.rint(flat * 1000)
    if not len(flat):
        return pack({"counts": counts})
    if nanoseconds.max() >= _LARGEST_EXACT or not _is_same(nanoseconds / 1000, flat):
        return pack({"counts": counts, "samples": flat.tolist()})
    step = int(np.gcd.reduce(nanoseconds.astype(np.int64))) or 1
    steps = nanoseconds.astype(np.int64) // step
    ends = list(itertools.accumulate(counts))
    by_block = [steps[end - count : end] for end, count in zip(ends, counts, strict=True)]
    medians = [int(np.partition(block, len(block) // 2)[len(block) // 2]) if len(block) else 0 for block in by_block]
    differences = (steps - np.repeat(np.array(medians, dtype=np.int64), counts)).tolist()
    return pack({"counts": counts, "step": [step], "medians": medians, "differences": differences})


def unpack_blocks(blob: bytes) -> list[tuple[float, ...]]:
    """The inverse of :func:`pack_blocks`: the samples of each block in us. Raises DatabaseError for other bytes."""
    packed = Columns(blob)
    with _telling_of_damage():
        counts = packed.values("counts")
        if any(count < 0 for count in counts) or sum(counts) > MOST_VALUES:
            raise ValueError("no counts")
        if "differences" in packed.names:
            medians = np.repeat(np.array(packed.values("medians"), dtype=np.int64), counts)
            steps = np.array(packed.values("differences"), dtype=np.int64) + medians
            flat = steps * packed.values("step")[0] / 1000
        else:
            flat = np.array(packed.values("samples") if "samples" in packed.names else [], dtype=np.float64)
        if len(flat) != sum(counts) or not ((flat >= 0) & (flat <= LONGEST_US)).all():
            raise ValueError("no samples")
        ends = itertools.accumulate(counts)
        samples = flat.tolist()
        return [tuple(samples[end - count : end]) for end, count in zip(ends, counts, strict=True)]


def _packed(values: Sequence[Value]) -> tuple[str, int, int, list[Any] | None, bytes]:
    """(form, scale, width, choices, bytes) of values that are there."""
    if all(type(value) is int and abs(value) <= LARGEST for value in values):
        integers = np.array(values, dtype=np.int64)
        return _shorter(integers)
    if all(type(value) is float and math.isfinite(value) for value in values):
        numbers = np.array(values, dtype=np.float64)
        choices = list(dict.fromkeys(numbers.tolist()))
        if 4 * len(choices) < len(values) and not any(number == 0 for number in choices):  # 0.0 is -0.0 to a dict
            return _chosen(values, choices)
        return _scaled(numbers)
    if all(type(value) is str for value in values):
        return _chosen(values, list(dict.fromkeys(values)))
    raise DatabaseError("refused to pack a column that is neither integers nor finite numbers nor texts")


def _chosen(values: Sequence[Value], choices: list[Any]) -> tuple[str, int, int, list[Any], bytes]:
    places = {choice: place for place, choice in enumerate(choices)}
    width, body = _planes(_to_zigzag(np.array([places[value] for value in values], dtype=np.int64)))
    return "c", 0, width, choices, body


def _shorter(integers: _Ints) -> tuple[str, int, int, None, bytes]:
    """Integers as they are or as differences, whichever compresses better."""
    width, body = _planes(_to_zigzag(integers))
    if len(integers) and int(integers.max()) - int(integers.min()) < LARGEST // 2 and abs(int(integers[0])) < LARGEST:
        other_width, other = _planes(_to_zigzag(np.diff(integers, prepend=np.int64(0))))
        if len(zlib.compress(other, 1)) < len(zlib.compress(body, 1)):
            return "d", 0, other_width, None, other
    return "i", 0, width, None, body


def _scaled(numbers: _Floats) -> tuple[str, int, int, None, bytes]:
    """Numbers as integers times a power of ten or two, where none loses a bit."""
    for scale in itertools.chain(_DECIMALS, (-exponent for exponent in _BINARY)):
        factor = 10.0**scale if scale >= 0 else 2.0**-scale
        with np.errstate(over="ignore"):
            integers = np.rint(numbers * factor)
        if np.abs(integers).max(initial=0) >= _LARGEST_EXACT:
            continue
        if _is_same(_unscaled(integers.astype(np.int64), scale), numbers):
            width, body = _planes(_to_zigzag(integers.astype(np.int64)))
            return "f", scale, width, None, body
    _, body = _planes(numbers.view(np.uint64), 8)
    return "r", 0, 8, None, body


def _unscaled(integers: _Ints, scale: int) -> _Floats:
    if not -64 < scale < 16:
        raise ValueError("no scale")
    if scale >= 0:
        return integers / 10.0**scale
    return np.ldexp(integers.astype(np.float64), scale)


def _is_same(some: _Floats, others: _Floats) -> bool:
    """Bit for bit: 0.0 is not -0.0."""
    return np.array_equal(some.view(np.uint64), others.view(np.uint64))


def _to_zigzag(integers: _Ints) -> NDArray[np.uint64]:
    return ((integers << 1) ^ (integers >> 63)).view(np.uint64)


def _from_zigzag(zigzag: NDArray[np.uint64]) -> _Ints:
    return (zigzag >> np.uint64(1)).view(np.int64) ^ -(zigzag & np.uint64(1)).view(np.int64)


def _planes(words: NDArray[np.uint64], width: int | None = None) -> tuple[int, bytes]:
    if width is None:
        width = -(-int(words.max(initial=0)).bit_length() // 8)
    as_bytes = words.astype("<u8").view(np.uint8).reshape(-1, 8)
    return width, as_bytes[:, :width].T.tobytes()


def _from_planes(packed: bytes, start: int, count: int, width: int) -> NDArray[np.uint64]:
    words = np.zeros((count, 8), dtype=np.uint8)
    if count and width:
        words[:, :width] = np.frombuffer(packed, np.uint8, count * width, start).reshape(width, count).T
    return words.view("<u8").reshape(-1).astype(np.uint64)


def _decompressed(blob: bytes) -> bytes:
    decompressor = zlib.decompressobj()
    found = decompressor.decompress(blob, LARGEST_PACKED)
    if not decompressor.eof or decompressor.unused_data:
        raise ValueError("too long or cut off")
    return found


@contextlib.contextmanager
def _telling_of_damage() -> Iterator[None]:
    try:
        yield
    except _DAMAGES:
        raise DatabaseError(DAMAGED) from None
