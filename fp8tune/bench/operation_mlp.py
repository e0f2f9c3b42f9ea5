"""``bench --op moe-mlp``: the MLP of all experts, see :mod:`fp8tune_kernels.gemm.moe_mlp`, beside bf16.

bf16 is two of torch's grouped GEMMs, and SwiGLU compiled by ``torch.compile`` between them. A layer of a shape set is
one whose name says "down", or has no name: the K of such a GEMM is N here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import fp8tune_kernels as kernels  # imports torch and Triton when a kernel is first named
from fp8tune.bench.layers import Layer
from fp8tune.bench.operation import BF16, FP8, Call, GroupedMM, Operands, Operation, Part
from fp8tune.records import NamedInts

if TYPE_CHECKING:
    import torch

MULTIPLE = 16
ONCE, ONCE_H, ONCE_Y = "fp8, weights once", "fp8, weights once, h again", "fp8, weights once, gate-up again"
RESULTS = ("out", "grad_x", "grad_w13", "grad_w2")


def _shape(row: Mapping[str, int], label: str) -> NamedInts | None:
    """The layer whose GEMM down a row is."""
    if label and "down" not in label:
        return None
    return NamedInts(M=row["M"], N=row["K"], K=row["N"], G=row["E"])


def _operands(layer: Layer, torch_device: str, pad: bool) -> Operands:
    """Random ones: A is x, B_t is w13 as it lies, and w2 beside them."""
    import torch

    M, N, K, G = (layer.shape[dim] for dim in "MNKG")
    generator = torch.Generator(torch_device).manual_seed(layer.seed)

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        made = torch.empty(shape, dtype=torch.bfloat16, device=torch_device)
        return made.normal_(0, std, generator=generator)

    return Operands(
        A=normal(M, K).requires_grad_(),
        B_t=normal(G, 2 * N, K, std=K**-0.5).requires_grad_(),
        offs=torch.tensor(layer.ends, dtype=torch.int32, device=torch_device),
        grad=normal(M, K),
        pad=pad,
        more=(normal(G, K, N, std=N**-0.5).requires_grad_(),),
    )


@cache
def _compiled_swiglu() -> Any:
    import torch

    def swiglu(y: torch.Tensor) -> torch.Tensor:
        gate, up = y.chunk(2, 1)
        return torch.nn.functional.silu(gate) * up

    return torch.compile(swiglu, dynamic=True)


def _bf16(given: Operands) -> GroupedMM:
    import torch

    swiglu, [w2] = _compiled_swiglu(), given.more

    def multiply(x: torch.Tensor, w13: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        h = swiglu(torch._grouped_mm(x, w13.transpose(1, 2), offs=offs))
        return torch._grouped_mm(h, w2.transpose(1, 2), offs=offs)

    return multiply


def _ours(given: Operands, **options: Any) -> GroupedMM:
    [w2] = given.more
    return lambda x, w13, offs: kernels.fp8_moe_mlp(x, w13, w2, offs, **options)


def _handles(given: Operands) -> tuple[Any, Any]:
    w13, w2 = given.B_t, given.more[0]
    return kernels.quantize_weights(w13, recipe="folded"), kernels.quantize_weights(w2, recipe="folded")


def _once(given: Operands, **options: Any) -> GroupedMM:
    """On handles that are there already; gradients reach the weights themselves."""
    w13, w2 = _handles(given)
    return lambda x, _, offs: kernels.fp8_moe_mlp(x, w13, w2, offs, **options)


def _exact(given: Operands, group: int, rows: slice) -> tuple[torch.Tensor, ...]:
    """The output and gradients of one expert, in float32."""
    import torch

    with torch.enable_grad():
        x, w13, w2 = (
            each.detach().float().requires_grad_() for each in (given.A[rows], given.B_t[group], given.more[0][group])
        )
        gate, up = (x @ w13.t()).chunk(2, 1)
        out = (torch.nn.functional.silu(gate) * up) @ w2.t()
        return out.detach(), *torch.autograd.grad(out, (x, w13, w2), given.grad[rows].float())


@dataclass(frozen=True)
class _Codes:
    """All that the parts of a step hand on: codes and scales."""

    x: tuple[torch.Tensor, ...]
    w13: tuple[torch.Tensor, ...]
    w2: tuple[torch.Tensor, ...]
    y: torch.Tensor
    h: tuple[torch.Tensor, ...]
    """Codes and scales of h, and of y."""
    grad: tuple[torch.Tensor, ...]
    grad_h: torch.Tensor
    grad_y: tuple[torch.Tensor, ...]


def _codes(given: Operands) -> _Codes:
    offs, w13, w2 = given.offs, given.B_t.detach(), given.more[0].detach()
    x = kernels.quantize_rowwise_2d(given.A.detach())
    of_13, of_2 = (kernels.quantize_colwise_3d(w.transpose(1, 2)) for w in (w13, w2))
    y = _rows(x, of_13, offs)()
    h = kernels.quantize_swiglu_rowwise(y, offs, keep=True)
    grad = kernels.quantize_rowwise_factored(given.grad, offs, of_2[1])
    grad_h = _back(grad, of_2, offs)()
    grad_y = kernels.quantize_swiglu_gradient(h[2], grad_h, offs, of_13[1], h[3])
    return _Codes(x, of_13, of_2, y, h, grad, grad_h, grad_y)


def _rows(rows: tuple[torch.Tensor, ...], weights: tuple[torch.Tensor, ...], offs: torch.Tensor) -> Call:
    """Rows times weights."""
    return partial(kernels.multiply_rows, rows[0], weights[0].transpose(1, 2), offs, rows[1], weights[1])


def _back(rows: tuple[torch.Tensor, ...], weights: tuple[torch.Tensor, ...], offs: torch.Tensor) -> Call:
    """Rows of a gradient times weights, whose scales are folded in."""
    transposed = kernels.transpose_codes_3d(weights[0]).transpose(1, 2)
    ones = rows[1].new_ones(transposed.shape[:2])
    return partial(kernels.multiply_rows, rows[0], transposed, offs, rows[1], ones)


def _columns(
    grad: tuple[torch.Tensor, ...], rows: tuple[torch.Tensor, ...], offs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of both as a GEMM over rows reads them, and the scale of each group."""
    from fp8tune_kernels.quantize.row_shifts import shifts_of_rows

    shifts, least = shifts_of_rows(grad[1], rows[1], offs)
    return kernels.transpose_codes(grad[0], offs, shifts), kernels.transpose_codes(rows[0], offs), least


