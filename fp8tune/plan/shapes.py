"""Shape sets: sizes of a model's layers, as TOML that people read and write by hand.

A file has ``[[rows]]`` entries, each with dims that are integers or lists of them. The lists of an entry multiply
out, ``M, K, N, E`` before all others. In the sets of fp8tune ``M`` is tokens on this device, ``K`` the
model dim, ``E`` experts held here (groups of tokens), and ``N``, if the source has one, the expert hidden dim. An entry
may have a ``name``, which tables print beside its rows.
"""

from __future__ import annotations

import itertools
import keyword
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8tune.errors import UsageError, unknown
from fp8tune.records import NamedInts
from fp8tune.text import NAME, visible

DIMS = ("M", "K", "N", "E")
"""Dims that multiply out first."""
LARGEST_DIM = 2**31 - 1
"""Group ends (``offs``) are int32."""
NAME_KEY = "name"
LONGEST_NAME = 60
"""Characters of a name, which is a column of tables."""
SETTINGS = ("routing", "dtype", "layout", "scale", "seed")
"""Keys beside ``[[rows]]``."""
LARGEST_FILE, LONGEST_LINE = 64_000, 2_000
"""Characters: a key with many dots takes time that grows with the square of its length."""
MOST_ROWS = 10_000
"""A file of more rows is a mistake: lists multiply out."""


@dataclass(frozen=True)
class ShapeSet:
    """A named list of rows, each mapping dims to sizes."""

    name: str
    rows: tuple[NamedInts, ...]
    names: Mapping[NamedInts, str] = field(default_factory=dict)
    """Names of the rows whose entry has one."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Settings of all rows, such as ``routing``."""


def sweeps_dir() -> Path:
    """Return the folder of shape sets: ``sweeps/`` of a checkout, ``fp8tune/_sweeps`` of a wheel."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_sweeps"
    return installed if installed.is_dir() else package.parent / "sweeps"


def list_sets() -> tuple[str, ...]:
    """Return the names of the shape sets that come with fp8tune, sorted."""
    return tuple(sorted(path.stem for path in sweeps_dir().glob("*.toml")))


def load(reference: str) -> ShapeSet:
    """Load the shape set of a name, or a file if ``reference`` ends in ``.toml`` or has a ``/``.

    Raises UsageError for an unknown name, an unreadable file, or an entry of another form.
    """
    if reference.endswith(".toml") or "/" in reference:
        path = Path(reference)
    elif reference in list_sets():
        path = sweeps_dir() / f"{reference}.toml"
    else:
        raise UsageError(
            f"{unknown('shape set', reference, list_sets())} A file needs its suffix: {reference:.40}.toml"
        )
    file = f"shape file {str(path)!r}"
    entries, settings = _entries(path, file)
    axes = [_axes(entry, f"{file}, entry {number}") for number, entry in enumerate(entries, start=1)]
    count = sum(math.prod(map(len, dims.values())) for dims in axes)
    if count > MOST_ROWS:
        raise UsageError(f"{file} multiplies out to {count} rows: keep it to {MOST_ROWS}")
    rows = [
        (NamedInts(list(zip(dims, sizes, strict=True))), entry.get(NAME_KEY, ""))
        for entry, dims in zip(entries, axes, strict=True)
        for sizes in itertools.product(*dims.values())
    ]
    return ShapeSet(path.stem, tuple(row for row, _ in rows), {row: name for row, name in rows if name}, settings)


def _entries(path: Path, file: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rows of a file and its settings."""
    try:
        with path.open(encoding="utf-8") as stream:
            text = stream.read(LARGEST_FILE + 1)
        if len(text) > LARGEST_FILE or max(map(len, text.splitlines()), default=0) > LONGEST_LINE:
            raise UsageError(
                f"{file} is too large: a shape set has at most {LARGEST_FILE:,} characters, a line {LONGEST_LINE:,}"
            )
        document = tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # TOML and UTF-8 errors are ValueErrors, and so is an endless number
        raise UsageError(f"{file} is not TOML: {' '.join(str(error).split())}") from None
    if unknown_keys := sorted(document.keys() - {"rows", *SETTINGS}):
        raise UsageError(f"{file}: unknown key {unknown_keys[0]!r:.80}: use [[rows]] or {', '.join(SETTINGS)}")
    entries = document.get("rows")
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{file} has no [[rows]] entry: add one, such as M = 16640, K = 5120, N = 8192, E = 8")
    return entries, {name: value for name, value in document.items() if name != "rows"}


def _axes(entry: Any, where: str) -> dict[str, tuple[int, ...]]:
    """Return the sizes of each dim of an entry. Raises UsageError that starts with ``where``."""
    if not isinstance(entry, dict):
        raise UsageError(f"{where}: must be a [[rows]] table, not {type(entry).__name__}")
    for dim in entry:
        if not NAME.fullmatch(dim) or keyword.iskeyword(dim):
            raise UsageError(f"{where}: the dim {dim!r:.80} is refused: use a name that Python takes, such as n_rows")
    dims = [dim for dim in DIMS if dim in entry] + [dim for dim in entry if dim not in (*DIMS, NAME_KEY)]
    if not dims:
        raise UsageError(f"{where}: is empty: give it dims, such as M = 16640")
    name = entry.get(NAME_KEY, "unnamed")
    if not isinstance(name, str) or not name.strip():
        raise UsageError(f"{where}: {NAME_KEY} must be a text, such as name = 'Mixtral-8x7B down'")
    if len(name) > LONGEST_NAME or visible(name) != name:
        raise UsageError(f"{where}: {NAME_KEY} must be one line of at most {LONGEST_NAME} characters")
    return {dim: _sizes(entry[dim], f"{where}: {dim}") for dim in dims}


def _sizes(value: object, where: str) -> tuple[int, ...]:
    sizes = value if isinstance(value, list) else [value]
    if not sizes:
        raise UsageError(f"{where} is an empty list: give it at least one size")
    for size in sizes:
        if type(size) is not int:  # a bool is an int, and not a size
            raise UsageError(f"{where} must be an integer or a list of integers, not {type(size).__name__}")
        if not 1 <= size <= LARGEST_DIM:
            raise UsageError(f"{where} must be from 1 to {LARGEST_DIM}")
    return tuple(sizes)
