"""Find a kernel's spec: one of this package by name, or anybody's as ``module:ATTRIBUTE`` or ``path.py:ATTRIBUTE``.

What that names may be a kernel instead, whose spec is made from a recording: see :mod:`fp8tune.replay.spec`. Whatever
somebody else's file does wrong becomes one line here. Loading a spec imports torch and triton.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from fp8tune import interpreter, registry
from fp8tune.errors import Fp8tuneError, MachineError, UsageError, in_spec, one_line, unknown
from fp8tune.replay import recording
from fp8tune.replay.recording import Kernel
from fp8tune.replay.spec import RecordedSpec, build
from fp8tune.revisions import first_import
from fp8tune.revisions.reference import KernelReference
from fp8tune.text import KERNEL_NAME, NAME, SPEC_NAME, WORD
from fp8tune_kernels.spec import CHECKS, DTYPES, KernelSpec, Tolerance
from fp8tune_kernels.tuners import is_kernel, resolved

FUNCTIONS = ("bytes_moved", "flops", "scaled_down", "excluded", "invalid", "pruned", "edges", "lookup_key")
"""Functions of a spec that run while a sweep is planned: what they raise is no trial's failure. ``problems`` too, whose
KeyError has a meaning: see :mod:`fp8tune.plan.problems`."""

LARGEST = 2**63 - 1  # the largest value an axis may have: what the database holds


@functools.cache
def load_spec(reference: str) -> KernelSpec:
    """Return the spec that ``reference`` names; the same object for the same text. Paths start at the current folder.

    ``reference``: the text of a :class:`~fp8tune.revisions.reference.KernelReference`. Raises UsageError for a name
    nobody declared, a module that cannot be imported, an attribute that is neither a usable KernelSpec nor a kernel of
    the recording; MachineError where a kernel of this package cannot be imported.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":  # somebody else's file imports none of ours
        interpreter.install()
    check_reference(reference)
    named = KernelReference.parse(reference)
    if ":" not in named.kernel:
        module_text, _, attribute = registry.kernels()[named.kernel].partition(":")
        try:
            return _with_check(getattr(importlib.import_module(module_text), attribute), named)
        except (ImportError, AttributeError) as error:
            reason = f"cannot import kernel {named.kernel}: {one_line(error)}"
            raise MachineError(f"{reason}: install fp8tune again") from error
    reach_recorded(named)
    module_text, _, attribute = named.kernel.rpartition(":")
    module = imported_module(module_text)
    try:
        spec = resolved(module, attribute)
    except (AttributeError, LookupError, TypeError):
        specs = [name for name, value in vars(module).items() if isinstance(value, KernelSpec)]
        raise unknown(f"kernel spec in {module_text}", attribute, specs) from None
    if not is_kernel(spec) and not isinstance(spec, KernelSpec):
        kinds = "name an fp8tune_kernels.spec.KernelSpec or a kernel of triton.autotune"
        raise UsageError(f"{named.kernel} is of type {type(spec).__name__}: {kinds}")
    try:
        spec = _from_recording(spec, named) if is_kernel(spec) else _with_check(spec, named)
        for refusal in _refusals(spec, module):
            raise UsageError(f"kernel {spec.name!r}: {refusal}")
    except (TypeError, ValueError, AttributeError) as error:  # a field of another type
        raise UsageError(f"{named.kernel} has a field that cannot be used: {one_line(error)}") from error
    guarded = copy.copy(spec)
    for name in FUNCTIONS:
        if (function := getattr(spec, name, None)) is not None:
            object.__setattr__(guarded, name, _one_line_raised(spec.name, name, function))
    return guarded


def check_reference(reference: str) -> None:
    """Raise the UsageError of :func:`load_spec` for a text or a name that nobody declared; imports nothing."""
    kernel = KernelReference.parse(reference).kernel
    if ":" not in kernel and kernel not in registry.kernels():
        raise unknown("kernel", kernel, registry.kernels())


