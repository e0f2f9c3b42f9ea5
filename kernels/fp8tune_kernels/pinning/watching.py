"""Watch the kernels that are made later: note their run-time tuning, and pin them at their first launch."""

from __future__ import annotations

import functools
import importlib
import sys
import weakref
from collections.abc import Callable
from typing import Any

from ..tuners import chain
from .installed import Pinned, TunedConfigs, install_all
from .registry import lock, pins, waiting
from .tables import Table
from .targets import is_of, kernel_named, target_of

tuners: weakref.WeakSet[Any] = weakref.WeakSet()
"""Autotuners whose run-time tuning is noted."""


def pin_all(tables: list[Table], mode: str, *, may_lack_modules: bool = False) -> None:
    """Pin the kernels of tables; those that do not exist yet at their first launch."""
    kernels = [kernel_named(item, may_lack_modules) for item in tables]
    install_all([Pinned(target_of(kernel), item, mode) for kernel, item in zip(kernels, tables, strict=True) if kernel])
    waiting.update((item.kernel, (item, mode)) for kernel, item in zip(kernels, tables, strict=True) if not kernel)
    if waiting:
        watch()


def watch() -> None:
    """Note the run-time tuning of kernels made from now on, and pin those that tables name at their first launch."""
    runtime = importlib.import_module("triton.runtime.autotuner")  # all of Triton may not be imported yet
    kinds = [runtime.Autotuner, runtime.JITFunction]
    if interpreter := sys.modules.get("triton.runtime.interpreter"):  # Triton's own functions load it where it is used
        kinds.append(interpreter.InterpretedFunction)
    for kind in kinds:
        if not hasattr(kind.__init__, "fp8tune_watches"):
            kind.__init__ = _watched(kind.__init__)


def _watched(initialize: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(initialize)
    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        if hasattr(self, "configs"):
            self.cache = TunedConfigs(self, self.cache)
            tuners.add(self)
        if waiting:
            self.run = functools.partial(_first_launch, self)

    watched.fp8tune_watches = True  # type: ignore[attr-defined]
    return watched


def _first_launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """Pin a kernel if a table names it, and launch it. What it wraps is launched by it, and not pinned on its own."""
    with lock:
        for item in chain(kernel):
            if getattr(vars(item).get("run"), "func", None) is _first_launch:
                del item.run
        if id(kernel) not in pins:  # another thread's first launch, or an explicit pin
            matching = (entry for entry in list(waiting.values()) if is_of(kernel, entry[0]))
            install_all([Pinned(kernel, *entry) for entry in matching])
    return kernel.run(*args, **kwargs)
