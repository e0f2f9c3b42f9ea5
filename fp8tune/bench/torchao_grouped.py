"""torchao 0.18.0's grouped GEMMs, on groups of any size but none.

They contract over groups of a positive multiple of 16 or 32 rows. Others are padded by torchao's own helpers around
the GEMM. Its FP8 GEMM would do so itself, but asserts that ``pad_token_groups_for_grouped_mm`` is off. A group without
rows stays empty there. torch's GEMM asserts that it is not, which ends the process: it is refused here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fp8tune.bench.counterparts import of_torchao
from fp8tune.errors import MachineError

if TYPE_CHECKING:
    import torch

    from fp8tune.bench.operation import GroupedMM

PACKAGE = "torchao.prototype.moe_training"


def grouped_mm(module: str, name: str) -> GroupedMM:
    """A grouped GEMM of torchao. Raises MachineError where it is not installed."""
    multiply: GroupedMM = of_torchao(f"{PACKAGE}.{module}", name)
    return multiply


def padded(multiply: GroupedMM, offs: torch.Tensor, alignment: int) -> GroupedMM:
    """The GEMM on groups padded by torchao. Raises MachineError where it has no such helper, or a group has no row."""
    if int(offs.diff(prepend=offs.new_zeros(1)).min()) <= 0:
        raise MachineError("torchao pads no group without rows, and its GEMM takes none: try --routing balanced")
    pad, unpad = (of_torchao(f"{PACKAGE}.utils", name) for name in ("pad_token_groups", "unpad_token_groups"))
    into, out_of = _padding(pad, unpad, alignment)

    def multiply_padded(A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        padded_A, starts, ends = into(A, offs)
        out: torch.Tensor = out_of(multiply(padded_A, B_t, ends), offs, starts, len(A))
        return out

    return multiply_padded


def _padding(
    pad: Callable[..., Any], unpad: Callable[..., Any], alignment: int
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Both helpers with the gradient that each is of the other: torchao calls them inside its own."""
    import torch

    class Pad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, offs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            padded, starts, ends = pad(x, offs, alignment_size=alignment)
            ctx.save_for_backward(offs, starts)
            ctx.rows = len(x)
            ctx.mark_non_differentiable(starts, ends)
            return padded, starts, ends

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            offs, starts = ctx.saved_tensors
            return unpad(grads[0].contiguous(), offs, starts, ctx.rows, alignment_size=alignment), None

    class Unpad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, offs: torch.Tensor, starts: torch.Tensor, rows: int) -> torch.Tensor:
            ctx.save_for_backward(offs)
            unpadded: torch.Tensor = unpad(x, offs, starts, rows, alignment_size=alignment)
            return unpadded

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            (offs,) = ctx.saved_tensors
            return pad(grads[0].contiguous(), offs, alignment_size=alignment)[0], None, None, None

    return Pad.apply, Unpad.apply