def recorded_kernel(named: KernelReference) -> Kernel:
    """Return the kernel of the recording that a reference names. Raises UsageError if it is not there."""
    path = Path(named.recording).absolute()
    kernels = _kernels(path, path.stat().st_mtime_ns if path.exists() else 0)
    if named.kernel in kernels:
        return kernels[named.kernel]
    where, _, attribute = named.kernel.rpartition(":")
    same = [kernel for kernel in kernels.values() if where.endswith(".py") and kernel.name.endswith(f":{attribute}")]
    for kernel in same:
        if Path(kernel.file).resolve() == Path(where).resolve():
            return kernel
    for kernel in same:  # the file may be a checkout's
        module = kernel.name.removesuffix(f":{attribute}")
        if f"/{where.removesuffix('.py')}".endswith(f"/{module.replace('.', '/')}"):
            return kernel
    raise unknown(f"kernel in {named.recording}", named.kernel, kernels)


@functools.lru_cache(maxsize=8)
def _kernels(path: Path, mtime_ns: int) -> Mapping[str, Kernel]:
    """Return the kernels of a recording by name; a sweep asks for them again and again."""
    return {kernel.name: kernel for kernel in recording.read(path).kernels}


def reach_recorded(named: KernelReference) -> None:
    """Let the module of a recorded kernel be imported from where it lay: the folder of a script is no package's."""
    where, _, _ = named.kernel.rpartition(":")
    if not named.recording or where.endswith(".py"):
        return
    file = Path(recorded_kernel(named).file)
    above = len(where.split(".")) - 1 + (file.name == "__init__.py")
    if file.is_file() and len(file.parents) > above and (folder := str(file.parents[above])) not in sys.path:
        sys.path.append(folder)


def _from_recording(function: Any, named: KernelReference) -> RecordedSpec:
    if not named.recording:
        record = f"run fp8tune record -o run.json -- python PROGRAM, and write {named.kernel}@run.json"
        raise UsageError(f"{named.kernel} is a kernel without a spec: {record}")
    return build(
        recorded_kernel(named),
        function,
        check=named.check,
        tolerance=named.tolerance,
        reference=_function(named.reference) if named.reference else None,
        make_inputs=_function(named.inputs, "inputs") if named.inputs else None,
        only_recorded_sizes=named.sizes == "recorded",
        shared=named.shared.split(",") if named.shared else (),
    )


def _with_check(spec: KernelSpec, named: KernelReference) -> KernelSpec:
    """Return a spec with the check that the user asks for instead of its own."""
    if named.recording:
        raise UsageError(f"{named.kernel} has a spec, which makes its own inputs: leave out @{named.recording}")
    if named.check:
        bound = named.tolerance or spec.tolerance if named.check == "tolerance" else None
        if named.check == "tolerance" and bound is None:
            raise UsageError(f"{named.kernel} declares no tolerance: add --tolerance 1e-3,1e-5")
        spec = replace(spec, check=named.check, tolerance=bound)
    if named.reference:
        function = _function(named.reference)

        def reference(*inputs: Any) -> tuple[Any, ...]:
            outputs = function(*inputs)
            return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)

        spec = replace(spec, reference=reference)
    return spec


def _function(text: str, option: str = "--reference") -> Callable[..., Any]:
    where, _, name = text.rpartition(":")
    function: Any = getattr(imported_module(where), name, None)
    if not callable(function):
        raise UsageError(f"{option} {text}: {where} has no function {name}")
    return function  # type: ignore[no-any-return]


def imported_module(text: str) -> ModuleType:
    """Import a module or a ``path.py`` that the user names: in a child process first if it is foreign code.

    Raises UsageError if that is not possible.
    """
    path, content = Path(text), ""
    if text.endswith(".py"):
        if not path.is_file():
            raise UsageError(f"cannot import kernel file {text!r}: no such file")
        with contextlib.suppress(OSError):  # the import says why
            content = hashlib.sha256(path.read_bytes()).hexdigest()
    if text not in sys.modules and text.partition(".")[0] not in ("fp8tune", "fp8tune_kernels"):
        _try_import(text, content)
    return imported_here(text)


@functools.cache
def _try_import(text: str, content: str) -> None:
    """Import a module in a child process, once for its content."""
    first_import.try_import(text, imported_here)


