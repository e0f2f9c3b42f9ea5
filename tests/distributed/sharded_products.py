"""Grouped GEMMs of DTensors on each rank, beside one device: placements, and bytes wherever no scale is cut."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from ranks import assert_placed, assert_refused
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fp8tune_kernels import fp8_grouped_mm, quantize_weights

SMALL = {"rows": 96, "E": 4, "N": 64, "K": 96}
LARGE = {"rows": 4096, "E": 8, "N": 1024, "K": 2048}
"""On a GPU: of the sizes that kernels are for."""


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
    offs = torch.tensor([rows // 3, *[middle] * (E - 2), rows - 5], dtype=torch.int32)
    return Layer(*(x.to(device, x.dtype if x is offs else torch.bfloat16) for x in (A, w, offs, grad)))


def results(A: Tensor, w: Tensor, offs: Tensor, grad: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """out, and the gradients of A and of w."""
    A, w = A.detach().requires_grad_(), w.detach().requires_grad_()
    out = fp8_grouped_mm(A, w.transpose(1, 2), offs, **options)
    out.backward(grad)
    assert A.grad is not None
    assert w.grad is not None
    return out.detach(), A.grad, w.grad


R, P = Replicate(), "P(sum)"

PLACED: dict[str, tuple[Any, Any, str, str]] = {
    "replicated": (R, R, "R R R", ""),
    "rows": (Shard(0), R, "S(0) S(0) P(sum)", "w where a group is cut"),
    "N": (R, Shard(1), "S(1) P(sum) S(1)", "A"),
    "K": (Shard(1), Shard(2), "P(sum) S(1) S(2)", "out"),
    "E": (R, Shard(0), "P(sum) P(sum) S(0)", ""),
    "N, rows to gather": (Shard(0), Shard(1), "S(1) S(0) S(1)", "A"),
    "K, columns to cut": (R, Shard(2), "P(sum) R S(2)", "out"),
}
"""Name -> how rows and weights (E, N, K) are sharded; placements of out and of the gradients of A and of the weights;
which of them are sums over ranks, that are rounded before they are added. All others are one device's bytes."""


def placements(mesh: Any, device: torch.device) -> None:
    """Each way to shard."""
    for sizes in (SMALL, LARGE) if device.type == "cuda" else (SMALL,):
        for is_whole in (True, False):
            A, w, offs, grad = layer(device, **sizes, whole=is_whole)
            expected = results(A, w, offs, grad)
            upstream = distribute_tensor(grad, mesh, [R])
            for name, (of_A, of_w, placed, sums) in PLACED.items():
                spread = distribute_tensor(A, mesh, [of_A]), distribute_tensor(w, mesh, [of_w])
                is_sum = {"A": "A" in sums, "out": "out" in sums, "w": "w" in sums and not is_whole}
                actual = results(*spread, offs, upstream)
                for what, tensor, right, place in zip(("out", "A", "w"), actual, expected, placed.split(), strict=True):
                    assert_placed(f"{name}, {what}", tensor, right, place, is_sum=is_sum[what])
        ends = distribute_tensor(offs, mesh, [R])
        spread = distribute_tensor(A, mesh, [Shard(0)]), distribute_tensor(w, mesh, [R])
        actual = results(*spread, ends, upstream)
        for tensor, right, place in zip(actual, expected, ("S(0)", "S(0)", P), strict=True):
            assert_placed("offs a DTensor", tensor, right, place, is_sum=place == P)
        for is_distributed in (True, False):
            own_rows(mesh, device, sizes, is_distributed_offs=is_distributed)


def own_rows(mesh: Any, device: torch.device, sizes: dict[str, int], *, is_distributed_offs: bool) -> None:
    """Experts on ranks, with rows of theirs that are not equally many."""
    A, w, offs, grad = layer(device, **sizes, whole=False)
    rank, ranks, E = mesh.get_local_rank(), mesh.size(), len(w)
    first, last = E // ranks * rank, E // ranks * (rank + 1)
    begin = int(offs[first - 1]) if first else 0
    end = int(offs[last - 1]) if last < E else len(A)
    own = (offs[first:last] - begin).to(torch.int32)
    lay = [Shard(0)]
    actual = results(
        DTensor.from_local(A[begin:end], mesh, lay, shape=A.shape, stride=A.stride()),
        distribute_tensor(w, mesh, lay),
        DTensor.from_local(own, mesh, lay) if is_distributed_offs else own,
        DTensor.from_local(grad[begin:end], mesh, lay, shape=grad.shape, stride=grad.stride()),
    )
    out, grad_A, grad_w = results(A, w, offs, grad)
    for tensor, right in zip(actual, (out[begin:end], grad_A[begin:end], grad_w[first:last]), strict=True):
        assert isinstance(tensor, DTensor)
        assert tensor.placements == (Shard(0),)
        assert torch.equal(tensor.to_local(), right)


