"""Classes that kernels have while a pin may reach them.

A class, and not an attribute ``run`` of the kernel: copies of the kernel have it too, what the program puts in the
place of ``run`` is called, and a kernel that is released from it costs nothing.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any, Generic


def derived(kind: Any, **methods: Callable[..., Any]) -> type:
    """Return a class with methods in the place of those of a kernel's class, which is not told of it."""
    base = kind
    while any("__init_subclass__" in vars(item) for item in base.__mro__ if item not in (Generic, object)):
        base = base.__base__  # a program may list its classes, or check them
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    result: type = type(kind)(kind.__name__, (base,), {**names, **methods, "__slots__": (), "fp8tune_own": kind})
    result.__bases__ = (kind,)
    return result


def own_class(kernel: Any) -> Any:
    """Return the class that the program gave a kernel."""
    return vars(type(kernel)).get("fp8tune_own", type(kernel))


def launched_class(kernel: Any) -> Any:
    """Return the class whose ``run`` launches a kernel: no class of :func:`derived`, and no program's class of one."""
    kind: Any = type(kernel)
    while hasattr(kind, "fp8tune_own"):
        kind = kind.fp8tune_own
    return kind


def release(kernel: Any) -> None:
    """Give a kernel its own class back."""
    kernel.__class__ = own_class(kernel)


def triton_kinds() -> list[Any]:
    """Return Triton's classes of autotuners and functions. Those of the interpreter are loaded where it is used."""
    kinds = {"autotuner": "Autotuner", "jit": "JITFunction", "interpreter": "InterpretedFunction"}
    modules = ((sys.modules.get(f"triton.runtime.{module}"), kind) for module, kind in kinds.items())
    return [getattr(module, kind) for module, kind in modules if module is not None]


def existing_kernels() -> list[Any]:
    """Return all kernels of this process. Takes some tenths of a second."""
    kinds: list[Any] = [kind for base in triton_kinds() for kind in (base, *_subclasses(base))]
    return [item for item in gc.get_referrers(*kinds) if issubclass(type(item), tuple(kinds))]


def _subclasses(kind: Any) -> Iterator[Any]:
    for item in kind.__subclasses__():
        yield item
        yield from _subclasses(item)
