"""What takes a process that compiles kernels: interpreting and compiling cannot share one, and each takes seconds.

Run as a script; prints what each check found, as JSON.
"""

from __future__ import annotations

import json

import torch

from fp8tune.measure import compiling
from fp8tune.plan import problems as plan
from fp8tune_kernels import catalog, quantize_colwise


def reference_on_a_cpu() -> bool:
    """Whether a wrapper gives the reference's bytes."""
    x, offs = torch.randn(20, 8), torch.tensor([7, 16], dtype=torch.int32)
    q, scales = quantize_colwise(x, offs)
    right = catalog.load("colwise").reference(x, offs, q.dtype, True)
    return torch.equal(q.view(torch.uint8), right[0].view(torch.uint8)) and torch.equal(scales, right[1])


def launches_of_a_pass() -> list[list[str]]:
    """The device of the result on meta tensors and the kernels that are launched, by method."""
    spec = catalog.load("grouped-mm-forward")
    problem = plan.problems(spec, [{"M": 16384, "K": 2048, "N": 1536, "E": 64}])[1]
    inputs = spec.inputs(problem, "meta")
    found = []
    for method in range(4):
        with compiling._recording("sm_90", compiles=False) as launches:
            (out,) = spec.launch({"METHOD": method}, inputs, ())
        found.append([str(out.device), *(launch.kernel[0] for launch in launches)])
    return found


if __name__ == "__main__":
    print(json.dumps({check.__name__: check() for check in (reference_on_a_cpu, launches_of_a_pass)}))
