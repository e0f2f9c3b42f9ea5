"""Files of modules, found as an import would find them; nothing is imported."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import pkgutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib.machinery import (
    BuiltinImporter,
    FrozenImporter,
    ModuleSpec,
    SourceFileLoader,
)
from importlib.metadata import Distribution, distributions
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

NOT_FOLLOWED = frozenset({"torch", "triton"})
"""Packages whose versions are stored beside the hash."""

_SITE = ("site-packages", "dist-packages")
_STANDARD = tuple({os.path.join(os.path.realpath(sysconfig.get_path(name)), "") for name in ("stdlib", "platstdlib")})


class Place(NamedTuple):
    """Place of a module."""

    file: str
    """Empty for a namespace package."""
    folders: tuple[str, ...] | None
    """Folders of the submodules; None for a module that is no package."""
    has_source: bool
    state: tuple[int, ...] = ()
    """Size, times of change and number of the file; another file or content has another."""


class Finder:
    """Lookup of modules by name: in ``roots`` first, then as this process would import them now.

    Args:
        start: Top-level module of the kernel.
        roots: Folders that imports start from.
        files: File of a module that has no such name, or is no module of a package.
        is_checkout: True if ``start`` is nowhere but in ``roots``.
    """

    def __init__(
        self,
        start: str,
        roots: Sequence[Path] = (),
        files: Mapping[str, Path] = MappingProxyType({}),
        *,
        is_checkout: bool = False,
    ) -> None:
        self.path = [*map(str, (*roots, *sys.path)), os.getcwd()]
        self.places: dict[str, Place | None] = {
            name: Place(str(file), (str(file.parent),) if file.name == "__init__.py" else None, True, _state(file))
            for name, file in files.items()
        }
        """What was looked up: a module's place, or None if there is none, or none to follow."""
        if is_checkout:
            self.places[start] = _place(_search(start, [*map(str, roots)]))
        self.is_complete = True
        """False if other files count than those that were looked up."""
        self._ignored = NOT_FOLLOWED - {start}

    def find(self, name: str) -> Place | None:
        """Return the place of a module; None if there is none, or if it is torch's, Triton's or the interpreter's."""
        if name not in self.places:
            above = name.rpartition(".")[0]
            if above:
                parent = self.find(above)
                spec = _search(name, parent.folders) if parent and parent.folders else None
            else:
                spec = None if name in self._ignored else self._top(name)
            self.places[name] = _place(spec)
        return self.places[name]

    def whole_text(self, top: str) -> str:
        """Return the hash of a package's Python files, which may be edited in place."""
        self.is_complete = False
        place = self.places[top]
        assert place is not None
        folders = map(Path, place.folders or ())
        files = sorted(path for folder in folders for path in folder.rglob("*.py")) or [Path(place.file)]
        texts = hashlib.sha256()
        for path in files:
            with contextlib.suppress(OSError):
                texts.update(path.read_bytes() + b"\0")
        return texts.hexdigest()[:16]

    def _top(self, name: str) -> ModuleSpec | None:
        if name in sys.stdlib_module_names and (BuiltinImporter.find_spec(name) or FrozenImporter.find_spec(name)):
            return None
        spec = _search(name, self.path)
        if spec is None or spec.origin is None:  # an editable install may have a finder of its own
            with contextlib.suppress(Exception):  # of any finder; ValueError for what lacks a spec in sys.modules
                return importlib.util.find_spec(name) or spec
        return spec


def stand_in(name: str, place: Place) -> str:
    """Return name and version of a sourceless module's distribution; without one, the file's own hash."""
    top = name.partition(".")[0]
    folder = Path(place.file).parents[name.count(".") + (place.folders is not None)]
    distribution = _distribution(top, str(folder))
    if distribution is not None:
        return f"{distribution.metadata['Name']} {distribution.version}"
    path = next(path for path in (Path(place.file), *Path(place.file).parents) if path.exists())  # a zip is above
    with contextlib.suppress(OSError), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return f"{name}, which cannot be read"


def is_installed(place: Place) -> bool:
    """Return True for a file that pip installed, which nobody edits in place."""
    return any(part in _SITE for part in Path(place.file).parts)


def _distribution(top: str, folder: str) -> Distribution | None:
    """Return the distribution in a folder that a package comes from: mostly it has the package's name."""
    for distribution in distributions(name=top, path=[folder]):
        return distribution
    for distribution in distributions(path=[folder]):
        record = distribution.read_text("RECORD") or ""
        if f"\n{top}/" in f"\n{record}" or f"\n{top}." in f"\n{record}":
            return distribution
    return None


def _search(name: str, folders: Sequence[str]) -> ModuleSpec | None:
    """Return the spec of a module in folders, as ``PathFinder`` does, which takes imported parents only."""
    portions = list[str]()
    for folder in folders:
        finder = pkgutil.get_importer(folder or os.getcwd())
        spec = finder.find_spec(name) if finder is not None else None
        if spec is not None and spec.loader is not None:
            return spec
        portions += spec.submodule_search_locations or () if spec is not None else ()
    namespace = ModuleSpec(name, None)
    namespace.submodule_search_locations = portions
    return namespace if portions else None


def _place(spec: ModuleSpec | None) -> Place | None:
    if spec is None:
        return None
    folders = None if spec.submodule_search_locations is None else tuple(spec.submodule_search_locations)
    if spec.origin is None or not spec.has_location:
        return Place("", folders, True) if folders else None
    if _is_standard(spec.origin):
        return None
    return Place(spec.origin, folders, isinstance(spec.loader, SourceFileLoader), _state(Path(spec.origin)))


def _state(file: Path) -> tuple[int, ...]:
    for path in (file, *file.parents):  # a zip lies above
        with contextlib.suppress(OSError):
            state = path.stat()
            return state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino
    return ()


def _is_standard(file: str) -> bool:
    path = os.path.realpath(file)
    return path.startswith(_STANDARD) and not any(f"{os.sep}{site}{os.sep}" in path for site in _SITE)
