"""PyTorch, imported at its first use: that takes seconds, and a process that only plans needs none of it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module("torch"), name)

    torch = _Torch()
