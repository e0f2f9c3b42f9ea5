"""Whole mixture-of-experts layers, router included: torch's in bfloat16, SonicMoE's, and ours."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..moe.choose_experts import choose_experts
from ..moe.expert_weights import quantize_down, quantize_gate_up
from ..moe.layer import moe_layer
from ..moe.permutation import scatter, sort_rows
from ..spec import NamedInts
from .grouped import compiled, normal_of, swiglu, tensor_cores, torch_mlp
from .operation import Call, Operation, Size, import_from


class Layer(NamedTuple):
    """Operands of one layer."""

    x: Tensor
    router: Tensor
    w13: Tensor
    w2: Tensor
    grad: Tensor
    top_k: int

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Return the tensors that get gradients."""
        return self.x, self.router, self.w13, self.w2

    def call(self, layer: Callable[..., Tensor], *weights: Any) -> Call:
        """Return the step of ``layer(x, router, w13, w2, top_k)``. ``weights`` stand for w13 and w2."""
        forward = functools.partial(layer, self.x, self.router, *(weights or (self.w13, self.w2)), self.top_k)
        return Call(forward, self.leaves, self.grad)

    def our_call(self, *weights: Any, precision: str = "fp8") -> Call:
        """Return the step of :func:`our_layer`, compared over the experts that it chooses among equal logits."""
        call = self.call(functools.partial(our_layer, precision=precision), *weights)
        return replace(call, reference=lambda: reference(self, choose_experts(self.logits, self.top_k)[0].long()))

    @property
    def logits(self) -> Tensor:
        """Return the router's output, without gradients."""
        with torch.no_grad():
            return functional.linear(self.x, self.router)


