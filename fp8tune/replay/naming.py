"""Names by which kernels can be imported: ``module:attribute``, ``module:BY_WIDTH[2]``, ``module:LAYER.kernel``."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from fp8tune_kernels.tuners import STEP, chain, function_name, python_function


def attribute_of(kernel: Any) -> str | None:
    """Return the name of a kernel, or of a decorator around it; None where no module holds it.

    A module may hold it as an attribute, or in a dict, list, class or object that is one.
    """
    function = python_function(kernel)
    interface = sys.modules["triton.runtime.jit"].KernelInterface
    own, own_name = function.__globals__, function.__name__  # of a module that may not be in sys.modules
    others = (getattr(module, "__dict__", {}) for module in list(sys.modules.values()))
    namespaces = [own, *(names for names in others if "__name__" in names and names is not own)]
    for parts in (lambda value: [("", value)], _members):  # attributes of all modules, then what those hold
        for names in namespaces:
            for name, value in [(own_name, names.get(own_name)), *list(names.items())]:
                for step, item in parts(value):
                    is_held = interface in type(item).__mro__ and any(inner is kernel for inner in chain(item))
                    if is_held and (not step or STEP.fullmatch(step)):
                        return f"{names['__name__']}:{name}{step}"
    return None


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a container or object with the text that leads to each."""
    if type(value) is dict:
        yield from ((f"[{key!r}]", inner) for key, inner in list(value.items()) if type(key) in (int, str))
    elif type(value) in (list, tuple):
        yield from ((f"[{index}]", inner) for index, inner in enumerate(value))
    elif not issubclass(type(value), ModuleType):
        try:  # past __getattribute__, which may do anything, such as warn
            names = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return
        yield from ((f".{name}", inner) for name, inner in list(names.items()))


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
        names = vars(sys.modules[module]) if module in sys.modules else function.__globals__
        path = Path(names.get("__file__") or "")
        own_name = path.parent.name if path.stem == "__init__" else path.stem
        is_made_up = path.suffix == ".py" and module.rpartition(".")[2] != own_name  # no import finds it
        return f"{path.absolute()}:{attribute}" if is_made_up else name, ""
    if script is None or not _is_guarded(Path(script)):
        return name, 'defined in __main__: move it to a module, or the program under if __name__ == "__main__"'
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"{spec.name if spec else Path(script).absolute()}:{attribute}", ""


def _is_guarded(script: Path) -> bool:
    """Return True if a script can be imported without running its program, as far as its text tells."""
    try:
        statements = ast.parse(script.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return False
    return any(isinstance(item, ast.If) and "__name__" in ast.unparse(item.test) for item in statements)
