"""What is compared on each rank: results of shards with those of one device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from ranks import Check, are_bytes, sqnr
from sharded_training import fsdp
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fp8tune_kernels import fp8_grouped_mm


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


CHECKS: dict[str, Check] = {"placements": placements, "fsdp": fsdp}
