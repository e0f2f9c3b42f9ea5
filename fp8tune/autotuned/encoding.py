"""Values of a launch as JSON holds them, and the name that a kernel can be imported by."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

from fp8tune.recording import Config, Value


class Unrecordable(Exception):  # noqa: N818 - a launch's, not the user's
    """Something of a launch that a recording cannot hold; the text says which."""


def encoded(value: Any, what: str) -> Value:
    """A scalar, constexpr or option as a recording holds it. Raises Unrecordable, which names ``what``."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if kind is tuple:
        return {"tuple": tuple(encoded(each, what) for each in value)}
    module = kind.__module__
    if module == "torch" and kind.__name__ == "dtype":
        return {"dtype": str(value)}
    if module.startswith("triton.") and kind.__name__ == "constexpr":
        return encoded(value.value, what)
    if module.startswith("triton.") and kind.__name__ == "dtype":
        names = vars(sys.modules["triton.language"])
        return {"dtype": next(f"tl.{name}" for name, one in names.items() if type(one) is kind and one == value)}
    if hasattr(value, "fn") or (callable(value) and hasattr(value, "__qualname__")):
        name = attribute_of(value)
        if name is None:
            raise Unrecordable(f"{what} is the function {function_name(value)}, which cannot be imported")
        return {"function": name}
    raise Unrecordable(f"{what} is of type {module}.{kind.__qualname__}, which a recording cannot hold")


def config_of(config: Any) -> Config:
    """A ``triton.Config`` as a recording holds it. Raises Unrecordable."""
    if getattr(config, "ir_override", None):
        raise Unrecordable("a config overrides the IR")
    return Config(
        {name: encoded(value, f"config value {name}") for name, value in config.kwargs.items()},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        num_ctas=getattr(config, "num_ctas", None) or 1,
        maxnreg=getattr(config, "maxnreg", None),
        has_pre_hook=config.pre_hook is not None,
    )


def chain(kernel: Any) -> Iterator[Any]:
    """A kernel and what it wraps, outermost first: Heuristics, Autotuner, JITFunction, the Python function."""
    seen = set[int]()
    while kernel is not None and id(kernel) not in seen:
        seen.add(id(kernel))
        yield kernel
        inside = vars(kernel) if hasattr(kernel, "__dict__") else {}
        kernel = inside.get("fn", inside.get("__wrapped__"))


def python_function(kernel: Any) -> Any:
    """The Python function that a kernel was made of."""
    return next(one for one in chain(kernel) if hasattr(one, "__code__"))


def function_name(kernel: Any) -> str:
    """``module:qualified name`` of the Python function."""
    function = python_function(kernel)
    return f"{function.__module__}:{function.__qualname__}"


def attribute_of(kernel: Any) -> str | None:
    """``module:attribute`` of the module that holds the kernel, or a decorator around it. None where no module does."""
    function = python_function(kernel)
    own = sys.modules.get(function.__module__)
    interface = sys.modules["triton.runtime.jit"].KernelInterface
    others = (module for module in list(sys.modules.values()) if module is not own)
    for module in (own, *others):
        names = getattr(module, "__dict__", {})
        for name, value in [(function.__name__, names.get(function.__name__)), *list(names.items())]:
            if interface in type(value).__mro__ and any(one is kernel for one in chain(value)):
                return f"{names['__name__']}:{name}"
    return None
