"""Operations on rows that are sorted by expert: two grouped GEMMs and the MLP of all experts."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..arches import MXFP8_GEMM_ARCHES
from ..gemm.grouped_mm import fp8_grouped_mm
from ..gemm.grouped_mxfp8 import mxfp8_grouped_mm, mxfp8_path
from ..gemm.quantized_weights import quantize_weights
from ..groups import group_ends
from ..moe.expert_weights import quantize_down, quantize_gate_up
from ..moe.layer import fp8_moe_mlp
from ..spec import NamedInts
from .operation import Call, Operation, Size, Unavailable, import_from


class Rows(NamedTuple):
    """Rows of experts, one after the other, weights of one or two GEMMs, and the output's gradient."""

    rows: Tensor
    weights: tuple[Tensor, ...]
    offs: Tensor
    grad: Tensor
    sizes: tuple[int, ...]

    def call(self, forward: Callable[..., Tensor], *operands: Any) -> Call:
        """Return the step of ``forward(rows, *weights, offs)``. ``operands`` stand for the weights."""
        arguments = (self.rows, *(operands or self.weights), self.offs)
        return Call(functools.partial(forward, *arguments), (self.rows, *self.weights), self.grad)


def normal_of(size: Size, device: str) -> Callable[..., Tensor]:
    """Return a function that draws a tensor of a shape, bfloat16, by the seed of a size."""
    generator = torch.Generator(device).manual_seed(size.seed)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, std, generator=generator)

    return normal


def _rows(size: Size, device: str, rows: Tensor, weights: Sequence[Tensor], grad: Tensor) -> Rows:
    ends = list(accumulate(size.groups)) or group_ends(size.routing, size.shape["M"], size.shape["G"], size.seed)
    leaves = [leaf.requires_grad_() for leaf in (rows, *weights)]
    sizes = tuple(end - start for start, end in itertools.pairwise([0, *ends]))
    return Rows(leaves[0], tuple(leaves[1:]), torch.tensor(ends, dtype=torch.int32, device=device), grad, sizes)


