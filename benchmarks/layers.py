"""Time grouped GEMMs and mixture-of-experts layers, forward and backward, beside torch, torchao and SonicMoE.

python -m benchmarks.layers moe-layer --shapes models
python -m benchmarks.layers grouped-mm --shapes models,routing=balanced

A result counts as right if the signal-to-noise ratio of its worst expert or slice of rows is at least 20 dB.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.contenders import OURS, Call, Unavailable, import_from, measured, report
from fp8tune.output.text import pairs
from fp8tune.plan import shapes
from fp8tune_kernels import choose_experts, fp8_grouped_mm, fp8_moe_mlp, moe_layer, mxfp8_grouped_mm, quantize_weights
from fp8tune_kernels.gemm.grouped_mxfp8 import mxfp8_path
from fp8tune_kernels.groups import group_ends
from fp8tune_kernels.moe.expert_weights import quantize_down, quantize_gate_up
from fp8tune_kernels.moe.permutation import scatter, sort_rows

LEAST_SQNR_DB = 20.0  # FP8 and MXFP8 give about 28 dB on normal values, bfloat16 over 45
SLICES, SLICE_ROWS = 64, 64  # in fewer rows, chance brings some below the ratio

Results = tuple[Any, ...]


def normal_of(seed: int, device: str) -> Callable[..., Tensor]:
    """Return a function that draws a tensor of a shape in bfloat16."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, std, generator=generator)

    return normal


@contextlib.contextmanager
def tensor_cores() -> Iterator[None]:
    """Multiply float32 as TF32, which holds every bfloat16 value: equal sums in a tenth of the time."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


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


# Rows of experts, one after the other: rows (M, K) @ weights (G, K, N), and the MLP of all experts


class Rows(NamedTuple):
    """Rows of experts, weights of one or two GEMMs, and the output's gradient."""

    rows: Tensor
    weights: tuple[Tensor, ...]
    offs: Tensor
    grad: Tensor
    sizes: tuple[int, ...]

    def call(self, forward: Callable[..., Tensor], *operands: Any) -> Call:
        """Return the step of ``forward(rows, *weights, offs)``. ``operands`` stand for the weights."""
        arguments = (self.rows, *(operands or self.weights), self.offs)
        return Call(functools.partial(forward, *arguments), (self.rows, *self.weights), self.grad)


def rows_of(row: Mapping[str, int], settings: shapes.Settings, device: str, *, is_mlp: bool) -> Rows:
    """Return seeded operands. The K of the GEMM down is the N of the MLP."""
    M, N, K, G = (row[dim] for dim in ("MKNE" if is_mlp else "MNKE"))
    normal = normal_of(settings.seed, device)
    if is_mlp:
        weights = [normal(G, 2 * N, K, std=K**-0.5), normal(G, K, N, std=N**-0.5)]
    else:  # a leaf that is no view: quantize_weights sends gradients to the base of a view
        weights = [torch.empty_strided((G, K, N), (K * N, 1, K), dtype=torch.bfloat16, device=device)]
        weights[0].mT.copy_(normal(G, N, K))
    rows, grad = normal(M, K), normal(M, K if is_mlp else N)
    ends = group_ends(settings.routing or "jagged", M, G, settings.seed)
    sizes = tuple(end - start for start, end in itertools.pairwise([0, *ends]))
    leaves = [leaf.requires_grad_() for leaf in (rows, *weights)]
    return Rows(leaves[0], tuple(leaves[1:]), torch.tensor(ends, dtype=torch.int32, device=device), grad, sizes)


def by_expert(inputs: Rows, multiply: Callable[..., Tensor]) -> Results:
    """Return the output and all gradients in float32, an expert at a time. Rows of no expert are zeros."""
    leaves = (inputs.rows, *inputs.weights)
    out = torch.zeros_like(inputs.grad, dtype=torch.float32)
    grads = [torch.zeros_like(leaf, dtype=torch.float32) for leaf in leaves]
    with tensor_cores(), torch.enable_grad():
        for expert, (start, end) in enumerate(itertools.pairwise([0, *itertools.accumulate(inputs.sizes)])):
            if start == end:
                continue
            places: list[Any] = [slice(start, end), *(expert for _ in inputs.weights)]
            operands = [leaf.detach()[at].float().requires_grad_() for leaf, at in zip(leaves, places, strict=True)]
            result = multiply(*operands)
            out[start:end] = result.detach()
            values = torch.autograd.grad(result, operands, inputs.grad[start:end].float())
            for grad, at, value in zip(grads, places, values, strict=True):
                grad[at] = value
    return out, *grads