def operators(mesh: Any, device: torch.device) -> None:
    """Each operator on DTensors keeps the shards that it can."""
    import fp8tune_kernels.dtensor  # noqa: F401  registers the rules

    for sizes in (SMALL, LARGE) if device.type == "cuda" else (SMALL,):
        A, w, offs, _ = layer(device, **sizes, whole=True)
        B_t, ops, mx = w.transpose(1, 2), torch.ops.fp8tune, (torch.float8_e4m3fn, "rceil")
        e4m3 = (torch.float8_e4m3fn, True)
        gathered = "S(0) S(0)" if sizes is LARGE else "R R"  # torch exchanges large shards, and gathers small ones
        calls: list[tuple[Any, tuple[Any, ...], dict[int, Any], str]] = [
            (ops.quantize_rowwise_2d, (A, *e4m3), {0: Shard(0)}, "S(0) S(0)"),
            (ops.quantize_rowwise_2d, (A, *e4m3), {0: Shard(1)}, gathered),
            (ops.quantize_mxfp8_dim1, (A, *mx), {0: Shard(1)}, "S(1) S(0)"),
            (ops.quantize_mxfp8_dim1_3d, (w, *mx), {0: Shard(2)}, "S(2) S(1)"),
            (ops.quantize_colwise, (A, offs, *e4m3), {0: Shard(1)}, "R R"),
            (ops.quantize_colwise_3d, (B_t, *e4m3), {0: Shard(2)}, "S(2) S(2)"),
            (ops.quantize_transpose_3d_atomic, (B_t, *e4m3), {0: Shard(1)}, "S(2) S(2)"),
        ]
        for operator, arguments, sharded, placed in calls:
            expected = operator.default(*arguments)
            spread = [
                _spread(item, mesh, sharded.get(place, R)) if isinstance(item, Tensor) else item
                for place, item in enumerate(arguments)
            ]
            actual = operator.default(*spread)
            both = ((item if isinstance(item, tuple) else (item,)) for item in (actual, expected))
            for tensor, right, place in zip(*both, placed.split(), strict=True):
                assert_placed(f"{operator} of {sharded}", tensor, right, place, is_sum=False)


def _spread(x: Tensor, mesh: Any, placement: Any) -> DTensor:
    """A DTensor whose shards lie in memory as ``x`` does: a transposed view stays one."""
    is_view = not x.is_contiguous()
    x = x.mT if is_view else x
    if placement.is_shard():
        dim = 3 - placement.dim if is_view and placement.dim else placement.dim
        placement, x = Shard(dim), x.chunk(mesh.size(), dim)[mesh.get_local_rank()].contiguous()
    spread = DTensor.from_local(x, mesh, [placement])  # gloo sends no FP8, as distribute_tensor would
    return spread.transpose(1, 2) if is_view else spread


def compiled(mesh: Any, device: torch.device) -> None:
    """torch.compile traces the whole, and gives the bytes of the eager call."""
    A, w, offs, grad = layer(device, **SMALL, whole=True)
    upstream = distribute_tensor(grad, mesh, [R])
    actual = []
    for multiply in (fp8_grouped_mm, torch.compile(fp8_grouped_mm, backend="aot_eager", fullgraph=True, dynamic=False)):
        leaves = [distribute_tensor(x, mesh, [lay]).requires_grad_() for x, lay in ((A, R), (w, Shard(0)))]
        out = multiply(leaves[0], leaves[1].transpose(1, 2), offs)
        out.backward(upstream)
        actual.append([item.full_tensor() for item in (out, *(leaf.grad for leaf in leaves))])
    for eager, traced in zip(*actual, strict=True):
        assert torch.equal(eager, traced)


def refusals(mesh: Any, device: torch.device) -> None:
    """Operands that do not belong together."""
    A, w, offs, _ = layer(device, **SMALL, whole=True)
    spread, weights = distribute_tensor(A, mesh, [R]), distribute_tensor(w, mesh, [Shard(1)]).transpose(1, 2)
    narrow = distribute_tensor(w[:, :48].contiguous(), mesh, [Shard(1)]).transpose(1, 2)
    plain_B_t = "A is a DTensor and B_t is not: wanted both as DTensors, or both to_local()"
    for arguments, says in {
        (A, weights, offs): "B_t is a DTensor and A is not: wanted both as DTensors, or both to_local()",
        (spread, w.transpose(1, 2), offs): plain_B_t,
        (spread, quantize_weights(w), offs): plain_B_t,
        (spread, weights, offs, A): "bias is a tensor, wanted None beside DTensors: add it to the result",
        (spread, narrow, offs): "B_t has K=96 and N=24, wanted multiples of 16",
    }.items():
        assert_refused(says, fp8_grouped_mm, *arguments)
