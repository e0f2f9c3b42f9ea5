"""fp8tune: check, time, record and export launch configs of Triton kernels."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8tune.pinning import pin as pin
    from fp8tune.pinning import unpin as unpin

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("pin", "unpin"):  # what programs call at run time, loaded when it is
        return getattr(importlib.import_module("fp8tune.pinning"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
