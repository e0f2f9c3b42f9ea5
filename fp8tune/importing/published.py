"""CSV files of published figures: the fields that all have, and what others printed of a grouped GEMM beside bf16.

Whatever a file holds becomes a checked value or one line that names the file, the line and what is wrong.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from fp8tune.errors import UsageError, unknown
from fp8tune.records import Device, NamedInts, Published
from fp8tune.store.texts import ARCH, UNSTATED, check_sizes, parse_named_ints
from fp8tune.text import LINE, WORD, unquoted_formula
from fp8tune_kernels.arches import ARCHES

SHORTEST_US, LONGEST_US = 1e-3, 1e9
"""A published time below 1 ns or above 1,000 s is a typing error."""

OPERATION = "grouped-mm"
"""What all lines are of; the recipe tells them apart."""

TIMES = ("bf16_fwd_bwd_us", "scaled_fwd_bwd_us", "bf16_fwd_us", "scaled_fwd_us")
COLUMNS = ("source", "device", "arch", "recipe", "shape", *TIMES, "note")

NOT_STATED = "not stated"
"""What stands for an arch that a publication does not name."""

_REPEATED = functools.lru_cache(65536)
"""For fields of which a file repeats a few."""

Made = TypeVar("Made")
Make = Callable[[Mapping[str, str]], Made]
"""The fields of a line by name -> what is made of them. Raises UsageError or ValueError saying what is wrong."""


def is_of_operations(path: Path) -> bool:
    """Whether a CSV holds rows of operations, not of kernels. Raises UsageError where it is no CSV."""
    with _opened(path) as reader:
        return "recipe" in next(reader, [])


def read_operations(path: Path) -> list[Published]:
    """The lines of a CSV with :data:`COLUMNS`, none left out. Raises UsageError naming file and line."""
    return read(path, COLUMNS, _operation)


def read(path: Path, columns: Sequence[str], make: Make[Made]) -> list[Made]:
    """What is made of each line of a CSV that has at least these columns. Raises UsageError naming file and line."""
    with _opened(path) as reader:
        names: list[str] = next(reader, [])
        _check_header(path, names, columns)
        return [read_line(path, reader.line_num, names, fields, make) for fields in reader if fields]


def read_line(path: Path, number: int, names: Sequence[str], fields: Sequence[str], make: Make[Made]) -> Made:
    """What is made of one line. Raises UsageError naming it."""
    if len(fields) != len(names):
        raise UsageError(f"{path} line {number}: {len(fields)} fields, the header has {len(names)}: mend the line")
    try:
        return make(dict(zip(names, fields, strict=True)))
    except (UsageError, ValueError) as error:
        raise UsageError(f"{path} line {number}: {error}") from None


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A CSV reader; what is wrong with the file as a whole becomes a UsageError here."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            try:
                yield reader
            except csv.Error as error:
                raise UsageError(f"{path} line {reader.line_num}: not CSV ({error}): mend the line") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text: save it as CSV in UTF-8") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; give a CSV file") from None


def _check_header(path: Path, names: Sequence[str], columns: Sequence[str]) -> None:
    missing = [name for name in columns if name not in names]
    if missing or len(set(names)) != len(names):
        what = f"lacks the column {missing[0]}" if missing else "names a column twice"
        raise UsageError(f"{path} line 1: the header {what}: it needs {','.join(columns)}")


# Fields


@_REPEATED
def named_ints(text: str) -> NamedInts:
    """Named integers. Raises ValueError, as all that follow."""
    return parse_named_ints(text)


def shape(text: str) -> NamedInts:
    """The sizes of a problem, at least one."""
    named = named_ints(text)
    check_sizes(named)
    return named


def microseconds(name: str, text: str) -> float:
    """A time of the column ``name``."""
    try:
        time_us = float(text)
    except ValueError:
        raise ValueError(f"{name} is {text[:80]!r}, not a number of microseconds") from None
    if not SHORTEST_US <= time_us <= LONGEST_US or not text.isascii() or "_" in text:  # not a NaN either
        raise ValueError(f"{name} is {text[:80]!r}, not a time between {SHORTEST_US:g} and {LONGEST_US:g} microseconds")
    return time_us


@_REPEATED
def line(what: str, text: str) -> str:
    """Plain text, which may be empty."""
    text = unquoted_formula(text)
    if not LINE.fullmatch(text):
        raise ValueError(f"{what} {text[:80]!r} is too long or holds control characters: write plain text on one line")
    return text


def source(text: str) -> str:
    """Where a figure was printed."""
    if not text.strip():
        raise ValueError("source is empty: every published row names where it was printed")
    return line("source", text)


def _operation(fields: Mapping[str, str]) -> Published:
    return Published(
        operation=OPERATION,
        shape=shape(fields["shape"]),
        recipe=_recipe(fields["recipe"]),
        device=Device(_arch(fields["arch"]), line("device", fields["device"])),
        source=source(fields["source"]),
        note=line("note", fields["note"]),
        **{name: microseconds(name, fields[name]) for name in TIMES},
    )


def _recipe(text: str) -> str:
    if not text or not WORD.fullmatch(text):
        raise ValueError(f"recipe is {text[:80]!r}, not one word such as mxfp8")
    return text


def _arch(text: str) -> str:
    if text == NOT_STATED:
        return UNSTATED
    if not ARCH.fullmatch(text):
        raise unknown("arch", text[:80], ARCHES)
    return text
