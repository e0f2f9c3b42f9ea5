"""fp8tune: check, time, record and export launch configs of Triton kernels.

The names of the Python API (:mod:`fp8tune.api`) are here too. Each is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8tune.api import *  # noqa: F403 - for type checkers

__version__ = "0.3.0"

_MODULES = {
    **dict.fromkeys(("open", "sweep", "recheck", "compare", "lookup", "export"), "fp8tune.api"),
    **dict.fromkeys(("Results", "SweepResult", "Recheck", "Comparison", "Lookup", "Export"), "fp8tune.api"),
    **dict.fromkeys(("SweepOptions", "CompareOptions"), "fp8tune.options"),
    **dict.fromkeys(("PinError", "pin", "pin_report", "unpin"), "fp8tune_kernels.pinning"),
    "Fp8tuneError": "fp8tune.errors",
}
"""Names that programs use -> the module that has them."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
