"""A spec of torch: fp8tune sweep --kernel docs/examples/pieces_spec.py:SPEC --shapes docs/examples/add.toml"""

import torch

from fp8tune_kernels.inputs import random_matrix
from fp8tune_kernels.spec import KernelSpec, NamedInts


def launch(config, inputs, outputs):
    for x, y, out in zip(*(tensor.chunk(config["PIECES"]) for tensor in (*inputs, *outputs)), strict=True):
        torch.add(x, y, out=out)


SPEC = KernelSpec(
    name="add-in-pieces",
    axes={"PIECES": (1, 2, 4, 8)},
    default=NamedInts(PIECES=1),
    key=("hidden", "tokens_bucket"),
    problems=lambda row: iter([NamedInts(tokens=row["tokens"], hidden=row["hidden"])]),
    inputs=lambda size, device: random_matrix(size, 2 * size.shape["tokens"], size.shape["hidden"], device).chunk(2),
    outputs=lambda x, y: (x.new_empty(x.shape),),
    launch=launch,
    reference=lambda x, y: (x + y,),
)
