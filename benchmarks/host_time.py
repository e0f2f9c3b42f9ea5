"""Host time of ``fp8_grouped_mm``: how long forward and backward take to enqueue, on an idle host.

    python -m benchmarks.host_time

The layer is so small that the device is done long before the host. Each figure is the median of calls in us. torch runs
the backward pass of CUDA tensors in a thread of its own: the last column is without that. Rows: the part that autograd
takes for a function that does nothing; ``torch._grouped_mm``, which the op replaces; the op's recipes, and bfloat16.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fp8tune_kernels import fp8_grouped_mm, quantize_weights
from fp8tune_kernels.catalog import RECIPES

M, N, K, E = 256, 128, 128, 4
CALLS, BATCHES = 50, 20

Multiply = Callable[..., torch.Tensor]


class Nothing(torch.autograd.Function):
    """An autograd function of three operands, without a launch."""

    @staticmethod
    def forward(ctx: Any, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Save what the op saves."""
        ctx.save_for_backward(A, B_t, offs)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the right shapes."""
        A, B_t, _ = ctx.saved_tensors
        return A, B_t, None, None


def median_us(call: Callable[[], object]) -> float:
    """Of calls that the device keeps up with: its queue is drained between batches."""
    times = []
    for batch in range(BATCHES + 2):
        torch.cuda.synchronize()
        for _ in range(CALLS):
            start = time.perf_counter()
            call()
            if batch > 1:  # before: compilation, and caches of the host
                times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def main() -> None:
    """Print the rows."""
    A = torch.randn(M, K, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    B_t = torch.empty_strided((E, K, N), (K * N, 1, K), device="cuda", dtype=torch.bfloat16)
    B_t.normal_().requires_grad_()  # a leaf that is no view: gradients of quantized weights reach what it is of
    offs = torch.arange(1, E + 1, device="cuda", dtype=torch.int32) * (M // E)
    grad = torch.randn(M, N, device="cuda", dtype=torch.bfloat16)

    def row(name: str, multiply: Multiply) -> None:
        def both() -> None:
            torch.autograd.grad(multiply(A, B_t, offs), (A, B_t), grad)

        with torch.no_grad():
            forward_us = median_us(lambda: multiply(A, B_t, offs))
        step_us = median_us(both)
        with torch.autograd.set_multithreading_enabled(False):
            alone_us = median_us(both)
        print(f"{name:32s} {forward_us:8.1f} {step_us:20.1f} {alone_us:18.1f}")

    print(f"{'':32s} {'forward':>8s} {'forward and backward':>20s} {'in a single thread':>18s}")
    nothing: Multiply = Nothing.apply
    row("nothing", lambda *given: nothing(*given, grad))
    row("torch._grouped_mm", lambda A, B_t, offs: torch._grouped_mm(A, B_t, offs=offs))
    for recipe in RECIPES:
        row(recipe, partial(fp8_grouped_mm, recipe=recipe))
        experts = quantize_weights(B_t, recipe=recipe)
        row(f"{recipe}, weights once", lambda A, B_t, offs, _experts=experts: fp8_grouped_mm(A, _experts, offs))
    row("bf16", partial(fp8_grouped_mm, precision="bf16"))


if __name__ == "__main__":
    main()
