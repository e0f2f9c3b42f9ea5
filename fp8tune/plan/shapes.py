"""Shape sets: sizes of a model's layers, as TOML that people read and write by hand, and ``--shapes``.

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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fp8tune.errors import UsageError, unknown
from fp8tune.records import NamedInts
from fp8tune.text import NAME, visible
from fp8tune_kernels.spec import DTYPES, ROUTINGS

DIMS = ("M", "K", "N", "E")  # dims that multiply out first
LARGEST_DIM = 2**31 - 1  # group ends (``offs``) are int32
NAME_KEY = "name"
LONGEST_NAME = 60  # characters of a name, which is a column of tables
LARGEST_SEED = 2**63 - 1  # what the database and torch hold
MOST_ROWS = 10_000  # a file of more rows is a mistake: lists multiply out


@dataclass(frozen=True)
class Settings:
    """Facts of problem sizes that are not sizes. An empty text is the kernel's own choice."""

    routing: str = ""  # how rows spread over groups
    dtype: str = ""
    layout: str = ""
    scale: str = ""  # how scales are rounded
    seed: int = 0

    @classmethod
    def parse(cls, values: Mapping[str, Any], origin: str) -> Settings:
        """Check values. Raises UsageError that starts with their origin."""
        texts = {"seed": "0", **{name: str(value) for name, value in values.items()}}
        if not texts["seed"].isdecimal() or int(texts["seed"][:30]) > LARGEST_SEED:
            raise UsageError(f"{origin}: seed must be from 0 to 2^63 - 1, got {texts['seed']:.40}")
        for name, known in (("routing", ROUTINGS), ("dtype", DTYPES)):
            if (value := texts.get(name)) and value not in known:
                raise unknown(name, value, known)
        return cls(**{**texts, "seed": int(texts["seed"])})  # type: ignore[arg-type]


NAMES = tuple(Settings.__dataclass_fields__)


@dataclass(frozen=True)
class Selection:
    """Rows of a shape set, each mapping dims to sizes, the sizes that are kept of them, and settings."""

    rows: tuple[NamedInts, ...]
    names: Mapping[NamedInts, str] = field(default_factory=dict)  # names of the rows that have one
    size: NamedInts = field(default_factory=NamedInts)  # sizes that a problem size, or else its row, must have
    settings: Settings = field(default_factory=Settings)


def sweeps_dir() -> Path:
    """Return the folder of shape sets: ``sweeps/`` of a checkout, ``fp8tune/_sweeps`` of a wheel."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_sweeps"
    return installed if installed.is_dir() else package.parent / "sweeps"


def list_sets() -> tuple[str, ...]:
    """Return the names of the shape sets that come with fp8tune, sorted."""
    return tuple(sorted(path.stem for path in sweeps_dir().glob("*.toml")))


def load(reference: str) -> Selection:
    """Load the shape set of a name, or a file if ``reference`` ends in ``.toml`` or has a ``/``.

    Raises UsageError for an unknown name, an unreadable file, or an entry of another form.
    """
    path = Path(reference)
    if not reference.endswith(".toml") and "/" not in reference:
        if reference not in list_sets():
            hint = f"A file needs its suffix: {reference:.40}.toml"
            raise UsageError(f"{unknown('shape set', reference, list_sets())} {hint}")
        path = sweeps_dir() / f"{reference}.toml"
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
    names = {row: name for row, name in rows if name}
    return Selection(tuple(row for row, _ in rows), names, settings=Settings.parse(settings, file))


def parse(text: str) -> Selection:
    """Read ``SET[,NAME=VALUE...]``. Raises UsageError for an unknown set, setting or value."""
    name, *items = text.split(",")
    if "=" in name:
        raise UsageError(f"--shapes {text!r:.80} names no shape set: write llama4,{text:.60}")
    chosen, origin = load(name), f"--shapes {text!r:.80}"
    size, settings = dict[str, int](), dict[str, Any](vars(chosen.settings))
    for item in items:
        key, _, value = item.partition("=")
        if not value:
            raise UsageError(f"{origin}: {item!r:.40} is not NAME=VALUE, such as K=5120 or routing=zipf")
        if key in NAMES:
            settings[key] = value
        elif NAME.fullmatch(key) and value.isascii() and value.isdecimal() and len(value) < 19:
            size[key] = int(value)
        else:
            raise unknown("setting", key, NAMES)
    return replace(chosen, size=NamedInts(size), settings=Settings.parse(settings, origin))


def common_settings(selections: Iterable[Selection]) -> Settings:
    """Return the settings that all selections share. Raises UsageError if they differ."""
    settings = list(dict.fromkeys(selection.settings for selection in selections)) or [Settings()]
    if len(settings) > 1:
        raise UsageError("--shapes with different routing, dtype, layout, scale or seed: run one command for each")
    return settings[0]


def _entries(path: Path, file: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rows of a file and its settings."""
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # TOML and UTF-8 errors are ValueErrors, and so is an endless number
        raise UsageError(f"{file} is not TOML: {' '.join(str(error).split())}") from None
    entries = settings.pop("rows", None)
    if unknown_keys := sorted(settings.keys() - {*NAMES}):
        raise UsageError(f"{file}: unknown key {unknown_keys[0]!r:.80}: use [[rows]] or {', '.join(NAMES)}")
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{file} has no [[rows]] entry: add one, such as M = 16640, K = 5120, N = 8192, E = 8")
    return entries, settings


def _axes(entry: Any, where: str) -> dict[str, list[int]]:
    """Return the sizes of an entry by dim. Raises UsageError that starts with ``where``."""
    if not isinstance(entry, dict):
        raise UsageError(f"{where}: must be a [[rows]] table, not {type(entry).__name__}")
    for dim in entry:
        if not NAME.fullmatch(dim) or keyword.iskeyword(dim):
            raise UsageError(f"{where}: the dim {dim!r:.80} is refused: use a name that Python takes, such as n_rows")
    name = entry.get(NAME_KEY, "unnamed")
    if not isinstance(name, str) or not name.strip() or len(name) > LONGEST_NAME or visible(name) != name:
        raise UsageError(f"{where}: {NAME_KEY} must be a text of one line and at most {LONGEST_NAME} characters")
    axes = {}
    for dim in [*filter(entry.__contains__, DIMS), *(dim for dim in entry if dim not in (*DIMS, NAME_KEY))]:
        sizes = axes[dim] = entry[dim] if isinstance(entry[dim], list) else [entry[dim]]
        # a bool is an int, and not a size
        if not sizes or not all(type(size) is int and 1 <= size <= LARGEST_DIM for size in sizes):
            raise UsageError(f"{where}: {dim} must be an integer from 1 to {LARGEST_DIM}, or a list of them")
    if not axes:
        raise UsageError(f"{where}: is empty: give it dims, such as M = 16640")
    return axes
