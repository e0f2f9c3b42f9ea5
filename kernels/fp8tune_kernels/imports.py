"""Calls after the import of a module that may never be imported. Imports nothing but the standard library."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any


def after_import(name: str, action: Callable[[ModuleType], object]) -> None:
    """Call a function with a module: now if it has been imported, else when its code has run."""
    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, AfterImport({name: action}))


class AfterImport:
    """Finder for ``sys.meta_path`` that calls a function with each of some modules once its code has run.

    What the function raises, the import statement raises.
    """

    def __init__(self, actions: Mapping[str, Callable[[ModuleType], object]]) -> None:
        self._actions = actions
        self._searched = set[str]()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of one of the modules, as the other finders have it."""
        if name not in self._actions or name in self._searched:  # another finder of this kind asks this one
            return None
        finders = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        self._searched.add(name)
        try:
            spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        finally:
            self._searched.remove(name)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            loader.exec_module = execute
            execute(module)
            self._actions[name](module)

        loader.exec_module = execute_and_call
        return spec