def sizes(row: Mapping[str, int], label: str) -> Iterator[tuple[NamedInts, str]]:
    """Yield the layer of a GEMM down that names ``top_k``. M counts rows of experts, so tokens are M / top_k."""
    if not label or "down" in label:
        top_k = row["top_k"]
        shape = {"tokens": row["M"] // top_k, "hidden": row["N"], "expert": row["K"], "experts": row["E"]}
        yield NamedInts({**shape, "top_k": top_k}), label.removesuffix(" down")


def inputs(size: Size, device: str) -> Layer:
    """Return seeded operands."""
    tokens, hidden, expert, experts, top_k = (
        size.shape[name] for name in ("tokens", "hidden", "expert", "experts", "top_k")
    )
    normal = normal_of(size, device)
    x, router = normal(tokens, hidden, std=0.2), normal(experts, hidden, std=0.02)
    w13, w2 = normal(experts, 2 * expert, hidden, std=0.02), normal(experts, hidden, expert, std=0.02)
    for leaf in (x, router, w13, w2):
        leaf.requires_grad_()
    return Layer(x, router, w13, w2, normal(tokens, hidden, std=0.2), top_k)


def reference(layer: Layer, ids: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return the output and all gradients in float32, an expert at a time. ``ids``: the experts of each token."""
    ids = layer.logits.topk(layer.top_k, dim=-1)[1] if ids is None else ids
    with tensor_cores(), torch.enable_grad():
        leaves = [leaf.detach().float().requires_grad_() for leaf in layer.leaves]
        x, router, w13, w2 = leaves
        weights = (x @ router.t()).gather(1, ids).softmax(-1)
        out = torch.zeros_like(x)
        for expert, (up, down) in enumerate(zip(w13.unbind(), w2.unbind(), strict=True)):
            tokens, places = (ids == expert).nonzero(as_tuple=True)
            rows = swiglu(x[tokens] @ up.t()) @ down.t()
            out = out.index_add(0, tokens, rows * weights[tokens, places].unsqueeze(1))
        return out.detach(), *torch.autograd.grad(out, leaves, layer.grad.float())


def torch_layer(
    x: Tensor, router: Tensor, w13: Tensor, w2: Tensor, top_k: int, activation: Callable[[Tensor], Tensor] = swiglu
) -> Tensor:
    """Run the layer by torch's operations in bfloat16."""
    values, ids = functional.linear(x, router).topk(top_k, dim=-1)
    rows, offs, order, place = sort_rows(x, ids, router.shape[0])
    out = scatter(torch_mlp(rows, w13, w2, offs, activation), order, place).view(-1, top_k, x.shape[1])
    return (out * values.float().softmax(-1).to(out.dtype).unsqueeze(-1)).sum(1)


def our_layer(x: Tensor, router: Tensor, w13: Any, w2: Any, top_k: int, precision: str = "fp8") -> Tensor:
    """Run ``choose_experts`` and ``moe_layer``."""
    return moe_layer(x, w13, w2, *choose_experts(functional.linear(x, router), top_k), precision=precision)


def _sonicmoe(layer: Layer) -> Call:
    """SonicMoE chooses its experts itself, and ranks equal logits differently. Its w13 has gate and up in turn."""
    sonic_layer = import_from("sonicmoe", "moe_TC_softmax_topk_layer")
    activation = import_from("sonicmoe.enums", "ActivationType").SWIGLU
    choose = import_from("sonicmoe.functional", "TC_Softmax_Topk_Router_Function").apply
    for name in ("forward", "backward"):  # tuning takes minutes for each number of tokens
        module = importlib.import_module(f"sonicmoe.functional.{name}")
        for gemm in ("gemm", "gemm_gated", "gemm_dgated", "gemm_act", "gemm_dact"):
            if hasattr(module, gemm) and not isinstance(getattr(module, gemm), functools.partial):
                setattr(module, gemm, functools.partial(getattr(module, gemm), tuned=False))
    x, router, w13, w2, grad, top_k = layer
    experts, rows, hidden = w13.shape
    in_turn = w13.detach().view(experts, 2, rows // 2, hidden).transpose(1, 2).reshape(w13.shape).requires_grad_()

    def forward() -> Tensor:
        stream = torch.cuda.current_stream().cuda_stream
        weights = in_turn.permute(1, 2, 0), None, w2.permute(1, 2, 0), None
        out: Tensor = sonic_layer(x, router, *weights, top_k, stream, activation, False)[0]
        return out

    def read(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        halves = results[3].view(experts, rows // 2, 2, hidden).transpose(1, 2).reshape(w13.shape)
        return *results[:3], halves, results[4]

    def expected() -> tuple[Tensor, ...]:
        ids = choose(layer.logits, experts, top_k, True, False)[1]
        return reference(layer, ids.long())

    return Call(forward, (x, router, in_turn, w2), grad, read, expected)


MOE_LAYER = Operation(
    name="moe-layer",
    title="MoE layer with its router, forward and backward",
    sizes=sizes,
    inputs=inputs,
    reference=reference,
    results=("out", "grad_x", "grad_router", "grad_w13", "grad_w2"),
    ours={
        "fp8tune": lambda layer: layer.our_call(),
        "fp8tune, weights once": lambda layer: layer.our_call(quantize_gate_up(layer.w13), quantize_down(layer.w2)),
        "fp8tune, bf16": lambda layer: layer.our_call(precision="bf16"),
    },
    baseline={"torch": lambda layer: layer.call(functools.partial(torch_layer, activation=compiled(swiglu)))},
    rivals={"torch.compile": lambda layer: layer.call(compiled(torch_layer)), "sonicmoe": _sonicmoe},
    flops=lambda shape: 18 * shape["tokens"] * shape["top_k"] * shape["hidden"] * shape["expert"],
    bytes_moved=lambda shape: (
        8 * shape["tokens"] * shape["top_k"] * (shape["hidden"] + 2 * shape["expert"])
        + 24 * shape["experts"] * shape["hidden"] * shape["expert"]
    ),
    routed=False,
    shapes="moe-layer-down",
)
