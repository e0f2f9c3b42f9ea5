"""The kernels of this package, readable without torch or triton: a kernel is a line here and one file."""

from __future__ import annotations

import importlib
from typing import cast

from .spec import KernelSpec, Span

VALUES_A_THREAD = 64
"""Of rows in registers, for a config that was measured on shorter ones. With 112 of each operand ``swiglu-gradient`` of
14,336 columns took 779 us on an H200, 4.8 times as long as a copy; with 56 to 64, of 7,168 and 8,192, 1.3 times."""

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
    "rowwise-factored": Span("TILE", "K", VALUES_A_THREAD),
    "mxfp8-dim0": None,
    "mxfp8-dim1": None,
    "mxfp8-dim1-3d": None,
    "mxfp8-dim1-3d-via-2d": None,
}
"""The ``span`` of each quantizing kernel's spec."""

QUANTIZERS = tuple(_SPAN_OF)
"""What casts to FP8."""

TRANSPOSERS = ("transposed-codes", "transposed-codes-3d")
"""What copies codes of these to where another GEMM reads them."""

GATED = ("swiglu-rowwise", "swiglu-gradient")
"""What quantizes the gated activation of an expert MLP and its gradient, which they do not write."""

GEMMS = ("grouped-rows", "grouped-contraction")
"""The grouped GEMMs on what those write."""

MOE = ("expert-sort", "gathered-rows", "gathered-transpose", "gather-sum", "shifted-transpose-3d", "cast-transpose-3d")
"""What a whole layer has beside those: they order rows by expert, and gather and sum them."""

KERNELS = (*QUANTIZERS, *TRANSPOSERS, *GATED, *GEMMS, *MOE)
"""Their names, in the order tables and help print them; the only names a published row may carry."""

RECIPES = ("default", "folded")
"""The names of the recipes of ``fp8_grouped_mm`` (:mod:`fp8tune_kernels.gemm.folded_mm`)."""

SPANS = {
    **{kernel: span for kernel, span in _SPAN_OF.items() if span},
    **dict.fromkeys(GATED, Span(None, "N", VALUES_A_THREAD)),
}
"""What lookups may launch where: ``export`` judges them by it and imports no kernel."""


def module_name(kernel: str) -> str:
    """The module that declares a kernel of this package: ``rowwise-2d`` -> ``fp8tune_kernels.quantize.rowwise_2d``."""
    folder = "moe" if kernel in MOE else "quantize" if kernel in (*QUANTIZERS, *TRANSPOSERS, *GATED) else "gemm"
    return f"{__package__}.{folder}.{kernel.replace('-', '_')}"


def load(kernel: str) -> KernelSpec:
    """Import the spec of a declared kernel (imports torch and triton). Raises KeyError for any other name."""
    if kernel not in KERNELS:
        raise KeyError(kernel)
    return cast(KernelSpec, importlib.import_module(module_name(kernel)).SPEC)
