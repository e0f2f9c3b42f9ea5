"""Find the kernels that tables name."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from ..tuners import chain, function_name, is_kernel, resolved, tuner_of
from .errors import PinError, one_line
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
        if module is not None and (
            may_lack_modules or getattr(getattr(module, "__spec__", None), "_initializing", False)
        ):
            return None
        reason = f"{table.source} is of {table.kernel}, which cannot be imported: {one_line(error, 100)}"
        raise PinError(f"{reason}: import its module first, or pass the kernel behind the table") from None


def _exists(where: str) -> bool:
    """Return True if there is such a file, or such a package at the top: those below are not looked for."""
    try:
        return Path(where).is_file() if where.endswith(".py") else bool(importlib.util.find_spec(where.split(".")[0]))
    except ValueError:  # a module without a spec
        return False


def loaded_module(where: str) -> Any:
    """Return a module of this program by its name, or by its file ``path.py``."""
    main = sys.modules["__main__"]
    if not where.endswith(".py"):  # a program of `python -m` is not imported by its name
        return main if getattr(getattr(main, "__spec__", None), "name", "") == where else sys.modules.get(where)
    path = Path(where).absolute()
    files = ((item, getattr(item, "__file__", None)) for item in list(sys.modules.values()))
    return next((item for item, file in files if file and Path(file).absolute() == path), None)


def is_of(kernel: Any, table: Table) -> bool:
    """Return True if the table names the kernel; the attribute may be called otherwise than its function."""
    target = target_of(kernel)
    where, _, attribute = table.kernel.rpartition(":")
    try:
        return target_of(resolved(loaded_module(where), attribute)) is target
    except (AttributeError, LookupError, PinError):
        return table.kernel == function_name(target)