def imported_here(text: str) -> ModuleType:
    """Import a module or a ``path.py`` in this process: it may import its neighbours, and print. Raises UsageError."""
    path, process = Path(text).resolve(), os.getpid()
    folder, what = (path.parent, str(path)) if text.endswith(".py") else (Path.cwd(), text)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # last, so that no neighbour hides an installed module
    try:
        with contextlib.redirect_stdout(sys.stderr):  # results have stdout to themselves
            return _from_file(path) if text.endswith(".py") else importlib.import_module(text)
    except (Exception, SystemExit) as error:
        raise UsageError(f"cannot import {what!r}: {one_line(error)}") from error
    finally:
        if os.getpid() != process:  # the module forked: its copy of this program would do everything a second time
            os._exit(0)


def _from_file(path: Path) -> ModuleType:
    # a name of its own, the same in every process, since a file may be called like a module that is installed
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec: Any = importlib.util.spec_from_file_location(name, path)  # not None, as the path ends in .py
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _refusals(spec: KernelSpec, module: ModuleType) -> Iterator[str]:
    """Yield the faults of a spec's fields, without the kernel's name."""
    pattern = KERNEL_NAME if isinstance(spec, RecordedSpec) else SPEC_NAME
    if not isinstance(spec.name, str) or not pattern.fullmatch(spec.name):
        yield "its name is refused: use up to 64 letters, digits, dots, underscores and dashes"
    path = registry.kernels().get(spec.name, "")
    if path and path.partition(".")[0] != module.__name__.partition(".")[0]:
        yield f"its name is registered for {path}: give the spec in {module.__name__} another name"
    if set(spec.default) != set(spec.axes):
        yield f"it has the axes {', '.join(spec.axes)}, but its default names {', '.join(spec.default)}"
    if spec.span and (spec.span.axis not in (None, *spec.axes) or spec.span.size not in spec.key):
        yield f"it has {spec.span}: name an axis, and a size that its key has exactly"
    for what, name in (*(("axis", name) for name in spec.axes), *(("key", name) for name in spec.key)):
        if not isinstance(name, str) or not NAME.fullmatch(name) or keyword.iskeyword(name):
            yield f"{what} {name!r} is refused: use a name that Python takes"
    for axis, values in spec.axes.items():
        for value in (*values, spec.default[axis]):
            if type(value) is not int or not 0 <= value <= LARGEST:
                yield f"{axis} has the value {value!r}: use whole numbers from 0"
    if not spec.in_dtypes or not {*spec.in_dtypes} <= {*DTYPES}:
        yield f"in_dtypes {spec.in_dtypes!r} is refused: name at least one of {', '.join(DTYPES)}"
    for name, words in (("scale_modes", spec.scale_modes), ("input_layouts", spec.input_layouts or ("",))):
        if not all(isinstance(word, str) and word and WORD.fullmatch(word) for word in words):
            yield f"{name} {getattr(spec, name)!r} is refused: name at least one, without blanks"
    if spec.check not in CHECKS:
        yield f"check {spec.check!r} is refused: use one of {', '.join(CHECKS)}"
    bound = spec.tolerance
    if (spec.check == "tolerance") != isinstance(bound, Tolerance):
        yield f"check {spec.check!r} with tolerance={bound!r} is refused: declare both or neither"
    elif bound is not None and not (min(numbers := astuple(bound)) >= 0 and 0 < sum(numbers) < math.inf):
        yield f"{bound!r} is refused: use numbers from 0, and one of them above"
    if spec.prepare is not None and not callable(spec.prepare):
        yield f"prepare {spec.prepare!r} is refused: use a function of (inputs, outputs)"


def _one_line_raised(kernel: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, but it raises one line instead of whatever it raises, and prints to stderr."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                result = function(*arguments, **named)
                return tuple(result) if name == "edges" else result  # what a generator raises is the spec's as well
        except Fp8tuneError:
            raise
        except (Exception, SystemExit) as error:
            if isinstance(error, KeyError) and name == "lookup_key":
                missing = f"key of kernel {kernel!r} names {error}, and its problems have no such size"
                raise UsageError(missing) from error
            raise in_spec(kernel, name, function, error) from error

    return call
