"""Triton's kernels and tuners as recording and pinning see them. Imports torch and Triton only for values of theirs."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

STEP = re.compile(r"\.([^\W\d]\w*)|\[(-?\d+|'[\w.\-]+')\]")
"""One step from a module to a kernel: ``.kernel`` or ``[2]``."""


class HookUnknownError(Exception):
    """Raised for a config that nobody declared, where the declared configs have different hooks."""


def chain(kernel: Any) -> Iterator[Any]:
    """Yield a kernel and what it wraps, outermost first: Heuristics, Autotuner, JITFunction, the Python function."""
    visited = set[int]()
    while kernel is not None and id(kernel) not in visited:
        visited.add(id(kernel))
        yield kernel
        inside = vars(kernel) if hasattr(kernel, "__dict__") else {}
        kernel = inside.get("fn", inside.get("__wrapped__"))


def is_kernel(value: Any) -> bool:
    """Return True for an Autotuner, Heuristics or a ``@triton.jit`` function."""
    return hasattr(value, "run") and hasattr(value, "fn")


def tuner_of(kernel: Any) -> Any:
    """Return the autotuner in a kernel; None for a bare one."""
    return next((item for item in chain(kernel) if hasattr(item, "configs")), None)


def python_function(kernel: Any) -> Any:
    """Return the Python function behind a kernel."""
    return next(item for item in chain(kernel) if hasattr(item, "__code__"))


def function_name(kernel: Any) -> str:
    """Return ``module:qualified name`` of the Python function."""
    function = python_function(kernel)
    return f"{function.__module__}:{function.__qualname__}"


def resolved(module: ModuleType | SimpleNamespace | None, path: str) -> Any:
    """Return what ``BY_WIDTH[2]`` or ``LAYER.kernel`` is in a module. Raises AttributeError or LookupError."""
    value: Any = module
    end = 0
    for step in STEP.finditer(f".{path}"):
        if step.start() != end:
            break
        end = step.end()
        value = getattr(value, step[1]) if step[1] else value[ast.literal_eval(step[2])]
    if end != len(path) + 1:
        raise AttributeError(f"{path!r} is no attribute")
    return value


def tuning_key(tuner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a key as ``Autotuner.run`` builds it: values of key arguments, then dtypes of all, in the call's order.

    The same in Triton 3.6.0, 3.7.1 and on its main branch at 0094017.
    """
    bound = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
    bound = {name: value for name, value in bound.items() if name in tuner.arg_names}
    key = [bound[name] for name in tuner.keys if name in bound]
    return (*key, *(str(value.dtype) for value in bound.values() if hasattr(value, "dtype")))


def is_tensor(value: Any) -> bool:
    """Return True if Triton takes the value as a pointer."""
    return hasattr(value, "data_ptr") and hasattr(value, "dtype")


def is_descriptor(value: Any) -> bool:
    """Return True for a ``TensorDescriptor`` made on the host."""
    module = sys.modules.get("triton.tools.tensor_descriptor")
    return module is not None and isinstance(value, module.TensorDescriptor)


def tensor_in(value: Any) -> Any:
    """Return a tensor, or the one that a TensorDescriptor describes; None for a scalar."""
    return value.base if is_descriptor(value) else value if is_tensor(value) else None


def flattened(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an argument, or the items of a tuple with tensors as ``name[0]``. Raises TypeError for other containers."""

    def has_memory(item: Any) -> bool:
        return tensor_in(item) is not None or (isinstance(item, tuple) and any(map(has_memory, item)))

    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    if not any(map(has_memory, items)):
        yield name, value
    elif type(value) is not tuple:
        raise TypeError(f"argument {name} is a {type(value).__name__} with tensors: pass them one by one")
    else:
        for index, item in enumerate(value):
            yield from flattened(f"{name}[{index}]", item)


@functools.cache
def backend_options() -> frozenset[str]:
    """Return the names of all compile options that backends of this Triton have, such as AMD's ``waves_per_eu``.

    A launch or a config may set them without any parameter of the kernel.
    """
    backends = importlib.import_module("triton.backends").backends.values()
    modules = (sys.modules[backend.compiler.__module__] for backend in backends)
    classes = [kind for module in modules for kind in vars(module).values() if dataclasses.is_dataclass(kind)]
    return frozenset(item.name for kind in classes for item in dataclasses.fields(kind))


def hook_for(config: Any, declared: Sequence[Any]) -> Any:
    """Return the ``pre_hook`` of a Triton config: that of the same declared config, else the one that all have.

    Raises HookUnknownError where they differ.
    """
    same = [item for item in declared if item.all_kwargs() == config.all_kwargs()]
    equal_kwargs = [item for item in declared if item.kwargs == config.kwargs]
    hooks = [item.pre_hook for item in same[:1] or equal_kwargs or declared]
    if len(set(map(_behaviour, hooks))) > 1:
        raise HookUnknownError("its pre_hook is unknown: it is not declared, and the pre_hooks of the declared differ")
    return next(iter(hooks), None)


def _behaviour(hook: Any) -> Any:
    """Return what two hooks have in common that do the same: a lambda for each config is made of one code."""
    if not hasattr(hook, "__code__"):
        return hook
    cells = tuple(id(cell.cell_contents) for cell in hook.__closure__ or ())
    return hook.__code__, cells, hook.__defaults__, id(hook.__globals__)


def decoded(value: Any) -> Any:
    """Return a value that JSON or a table holds as ``{"dtype": "tl.float32"}``, and any plain one as it is.

    Raises ValueError for one that is not here.
    """
    if isinstance(value, tuple | list):
        return tuple(map(decoded, value))
    if not isinstance(value, Mapping):
        return value
    ((kind, text),) = value.items()
    if kind in ("float", "tuple"):
        return float(text) if kind == "float" else decoded(text)
    module_name, _, name = text.rpartition(":" if kind == "function" else ".")
    if kind != "function" and module_name not in ("torch", "tl"):  # data names no other module to import
        raise ValueError(f"the dtype {text!r:.80} is none of torch or triton.language")
    try:
        module = importlib.import_module("triton.language" if module_name == "tl" else module_name)
        if module_name == "tl" and not hasattr(module, name):
            return module.dtype(name)  # tl.float32 calls itself fp32
        return resolved(module, name)
    except (ImportError, AttributeError, LookupError, ValueError, AssertionError):
        raise ValueError(f"the value {text!r} cannot be imported here") from None
