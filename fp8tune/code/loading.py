"""Find a kernel's spec: one of this package by name, or anybody's as ``module:ATTRIBUTE`` or ``path.py:ATTRIBUTE``.

Whatever somebody else's file does wrong becomes one line here. Loading a spec imports torch and triton; importing this
module does not.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from fp8tune.errors import MachineError, UsageError, unknown
from fp8tune_kernels import catalog
from fp8tune_kernels.spec import KernelSpec

KERNEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""What a kernel may be called: names reach paths, tables and terminals."""


@cache
def load_spec(reference: str) -> KernelSpec:
    """The spec that ``reference`` names; the same object for the same text. Relative paths start at the current folder.

    Raises UsageError for a name nobody declared, a module that cannot be imported, or an attribute that is no usable
    KernelSpec; MachineError where a kernel of this package cannot be imported.
    """
    if ":" not in reference:
        return _declared(reference)
    module_text, _, attribute = reference.rpartition(":")
    module = _from_file(Path(module_text)) if module_text.endswith(".py") else _from_name(module_text)
    spec = getattr(module, attribute, None)
    if spec is None:
        specs = [name for name, value in vars(module).items() if isinstance(value, KernelSpec)]
        raise unknown(f"kernel spec in {module_text}", attribute, specs)
    if not isinstance(spec, KernelSpec):
        raise UsageError(f"{reference} is of type {type(spec).__name__}: name an fp8tune_kernels.spec.KernelSpec")
    return _usable(spec, module)


def check_reference(reference: str) -> None:
    """Raise the UsageError of :func:`load_spec` for a bare name that is not declared; imports nothing."""
    if ":" in reference or reference in catalog.KERNELS:
        return
    raise unknown("kernel", reference, catalog.KERNELS)


def _declared(kernel: str) -> KernelSpec:
    check_reference(kernel)
    try:
        return catalog.load(kernel)
    except ImportError as error:
        raise MachineError(f"cannot import kernel {kernel}: {_one_line(error)}: install fp8tune again") from error


def _from_name(name: str) -> ModuleType:
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # the module's own code runs here, and may raise anything
        raise _cannot_import(name, error) from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"cannot import kernel file {str(path)!r}: no such file")
    path = path.resolve()
    # a name of its own, the same in every process, since a file may be called like a module that is installed
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None  # ending in .py settles both
    _make_importable(path.parent)
    module = sys.modules[name] = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _cannot_import(str(path), error) from error
    return module


def _make_importable(folder: Path) -> None:
    """Let a kernel import its neighbours. Last in the path, so that no neighbour hides an installed module."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _cannot_import(what: str, error: BaseException) -> UsageError:
    return UsageError(f"cannot import {what!r}: {_one_line(error)}")


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _usable(spec: KernelSpec, module: ModuleType) -> KernelSpec:
    """The spec of another repository, once its name and grid are what the rest of fp8tune relies on."""
    if not KERNEL_NAME.fullmatch(spec.name):
        raise UsageError(f"kernel name {spec.name!r} is refused: use up to 64 letters, digits, dots and dashes")
    if spec.name in catalog.KERNELS and not module.__name__.startswith("fp8tune_kernels."):
        raise UsageError(f"kernel name {spec.name!r} is fp8tune's own: give the spec in {module.__name__} another name")
    if set(spec.default) != set(spec.axes):
        axes, default = ", ".join(spec.axes), ", ".join(spec.default)
        raise UsageError(f"kernel {spec.name!r} has the axes {axes}, but its default names {default}")
    if spec.span and (spec.span.axis not in spec.axes or spec.span.size not in spec.key):
        raise UsageError(f"kernel {spec.name!r} has {spec.span}: name an axis, and a size that its key has exactly")
    return spec
