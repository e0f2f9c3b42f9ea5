"""Names by which kernels can be imported: ``module:attribute``, ``module:BY_WIDTH[2]``, ``module:LAYER.kernel``."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

_STEP = re.compile(r"\.([^\W\d]\w*)|\[(-?\d+|'[\w.\-]+')\]")


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
    """Return the Python function that a kernel was made of."""
    return next(item for item in chain(kernel) if hasattr(item, "__code__"))


def function_name(kernel: Any) -> str:
    """Return ``module:qualified name`` of the Python function."""
    function = python_function(kernel)
    return f"{function.__module__}:{function.__qualname__}"


def attribute_of(kernel: Any) -> str | None:
    """Return the name of a kernel, or of a decorator around it; None where no module holds it.

    A module may hold it as an attribute, or in a dict, list, class or object that is one.
    """
    function = python_function(kernel)
    interface = sys.modules["triton.runtime.jit"].KernelInterface
    own = sys.modules.get(function.__module__)
    modules = [own, *(module for module in list(sys.modules.values()) if module is not own)]
    every = [names for module in modules if "__name__" in (names := getattr(module, "__dict__", {}))]

    def holds(value: Any) -> bool:
        return interface in type(value).__mro__ and any(item is kernel for item in chain(value))

    for names in every:
        for name, value in [(function.__name__, names.get(function.__name__)), *list(names.items())]:
            if holds(value):
                return f"{names['__name__']}:{name}"
    for names in every:
        for name, value in list(names.items()):
            for step, inner in _members(value):
                if holds(inner) and _STEP.fullmatch(step):
                    return f"{names['__name__']}:{name}{step}"
    return None


def _members(value: Any) -> list[tuple[str, Any]]:
    """Return the parts of a container or object, each with the text that leads to it."""
    if type(value) is dict:
        return [(f"[{key!r}]", inner) for key, inner in list(value.items()) if type(key) in (int, str)]
    if type(value) in (list, tuple):
        return [(f"[{index}]", inner) for index, inner in enumerate(value)]
    if issubclass(type(value), ModuleType):
        return []
    try:  # past __getattribute__, which may do anything, such as warn
        names = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return []
    return [(f".{name}", inner) for name, inner in list(names.items())]


def resolved(module: Any, path: str) -> Any:
    """Return what ``BY_WIDTH[2]`` or ``LAYER.kernel`` is in a module. Raises AttributeError or LookupError."""
    value, end = module, 0
    for step in _STEP.finditer(f".{path}"):
        if step.start() != end:
            break
        end = step.end()
        value = getattr(value, step[1]) if step[1] else value[ast.literal_eval(step[2])]
    if end != len(path) + 1:
        raise AttributeError(f"{path!r} is no attribute")
    return value


def place_of(kernel: Any, script: str | None) -> tuple[str, str]:
    """Return the name that a kernel can be imported by, else its qualified name and the reason why it cannot be.

    ``script``: the file of ``__main__``.
    """
    name, function = attribute_of(kernel), python_function(kernel)
    if name is None:
        qualified = function.__qualname__
        reason = f"no module holds it: assign it in {function.__module__}"
        if "<lambda>" in qualified:
            reason = "a lambda: write it as a function at the top of a module"
        elif "<locals>" in qualified:
            maker = qualified.partition(".<locals>")[0]
            reason = f"a closure, made inside {maker}: move it to the top of its module"
        return function_name(kernel), reason
    module, _, attribute = name.partition(":")
    if module != "__main__":
        return name, ""
    if script is None or not _is_guarded(Path(script)):
        return name, 'defined in __main__: move it to a module, or the program under if __name__ == "__main__"'
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return (f"{spec.name}:{attribute}" if spec else f"{Path(script).absolute()}:{attribute}"), ""


def _is_guarded(script: Path) -> bool:
    """Return True if a script can be imported without running its program, as far as its text tells."""
    try:
        statements = ast.parse(script.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return False
    return any(isinstance(item, ast.If) and "__name__" in ast.unparse(item.test) for item in statements)