def torchao(inputs: Rows, module: str, name: str, multiple: int, **options: Any) -> Call:
    """Return torchao's grouped GEMM, whose kernel ends the process for other groups than it takes."""
    function = import_from(f"torchao.prototype.moe_training.{module}", name)
    if any(size == 0 or size % multiple for size in inputs.sizes):
        raise Unavailable(f"groups of a positive multiple of {multiple} rows: add routing=balanced")
    return inputs.call(functools.partial(function, **options))


def torchao_fp8(inputs: Rows) -> Call:
    """Return torchao's FP8 GEMM."""
    name, pads = "_to_fp8_rowwise_then_scaled_grouped_mm", {"pad_token_groups_for_grouped_mm": False}
    return torchao(inputs, "fp8_grouped_mm", name, 16, **pads)


def torchao_mxfp8(inputs: Rows) -> Call:
    """Return torchao's MXFP8 GEMM."""
    preference = import_from("torchao.quantization.quantize_.common", "KernelPreference")
    choice = preference.EMULATED if mxfp8_path(inputs.rows.device) == "emulated" else preference.AUTO
    return torchao(inputs, "mxfp8_grouped_mm", "_to_mxfp8_then_scaled_grouped_mm", 32, kernel_preference=choice)


def our_mxfp8(inputs: Rows) -> Call:
    """Return our MXFP8 GEMM, which pads groups if it must."""
    pads = any(size == 0 or size % 32 for size in inputs.sizes)
    return inputs.call(functools.partial(mxfp8_grouped_mm, pad_token_groups=pads))


