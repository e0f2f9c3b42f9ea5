"""flash-linear-attention 0.6: its L2 norm and retention, at sizes of a 1.3B model.

    FLA_CACHE_RESULTS=0 fp8tune record -o fla.json -- python -m benchmarks.real.fla_layers

Its default, ``FLA_CACHE_RESULTS=1``, reads Triton's cache of results: only the first process tunes. The norm runs
forward and backward, retention forward; ``--backward`` adds its backward pass, whose kernels take a minute to tune.
Gated variants are left out, because fla refuses their backward pass on Hopper with Triton 3.6.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

from benchmarks.real import steps

SIZES = ((4, 4096, 16, 128), (1, 8192, 16, 128))
"""Batch, tokens, heads, head dim. Retention has one key for both."""


def l2norm(size: tuple[int, ...]) -> None:
    """The norm of queries and keys."""
    import torch
    from fla.modules.norm.l2norm import l2norm as norm

    x = torch.randn(*size, dtype=torch.bfloat16, device=steps.DEVICE, requires_grad=True)
    y = norm(x)
    torch.autograd.grad(y, x, torch.randn_like(y))


def retention(size: tuple[int, ...], *, backward: bool) -> None:
    """Attention with a fixed decay per head, in chunks."""
    import torch
    from fla.ops.retention import chunk_retention

    q, k, v = (torch.randn(*size, dtype=torch.bfloat16, device=steps.DEVICE, requires_grad=True) for _ in range(3))
    out, _ = chunk_retention(q, k, v)
    if backward:
        torch.autograd.grad(out, (q, k, v), torch.randn_like(out))


def main() -> int:
    """Runs the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backward", action="store_true", help="also run retention's backward pass")
    arguments = parser.parse_args()
    named = {f"l2norm {size}": partial(l2norm, size) for size in SIZES}
    named |= {f"retention {size}": partial(retention, size, backward=arguments.backward) for size in SIZES}
    return 1 if steps.run(named) else 0


if __name__ == "__main__":
    sys.exit(main())
