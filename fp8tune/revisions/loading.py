"""Find a kernel's spec: one of this package by name, or anybody's as ``module:ATTRIBUTE`` or ``path.py:ATTRIBUTE``.

Whatever somebody else's file does wrong becomes one line here. Loading a spec imports torch and triton.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import importlib
import importlib.util
import keyword
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from fp8tune.errors import Fp8tuneError, MachineError, UsageError, in_spec, one_line, unknown
from fp8tune.text import NAME, SPEC_NAME, WORD
from fp8tune_kernels import catalog
from fp8tune_kernels.spec import CHECKS, DTYPES, KernelSpec, Tolerance

FUNCTIONS = ("bytes_moved", "flops", "scaled_down", "invalid", "edges", "lookup_key")
"""What of a spec runs while a sweep is planned: what it raises is no trial's failure. ``problems`` too, whose KeyError
has a meaning: see :mod:`fp8tune.plan.problems`."""

LARGEST = 2**63 - 1
"""The largest value an axis may have: what the database holds."""


@functools.cache
def load_spec(reference: str) -> KernelSpec:
    """The spec that ``reference`` names; the same object for the same text. Relative paths start at the current folder.

    Raises UsageError for a name nobody declared, a module that cannot be imported, or an attribute that is no usable
    KernelSpec; MachineError where a kernel of this package cannot be imported.
    """
    _repair_interpreter()
    if ":" not in reference:
        return _declared(reference)
    module_text, _, attribute = reference.rpartition(":")
    if module_text.endswith(".py"):
        module = _from_file(Path(module_text))
    else:
        with _importing(module_text, Path.cwd()):
            module = importlib.import_module(module_text)
    spec = getattr(module, attribute, None)
    if spec is None:
        specs = [name for name, value in vars(module).items() if isinstance(value, KernelSpec)]
        raise unknown(f"kernel spec in {module_text}", attribute, specs)
    if not isinstance(spec, KernelSpec):
        raise UsageError(f"{reference} is of type {type(spec).__name__}: name an fp8tune_kernels.spec.KernelSpec")
    try:
        return _usable(spec, module)
    except (TypeError, ValueError, AttributeError) as error:  # a field of another type
        raise UsageError(f"{reference} has a field that cannot be used: {one_line(error)}") from error


def _repair_interpreter() -> None:
    """In every process that may launch a kernel: somebody else's file imports none of ours."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        importlib.import_module("fp8tune_kernels.interpreter").install()


def check_reference(reference: str) -> None:
    """Raise the UsageError of :func:`load_spec` for a bare name that is not declared; imports nothing."""
    if ":" not in reference and reference not in catalog.KERNELS:
        raise unknown("kernel", reference, catalog.KERNELS)


def _declared(kernel: str) -> KernelSpec:
    check_reference(kernel)
    try:  # the catalog of another checkout in a worker of ``compare``: kernels may lie in other modules there
        return cast(KernelSpec, importlib.import_module("fp8tune_kernels.catalog").load(kernel))
    except ImportError as error:
        raise MachineError(f"cannot import kernel {kernel}: {one_line(error)}: install fp8tune again") from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"cannot import kernel file {str(path)!r}: no such file")
    path = path.resolve()
    # a name of its own, the same in every process, since a file may be called like a module that is installed
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None  # ending in .py settles both
    module = sys.modules[name] = importlib.util.module_from_spec(found)
    with _importing(str(path), path.parent):
        try:
            found.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return module


