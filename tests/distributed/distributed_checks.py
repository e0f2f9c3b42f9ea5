"""What is compared on each rank: results of shards with those of one device."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from ranks import Check, are_bytes, sqnr
from sharded_layers import compiled_layer, layers, refused_layers, trained_layers
from sharded_training import fsdp
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fp8tune_kernels import fp8_grouped_mm, quantize_weights


class Layer(NamedTuple):
    """Operands of a layer, as one device has them."""

    A: Tensor
    w: Tensor
    offs: Tensor
    grad: Tensor


def layer(device: torch.device, *, rows: int, E: int, N: int, K: int, whole: bool) -> Layer:
    """Random ones; one expert has no rows, and the last rows have no expert. ``whole``: half of the rows belong to the
    first half of the experts."""
    generator = torch.Generator().manual_seed(0)
    A, grad = (torch.randn(rows, size, generator=generator) for size in (K, N))
    w = torch.randn(E, N, K, generator=generator) / K**0.5
    middle = rows // 2 - (0 if whole else 7)
    ends = [rows // 3] + [middle] * (E // 2 - 1) + [middle] * (E // 2 - 1) + [rows - 5]
    offs = torch.tensor(ends, dtype=torch.int32)
    return Layer(*(x.to(device, x.dtype if x is offs else torch.bfloat16) for x in (A, w, offs, grad)))


def results(A: Tensor, w: Tensor, offs: Tensor, grad: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """out, and the gradients of A and of w."""
    A, w = A.detach().requires_grad_(), w.detach().requires_grad_()
    out = fp8_grouped_mm(A, w.transpose(1, 2), offs, **options)
    out.backward(grad)
    assert A.grad is not None
    assert w.grad is not None
    return out.detach(), A.grad, w.grad


NAMES = ("out", "grad_A", "grad_w")


def compared(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> dict[str, Any]:
    """For each result: where it was placed, and "bytes" or its SQNR in dB."""
    said = {}
    for name, result, reference in zip(NAMES, found, wanted, strict=True):
        placement = ""
        if isinstance(result, DTensor):
            placement = " ".join(str(each) for each in result.placements)
            result = result.full_tensor()
        assert result.shape == reference.shape, (name, result.shape, reference.shape)
        said[name] = [placement, "bytes" if are_bytes(result, reference) else round(sqnr(result, reference), 1)]
    return said


PLACEMENTS = {
    "replicated": (Replicate(), Replicate()),
    "rows": (Shard(0), Replicate()),
    "N": (Replicate(), Shard(1)),
    "K": (Shard(1), Shard(2)),
    "E": (Replicate(), Shard(0)),
    "N, rows to gather": (Shard(0), Shard(1)),
    "K, columns to cut": (Replicate(), Shard(2)),
}
"""Name -> how rows and weights (E, N, K) are sharded."""


SMALL = {"rows": 96, "E": 4, "N": 64, "K": 96}
LARGE = {"rows": 4096, "E": 8, "N": 1024, "K": 2048}
"""On a GPU: of the sizes that kernels are for."""


def placements(mesh: Any, device: torch.device) -> dict[str, Any]:
    """Each way to shard, beside one device."""
    found = _placements(mesh, device, SMALL)
    if device.type == "cuda":
        found |= {f"large: {name}": case for name, case in _placements(mesh, device, LARGE).items()}
    return found


def _placements(mesh: Any, device: torch.device, sizes: dict[str, int]) -> dict[str, Any]:
    found = {}
    for is_whole in (True, False):
        A, w, offs, grad = layer(device, **sizes, whole=is_whole)
        wanted = results(A, w, offs, grad)
        for name, (of_A, of_w) in PLACEMENTS.items():
            spread = distribute_tensor(A, mesh, [of_A]), distribute_tensor(w, mesh, [of_w])
            upstream = distribute_tensor(grad, mesh, [Replicate()])
            case = name if is_whole else f"{name}, a group cut"
            found[case] = compared(results(*spread, offs, upstream), wanted)
    spread = distribute_tensor(A, mesh, [Shard(0)]), distribute_tensor(w, mesh, [Replicate()])
    ends = distribute_tensor(offs, mesh, [Replicate()])
    found["offs a DTensor"] = compared(results(*spread, ends, upstream, keep_fp8=("A",)), wanted)
    found["own rows"] = _own_rows(mesh, device, sizes, is_distributed_offs=True)
    found["own rows, plain offs"] = _own_rows(mesh, device, sizes, is_distributed_offs=False)
    return found


def _own_rows(mesh: Any, device: torch.device, sizes: dict[str, int], *, is_distributed_offs: bool) -> dict[str, Any]:
    """Experts on ranks, with rows of theirs that are not equally many."""
    A, w, offs, grad = layer(device, **sizes, whole=False)
    rank, ranks, E = mesh.get_local_rank(), mesh.size(), len(w)
    first, last = E // ranks * rank, E // ranks * (rank + 1)
    begin = int(offs[first - 1]) if first else 0
    end = int(offs[last - 1]) if last < E else len(A)
    rows, upstream, own = A[begin:end], grad[begin:end], (offs[first:last] - begin).to(torch.int32)
    lay = [Shard(0)]
    spread = (
        DTensor.from_local(rows, mesh, lay, shape=A.shape, stride=A.stride()),
        distribute_tensor(w, mesh, lay),
        DTensor.from_local(own, mesh, lay) if is_distributed_offs else own,
        DTensor.from_local(upstream, mesh, lay, shape=grad.shape, stride=grad.stride()),
    )
    out, grad_A, grad_w = results(*spread)
    wanted = results(A, w, offs, grad)
    local = compared(
        (out.to_local(), grad_A.to_local(), grad_w.to_local()),
        (wanted[0][begin:end], wanted[1][begin:end], wanted[2][first:last]),
    )
    for name, result in zip(NAMES, (out, grad_A, grad_w), strict=True):
        local[name][0] = str(result.placements[0])
    return local


def operators(mesh: Any, device: torch.device) -> dict[str, Any]:
    """Each operator on DTensors, beside plain tensors: placements of the results, and "bytes" or their SQNR in dB."""
    import fp8tune_kernels.dtensor  # noqa: F401  registers the rules

    found = _operators(mesh, device, SMALL)
    if device.type == "cuda":
        found |= {f"large: {name}": case for name, case in _operators(mesh, device, LARGE).items()}
    return found


def _operators(mesh: Any, device: torch.device, sizes: dict[str, int]) -> dict[str, Any]:
    A, w, offs, grad = layer(device, **sizes, whole=True)
    B_t, ops = w.transpose(1, 2), torch.ops.fp8tune
    e4m3 = (torch.float8_e4m3fn, True)
    forward, transposed = ops.quantize_colwise_3d(B_t, *e4m3), ops.quantize_transpose_3d_atomic(B_t, *e4m3)
    rows, ends = ops.quantize_rowwise_2d(A, *e4m3), (offs, None, 0)
    none = (None,) * 4
    calls = {
        "rowwise-2d, rows": (ops.quantize_rowwise_2d, (A, *e4m3), {0: Shard(0)}),
        "rowwise-2d, columns": (ops.quantize_rowwise_2d, (A, *e4m3), {0: Shard(1)}),
        "mxfp8-dim1, columns": (ops.quantize_mxfp8_dim1, (A, torch.float8_e4m3fn, "rceil"), {0: Shard(1)}),
        "mxfp8-dim1-3d, K": (ops.quantize_mxfp8_dim1_3d, (w, torch.float8_e4m3fn, "rceil"), {0: Shard(2)}),
        "colwise, columns": (ops.quantize_colwise, (A, offs, *e4m3), {0: Shard(1)}),
        "colwise-3d, N": (ops.quantize_colwise_3d, (B_t, *e4m3), {0: Shard(2)}),
        "transpose-3d, K": (ops.quantize_transpose_3d_atomic, (B_t, *e4m3), {0: Shard(1)}),
        "colwise-transpose-3d, E": (ops.quantize_colwise_transpose_3d, (B_t, *e4m3), {0: Shard(0)}),
        "forward, N": (ops.grouped_mm_forward, (A, B_t, *ends, *none), {1: Shard(2)}),
        "forward, K": (ops.grouped_mm_forward, (A, B_t, *ends, *none), {0: Shard(1), 1: Shard(1)}),
        "forward of codes, N": (
            ops.grouped_mm_forward,
            (A, B_t, *ends, *rows, *forward),
            {1: Shard(2), 7: Shard(2), 8: Shard(2)},
        ),
        "input gradient, K": (ops.grouped_mm_input_gradient, (grad, B_t, *ends, *none), {1: Shard(1)}),
        "input gradient of codes, N": (
            ops.grouped_mm_input_gradient,
            (grad, B_t, *ends, None, None, *transposed),
            {0: Shard(1), 1: Shard(2), 7: Shard(1)},
        ),
        "weight gradient, N": (ops.grouped_mm_weight_gradient, (grad, A, *ends, *none), {0: Shard(1)}),
        "weight gradient, K": (ops.grouped_mm_weight_gradient, (grad, A, *ends, *none), {1: Shard(1)}),
    }
    found = {}
    for name, (operator, arguments, sharded) in calls.items():
        wanted = operator.default(*arguments)
        spread = [
            _spread(each, mesh, sharded.get(place, Replicate())) if isinstance(each, Tensor) else each
            for place, each in enumerate(arguments)
        ]
        results = operator.default(*spread)
        both = zip(*((each if isinstance(each, tuple) else (each,)) for each in (results, wanted)), strict=True)
        found[name] = [_against(result, reference) for result, reference in both]
    return found


def _spread(x: Tensor, mesh: Any, placement: Any) -> DTensor:
    """A DTensor whose shards lie in memory as ``x`` does: a transposed view stays one."""
    is_view = not x.is_contiguous()
    x = x.mT if is_view else x
    if placement.is_shard():
        dim = 3 - placement.dim if is_view and placement.dim else placement.dim
        placement, x = Shard(dim), x.chunk(mesh.size(), dim)[mesh.get_local_rank()].contiguous()
    spread = DTensor.from_local(x, mesh, [placement])  # gloo sends no FP8, as distribute_tensor would
    return spread.transpose(1, 2) if is_view else spread


def _against(result: Tensor, reference: Tensor) -> list[Any]:
    assert isinstance(result, DTensor)
    lay = result.placements
    local = result.to_local()
    if local.dtype.itemsize == 1:  # gloo gathers no FP8
        local, reference = local.view(torch.uint8), reference.view(torch.uint8)
    spread = DTensor.from_local(local, result.device_mesh, lay, shape=reference.shape, stride=reference.stride())
    whole = spread.full_tensor()
    return [str(lay[0]), "bytes" if are_bytes(whole, reference) else round(sqnr(whole, reference), 1)]


def refusals(mesh: Any, device: torch.device) -> dict[str, Any]:
    """What is said of operands that do not belong together."""
    A, w, offs, _ = layer(device, **SMALL, whole=True)
    spread, weights = distribute_tensor(A, mesh, [Replicate()]), distribute_tensor(w, mesh, [Shard(1)]).transpose(1, 2)
    narrow = distribute_tensor(w[:, :48].contiguous(), mesh, [Shard(1)]).transpose(1, 2)
    calls = {
        "A plain": ((A, weights), {}),
        "B_t plain": ((spread, w.transpose(1, 2)), {}),
        "quantized": ((spread, quantize_weights(w)), {}),
        "bias": ((spread, weights), {"bias": A}),
        "24 columns": ((spread, narrow), {}),
    }
    found = {}
    for name, (operands, options) in calls.items():
        try:
            fp8_grouped_mm(*operands, offs, **options)
        except ValueError as error:
            found[name] = str(error)
    return found


def compiled(mesh: Any, device: torch.device) -> dict[str, Any]:
    """torch.compile traces the whole, and gives the bytes of the eager call."""
    A, w, offs, grad = layer(device, **SMALL, whole=True)
    spread = distribute_tensor(A, mesh, [Replicate()]), distribute_tensor(w, mesh, [Shard(0)])
    upstream = distribute_tensor(grad, mesh, [Replicate()])
    found = []
    for multiply in (fp8_grouped_mm, torch.compile(fp8_grouped_mm, backend="aot_eager", fullgraph=True, dynamic=False)):
        A, w = (each.detach().requires_grad_() for each in spread)
        out = multiply(A, w.transpose(1, 2), offs)
        out.backward(upstream)
        assert A.grad is not None
        assert w.grad is not None
        found.append([each.full_tensor() for each in (out, A.grad, w.grad)])
    return {name: are_bytes(*both) for name, both in zip(NAMES, zip(*found, strict=True), strict=True)}


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        operators,
        refusals,
        compiled,
        placements,
        fsdp,
        layers,
        refused_layers,
        compiled_layer,
        trained_layers,
    )
}


def together(names: Collection[str], mesh: Any, device: torch.device) -> dict[str, Any]:
    """Some checks by name, since ranks take seconds to start. Each prints what it found, and how long it took."""
    rank, found = mesh.get_local_rank(), {}
    for name in names:
        begin = time.monotonic()
        found[name] = CHECKS[name](mesh, device)
        lines = [f"{name} | rank {rank} | {case} | {outcome}" for case, outcome in found[name].items()]
        print(*lines, f"{name} | rank {rank} | took {time.monotonic() - begin:.1f} s", sep="\n", flush=True)
    return found
