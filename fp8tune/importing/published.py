"""CSV files of published kernel times.

Every field becomes a checked value, or one line names the file, the line and the fault. What sources do not say is
``unstated``: the routing, the scale mode, the config. The FP8 dtype is the arch's own. ``transposed view as input`` in
the note makes the input layout ``transposed``, which is another problem than ``contiguous``.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable, Mapping
from pathlib import Path

from fp8tune import registry
from fp8tune.errors import UsageError, unknown
from fp8tune.records import Device, Kind, NamedInts, Outcome, Problem, Row, Status
from fp8tune.store.texts import ARCH, UNSTATED, check_sizes, parse_named_ints
from fp8tune.text import LINE, unquoted_formula
from fp8tune_kernels.arches import ARCHES

SHORTEST_US, LONGEST_US = 1e-3, 1e9
"""A published time below 1 ns or above 1,000 s is a typing error."""

LARGEST_BYTES = 2**28
"""Size of the largest file that is read."""

COLUMNS = ("source", "device", "arch", "kernel", "shape", "config", "us", "note")

LookupKey = Callable[[Problem], NamedInts | None]
"""Problem -> its key in the table, or None. Raises UsageError or ValueError for one that the kernel cannot have."""

_repeated = functools.lru_cache(65536)  # a file repeats few values of these fields


def read(path: Path, lookup_key: LookupKey = lambda problem: None) -> list[Row]:
    """Return the rows of a file.

    Raises:
        UsageError: The file or a line cannot be used; nothing is left out.
    """
    known_key, rows, line = functools.cache(lookup_key), list[Row](), 0
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise UsageError(f"{path} is larger than {LARGEST_BYTES >> 20} MiB: split it")
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            names = next(reader, [])
            line = reader.line_num or 1
            missing = [name for name in COLUMNS if name not in names]
            if missing or len(set(names)) != len(names):
                fault = f"lacks the column {missing[0]}" if missing else "names a column twice"
                raise ValueError(f"the header {fault}: it needs {','.join(COLUMNS)}")
            for fields in reader:
                line = reader.line_num
                if fields and len(fields) != len(names):
                    raise ValueError(f"{len(fields)} fields, the header has {len(names)}: mend the line")
                if fields:
                    rows.append(kernel_row(dict(zip(names, fields, strict=True)), known_key))
            return rows
    except csv.Error as error:
        raise UsageError(f"{path} line {line + 1}: not CSV ({error}): mend the line") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text: save it as CSV in UTF-8") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; give a CSV file") from None
    except (UsageError, ValueError) as error:
        raise UsageError(f"{path} line {line}: {error}" if line else str(error)) from None


def kernel_row(fields: Mapping[str, str], lookup_key: LookupKey) -> Row:
    """Return the row of one line. Raises UsageError or ValueError that names the fault."""
    arch, kernel, note, time_us = fields["arch"], fields["kernel"], _line("note", fields["note"]), _time(fields["us"])
    if not ARCH.fullmatch(arch):
        raise unknown("arch", arch[:80], ARCHES)
    if kernel not in registry.kernels():
        raise unknown("kernel", kernel[:80], registry.kernels())
    if not fields["source"].strip():
        raise ValueError("source is empty: every published row names where it was printed")
    problem = _problem(kernel, fields["shape"], arch, is_transposed="transposed view as input" in note)
    return Row(
        problem=problem,
        config=parse_named_ints(fields["config"]) if fields["config"] else None,
        device=_device(arch, _line("device", fields["device"])),
        kind=Kind.PUBLISHED,
        outcome=Outcome(Status.OK, time_us),
        lookup_key=lookup_key(problem),
        source=_line("source", fields["source"]),
        note=note,
        process=f"figure {time_us!r}",  # each printed figure counts as one, and only once
    )


@_repeated
def _problem(kernel: str, shape: str, arch: str, *, is_transposed: bool) -> Problem:
    named = parse_named_ints(shape)
    check_sizes(named)
    return Problem(
        kernel=kernel,
        shape=named,
        routing=UNSTATED,
        input_layout="transposed" if is_transposed else "contiguous",
        fp8_dtype=ARCHES[arch].fp8_dtype if arch in ARCHES else UNSTATED,
        scale_mode=UNSTATED,
    )


_device = _repeated(Device)


def _time(text: str) -> float:
    try:
        time_us = float(text)
    except ValueError:
        raise ValueError(f"us is {text[:80]!r}, not a number of microseconds") from None
    if not SHORTEST_US <= time_us <= LONGEST_US or not text.isascii() or "_" in text:  # not a NaN either
        raise ValueError(f"us is {text[:80]!r}, not a time between {SHORTEST_US:g} and {LONGEST_US:g} microseconds")
    return time_us


@_repeated
def _line(name: str, text: str) -> str:
    """Return plain text, which may be empty."""
    text = unquoted_formula(text)
    if not LINE.fullmatch(text):
        raise ValueError(f"{name} {text[:80]!r} is too long or holds control characters: write plain text on one line")
    return text
