"""flash-linear-attention 0.6: forward and backward of its L2 norm and of retention, at sizes of a 1.3B model.

    FLA_CACHE_RESULTS=0 fp8tune record -o fla.json -- python -m benchmarks.real.fla_layers

Its default, ``FLA_CACHE_RESULTS=1``, reads Triton's cache of results: only the first process tunes. Gated variants are
left out, because fla refuses their backward pass on Hopper with Triton 3.6.
"""

from __future__ import annotations

import sys
from functools import partial

from benchmarks.real import steps

SIZES = ((4, 4096, 16, 128), (1, 8192, 32, 64))
"""Batch, tokens, heads, head dim."""


def l2norm(size: tuple[int, ...]) -> None:
    """The norm of queries and keys."""
    import torch
    from fla.modules.norm.l2norm import l2norm as norm

    x = torch.randn(*size, dtype=torch.bfloat16, device=steps.DEVICE, requires_grad=True)
    y = norm(x)
    torch.autograd.grad(y, x, torch.randn_like(y))


def retention(size: tuple[int, ...]) -> None:
    """Attention with a fixed decay per head, in chunks."""
    import torch
    from fla.ops.retention import chunk_retention

    q, k, v = (torch.randn(*size, dtype=torch.bfloat16, device=steps.DEVICE, requires_grad=True) for _ in range(3))
    out, _ = chunk_retention(q, k, v)
    torch.autograd.grad(out, (q, k, v), torch.randn_like(out))


def main() -> int:
    """Runs the steps."""
    named = {
        f"{function.__name__} {size}": partial(function, size) for function in (l2norm, retention) for size in SIZES
    }
    return 1 if steps.run(named) else 0


if __name__ == "__main__":
    sys.exit(main())
