"""``grouped-mm-weight-gradient``: the weight gradient of ``fp8_grouped_mm``, by each method.

    grad_B = grad.t() @ A    over the rows of each group

    grad     (M, N), row-major, bfloat16
    A        (M, K), row-major, bfloat16
    offs     (G,), int32
    grad_B   (G, N, K), row-major, bfloat16; zeros for a group without rows

See :mod:`.grouped_mm_passes`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fp8tune_kernels.gemm import grouped_mm_passes as shared
from fp8tune_kernels.gemm import passes
from fp8tune_kernels.gemm.grouped_mm_passes import ANY, FP8_ONLY
from fp8tune_kernels.gemm.operands import random_operand
from fp8tune_kernels.inputs import dtype_named, offsets
from fp8tune_kernels.runtime.ops import Inputs, Tensors
from fp8tune_kernels.spec import KernelSpec, Problem

__all__ = ["SPEC"]


def inputs(problem: Problem, device: str) -> Inputs:
    """``(grad, A, offs, float8_dtype)`` of a problem."""
    M, N, K = (problem.shape[dim] for dim in "MNK")
    grad, A = (random_operand(problem, M, size, device, number) for number, size in enumerate((N, K)))
    return grad, A, offsets(problem, device), dtype_named(problem.fp8_dtype)


def outputs(grad: torch.Tensor, A: torch.Tensor, offs: torch.Tensor, *rest: object) -> Tensors:
    """Uninitialised ``grad_B``."""
    return shared.result(offs.shape[0], grad.shape[1], A.shape[1], like=A)


def launch(config: Mapping[str, int], inputs: Inputs, outputs: Tensors) -> Tensors:
    """The pass by METHOD, which allocates ``grad_B``."""
    grad, A, offs, float8_dtype = inputs
    return (passes.weight_gradient(grad, A, offs, config["METHOD"], float8_dtype),)


def reference(grad: torch.Tensor, A: torch.Tensor, offs: torch.Tensor, *rest: object) -> Tensors:
    """The same in plain torch, in float32, of the values before any cast; reads ``offs`` on the host."""
    (out,) = outputs(grad, A, offs)
    start = 0
    with torch.autocast(A.device.type, enabled=False):  # a caller's would multiply in its own dtype
        for group, end in enumerate(offs.tolist()):
            out[group] = grad[start:end].t().float() @ A[start:end].float()
            start = end
    return (out,)


def bytes_moved(shape: Mapping[str, int]) -> int:
    """Operands and result once, in bfloat16."""
    M, N, K, G = (shape[dim] for dim in "MNKG")
    return 2 * (M * (N + K) + G * N * K)


SPEC = KernelSpec(
    name="grouped-mm-weight-gradient",
    axes=shared.AXES,
    default=shared.DEFAULT,
    key=shared.KEY,
    problems=shared.problems_with(FP8_ONLY, ANY),
    inputs=inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    excluded=shared.excluded,
    invalid=shared.invalid,
    interpreted={**shared.INTERPRETED, "precision": ANY},
    edges=shared.EDGES,
    routed=True,
    layout_sizes={"N": 272, "K": 400, "G": 8},
    uses_fp8=True,
    check="exact-inputs",
    bytes_moved=bytes_moved,
)