def by_expert(inputs: Rows, multiply: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    """Return the output and all gradients in float32, an expert at a time. Rows of no expert are zeros."""
    leaves = (inputs.rows, *inputs.weights)
    out = torch.zeros_like(inputs.grad, dtype=torch.float32)
    grads = [torch.zeros_like(leaf, dtype=torch.float32) for leaf in leaves]
    with tensor_cores(), torch.enable_grad():
        for expert, (start, end) in enumerate(itertools.pairwise([0, *accumulate(inputs.sizes)])):
            if start == end:
                continue
            places: list[Any] = [slice(start, end), *(expert for _ in inputs.weights)]
            operands = [leaf.detach()[at].float().requires_grad_() for leaf, at in zip(leaves, places, strict=True)]
            result = multiply(*operands)
            out[start:end] = result.detach()
            for grad, at, value in zip(
                grads, places, torch.autograd.grad(result, operands, inputs.grad[start:end].float()), strict=True
            ):
                grad[at] = value
    return out, *grads


@contextlib.contextmanager
def tensor_cores() -> Iterator[None]:
    """Multiply float32 as TF32, which holds every bfloat16 value: equal sums in a tenth of the time."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# Grouped GEMM: rows (M, K) @ weights (G, K, N)


def _gemm_sizes(row: Mapping[str, int], label: str) -> Iterator[tuple[NamedInts, str]]:
    yield NamedInts(M=row["M"], N=row["N"], K=row["K"], G=row["E"]), label


def _gemm_inputs(size: Size, device: str) -> Rows:
    M, N, K, G = (size.shape[dim] for dim in "MNKG")
    normal = normal_of(size, device)
    # a leaf that is no view: quantize_weights sends gradients to the base of a view
    weights = torch.empty_strided((G, K, N), (K * N, 1, K), dtype=torch.bfloat16, device=device)
    weights.mT.copy_(normal(G, N, K))
    return _rows(size, device, normal(M, K), [weights], normal(M, N))


def _gemm_bytes(shape: Mapping[str, int]) -> int:
    M, N, K, G = (shape[dim] for dim in "MNKG")
    return 8 * (M * N + M * K + G * N * K)


def _torchao(module: str, name: str, multiple: int, inputs: Rows, **options: Any) -> Call:
    function = import_from(f"torchao.prototype.moe_training.{module}", name)
    if any(size == 0 or size % multiple for size in inputs.sizes):  # its GEMM ends the process
        raise Unavailable(f"torchao takes groups of a positive multiple of {multiple} rows: add routing=balanced")
    return inputs.call(functools.partial(function, **options))


def _torchao_mxfp8(inputs: Rows) -> Call:
    preference = import_from("torchao.quantization.quantize_.common", "KernelPreference")
    choice = preference.EMULATED if mxfp8_path(inputs.rows.device) == "emulated" else preference.AUTO
    return _torchao("mxfp8_grouped_mm", "_to_mxfp8_then_scaled_grouped_mm", 32, inputs, kernel_preference=choice)


def _mxfp8(inputs: Rows) -> Call:
    pads = any(size == 0 or size % 32 for size in inputs.sizes)
    return inputs.call(functools.partial(mxfp8_grouped_mm, pad_token_groups=pads))


GROUPED_MM = Operation(
    name="grouped-mm",
    title="FP8 grouped GEMM, forward and backward",
    sizes=_gemm_sizes,
    inputs=_gemm_inputs,
    reference=lambda inputs: by_expert(inputs, torch.matmul),
    results=("out", "grad_rows", "grad_weights"),
    ours={
        "fp8tune": lambda inputs: inputs.call(fp8_grouped_mm),
        "fp8tune, folded": lambda inputs: inputs.call(functools.partial(fp8_grouped_mm, recipe="folded")),
        "fp8tune, weights once": lambda inputs: inputs.call(
            fp8_grouped_mm, quantize_weights(inputs.weights[0], recipe="folded")
        ),
    },
    baseline={
        "torch": lambda inputs: inputs.call(lambda rows, weights, offs: torch._grouped_mm(rows, weights, offs=offs))
    },
    rivals={
        "torchao": functools.partial(
            _torchao,
            "fp8_grouped_mm",
            "_to_fp8_rowwise_then_scaled_grouped_mm",
            16,
            pad_token_groups_for_grouped_mm=False,
        ),
    },
    flops=lambda shape: 6 * shape["M"] * shape["N"] * shape["K"],
    bytes_moved=_gemm_bytes,
)

MXFP8_GROUPED_MM = replace(
    GROUPED_MM,
    name="mxfp8-grouped-mm",
    title="MXFP8 grouped GEMM, forward and backward",
    ours={"fp8tune": _mxfp8},
    rivals={"torchao": _torchao_mxfp8},
    native_arches=MXFP8_GEMM_ARCHES,
)


# MLP of all experts: rows (M, K), gate and up (G, 2N, K), down (G, K, N)


def _mlp_sizes(row: Mapping[str, int], label: str) -> Iterator[tuple[NamedInts, str]]:
    if not label or "down" in label:  # the K of the GEMM down is the N of the MLP
        yield NamedInts(M=row["M"], N=row["K"], K=row["N"], G=row["E"]), label.removesuffix(" down")


def _mlp_inputs(size: Size, device: str) -> Rows:
    M, N, K, G = (size.shape[dim] for dim in "MNKG")
    normal = normal_of(size, device)
    weights = normal(G, 2 * N, K, std=K**-0.5), normal(G, K, N, std=N**-0.5)
    return _rows(size, device, normal(M, K), weights, normal(M, K))


def swiglu(y: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of gate and up side by side."""
    gate, up = y.chunk(2, 1)
    return functional.silu(gate) * up


@functools.cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile a function for all sizes. Each size would take half a minute of its own."""
    return torch.compile(function, dynamic=True)


def torch_mlp(
    rows: Tensor, w13: Tensor, w2: Tensor, offs: Tensor, activation: Callable[[Tensor], Tensor] = swiglu
) -> Tensor:
    """Run torch's grouped GEMMs in bfloat16."""
    h = activation(torch._grouped_mm(rows, w13.transpose(1, 2), offs=offs))
    return torch._grouped_mm(h, w2.transpose(1, 2), offs=offs)


MOE_MLP = Operation(
    name="moe-mlp",
    title="MLP of all experts in FP8, forward and backward",
    sizes=_mlp_sizes,
    inputs=_mlp_inputs,
    reference=lambda inputs: by_expert(inputs, lambda x, w13, w2: swiglu(x @ w13.t()) @ w2.t()),
    results=("out", "grad_x", "grad_w13", "grad_w2"),
    ours={
        "fp8tune": lambda inputs: inputs.call(fp8_moe_mlp),
        "fp8tune, weights once": lambda inputs: inputs.call(
            fp8_moe_mlp, quantize_gate_up(inputs.weights[0]), quantize_down(inputs.weights[1])
        ),
    },
    baseline={"torch": lambda inputs: inputs.call(functools.partial(torch_mlp, activation=compiled(swiglu)))},
    rivals={"torch.compile": lambda inputs: inputs.call(compiled(torch_mlp))},
    flops=lambda shape: 18 * shape["M"] * shape["N"] * shape["K"],
    bytes_moved=lambda shape: (
        8 * (2 * shape["M"] * (shape["N"] + shape["K"]) + 3 * shape["G"] * shape["N"] * shape["K"])
    ),
)
