"""Torch and Triton, imported when they are first used: what only reads a recording needs neither."""

from __future__ import annotations

import importlib
from typing import Any


class _Lazy:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


torch: Any = _Lazy("torch")
triton: Any = _Lazy("triton")
