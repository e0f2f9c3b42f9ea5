"""A spec by hand, for a kernel that is not autotuned: a softmax, whose sums depend on their order.

fp8tune sweep --kernel docs/examples/softmax_spec.py:SPEC --shapes docs/examples/softmax.toml
"""

import torch
import triton
import triton.language as tl

from fp8tune_kernels.edges import declared, edge, past_half
from fp8tune_kernels.spec import KernelSpec, NamedInts, Tolerance


@triton.jit
def softmax_kernel(x_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    at, inside = row * columns + column, (row < rows) & (column < columns)
    x = tl.load(x_ptr + at, mask=inside, other=-float("inf")).to(tl.float32)
    powers = tl.exp(x - tl.max(x, 1, keep_dims=True))
    tl.store(out_ptr + at, powers / tl.sum(powers, 1, keep_dims=True), mask=inside)


def launch(config, inputs, outputs):
    (x,), (out,) = inputs, outputs
    grid = (triton.cdiv(len(x), config["ROWS"]),)
    softmax_kernel[grid](x, out, *x.shape, COLUMNS=triton.next_power_of_2(x.shape[1]), **config)


def inputs(problem, device):
    shape, generator = (problem.shape["R"], problem.shape["C"]), torch.Generator("cpu").manual_seed(problem.seed)
    if device == "meta":
        return (torch.empty(shape, dtype=torch.bfloat16, device=device),)
    return (torch.randn(shape, generator=generator).bfloat16().to(device),)


SPEC = KernelSpec(
    name="softmax",
    axes={"ROWS": (1, 2, 4), "num_warps": (2, 4, 8)},
    default=NamedInts(ROWS=1, num_warps=4),
    key=("C", "R_bucket"),
    problems=lambda row: iter([NamedInts(R=row["R"], C=row["C"])]),
    inputs=inputs,
    outputs=lambda x: (torch.empty_like(x),),
    launch=launch,
    reference=lambda x: (torch.softmax(x.double(), 1),),
    check="tolerance",
    tolerance=Tolerance(relative=4e-3, absolute=1e-9),  # bfloat16 rounds by up to 2e-3
    edges=declared(
        edge("one row and one column", R=1, C=1),
        edge("a tail", R=3, C=past_half("C")),
        edge("NaN", "nan", R=3, C=100),
        edge("infinity", "infinite", R=3, C=100),
        edge("huge", "huge", R=3, C=100),
    ),
)
