"""Find the kernels that tables name."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..identity.modules import Finder
from ..tuners import chain, function_name, is_kernel, python_function, resolved, tuner_of
from .errors import PinError, one_line
from .registry import Entry, entries
from .tables import Table


def target_of(kernel: Any) -> Any:
    """Return the autotuner of a kernel, else the bare jitted function."""
    every = [item for item in chain(kernel) if is_kernel(item)]
    if not every:
        name = getattr(kernel, "__name__", None) or type(kernel).__name__
        raise PinError(f"{name} is no Triton kernel: pin a kernel of triton.autotune or triton.jit")
    return tuner_of(kernel) or every[-1]


def kernel_named(table: Table, may_lack_modules: bool = False) -> Any:
    """Return the kernel of a table; None if its module has not been imported, or is being imported."""
    if not table.kernel:
        raise PinError("a dict names no kernel: pass the kernel behind it")
    where, _, attribute = table.kernel.rpartition(":")
    module = loaded_module(where)
    if module is None and (may_lack_modules or _exists(where)):
        return None
    try:
        if module is None:
            raise ModuleNotFoundError(f"no module {where!r}")
        return resolved(module, attribute)
    except (ImportError, AttributeError, LookupError, TypeError) as error:
        if module is not None and (may_lack_modules or _is_importing(module)):
            return None
        reason = f"{table.source} is of {table.kernel}, which cannot be imported: {one_line(error, 100)}"
        raise PinError(f"{reason}: import its module first, or pass the kernel behind the table") from None


def _exists(where: str) -> bool:
    """Return True if there is such a file, or such a package at the top: those below are not searched."""
    try:
        return Path(where).is_file() if where.endswith(".py") else bool(importlib.util.find_spec(where.split(".")[0]))
    except ValueError:  # a module without a spec
        return False


def loaded_module(where: str) -> Any:
    """Return a module of this program by its name, or by its file ``path.py``."""
    main = sys.modules["__main__"]
    if not where.endswith(".py"):  # a program of `python -m` is not imported by its name
        return main if getattr(getattr(main, "__spec__", None), "name", "") == where else sys.modules.get(where)
    path, name = os.path.abspath(where), os.path.basename(where)
    files = ((item, getattr(item, "__file__", None)) for item in list(sys.modules.values()))
    return next((item for item, file in files if file and file.endswith(name) and os.path.abspath(file) == path), None)


def is_of(kernel: Any, table: Table) -> bool:
    """Return True if the table names the kernel; the attribute may be called otherwise than its function."""
    target = target_of(kernel)
    return named(table, python_function(target)) is target or table.kernel == function_name(target)


def entry_of(target: Any) -> tuple[Entry | None, str]:
    """Return the table for an autotuner or bare kernel that is launched; None, and the reason if a table is near.

    A table is for the kernel that was passed with it or that it names, and for copies: a copy is made of the same
    function, and has the same key and configs.
    """
    function, reason = python_function(target), ""
    originals = [(item, item.target or named(item.table, function)) for item in list(entries.values())]
    for entry, original in originals:
        if original is target or (original is None and entry.table.kernel == function_name(target)):
            return entry, ""
    for entry, original in originals:
        if original is not None and python_function(original) is function:
            reason = _difference(original, target)
            if not reason:
                return entry, ""
    return None, reason


def entries_near(target: Any) -> list[Entry]:
    """Return tables of a file that has such a kernel: a copy, another revision, or the same under another name."""
    own = python_function(target).__globals__
    return [entry for entry in list(entries.values()) if _is_near(entry.table.kernel, own, target)]


def _is_near(kernel: str, own: Mapping[str, Any], target: Any) -> bool:
    where, _, attribute = kernel.rpartition(":")
    file = Path(own.get("__file__") or "")
    if where.endswith(".py"):  # in any folder
        names = [path.parts[-2:] if path.name == "__init__.py" else path.name for path in (Path(where), file)]
        is_alike = names[0] == names[1]
    else:
        place = Finder(where.partition(".")[0]).find(where)
        is_alike = place is not None and bool(place.file) and os.path.abspath(place.file) == os.path.abspath(file)
    with contextlib.suppress(AttributeError, LookupError, TypeError, PinError):
        return is_alike and target_of(resolved(SimpleNamespace(**own), attribute)) is target
    return False


def absence_of(table: Table) -> str:
    """Return the reason why no launch can ever be of a table; empty if one may still come."""
    where, _, attribute = table.kernel.rpartition(":")
    if "<locals>" in attribute:
        return ""
    module = loaded_module(where)
    if module is None:
        is_there = Path(where).is_file() if where.endswith(".py") else Finder(where.partition(".")[0]).find(where)
        return "" if is_there else f"there is no {where} any more"
    try:
        resolved(module, attribute)
    except (AttributeError, LookupError, TypeError):
        return "" if _is_importing(module) else f"{where} has no {attribute} any more"
    return ""


def _is_importing(module: Any) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def named(table: Table, function: Any) -> Any:
    """Return the kernel that a table names, in the module of a function or else in a loaded one; None without one.

    Several modules may be made of one file, and those that a loader makes may not be in ``sys.modules``.
    """
    where, _, attribute = table.kernel.rpartition(":")
    own = function.__globals__
    is_own = own.get("__name__") == where or (where.endswith(".py") and _is_file(own, where))
    for module in (SimpleNamespace(**own) if is_own else None, loaded_module(where)):
        with contextlib.suppress(AttributeError, LookupError, TypeError, PinError):
            return target_of(resolved(module, attribute))
    return None


def _is_file(names: Mapping[str, Any], where: str) -> bool:
    file = names.get("__file__") or ""
    return file.endswith(os.path.basename(where)) and os.path.abspath(file) == os.path.abspath(where)


def _difference(original: Any, target: Any) -> str:
    """Return what makes a kernel of the same function another; empty for a copy."""
    name = function_name(original)
    if not hasattr(target, "configs"):
        return "launched without its autotuner: launch that, and not what it wraps"
    if not hasattr(original, "configs"):
        return f"an autotuner around {name}, whose table is for launches without one: tune it by itself"
    if list(target.keys) != list(original.keys):
        return f"its key {list(target.keys)} is not that of {name}, {list(original.keys)}: tune it by itself"
    if [item.all_kwargs() for item in target.configs] != [item.all_kwargs() for item in original.configs]:
        return f"its configs are not those of {name}: tune it by itself"
    return ""
