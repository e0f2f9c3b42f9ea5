"""Steps of other libraries' autotuned kernels, for ``fp8tune record``. A step that fails ends no other.

    fp8tune record -o run.json -- python -m benchmarks.real.libraries torchao
    FLA_CACHE_RESULTS=0 fp8tune record -o run.json -- python -m benchmarks.real.libraries fla

``torchao`` 0.18: forward and backward of its FP8 grouped GEMM on the shapes of ``grouped-mm``, and its column-wise
kernel alone, which no step calls. ``fla``: L2 norm and retention of flash-linear-attention 0.6 at sizes of a 1.3B
model, without gated variants, whose backward pass it refuses on Hopper with Triton 3.6. Its default,
``FLA_CACHE_RESULTS=1``, reads Triton's cache of results: only the first process tunes. ``liger``: fused experts and
dynamic tanh of Liger-Kernel 0.8.5.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.real.steps import DEVICE
from fp8tune.plan import shapes
from fp8tune_kernels.groups import group_ends

TIMES = 3  # runs of each step: the first tunes, the others are like those of a long run
GROUPS = (8, 16)  # of torchao's column-wise kernel: both have one key of its autotuner, which has the rows alone
LENGTHS = ((4, 4096, 16, 128), (1, 8192, 16, 128))  # of fla: batch, tokens, heads, head dim; one key of retention
EXPERTS = ((4096, 2048, 768, 64, 2), (1024, 2048, 768, 64, 2))  # of Liger: tokens, sizes, experts, experts per token
TANH = ((8192, 4096), (8192, 2048))

Steps = Iterator[tuple[str, Callable[[], object]]]


def normal(*shape: int, is_leaf: bool = True) -> torch.Tensor:
    """Return random numbers in bfloat16."""
    return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE, requires_grad=is_leaf)


def backward(out: torch.Tensor, *leaves: torch.Tensor) -> None:
    """Run a backward pass with random gradients."""
    torch.autograd.grad(out, leaves, torch.randn_like(out))


def torchao() -> Steps:
    """Yield the steps of torchao."""
    from torchao.prototype.moe_training import fp8_grouped_mm, kernels

    def product(M: int, N: int, K: int, E: int) -> None:
        layouts = (group_ends("jagged", M, E, seed) for seed in itertools.count())
        # its weight gradient takes no empty group
        ends = next(ends for ends in layouts if all(a < b for a, b in itertools.pairwise([0, *ends])))
        offs = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        A, B_t = normal(M, K), normal(E, N, K, is_leaf=False).transpose(1, 2).requires_grad_()
        multiply: Any = fp8_grouped_mm._to_fp8_rowwise_then_scaled_grouped_mm
        backward(multiply(A, B_t, offs, pad_token_groups_for_grouped_mm=False), A, B_t)

    def quantize(groups: int) -> None:
        offs = torch.tensor(group_ends("balanced", 16384, groups), dtype=torch.int32, device=DEVICE)
        function: Any = kernels.triton_fp8_per_group_colwise_scales
        function(normal(16384, 4096, is_leaf=False), offs, torch.float8_e4m3fn, round_scales_to_power_of_2=True)

    # one group of a row is a layer
    for row in dict.fromkeys(tuple(row[dim] for dim in "MNKE") for row in shapes.load("grouped-mm").rows):
        yield f"M, N, K, E = {row}", partial(product, *row)
    for groups in GROUPS:
        yield f"colwise in {groups} groups", partial(quantize, groups)


def fla() -> Steps:
    """Yield the steps of flash-linear-attention: its norm forward and backward, retention forward."""
    from fla.modules.norm.l2norm import l2norm
    from fla.ops.retention import chunk_retention

    for size in LENGTHS:
        x, qkv = normal(*size), [normal(*size) for _ in range(3)]
        yield f"l2norm {size}", lambda x=x: backward(l2norm(x), x)  # type: ignore[misc]
        yield f"retention {size}", partial(chunk_retention, *qkv)


def liger() -> Steps:
    """Yield the steps of Liger-Kernel: dynamic tanh forward and backward, experts forward."""
    from liger_kernel.ops import LigerFusedMoEFunction
    from liger_kernel.transformers.dyt import LigerDyT

    def tanh(tokens: int, hidden: int) -> None:
        layer, x = LigerDyT(hidden).to(DEVICE), normal(tokens, hidden)
        backward(layer(x), x, *layer.parameters())

    def experts(tokens: int, hidden: int, between: int, count: int, top_k: int) -> None:
        sizes = (tokens, hidden), (count, 2 * between, hidden), (count, hidden, between)
        leaves = [normal(*size, is_leaf=False).div(size[-1] ** 0.5).requires_grad_() for size in sizes]
        weights, index = torch.randn(tokens, count, device=DEVICE).softmax(-1).topk(top_k)
        LigerFusedMoEFunction.apply(*leaves, index.int(), weights.bfloat16())

    yield from ((f"tanh {size}", partial(tanh, *size)) for size in TANH)
    yield from ((f"experts {size}", partial(experts, *size)) for size in EXPERTS)


def colwise(input_ptr: torch.Tensor, offsets_ptr: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantize as torchao's column-wise kernel: a power-of-two scale for each column of each group (``--reference``).

    ``input_ptr`` is ``(rows, columns)``, ``offsets_ptr`` the end row of each group. Gives the codes, float8_e4m3fn
    ``(rows, columns)`` with strides ``(1, rows)``, and the scales, float32 ``(groups * columns,)``. Codes of rows that
    no group has are zeros. As on a GPU, a maximum ignores NaN, and what is NaN after scaling becomes -448.
    """
    rows, columns = input_ptr.shape
    codes = torch.zeros(columns, rows, dtype=torch.uint8, device=input_ptr.device).view(torch.float8_e4m3fn).t()
    scales, start = [], 0
    for end in offsets_ptr.tolist():
        part = input_ptr[start:end].float()
        largest = part.abs().nan_to_num(nan=0.0, posinf=math.inf).amax(0) if end > start else part.new_zeros(columns)
        ratio = (448.0 / largest.double().clamp(min=1e-12)).float()
        scales.append(torch.exp2(torch.floor(torch.log2(ratio))))
        scaled = (part * scales[-1]).nan_to_num(nan=-448.0, posinf=448.0, neginf=-448.0)
        codes[start:end] = scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        start = end
    return {"out_ptr": codes, "scales_ptr": torch.cat(scales)}


def main(library: str) -> int:
    """Run the steps of a library and print how long each took; return 1 if one failed."""
    code = 0
    for name, step in {"torchao": torchao, "fla": fla, "liger": liger}[library]():
        torch.manual_seed(0)
        start = time.perf_counter()
        try:
            for _ in range(TIMES):
                step()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
        except Exception:
            code = 1
            traceback.print_exc(limit=3)
            print(f"{name}: failed", file=sys.stderr)
        torch.cuda.empty_cache()  # the largest step fills a quarter of a GPU
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