def _contraction(
    grad: tuple[torch.Tensor, ...], rows: tuple[torch.Tensor, ...], factors: torch.Tensor, offs: torch.Tensor
) -> Call:
    a, b, least = _columns(grad, rows, offs)
    scales = (least[:, None] / factors.view(len(offs), -1)).view(-1)
    return partial(kernels.contract_rows, a, b, offs, scales, least.new_ones(len(offs) * b.shape[1]), 128)


def _part(reads: tuple[str, ...], call: Any, result: str = "", bytes_an_element: int = 3) -> Part:
    return Part(reads, lambda given: call(given, _codes(given)), result, bytes_an_element=bytes_an_element)


PARTS = {
    "rowwise-2d x": Part(("A",), lambda given: partial(kernels.quantize_rowwise_2d, given.A)),
    "colwise-3d w13": Part(("w13",), lambda given: partial(kernels.quantize_colwise_3d, given.B_t.transpose(1, 2))),
    "GEMM y": _part(("A", "w13"), lambda given, c: _rows(c.x, c.w13, given.offs), "y"),
    "swiglu-rowwise": _part(
        ("h",), lambda given, c: partial(kernels.quantize_swiglu_rowwise, c.y, given.offs, keep=True), "", 7
    ),
    "colwise-3d w2": Part(("w2",), lambda given: partial(kernels.quantize_colwise_3d, given.more[0].transpose(1, 2))),
    "GEMM out": _part(("h", "w2"), lambda given, c: _rows(c.h, c.w2, given.offs), "A"),
    "rowwise-factored grad": _part(
        ("A",), lambda given, c: partial(kernels.quantize_rowwise_factored, given.grad, given.offs, c.w2[1])
    ),
    "transposed-codes-3d w2": _part(
        ("w2",), lambda given, c: partial(kernels.transpose_codes_3d, c.w2[0]), "", 2
    ),
    "GEMM grad_h": _part(("A", "w2"), lambda given, c: _back(c.grad, c.w2, given.offs), "h"),
    "transposed-codes grad, h": _part(
        ("A", "h"), lambda given, c: partial(_columns, c.grad, c.h, given.offs), "", 2
    ),
    "GEMM grad_w2": _part(("A", "h"), lambda given, c: _contraction(c.grad, c.h, c.w2[1], given.offs), "w2"),
    "swiglu-gradient": _part(
        ("h",),
        lambda given, c: partial(
            kernels.quantize_swiglu_gradient, c.h[2], c.grad_h, given.offs, c.w13[1], c.h[3]
        ),
        "",
        6,
    ),
    "transposed-codes-3d w13": _part(
        ("w13",), lambda given, c: partial(kernels.transpose_codes_3d, c.w13[0]), "", 2
    ),
    "GEMM grad_x": _part(("y", "w13"), lambda given, c: _back(c.grad_y, c.w13, given.offs), "A"),
    "transposed-codes grad_y, x": _part(
        ("y", "A"), lambda given, c: partial(_columns, c.grad_y, c.x, given.offs), "", 2
    ),
    "GEMM grad_w13": _part(("y", "A"), lambda given, c: _contraction(c.grad_y, c.x, c.w13[1], given.offs), "w13"),
}  # fmt: skip
"""In the order of the step."""

MOE_MLP = Operation(
    name="moe-mlp",
    recipe="fp8, folded scales",
    what="expert MLP",
    ours=FP8,
    multiple=MULTIPLE,
    pads=False,
    contenders={
        BF16: _bf16,
        FP8: _ours,
        ONCE: _once,
        ONCE_H: partial(_once, recompute="h"),
        ONCE_Y: partial(_once, recompute="gate-up"),
    },
    once={ONCE: FP8, ONCE_H: FP8, ONCE_Y: FP8},
    quantize_weights={FP8: lambda given: partial(_handles, given)},
    weight_casts=("colwise-3d w13", "colwise-3d w2", "transposed-codes-3d w13", "transposed-codes-3d w2"),
    parts=PARTS,
    gemms=tuple(part for part in PARTS if part.startswith("GEMM")),
    shape_of=_shape,
    operands=_operands,
    exact=_exact,
    results=RESULTS,
)
