"""Launches inside ``torch.compile``, which copies configs of a kernel into the code that it makes.

It is given the one config of the table where the key is constant in the traced code: another size is traced anew. A
launch whose sizes are symbols is made for many keys: torch tunes it, and a warning says so once.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ..imports import after_import
from ..tuners import function_name, tuning_key
from .errors import PinError, one_line
from .reach import release
from .registry import logger, unpinned

MODULE = "torch._higher_order_ops.triton_kernel_wrap"
_OTHER_TORCH = "use torch 2.11 to 2.15, or launch it outside torch.compile"

_thread = threading.local()


def watch_compiler(pinned_of: Callable[[Any], Any]) -> None:
    """Pin launches that torch traces from now on. ``pinned_of`` returns what a kernel is pinned to, or None."""
    after_import(MODULE, functools.partial(_patch, pinned_of))


def _patch(pinned_of: Callable[[Any], Any], module: ModuleType) -> None:
    tracer = getattr(module, "TritonHOPifier", None)
    original = getattr(tracer, "call_triton_kernel", None)
    if original is None:
        _warn("torch.compile", f"it has no {MODULE}.TritonHOPifier.call_triton_kernel", _OTHER_TORCH)
    elif not hasattr(original, "fp8tune_pins"):
        tracer.call_triton_kernel = _pinning(original, pinned_of)  # type: ignore[union-attr]


def _pinning(original: Callable[..., Any], pinned_of: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return the method that traces a launch, for pinned kernels with the config of the table."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(_thread, "is_tracing", False):  # for another list of configs of the same kernel
            return original(self, *args, **kwargs)
        _thread.is_tracing = True
        try:
            launch = inspect.signature(original).bind(self, *args, **kwargs)
            _narrow(self, launch.arguments, pinned_of)
            return original(*launch.args, **launch.kwargs)
        finally:
            _thread.is_tracing = False

    call.fp8tune_pins = True  # type: ignore[attr-defined]
    return call


def _narrow(tracer: Any, launch: dict[str, Any], pinned_of: Callable[[Any], Any]) -> None:
    """Give a launch the config of the table; a torch that is built otherwise tunes it, and a warning says so.

    Raises PinError for a key that the table lacks and may not lack.
    """
    kernel = getattr(launch.get("variable"), "kernel", None)
    try:
        variable = launch["variable"]
        narrowed = _narrowed(variable.kernel, pinned_of(variable.kernel), launch["args"], launch["kwargs"])
        if narrowed is None:
            return
        if hasattr(tracer, "recreate_variable"):  # torch 2.12 and later
            replacement = tracer.recreate_variable(variable, kernel=narrowed, kernel_idx=None, grid=variable.grid)
        else:
            replacement = type(variable)(narrowed, None, variable.grid)
        launch["variable"] = replacement
    except PinError:
        raise
    except Exception as error:  # whatever a torch may raise that is not known here: a pin stops no program
        name = "a kernel" if kernel is None else function_name(kernel)
        _warn(name, f"inside torch.compile torch tunes it, as {one_line(error, 120)}", _OTHER_TORCH)


def _narrowed(kernel: Any, pinned: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return a tuner with the config of the table alone; None for a kernel that torch launches or tunes itself."""
    if pinned is None:
        return None
    if not hasattr(kernel, "configs"):
        reason = "inside torch.compile its caller's config is used"
        return _warn(function_name(kernel), reason, "put the config into its call")
    key = tuning_key(
        kernel, [_traced(value) for value in args], {name: _traced(value) for name, value in kwargs.items()}
    )
    if any(hasattr(value, "node") for value in key):  # a symbol
        reason = "inside torch.compile torch tunes it, as its sizes are dynamic"
        return _warn(function_name(kernel), reason, "compile it with dynamic=False")
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


def _warn(name: str, reason: str, fix: str) -> None:
    """Say once that a kernel is not pinned inside torch.compile."""
    text = f"{reason}: {fix}"
    if (name, text) not in unpinned:
        unpinned[name, text] = None
        logger.warning("%s is not pinned: %s", name, text)
