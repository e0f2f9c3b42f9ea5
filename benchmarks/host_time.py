"""Host time of ``fp8_grouped_mm``: how long forward and backward take to enqueue, on an idle host.

    python -m benchmarks.host_time

The layer is so small that the device is done long before the host. Each row is the median of calls in us, and the part
that autograd takes for a function that does nothing. ``torch._grouped_mm`` is what the op replaces.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from fp8tune_kernels import fp8_grouped_mm
from fp8tune_kernels.gemm import grouped_mm_operators, passes

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
    """Print a row a method."""
    A = torch.randn(M, K, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    B_t = torch.randn(E, N, K, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
    offs = torch.arange(1, E + 1, device="cuda", dtype=torch.int32) * (M // E)
    grad = torch.randn(M, N, device="cuda", dtype=torch.bfloat16)

    def row(name: str, multiply: Multiply) -> None:
        def both() -> None:
            torch.autograd.grad(multiply(A, B_t, offs), (A, B_t), grad)

        with torch.no_grad():
            forward = median_us(lambda: multiply(A, B_t, offs))
        print(f"{name:32s} forward {forward:6.1f}   forward and backward {median_us(both):6.1f}")

    nothing: Multiply = Nothing.apply
    row("nothing", lambda *given: nothing(*given, grad))
    row("torch._grouped_mm", lambda A, B_t, offs: torch._grouped_mm(A, B_t, offs=offs))
    row("fp8_grouped_mm", fp8_grouped_mm)
    for method, name in enumerate(passes.METHODS):
        with mock.patch.object(grouped_mm_operators, "method_for", lambda *given, _method=method: _method):
            row(name, lambda *given: fp8_grouped_mm(*given, precision="auto"))


if __name__ == "__main__":
    main()
