"""``grouped-mm-input-gradient``: the input gradient of ``fp8_grouped_mm``, by each method.

    grad_A = grad @ B

    grad     (M, N), row-major, bfloat16
    B_t      (G, K, N), strides (K*N, 1, K), bfloat16
    offs     (G,), int32
    codes    of B_t, as ``transpose-3d-atomic`` writes them, and their scales; None but with precision ANY_ONCE
    grad_A   (M, K), row-major, bfloat16

See :mod:`.grouped_mm_passes`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fp8tune_kernels.gemm import grouped_mm_passes as shared
from fp8tune_kernels.gemm import passes
from fp8tune_kernels.gemm.grouped_mm_passes import ANY, ANY_ONCE, FP8_ONLY
from fp8tune_kernels.inputs import dtype_named, offsets, random_matrix
from fp8tune_kernels.quantize.transpose_3d_atomic import quantize_transpose_3d_atomic
from fp8tune_kernels.runtime.ops import Inputs, Tensors
from fp8tune_kernels.spec import KernelSpec, Problem

__all__ = ["SPEC"]


def inputs(problem: Problem, device: str) -> Inputs:
    """``(grad, B_t, offs, codes, scales, float8_dtype)`` of a problem."""
    grad = random_matrix(problem, problem.shape["M"], problem.shape["N"], device)
    B_t = shared.random_weights(problem, device)
    before = shared.quantized_before(problem, B_t, quantize_transpose_3d_atomic)
    return grad, B_t, offsets(problem, device), *before, dtype_named(problem.fp8_dtype)


def constrain(inputs: Inputs) -> None:
    """Codes are those of the weights."""
    shared.quantize_again(inputs, quantize_transpose_3d_atomic)


def outputs(grad: torch.Tensor, B_t: torch.Tensor, *rest: object) -> Tensors:
    """Uninitialised ``grad_A``."""
    return shared.result(grad.shape[0], B_t.shape[1], like=grad)


def launch(config: Mapping[str, int], inputs: Inputs, outputs: Tensors) -> Tensors:
    """The pass by METHOD, which allocates ``grad_A``."""
    grad, B_t, offs, _, _, float8_dtype = inputs
    return (passes.input_gradient(grad, B_t, offs, config["METHOD"], float8_dtype, shared.codes_of(inputs)),)


def reference(grad: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor, *rest: object) -> Tensors:
    """The same in plain torch, of the values before any cast."""
    return shared.multiplied_rows(grad, B_t.transpose(1, 2), offs)


def bytes_moved(shape: Mapping[str, int]) -> int:
    """Operands and result once: bfloat16, the weights one byte where their codes are read."""
    M, N, K, G = (shape[dim] for dim in "MNKG")
    return 2 * M * (N + K) + (1 if shape["precision"] == ANY_ONCE else 2) * G * N * K


SPEC = KernelSpec(
    name="grouped-mm-input-gradient",
    axes=shared.AXES,
    default=shared.DEFAULT,
    key=shared.KEY,
    problems=shared.problems_with(FP8_ONLY, ANY, ANY_ONCE),
    inputs=inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    constrain=constrain,
    excluded=shared.excluded,
    invalid=shared.invalid,
    interpreted=shared.INTERPRETED,
    edges=shared.EDGES,
    routed=True,
    layout_sizes={"N": 272, "K": 400, "G": 8},
    uses_fp8=True,
    check="exact-inputs",
    bytes_moved=bytes_moved,
)
