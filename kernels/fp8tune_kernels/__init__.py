"""FP8 quantization kernels for mixture-of-experts training, launched with the configs that fp8tune has exported.

``from fp8tune_kernels import quantize_colwise`` imports torch and triton; importing the package alone does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8tune_kernels.colwise import quantize_colwise
    from fp8tune_kernels.rowwise_2d import quantize_rowwise_2d

__all__ = ["quantize_colwise", "quantize_rowwise_2d"]

_MODULES = {"quantize_colwise": "colwise", "quantize_rowwise_2d": "rowwise_2d"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
