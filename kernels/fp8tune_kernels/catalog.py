"""The kernels of this package, readable without torch or triton: a kernel is a line here and one file."""

from __future__ import annotations

import importlib
from typing import cast

from .spec import KernelSpec, Span

VALUES_A_THREAD = 64
"""Of rows in registers, for a config that was measured on shorter ones. With 112 of each operand ``swiglu-gradient`` of
14,336 columns took 779 us on an H200, 4.8 times as long as a copy; with 56 to 64, of 7,168 and 8,192, 1.3 times."""

_2D = ("colwise", "rowwise-2d", "rowwise", "colwise-dual")
_3D = ("colwise-3d", "transpose-3d-atomic", "transpose-3d-reduction")

QUANTIZERS = (*_2D, *_3D, "rowwise-factored", "mxfp8-dim0", "mxfp8-dim1", "mxfp8-dim1-3d", "mxfp8-dim1-3d-via-2d")
"""Casts to FP8."""

TRANSPOSERS = ("transposed-codes", "transposed-codes-3d")
"""Copies of FP8 values to where another GEMM reads them."""

GATED = ("swiglu-rowwise", "swiglu-gradient")
"""Casts of the gated activation of an expert MLP and of its gradient, which they do not write."""

GEMMS = ("grouped-rows", "grouped-contraction")
"""Grouped GEMMs on what those write."""

ON_HOPPER = ("grouped-rows-hopper", "grouped-contraction-hopper")
"""The same products of FP8 values by Gluon kernels for one arch; elsewhere they launch the Triton kernels above."""

MOE = ("expert-sort", "gathered-rows", "gathered-transpose", "gather-sum", "shifted-transpose-3d", "cast-transpose-3d")
"""Further steps of a layer: they order rows by expert, and gather and sum them."""

KERNELS = (*QUANTIZERS, *TRANSPOSERS, *GATED, *GEMMS, *ON_HOPPER, *MOE)
"""Names in the order that tables and help print; the only names that a published row may have."""

RECIPES = ("default", "folded")
"""The names of the recipes of ``fp8_grouped_mm``."""

SPANS = {
    "rowwise-2d": Span("BLOCK_SIZE_ITER", "K"),
    "colwise-3d": Span("BLOCK_SIZE_K", "K"),
    "transpose-3d-reduction": Span("BLOCK_SIZE_N", "N"),
    "rowwise-factored": Span("TILE", "K", VALUES_A_THREAD),
    **dict.fromkeys(GATED, Span(None, "N", VALUES_A_THREAD)),
}
"""``span`` of specifications: ``export`` judges lookups by it and imports no kernel."""


def module_name(kernel: str) -> str:
    """Return the module that declares a kernel: ``rowwise-2d`` -> ``fp8tune_kernels.quantize.rowwise_2d``."""
    folder = "moe" if kernel in MOE else "gemm" if kernel in (*GEMMS, *ON_HOPPER) else "quantize"
    return f"{__package__}.{folder}.{kernel.replace('-', '_')}"


def load(kernel: str) -> KernelSpec:
    """Import the specification of a kernel, with torch and triton. Raises KeyError for any other name."""
    if kernel not in KERNELS:
        raise KeyError(kernel)
    return cast(KernelSpec, importlib.import_module(module_name(kernel)).SPEC)
