"""fp8tune: check, time, record and export launch configs of Triton kernels.

The names of the Python API (:mod:`fp8tune.api`) are here too. Each is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8tune.api import CompareOptions as CompareOptions
    from fp8tune.api import Comparison as Comparison
    from fp8tune.api import Export as Export
    from fp8tune.api import Lookup as Lookup
    from fp8tune.api import Recheck as Recheck
    from fp8tune.api import Results as Results
    from fp8tune.api import SweepOptions as SweepOptions
    from fp8tune.api import SweepResult as SweepResult
    from fp8tune.api import compare as compare
    from fp8tune.api import export as export
    from fp8tune.api import lookup as lookup
    from fp8tune.api import open as open
    from fp8tune.api import recheck as recheck
    from fp8tune.api import sweep as sweep
    from fp8tune.errors import Fp8tuneError as Fp8tuneError
    from fp8tune_kernels.pinning import PinError as PinError
    from fp8tune_kernels.pinning import pin as pin
    from fp8tune_kernels.pinning import pin_report as pin_report
    from fp8tune_kernels.pinning import unpin as unpin

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
