"""A spec by hand: fp8tune sweep --kernel docs/examples/add_spec.py:SPEC --shapes docs/examples/add.toml"""

import triton
import triton.language as tl

from fp8tune_kernels.inputs import random_matrix
from fp8tune_kernels.spec import KernelSpec, NamedInts


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, elements, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x_ptr + at, mask=at < elements).to(tl.float32) + tl.load(y_ptr + at, mask=at < elements)
    tl.store(out_ptr + at, total, mask=at < elements)


def launch(config, inputs, outputs):
    elements = outputs[0].numel()
    add_kernel[(triton.cdiv(elements, config["BLOCK"]),)](*inputs, *outputs, elements, **config)


SPEC = KernelSpec(
    name="residual-add",
    axes={"BLOCK": (512, 1024, 2048, 4096), "num_warps": (2, 4, 8)},
    default=NamedInts(BLOCK=1024, num_warps=4),
    key=("hidden", "tokens_bucket"),
    problems=lambda row: iter([NamedInts(tokens=row["tokens"], hidden=row["hidden"])]),
    inputs=lambda size, device: random_matrix(size, 2 * size.shape["tokens"], size.shape["hidden"], device).chunk(2),
    outputs=lambda x, y: (x.new_empty(x.shape),),
    launch=launch,
    reference=lambda x, y: (x + y,),
)
