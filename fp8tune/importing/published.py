"""CSV files of published figures: times of kernels, and of whole grouped GEMMs beside bf16.

Every field becomes a checked value, or one line names the file, the line and the fault. What sources do not say is
``unstated``: the routing, the scale mode, the config. The FP8 dtype is the arch's own. ``transposed view as input`` in
the note makes the input layout ``transposed``, which is another problem than ``contiguous``.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

from fp8tune import registry
from fp8tune.errors import UsageError, unknown
from fp8tune.records import Device, Kind, NamedInts, Outcome, Problem, Published, Row, Status
from fp8tune.store.texts import ARCH, UNSTATED, check_sizes, parse_named_ints
from fp8tune.text import LINE, WORD, unquoted_formula
from fp8tune_kernels.arches import ARCHES

SHORTEST_US, LONGEST_US = 1e-3, 1e9
"""A published time below 1 ns or above 1,000 s is a typing error."""

LARGEST_BYTES = 2**28
"""Size of the largest file that is read."""

KERNEL_COLUMNS = ("source", "device", "arch", "kernel", "shape", "config", "us", "note")
TIMES = ("bf16_fwd_bwd_us", "scaled_fwd_bwd_us", "bf16_fwd_us", "scaled_fwd_us")
COLUMNS = ("source", "device", "arch", "recipe", "shape", *TIMES, "note")

LookupKey = Callable[[Problem], NamedInts | None]
"""Problem -> its key in the table, or None. Raises UsageError or ValueError for one that the kernel cannot have."""

_TRANSPOSED = "transposed view as input"
_repeated = functools.lru_cache(65536)  # a file repeats few values of these fields

Made = TypeVar("Made")


def read(path: Path, lookup_key: LookupKey = lambda problem: None) -> tuple[list[Row], list[Published]]:
    """Return the kernels' rows or the operations of a file, which its header tells apart.

    Raises:
        UsageError: The file or a line cannot be used; nothing is left out.
    """
    known_key = functools.cache(lookup_key)  # a file repeats a few problems
    with _opened(path) as (file, names):
        if "recipe" in names:
            return [], _lines(path, file, names, COLUMNS, _operation)
        return _lines(path, file, names, KERNEL_COLUMNS, lambda fields: kernel_row(fields, known_key)), []


def read_operations(path: Path) -> list[Published]:
    """Return the operations of a file with :data:`COLUMNS`. Raises UsageError."""
    with _opened(path) as (file, names):
        return _lines(path, file, names, COLUMNS, _operation)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[str], list[str]]]:
    """Open a CSV and read its header; faults of the file as a whole become a UsageError."""
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise UsageError(f"{path} is larger than {LARGEST_BYTES >> 20} MiB: split it")
        with path.open(newline="", encoding="utf-8-sig") as file:
            yield file, next(csv.reader(file, strict=True), [])
    except csv.Error as error:
        raise UsageError(f"{path} line 1: not CSV ({error}): mend the line") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text: save it as CSV in UTF-8") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; give a CSV file") from None


def _lines(
    path: Path, file: IO[str], names: Sequence[str], columns: Sequence[str], make: Callable[[Mapping[str, str]], Made]
) -> list[Made]:
    missing = [name for name in columns if name not in names]
    if missing or len(set(names)) != len(names):
        fault = f"lacks the column {missing[0]}" if missing else "names a column twice"
        raise UsageError(f"{path} line 1: the header {fault}: it needs {','.join(columns)}")
    reader, made = csv.reader(file, strict=True), []
    try:
        for fields in filter(None, reader):
            if len(fields) != len(names):
                raise ValueError(f"{len(fields)} fields, the header has {len(names)}: mend the line")
            made.append(make(dict(zip(names, fields, strict=True))))
    except UnicodeDecodeError:  # a ValueError, of the file as a whole
        raise
    except csv.Error as error:
        raise UsageError(f"{path} line {reader.line_num + 1}: not CSV ({error}): mend the line") from None
    except (UsageError, ValueError) as error:
        raise UsageError(f"{path} line {reader.line_num + 1}: {error}") from None
    return made


def kernel_row(fields: Mapping[str, str], lookup_key: LookupKey) -> Row:
    """Return the row of one line. Raises UsageError or ValueError that names the fault."""
    arch, kernel, note, time_us = _arch(fields["arch"]), fields["kernel"], _line("note", fields["note"]), _time(fields)
    if kernel not in registry.kernels():
        raise unknown("kernel", kernel[:80], registry.kernels())
    problem = _problem(kernel, fields["shape"], arch, is_transposed=_TRANSPOSED in note)
    return Row(
        problem=problem,
        config=_named_ints(fields["config"]) if fields["config"] else None,
        device=_device(arch, _line("device", fields["device"])),
        kind=Kind.PUBLISHED,
        outcome=Outcome(Status.OK, time_us),
        lookup_key=lookup_key(problem),
        source=_source(fields["source"]),
        note=note,
        process=f"figure {time_us!r}",  # each printed figure counts as one, and only once
    )


def _operation(fields: Mapping[str, str]) -> Published:
    recipe, arch = fields["recipe"], fields["arch"]
    if not recipe or not WORD.fullmatch(recipe):
        raise ValueError(f"recipe is {recipe[:80]!r}, not one word such as mxfp8")
    arch = UNSTATED if arch == "not stated" else _arch(arch)
    return Published(
        operation="grouped-mm",
        shape=_shape(fields["shape"]),
        recipe=recipe,
        device=_device(arch, _line("device", fields["device"])),
        source=_source(fields["source"]),
        note=_line("note", fields["note"]),
        **{name: _time(fields, name) for name in TIMES},
    )


@_repeated
def _problem(kernel: str, shape: str, arch: str, *, is_transposed: bool) -> Problem:
    return Problem(
        kernel=kernel,
        shape=_shape(shape),
        routing=UNSTATED,
        input_layout="transposed" if is_transposed else "contiguous",
        fp8_dtype=ARCHES[arch].fp8_dtype if arch in ARCHES else UNSTATED,
        scale_mode=UNSTATED,
    )


_device = _repeated(Device)
_named_ints = _repeated(parse_named_ints)


def _shape(text: str) -> NamedInts:
    named = _named_ints(text)
    check_sizes(named)
    return named


def _arch(text: str) -> str:
    if not ARCH.fullmatch(text):
        raise unknown("arch", text[:80], ARCHES)
    return text


def _time(fields: Mapping[str, str], name: str = "us") -> float:
    text = fields[name]
    try:
        time_us = float(text)
    except ValueError:
        raise ValueError(f"{name} is {text[:80]!r}, not a number of microseconds") from None
    if not SHORTEST_US <= time_us <= LONGEST_US or not text.isascii() or "_" in text:  # not a NaN either
        raise ValueError(f"{name} is {text[:80]!r}, not a time between {SHORTEST_US:g} and {LONGEST_US:g} microseconds")
    return time_us


@_repeated
def _line(name: str, text: str) -> str:
    """Return plain text, which may be empty."""
    text = unquoted_formula(text)
    if not LINE.fullmatch(text):
        raise ValueError(f"{name} {text[:80]!r} is too long or holds control characters: write plain text on one line")
    return text


def _source(text: str) -> str:
    if not text.strip():
        raise ValueError("source is empty: every published row names where it was printed")
    return _line("source", text)
