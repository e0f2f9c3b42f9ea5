"""How a field of printed JSON is declared: its type, its unit, what it means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

TYPES: Mapping[str, type | tuple[type, ...]] = {
    "text": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": Mapping,
    "list": (list, tuple),
}
"""The first word of a field's type -> what it is in Python."""

UNITS = {
    "_gb_per_s": "GB/s",
    "_flop_per_s": "flop/s",
    "_bytes": "bytes",
    "_us": "us",
    "_share": "share, 0 to 1",
    "_db": "dB",
    "_s": "s",
    "slowdown": "ratio",
    "ratio": "ratio",
    "control": "ratio",
}
"""The end of a field's name -> its unit; the first that fits."""


Fields = tuple["Field", ...]


@dataclass(frozen=True)
class Field:
    """One field of an object."""

    name: str
    type: str
    """``text``, ``integer``, ``number``, ``boolean``, ``object`` or ``list``, each with more words, or two of
    these with ``or`` between them; ``or null`` at the end."""
    meaning: str
    unit: str = ""
    of: Fields = ()
    """What the object, or each object of the list, holds."""
    keyed: bool = False
    """Whether the object maps names to such objects."""

    def faults(self, value: object) -> Iterator[str]:
        """Why a value is not of this field."""
        if value is None:
            if not self.type.endswith("or null"):
                yield f"{self.name} is null"
            return
        kinds = {each.split()[0] for each in self.type.split(" or ")} - {"null"}
        fits = isinstance(value, tuple(TYPES[kind] for kind in kinds))
        if not fits or (isinstance(value, bool) and "boolean" not in kinds):
            yield f"{self.name} is {value!r:.40}, not {self.type}"
        elif self.of:
            inner = list(value) if isinstance(value, list | tuple) else [value]
            if self.keyed and isinstance(value, Mapping):
                inner = list(value.values())
            for each in inner:
                yield from (f"{self.name}: {fault}" for fault in faults(self.of, each))


@dataclass(frozen=True)
class Document:
    """An object that a command prints."""

    commands: str
    """What prints it."""
    meaning: str
    fields: Fields


def faults(fields: Fields, found: object) -> Iterator[str]:
    """What an object has beside these fields, lacks of them, or holds of another type."""
    if not isinstance(found, Mapping):
        yield f"{found!r:.40} is no object"
        return
    declared = {field.name: field for field in fields}
    yield from (f"{name} is not declared" for name in found.keys() - declared.keys())
    yield from (f"{name} is missing" for name in declared.keys() - found.keys())
    for name in declared.keys() & found.keys():
        yield from declared[name].faults(found[name])


def field(name: str, type: str, meaning: str, unit: str = "", of: Fields = (), keyed: bool = False) -> Field:
    """A field, its unit by its name where none is given."""
    unit = unit or next((unit for end, unit in UNITS.items() if name.endswith(end)), "")
    return Field(name, type, meaning, unit, of, keyed)
