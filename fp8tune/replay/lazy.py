"""Torch and Triton, imported when they are first used: what only reads a recording needs neither."""

from __future__ import annotations

import importlib
from functools import cached_property
from types import ModuleType
from typing import Any


class _Lazy:
    def __init__(self, name: str) -> None:
        self._name = name

    @cached_property
    def _module(self) -> ModuleType:
        return importlib.import_module(self._name)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._module, attribute)


torch: Any = _Lazy("torch")
triton: Any = _Lazy("triton")
