"""A package that can be called: ``fp8tune.sweep(...)`` is a function of the Python API.

Importing a part of the package sets its name on ``fp8tune``, and would hide a function of that name.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    """A package of fp8tune that is called as the function of its name in :mod:`fp8tune.api`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function gives."""
        return self._function(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """Of the function: what ``help`` and editors show."""
        return inspect.signature(self._function)

    @property
    def _function(self) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(importlib.import_module("fp8tune.api"), self.__name__.rpartition(".")[2])
        return function
