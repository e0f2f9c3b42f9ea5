"""Public functions of the kernels, by kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fp8tune_kernels
from fp8tune_kernels.spec import KernelSpec

_NAMES = {
    "grouped-rows": "multiply_rows",
    "grouped-contraction": "contract_rows",
    "grouped-rows-hopper": "multiply_rows_hopper",
    "grouped-contraction-hopper": "contract_rows_hopper",
    "transposed-codes": "transpose_codes",
    "transposed-codes-3d": "transpose_codes_3d",
    "swiglu-rowwise": "quantize_swiglu_rowwise",
    "swiglu-gradient": "quantize_swiglu_gradient",
    "expert-sort": "sort_by_expert",
    "gathered-rows": "multiply_gathered_rows",
    "gathered-transpose": "transpose_gathered_codes",
    "gather-sum": "sum_rows_of_tokens",
    "shifted-transpose-3d": "transpose_codes_to_one_scale",
    "cast-transpose-3d": "cast_and_transpose",
}


def public_wrapper(spec: KernelSpec) -> Callable[..., Any]:
    """Return ``quantize_colwise`` for ``colwise``, ``multiply_rows`` for ``grouped-rows``."""
    name = _NAMES.get(spec.name) or f"quantize_{spec.name.replace('-', '_')}"
    wrapper: Callable[..., Any] = getattr(fp8tune_kernels, name)
    return wrapper