def torch_gemm(rows: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
    """Run torch's grouped GEMM in bfloat16."""
    return torch._grouped_mm(rows, weights, offs=offs)


# Whole layers, router included


class Layer(NamedTuple):
    """Operands of one layer."""

    x: Tensor
    router: Tensor
    w13: Tensor
    w2: Tensor
    grad: Tensor
    top_k: int

    def call(self, layer: Callable[..., Tensor], *weights: Any) -> Call:
        """Return the step of ``layer(x, router, w13, w2, top_k)``. ``weights`` stand for w13 and w2."""
        forward = functools.partial(layer, self.x, self.router, *(weights or (self.w13, self.w2)), self.top_k)
        return Call(forward, self[:4], self.grad)

    def our_call(self, *weights: Any, precision: str = "fp8") -> Call:
        """Return the step of :func:`our_layer`, compared over the experts that it chooses among equal logits."""
        call = self.call(functools.partial(our_layer, precision=precision), *weights)
        return replace(call, reference=lambda: reference(self, choose_experts(self.logits, self.top_k)[0].long()))

    @property
    def logits(self) -> Tensor:
        """Return the router's output, without gradients."""
        with torch.no_grad():
            return functional.linear(self.x, self.router)


def layer_of(row: Mapping[str, int], settings: shapes.Settings, device: str) -> Layer:
    """Return seeded operands. M counts rows of experts, so tokens are M / top_k."""
    normal, top_k = normal_of(settings.seed, device), row["top_k"]
    tokens, hidden, expert, experts = row["M"] // top_k, row["N"], row["K"], row["E"]
    x, router = normal(tokens, hidden, std=0.2), normal(experts, hidden, std=0.02)
    w13, w2 = normal(experts, 2 * expert, hidden, std=0.02), normal(experts, hidden, expert, std=0.02)
    for leaf in (x, router, w13, w2):
        leaf.requires_grad_()
    return Layer(x, router, w13, w2, normal(tokens, hidden, std=0.2), top_k)


def reference(layer: Layer, ids: Tensor | None = None) -> Results:
    """Return the output and all gradients in float32, an expert at a time. ``ids``: the experts of each token."""
    ids = layer.logits.topk(layer.top_k, dim=-1)[1] if ids is None else ids
    with tensor_cores(), torch.enable_grad():
        leaves = [leaf.detach().float().requires_grad_() for leaf in layer[:4]]
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


def sonicmoe(layer: Layer) -> Call:
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

    def read(results: Results) -> Results:
        halves = results[3].view(experts, rows // 2, 2, hidden).transpose(1, 2).reshape(w13.shape)
        return *results[:3], halves, results[4]

    def expected() -> Results:
        return reference(layer, choose(layer.logits, experts, top_k, True, False)[1].long())

    return Call(forward, (x, router, in_turn, w2), grad, read, expected)


# The table


@dataclass(frozen=True)
class Operation:
    """One operation, and everything that computes it."""

    inputs: Callable[[Mapping[str, int], shapes.Settings, str], Any]
    reference: Callable[[Any], Results]
    contenders: Mapping[str, Callable[[Any], Call]]
    is_layer: bool = False  # needs the row of a GEMM down


_gemm_inputs = functools.partial(rows_of, is_mlp=False)
OPERATIONS = {
    "grouped-mm": Operation(
        _gemm_inputs,
        lambda inputs: by_expert(inputs, torch.matmul),
        {
            OURS: lambda inputs: inputs.call(fp8_grouped_mm),
            "folded": lambda inputs: inputs.call(functools.partial(fp8_grouped_mm, recipe="folded")),
            "weights once": lambda inputs: inputs.call(
                fp8_grouped_mm, quantize_weights(inputs.weights[0], recipe="folded")
            ),
            "torch": lambda inputs: inputs.call(torch_gemm),
            "torchao": torchao_fp8,
        },
    ),
    "mxfp8-grouped-mm": Operation(
        _gemm_inputs,
        lambda inputs: by_expert(inputs, torch.matmul),
        {OURS: our_mxfp8, "torch": lambda inputs: inputs.call(torch_gemm), "torchao": torchao_mxfp8},
    ),
    "moe-mlp": Operation(
        functools.partial(rows_of, is_mlp=True),
        lambda inputs: by_expert(inputs, lambda x, w13, w2: swiglu(x @ w13.t()) @ w2.t()),
        {
            OURS: lambda inputs: inputs.call(fp8_moe_mlp),
            "weights once": lambda inputs: inputs.call(
                fp8_moe_mlp, quantize_gate_up(inputs.weights[0]), quantize_down(inputs.weights[1])
            ),
            "torch": lambda inputs: inputs.call(functools.partial(torch_mlp, activation=compiled(swiglu))),
            "torch.compile": lambda inputs: inputs.call(compiled(torch_mlp)),
        },
        is_layer=True,
    ),
    "moe-layer": Operation(
        layer_of,
        reference,
        {
            OURS: lambda layer: layer.our_call(),
            "weights once": lambda layer: layer.our_call(quantize_gate_up(layer.w13), quantize_down(layer.w2)),
            "ours, bf16": lambda layer: layer.our_call(precision="bf16"),
            "torch": lambda layer: layer.call(functools.partial(torch_layer, activation=compiled(swiglu))),
            "torch.compile": lambda layer: layer.call(compiled(torch_layer)),
            "sonicmoe": sonicmoe,
        },
        is_layer=True,
    ),
}


def fault(outputs: Results, expected: Results) -> str:
    """Return what is wrong: the worst expert of weight gradients and the worst slice of rows count."""
    for number, (output, right) in enumerate(zip(outputs, expected, strict=True)):
        count = len(right) if right.ndim == 3 else max(1, min(SLICES, len(right) // SLICE_ROWS))
        if output.shape != right.shape:
            return f"wrong shape of result {number}"
        for part, exact in zip(output.detach().chunk(count), right.chunk(count), strict=True):
            signal, noise = (x.square().sum(dtype=torch.float64).item() for x in (exact, part.float() - exact))
            if signal and not noise * 10 ** (LEAST_SQNR_DB / 10) <= signal:  # NaN is wrong, too
                return f"wrong result {number}"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of an operation."""
    parser = argparse.ArgumentParser(prog="benchmarks.layers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("operation", choices=tuple(OPERATIONS))
    parser.add_argument("--shapes", help="shape set or TOML file; rows of a layer have top_k")
    parser.add_argument("--against", nargs="+", help="contenders; default: all")
    options = parser.parse_args(arguments)
    operation, device = OPERATIONS[options.operation], "cuda" if torch.cuda.is_available() else "cpu"
    selection = shapes.parse(options.shapes or ("moe-layer-down" if operation.is_layer else "grouped-mm"))
    rows = []
    for row in selection.rows:
        name = selection.names.get(row, "")
        if (operation.is_layer and name and "down" not in name) or (selection.size.items() - row.items()):
            continue
        inputs = operation.inputs(row, selection.settings, device)
        contenders = {
            name: functools.partial(make, inputs)
            for name, make in operation.contenders.items()
            if name == OURS or not options.against or name in options.against
        }
        size = f"{name} {pairs({dim: value for dim, value in row.items() if dim in 'MNKE'})}".strip()
        rows.append((size, measured(contenders, functools.partial(operation.reference, inputs), fault)))
        del inputs, contenders
    return report(options.operation, rows)


if __name__ == "__main__":
    sys.exit(main())
