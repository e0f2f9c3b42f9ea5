"""The grouped GEMM of torchtitan's experts: one line patches it.

    from torchtitan.models.common.moe import GroupedExperts
    GroupedExperts._grouped_mm = grouped_mm_method()

The experts of torchtitan multiply by a method ``_grouped_mm(self, *, A, weight_EOI, offs)``, whose weights lie as
(experts, out, in); in some versions the name is ``weight_ENK``. Versions with ``B_t`` take ``fp8_grouped_mm`` as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fp8tune_kernels.gemm.gathered_weights import multipliable, quantize_after_all_gather
from fp8tune_kernels.gemm.grouped_mm import fp8_grouped_mm

__all__ = ["grouped_mm_method", "quantize_after_all_gather"]


def grouped_mm_method(**options: Any) -> Callable[..., Tensor]:
    """A ``_grouped_mm`` for experts of torchtitan, of ``fp8_grouped_mm`` with these options.

    It takes A (M, K), row-major, weights (E, N, K) as they are stored, ``offs`` (E,), int32, and returns (M, N),
    bfloat16. It multiplies the codes that were made after an all-gather where there are some
    (:func:`quantize_after_all_gather`), and else quantizes the weights at each call.

    Raises what ``fp8_grouped_mm`` raises.
    """

    def grouped_mm(
        experts: nn.Module,
        *,
        A: Tensor,
        offs: Tensor,
        weight_EOI: Tensor | None = None,
        weight_ENK: Tensor | None = None,
    ) -> Tensor:
        weights = weight_ENK if weight_EOI is None else weight_EOI
        if weights is None:
            raise ValueError("weight_EOI is None, wanted the weights (E, N, K)")
        return fp8_grouped_mm(A, multipliable(weights), offs, **options)

    return grouped_mm
