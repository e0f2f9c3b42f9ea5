"""The kernels of this package, readable without torch or triton: a kernel is a line here and one file."""

from __future__ import annotations

import importlib
from typing import cast

from fp8tune_kernels.spec import KernelSpec, Span

_SPAN_OF: dict[str, Span | None] = {
    "colwise": None,
    "rowwise-2d": Span("BLOCK_SIZE_ITER", "K"),
    "rowwise": None,
    "colwise-dual": None,
    "rowwise-colwise": None,
    "colwise-3d": Span("BLOCK_SIZE_K", "K"),
    "transpose-3d-atomic": None,
    "transpose-3d-reduction": Span("BLOCK_SIZE_N", "N"),
    "colwise-transpose-3d": None,
    "mxfp8-dim0": None,
    "mxfp8-dim1": None,
    "mxfp8-dim1-3d": None,
    "mxfp8-dim1-3d-via-2d": None,
}
"""The ``span`` of each quantizing kernel's spec: ``export`` judges lookups by it and imports no kernel."""

_GEMMS = ("grouped-rows", "grouped-contraction")
"""The grouped GEMMs on what those write."""

KERNELS = (*_SPAN_OF, *_GEMMS)
"""Their names, in the order tables and help print them; the only names a published row may carry."""

SPANS = {kernel: span for kernel, span in _SPAN_OF.items() if span}


def module_name(kernel: str) -> str:
    """The module that declares a kernel of this package: ``rowwise-2d`` -> ``fp8tune_kernels.quantize.rowwise_2d``."""
    folder = "quantize" if kernel in _SPAN_OF else "gemm"
    return f"fp8tune_kernels.{folder}.{kernel.replace('-', '_')}"


def load(kernel: str) -> KernelSpec:
    """Import the spec of a declared kernel (imports torch and triton). Raises KeyError for any other name."""
    if kernel not in KERNELS:
        raise KeyError(kernel)
    return cast(KernelSpec, importlib.import_module(module_name(kernel)).SPEC)
