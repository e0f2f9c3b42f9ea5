"""fp8tune: check, time, record and export launch configs of Triton kernels.

The names of the Python API (:mod:`fp8tune.api`) are here too. Each is loaded when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8tune.api import Exported as Exported
    from fp8tune.api import Lookup as Lookup
    from fp8tune.api import Results as Results
    from fp8tune.api import Swept as Swept
    from fp8tune.api import export as export
    from fp8tune.api import lookup as lookup
    from fp8tune.api import open as open
    from fp8tune.api import sweep as sweep
    from fp8tune.errors import Fp8tuneError as Fp8tuneError
    from fp8tune.replay.pinning import pin as pin
    from fp8tune.replay.pinning import unpin as unpin

__version__ = "0.2.0"

_MODULES = {
    **dict.fromkeys(("pin", "unpin"), "fp8tune.replay.pinning"),
    **dict.fromkeys(("open", "sweep", "export", "lookup", "Results", "Lookup", "Swept", "Exported"), "fp8tune.api"),
    "Fp8tuneError": "fp8tune.errors",
}
"""Where a name lives that programs use."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
