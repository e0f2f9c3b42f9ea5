"""The names of the kernels, readable without torch or triton. A kernel is one file plus its name in one tuple here."""

from __future__ import annotations

import importlib
from typing import cast

from fp8tune_kernels.spec import KernelSpec, Span

KERNELS = (
    "colwise",
    "rowwise-2d",
    "rowwise",
    "colwise-dual",
    "rowwise-colwise",
    "colwise-3d",
    "transpose-3d-atomic",
    "transpose-3d-reduction",
    "colwise-transpose-3d",
    "mxfp8-dim0",
    "mxfp8-dim1",
    "mxfp8-dim1-3d",
    "mxfp8-dim1-3d-via-2d",
)
"""The kernels of this package, in the order tables and help print them; the only names a published row may carry."""

SPANS = {
    "rowwise-2d": Span("BLOCK_SIZE_ITER", "K"),
    "colwise-3d": Span("BLOCK_SIZE_K", "K"),
    "transpose-3d-reduction": Span("BLOCK_SIZE_N", "N"),
}
"""The ``span`` of each spec that has one. Here, because ``export`` judges lookups by it and imports no kernel."""


def module_name(kernel: str) -> str:
    """The module that declares a kernel of this package: ``rowwise-2d`` -> ``fp8tune_kernels.quantize.rowwise_2d``."""
    return f"fp8tune_kernels.quantize.{kernel.replace('-', '_')}"


def load(kernel: str) -> KernelSpec:
    """Import the spec of a declared kernel (imports torch and triton). Raises KeyError for any other name."""
    if kernel not in KERNELS:
        raise KeyError(kernel)
    return cast(KernelSpec, importlib.import_module(module_name(kernel)).SPEC)
