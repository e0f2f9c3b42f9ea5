"""Shape sets: the sizes of a model's layers, as TOML that people read and write by hand.

A file holds ``[[rows]]`` entries. Each names dims, as the kernels know them; a dim is an integer or a list of them. The
lists of an entry multiply out, in the order written, ``M, K, N, E`` before all others. In the sets of fp8tune ``M`` is
tokens on this device, ``K`` the model dim, ``E`` experts held here (and groups of tokens), and ``N``, where the source
has one, the expert hidden dim. Kernels derive problems from a row by ``KernelSpec.problems``. An entry may have a
``name``, a text that tables print beside its rows.
"""

from __future__ import annotations

import itertools
import keyword
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fp8tune.errors import UsageError, unknown
from fp8tune.records import NamedInts
from fp8tune.text import NAME, visible

DIMS = ("M", "K", "N", "E")
"""Dims that multiply out first, in this order, wherever an entry has them."""

LARGEST_DIM = 2**31 - 1
"""Group ends (``offs``) are int32."""

NAME_KEY = "name"
"""Of an entry: no dim, but what its rows are of."""

LONGEST_NAME = 60
"""Characters of a name: it is a column of tables."""

MOST_ROWS = 10_000
"""A file of more rows is a mistake: lists multiply out."""


@dataclass(frozen=True)
class ShapeSet:
    """A named list of rows, each mapping dims to sizes."""

    name: str
    rows: tuple[NamedInts, ...]
    names: Mapping[NamedInts, str] = field(default_factory=dict)
    """Of the rows whose entry has a name."""


def sweeps_dir() -> Path:
    """Where shape sets and published measurements lie: ``sweeps/`` of a checkout, ``fp8tune/_sweeps`` of a wheel."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_sweeps"
    return installed if installed.is_dir() else package.parent / "sweeps"


def list_sets() -> tuple[str, ...]:
    """The names of the shape sets that come with fp8tune, sorted."""
    return tuple(sorted(path.stem for path in sweeps_dir().glob("*.toml")))


def load(reference: str) -> ShapeSet:
    """The shape set of that name, or of that file where ``reference`` ends in ``.toml`` or holds a ``/``.

    Raises UsageError for an unknown name, an unreadable file, or an entry that is not as this module's docstring says.
    """
    if reference.endswith(".toml") or "/" in reference:
        path = Path(reference)
    elif reference in list_sets():
        path = sweeps_dir() / f"{reference}.toml"
    else:
        raise unknown("shape set", reference, list_sets())
    names = _rows(path)
    return ShapeSet(path.stem, tuple(row for row, _ in names), {row: name for row, name in names if name})


def _rows(path: Path) -> list[tuple[NamedInts, str]]:
    """Each row with the name of its entry, empty for none."""
    where = f"shape file {str(path)!r}"
    document = _read(path)
    if strange := sorted(set(document) - {"rows"}):
        raise UsageError(f"{where}: unknown key {strange[0]!r}: only [[rows]] entries are known")
    entries = document.get("rows")
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{where} has no [[rows]] entry: add one, such as M = 16640, K = 5120, N = 8192, E = 8")
    numbered = [(entry, f"{where}, entry {number}") for number, entry in enumerate(entries, start=1)]
    axes = [(_axes(entry, where), _name(entry, where)) for entry, where in numbered]
    count = sum(math.prod(len(sizes) for sizes in entry.values()) for entry, _ in axes)
    if count > MOST_ROWS:
        raise UsageError(f"{where} multiplies out to {count} rows: keep it to {MOST_ROWS}")
    multiplied = ((entry, sizes, name) for entry, name in axes for sizes in itertools.product(*entry.values()))
    return [(NamedInts(list(zip(entry, sizes, strict=True))), name) for entry, sizes, name in multiplied]


def _read(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read shape file {str(path)!r}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # TOML and UTF-8 errors are ValueErrors, and so is an endless number
        raise UsageError(f"shape file {str(path)!r} is not TOML: {' '.join(str(error).split())}") from None


def _axes(entry: object, where: str) -> dict[str, tuple[int, ...]]:
    """The sizes of each dim that one entry names. Raises UsageError, its line starting with ``where``."""
    if not isinstance(entry, dict):
        raise UsageError(f"{where}: must be a [[rows]] table, not {type(entry).__name__}")
    for dim in entry:
        if not NAME.fullmatch(dim) or keyword.iskeyword(dim):
            raise UsageError(f"{where}: the dim {dim!r:.80} is refused: use a name that Python takes, such as n_rows")
    dims = [dim for dim in DIMS if dim in entry] + [dim for dim in entry if dim not in (*DIMS, NAME_KEY)]
    if not dims:
        raise UsageError(f"{where}: is empty: give it dims, such as M = 16640")
    return {dim: _sizes(entry[dim], f"{where}: {dim}") for dim in dims}


def _name(entry: dict[str, object], where: str) -> str:
    """The name of an entry, empty for none. Raises UsageError, its line starting with ``where``."""
    name = entry.get(NAME_KEY, "")
    if not isinstance(name, str) or (NAME_KEY in entry and not name.strip()):
        raise UsageError(f"{where}: {NAME_KEY} must be a text, such as name = 'Mixtral-8x7B down'")
    if len(name) > LONGEST_NAME or visible(name) != name:
        raise UsageError(f"{where}: {NAME_KEY} must be one line of at most {LONGEST_NAME} characters")
    return name


def _sizes(value: object, where: str) -> tuple[int, ...]:
    sizes = value if isinstance(value, list) else [value]
    if not sizes:
        raise UsageError(f"{where} is an empty list: give it at least one size")
    for size in sizes:
        if type(size) is not int:  # a bool is an int, and no size
            raise UsageError(f"{where} must be an integer or a list of integers, not {type(size).__name__}")
        if not 1 <= size <= LARGEST_DIM:
            raise UsageError(f"{where} must be from 1 to {LARGEST_DIM}")
    return tuple(sizes)
