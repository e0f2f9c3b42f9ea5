"""Launches inside ``torch.compile``, which copies configs of a kernel into the code that it makes.

It is given the one config of the table where the key is constant in the traced code: another size is traced anew. A
launch whose sizes are symbols is made for many keys: torch tunes it, and a warning says so once.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ..imports import after_import
from ..tuners import function_name, tuning_key
from .reach import release
from .registry import logger, unpinned

MODULE = "torch._higher_order_ops.triton_kernel_wrap"

_thread = threading.local()


def watch_compiler(pinned_of: Callable[[Any], Any]) -> None:
    """Pin launches that torch traces from now on. ``pinned_of`` returns what a kernel is pinned to, or None."""
    after_import(MODULE, functools.partial(_patch, pinned_of))


def _patch(pinned_of: Callable[[Any], Any], module: ModuleType) -> None:
    tracer = module.TritonHOPifier
    original = tracer.call_triton_kernel
    if hasattr(original, "fp8tune_pins"):
        return

    @functools.wraps(original)
    def call(self: Any, variable: Any, args: Any, kwargs: Any, tx: Any) -> Any:
        if getattr(_thread, "is_tracing", False):  # for another list of configs of the same kernel
            return original(self, variable, args, kwargs, tx)
        _thread.is_tracing = True
        try:
            narrowed = _narrowed(variable.kernel, pinned_of(variable.kernel), args, kwargs)
            if narrowed is not None:
                variable = self.recreate_variable(variable, kernel=narrowed, kernel_idx=None, grid=variable.grid)
            return original(self, variable, args, kwargs, tx)
        finally:
            _thread.is_tracing = False

    call.fp8tune_pins = True  # type: ignore[attr-defined]
    tracer.call_triton_kernel = call


def _narrowed(kernel: Any, pinned: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return a tuner with the config of the table alone; None for a kernel that torch launches or tunes itself."""
    if pinned is None:
        return None
    if not hasattr(kernel, "configs"):
        return _warn(kernel, "its caller's config is used", "put the config into its call")
    key = tuning_key(
        kernel, [_traced(value) for value in args], {name: _traced(value) for name, value in kwargs.items()}
    )
    if any(hasattr(value, "node") for value in key):  # a symbol
        return _warn(kernel, "torch tunes it, as its sizes are dynamic", "compile it with dynamic=False")
    if key not in pinned:
        return None
    result = importlib.import_module("triton").autotune(configs=[pinned[key]], key=[])(kernel.fn)
    release(result)
    return result


def _traced(value: Any) -> Any:
    """Return the constant, symbol or example tensor of an argument that torch traces."""
    if not hasattr(value, "as_python_constant"):
        return value
    if value.is_python_constant():
        return value.as_python_constant()
    if getattr(value, "sym_num", None) is not None:
        return value.sym_num
    proxy = getattr(value, "proxy", None)
    return value if proxy is None else proxy.node.meta.get("example_value", value)


def _warn(kernel: Any, reason: str, fix: str) -> None:
    """Say once that a kernel is not pinned inside torch.compile."""
    name, text = function_name(kernel), f"inside torch.compile {reason}: {fix}"
    if (name, text) not in unpinned:
        unpinned[name, text] = None
        logger.warning("%s is not pinned: %s", name, text)
