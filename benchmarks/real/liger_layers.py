"""Liger-Kernel 0.8.5: forward and backward of its fused experts and of dynamic tanh.

fp8tune record -o liger.json -- python -m benchmarks.real.liger_layers
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

from benchmarks.real import steps

EXPERTS = ((4096, 2048, 768, 64, 2), (1024, 2048, 768, 64, 2))
"""Tokens, hidden size, size between, experts, experts a token. Index tensors are at most 64 KiB; the keys are equal."""
TANH = ((8192, 4096), (8192, 2048))
"""Tokens, hidden size."""


def experts(tokens: int, hidden: int, between: int, count: int, of_a_token: int, *, backward: bool) -> None:
    """All experts of a layer as grouped GEMMs."""
    import torch
    from liger_kernel.ops import LigerFusedMoEFunction

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=steps.DEVICE).div(shape[-1] ** 0.5)

    torch.manual_seed(0)
    x, up, down = normal(tokens, hidden), normal(count, 2 * between, hidden), normal(count, hidden, between)
    weights, index = torch.randn(tokens, count, device=steps.DEVICE).softmax(-1).topk(of_a_token)
    leaves = [leaf.requires_grad_() for leaf in (x, up, down)]
    out = LigerFusedMoEFunction.apply(*leaves, index.int(), weights.bfloat16())
    if backward:
        torch.autograd.grad(out, leaves, torch.randn_like(out))


def tanh(tokens: int, hidden: int) -> None:
    """The layer that stands in place of a norm."""
    import torch
    from liger_kernel.transformers.dyt import LigerDyT

    layer = LigerDyT(hidden).to(steps.DEVICE)
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=steps.DEVICE, requires_grad=True)
    y = layer(x)
    torch.autograd.grad(y, [x, *layer.parameters()], torch.randn_like(y))


def main() -> int:
    """Runs the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backward", action="store_true", help="also run the experts' backward pass")
    arguments = parser.parse_args()
    named = {f"tanh {size}": partial(tanh, *size) for size in TANH}
    named |= {f"experts {size}": partial(experts, *size, backward=arguments.backward) for size in EXPERTS}
    return 1 if steps.run(named) else 0


if __name__ == "__main__":
    sys.exit(main())