@contextlib.contextmanager
def _importing(what: str, folder: Path) -> Iterator[None]:
    """A kernel may import its neighbours and print. Whatever its module raises is one line."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # last, so that no neighbour hides an installed module
    try:
        with contextlib.redirect_stdout(sys.stderr):  # results have stdout to themselves
            yield
    except (Exception, SystemExit) as error:
        raise UsageError(f"cannot import {what!r}: {one_line(error)}") from error


def _usable(spec: KernelSpec, module: ModuleType) -> KernelSpec:
    """The spec, its functions guarded, once its names and grid are what the rest of fp8tune relies on."""
    for refusal in _refusals(spec, module):
        raise UsageError(refusal)
    guarded = copy.copy(spec)
    for function in FUNCTIONS:
        if (given := getattr(spec, function)) is not None:
            object.__setattr__(guarded, function, _one_line_raised(spec.name, function, given))
    return guarded


def _refusals(spec: KernelSpec, module: ModuleType) -> Iterator[str]:
    kernel = f"kernel {spec.name!r}"
    if not isinstance(spec.name, str) or not SPEC_NAME.fullmatch(spec.name):
        rule = "use up to 64 letters, digits, dots, underscores and dashes, and begin with a letter or digit"
        yield f"kernel name {spec.name!r} is refused: {rule}"
    if spec.name in catalog.KERNELS and not module.__name__.startswith("fp8tune_kernels."):
        yield f"kernel name {spec.name!r} is fp8tune's own: give the spec in {module.__name__} another name"
    if set(spec.default) != set(spec.axes):
        yield f"{kernel} has the axes {', '.join(spec.axes)}, but its default names {', '.join(spec.default)}"
    if spec.span and (spec.span.axis not in spec.axes or spec.span.size not in spec.key):
        yield f"{kernel} has {spec.span}: name an axis, and a size that its key has exactly"
    for what, names in (("axis", spec.axes), ("key", spec.key)):
        for name in names:
            if not isinstance(name, str) or not NAME.fullmatch(name) or keyword.iskeyword(name):
                yield f"{kernel}: {what} {name!r} is refused: use a name that Python takes"
    for axis, values in spec.axes.items():
        for value in (*values, spec.default[axis]):
            if type(value) is not int or not 0 <= value <= LARGEST:
                yield f"{kernel}: {axis} has the value {value!r}: use whole numbers from 0"
    if not spec.in_dtypes or not {*spec.in_dtypes} <= {*DTYPES}:
        yield f"{kernel}: in_dtypes {spec.in_dtypes!r} is refused: name at least one of {', '.join(DTYPES)}"
    for name in ("scale_modes", "input_layouts"):
        words = getattr(spec, name)
        is_missing = not words and name == "input_layouts"
        if is_missing or not all(isinstance(word, str) and WORD.fullmatch(word) for word in words):
            yield f"{kernel}: {name} {words!r} is refused: name at least one, without blanks"
    yield from _refused_checks(spec, kernel)


def _refused_checks(spec: KernelSpec, kernel: str) -> Iterator[str]:
    if spec.check not in CHECKS:
        yield f"{kernel}: check {spec.check!r} is refused: use one of {', '.join(CHECKS)}"
    if (spec.check == "tolerance") != isinstance(spec.tolerance, Tolerance):
        yield f"{kernel}: check {spec.check!r} with tolerance={spec.tolerance!r} is refused: declare both or neither"
    if isinstance(spec.tolerance, Tolerance):
        bounds = (spec.tolerance.relative, spec.tolerance.absolute)
        if not any(bounds) or not all(0 <= bound < math.inf for bound in bounds):
            yield f"{kernel}: {spec.tolerance!r} is refused: use numbers from 0, and one of them above"
    if spec.prepare is not None and not callable(spec.prepare):
        yield f"{kernel}: prepare {spec.prepare!r} is refused: use a function of (inputs, outputs)"


def _one_line_raised(kernel: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, but it raises one line instead of whatever it raises, and prints to stderr."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                found = function(*arguments, **named)
                return tuple(found) if name == "edges" else found  # what a generator raises is the spec's as well
        except Fp8tuneError:
            raise
        except (Exception, SystemExit) as error:
            if isinstance(error, KeyError) and name == "lookup_key":
                missing = f"key of kernel {kernel!r} names {error}, and its problems have no such size"
                raise UsageError(missing) from error
            raise in_spec(kernel, name, function, error) from error

    return call
