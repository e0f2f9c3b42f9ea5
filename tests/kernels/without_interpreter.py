"""What takes a process that compiles kernels: interpreting and compiling cannot share one, and each takes seconds.

Run as a script; prints what each check found, as JSON.
"""

from __future__ import annotations

import json

import torch

from fp8tune_kernels import catalog, quantize_colwise


def reference_on_a_cpu() -> bool:
    """Whether a wrapper gives the reference's bytes."""
    x, offs = torch.randn(20, 8), torch.tensor([7, 16], dtype=torch.int32)
    q, scales = quantize_colwise(x, offs)
    right = catalog.load("colwise").reference(x, offs, q.dtype, True)
    return torch.equal(q.view(torch.uint8), right[0].view(torch.uint8)) and torch.equal(scales, right[1])


if __name__ == "__main__":
    print(json.dumps({check.__name__: check() for check in (reference_on_a_cpu,)}))
