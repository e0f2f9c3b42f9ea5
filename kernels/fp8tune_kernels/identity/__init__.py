"""Identity of a kernel's code: a hash of every function and constant that it reaches, wherever they live.

Nothing is imported: modules are found as this process would import them now, and read as text. Where a module has no
Python source, name and version of its distribution stand in. Torch, Triton and the standard library are no part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .cache import cached
from .code import Location, digest, locate
from .code import declared_name as declared_name_at  # ``from . import code`` would import the package above
from .code import fields_hash as fields_hash_at
from .errors import InvalidCodeError, UnknownCodeError
from .modules import Finder

__all__ = [
    "InvalidCodeError",
    "Location",
    "UnknownCodeError",
    "code_hash",
    "declared_name",
    "digest",
    "fields_hash",
    "locate",
]


def code_hash(kernel: str, file: Path | None = None, roots: Sequence[Path] = ()) -> str:
    """Return 16 hex digits for the code on the timed path of ``module:ATTRIBUTE`` or ``path.py:ATTRIBUTE``.

    It comes from a cache on disk as long as no file has changed.

    Args:
        kernel: Kernel or spec.
        file: File of the module, where it has a made-up name or is ``__main__``.
        roots: Folders where a checkout keeps its packages. The kernel is read there, and whatever it reaches and they
            have; all else is read as it is installed.

    Raises:
        UnknownCodeError: There is no source of such a kernel.
        InvalidCodeError: A file of the kernel's package is not Python.
    """
    return fields_hash(kernel, ("launch", "outputs"), "launch", file, roots)


def fields_hash(
    kernel: str, fields: Sequence[str] = (), required: str = "", file: Path | None = None, roots: Sequence[Path] = ()
) -> str:
    """Return 16 hex digits for the code of some fields of a spec, or of all if ``required`` is not among them.

    Without fields the configs of ``triton.autotune`` count as well. Raises as :func:`code_hash` does.
    """
    location, finder = _found(kernel, file, roots)
    subject = (*map(str, location), str(file or ""), *fields, required)
    if roots:  # of a checkout that is gone soon
        return fields_hash_at(location, finder, fields, required)
    return cached(subject, finder, lambda: fields_hash_at(location, finder, fields, required))


def declared_name(kernel: str, roots: Sequence[Path] = ()) -> str | None:
    """Return the ``name=`` that a spec declares, empty if it is no literal; None for a kernel without a spec.

    Raises as :func:`code_hash` does.
    """
    return declared_name_at(*_found(kernel, None, roots))


def _found(kernel: str, file: Path | None, roots: Sequence[Path]) -> tuple[Location, Finder]:
    location = locate(kernel, file)
    top = location.module.partition(".")[0]
    if roots:
        return location, Finder(top, roots, is_checkout=True)
    if location.root is None:
        if top == "__main__":
            raise UnknownCodeError(f"{top} has no file of its own: name the kernel's file as path.py:ATTRIBUTE")
        if (finder := Finder(top)).find(top) is None:
            raise UnknownCodeError(f"no module named {top!r}: install it, or name the file as path.py:ATTRIBUTE")
        return location, finder
    path = Path(file or kernel.rpartition(":")[0]).absolute()
    if not path.is_file():
        raise UnknownCodeError(f"there is no file {path}: check the kernel's name")
    return location, Finder(top, [location.root], {location.module: path})
