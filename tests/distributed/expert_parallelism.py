"""Layers whose experts are divided among ranks, beside one device that has all experts and tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ranks import SUM_DB, assert_refused, sqnr
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fp8tune_kernels import (
    ExpertGroup,
    choose_experts,
    expert_parallel_moe,
    moe_layer,
    quantize_down,
    quantize_gate_up,
)

T, K, N, E, TOP_K = 40, 48, 32, 12, 3  # experts of two, three and four ranks
NAMES = ("out", "x", "logits", "w13", "w2")


class Case(NamedTuple):
    """Settings, and parts of all tokens that the first ranks have; the last has the rest."""

    settings: dict[str, Any]
    parts: tuple[float, ...] | None = None
    unused: slice = slice(3, 4)
    tokens: int = T
    layout: str = "halves"
    are_quantized: bool = False
    are_views: bool = False


EXACT: dict[str, Any] = {"sums": torch.float32}
CASES = {
    "even": Case({}, tokens=36),
    "rows counted": Case({"counts_rows": True}, tokens=36),
    "uneven": Case({"tokens": T, "counts_rows": True}, (0.6, 0.1, 0.2)),
    "no tokens on the first rank": Case({"tokens": T}, (0.0, 0.3, 0.3)),
    "no tokens": Case({"tokens": 0}, tokens=0),
    "rows on no rank but the last": Case({"counts_rows": True}, unused=slice(0, 9), tokens=36),
    "interleaved, quantized before": Case({}, tokens=36, layout="interleaved", are_quantized=True),
    "weights that are views": Case({}, tokens=36, are_views=True),
    "enough capacity": Case({"capacity": 1.75, "tokens": T}, (0.0, 0.3, 0.3)),
}


def operands(device: torch.device, tokens: int, unused: slice) -> list[Tensor]:
    """x, logits, w13, w2 and the output's gradient of one device."""
    draw = torch.Generator().manual_seed(0)
    shapes = ((tokens, K), (tokens, E), (E, 2 * N, K), (E, K, N), (tokens, K))
    made = [torch.randn(shape, generator=draw).bfloat16().to(device) for shape in shapes]
    made[1][:, unused] = -20
    return [made[0], made[1], made[2] * K**-0.5, made[3] * N**-0.5, made[4]]


def step(layer: Any, x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor, grad: Tensor) -> list[Tensor]:
    """The output, and the gradients of all operands."""
    leaves = [tensor.detach().requires_grad_() for tensor in (x, logits, w13, w2)]
    out = layer(leaves[0], leaves[2], leaves[3], *choose_experts(leaves[1], TOP_K))
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def assert_same(label: str, result: Tensor, right: Tensor, device: torch.device) -> None:
    """The bytes of one device; on GPUs near them, as products of other sizes may run other configs."""
    assert torch.equal(result, right) or (device.type == "cuda" and sqnr(result, right) > SUM_DB), label


def experts_over_ranks(mesh: Any, device: torch.device) -> None:
    """All cases over groups of three and more ranks, or of two."""
    for ranks in {min(mesh.size(), 3), mesh.size()}:
        group = dist.new_group(range(ranks))
        if mesh.get_rank() < ranks:
            for name, case in CASES.items():
                check_case(f"{name}, {ranks} ranks", case, group, device)
            check_sums(group, device)
            check_overflow(group, device)
            check_refusals(group, device)
    under_fsdp(mesh, device)


def check_case(label: str, case: Case, group: Any, device: torch.device) -> None:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    whole = operands(device, case.tokens, case.unused)
    right = step(lambda *layer: moe_layer(*layer, layout=case.layout), *whole)
    ends = [case.tokens * number // ranks for number in range(ranks + 1)]
    if case.parts is not None:
        ends = [0, *[round(sum(case.parts[: number + 1]) * case.tokens) for number in range(ranks - 1)], case.tokens]
    tokens, own = slice(ends[rank], ends[rank + 1]), slice(rank * E // ranks, (rank + 1) * E // ranks)
    settings = ExpertGroup(group, **EXACT, **case.settings)

    def layer(x: Tensor, w13: Any, w2: Any, *choice: Tensor) -> Tensor:
        if case.are_quantized:
            w13, w2 = quantize_gate_up(w13), quantize_down(w2)
        return expert_parallel_moe(x, w13, w2, *choice, settings, layout=case.layout)

    x, logits, w13, w2, grad = whole
    weights = (w.mT.contiguous().mT if case.are_views else w for w in (w13[own], w2[own]))
    mine = step(layer, x[tokens], logits[tokens], *weights, grad[tokens])
    for name, result, part in zip(NAMES, mine, (tokens, tokens, tokens, own, own), strict=True):
        assert_same(f"{label}: {name}", result, right[NAMES.index(name)][part], device)
    with torch.no_grad():
        assert_same(label, layer(x[tokens], w13[own], w2[own], *choose_experts(logits[tokens], TOP_K)), mine[0], device)


def check_sums(group: Any, device: torch.device) -> None:
    """Sums that travel in bfloat16 are those of layers that have one rank's experts each."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    x, logits, w13, w2, grad = operands(device, 36, slice(0, 0))
    parts, share = [], E // ranks
    for first in range(0, E, share):
        own = slice(first, first + share)

        def local(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, first: int = first) -> Tensor:
            return moe_layer(x, w13, w2, ids - first, weights)

        parts.append(step(local, x, logits, w13[own], w2[own], grad)[:2])
    tokens, own = slice(36 * rank // ranks, 36 * (rank + 1) // ranks), slice(rank * share, (rank + 1) * share)
    whole = x[tokens], logits[tokens], w13[own], w2[own], grad[tokens]
    out, d_x, *_ = step(lambda *layer: expert_parallel_moe(*layer, group), *whole)
    for result, right in ((out, 0), (d_x, 1)):
        total = torch.stack([part[right][tokens].float() for part in parts]).sum(0).bfloat16()
        assert_same(f"sums of {NAMES[right]}", result, total, device)


def check_overflow(group: Any, device: torch.device) -> None:
    """If the first rank has memory for too few rows, outputs and gradients of tokens are NaN on all ranks."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    x, logits, w13, w2, grad = operands(device, 36, slice(E // ranks, E))  # all choose experts of the first rank
    right = step(moe_layer, x, logits, w13, w2, grad)
    tokens, own = slice(36 * rank // ranks, 36 * (rank + 1) // ranks), slice(rank * E // ranks, (rank + 1) * E // ranks)
    whole = x[tokens], logits[tokens], w13[own], w2[own], grad[tokens]
    for capacity in (ranks, ranks - 0.1):
        settings = ExpertGroup(group, capacity=capacity, **EXACT)
        results = step(lambda *layer: expert_parallel_moe(*layer, settings), *whole)  # noqa: B023 - called at once
        for name, result in zip(NAMES, results, strict=True):
            part = right[NAMES.index(name)][own if name in ("w13", "w2") else tokens]
            if capacity == ranks or (name in ("w13", "w2") and rank):
                assert_same(f"capacity {capacity}: {name}", result, part, device)
            else:
                is_nan = result.isnan()
                assert (is_nan.any(1) if name == "logits" else is_nan).all(), f"capacity {capacity}: {name}"


def check_refusals(group: Any, device: torch.device) -> None:
    x, logits, w13, w2, _ = operands(device, 4, slice(0, 0))
    ids, weights = choose_experts(logits, TOP_K)
    layer, few = (x, w13, w2, ids, weights), ExpertGroup(group, tokens=3)
    assert_refused("tokens must be at least 4, the rows of x, got 3", expert_parallel_moe, *layer, few)
    for settings in ({"capacity": 0.0}, {"capacity": 1.0, "counts_rows": True}):
        both = ExpertGroup(group, **settings)
        assert_refused("capacity must be positive, and None with counts_rows", expert_parallel_moe, *layer, both)
    sums = ExpertGroup(group, sums=torch.float16)
    assert_refused("sums must be torch.bfloat16 or torch.float32", expert_parallel_moe, *layer, sums)
    assert_refused("w2 must have shape", expert_parallel_moe, x, w13, w2[:2], ids, weights, group)
    assert_refused("layout must be", expert_parallel_moe, *layer, group, layout="rows")


class Experts(nn.Module):
    """Experts of this rank, sharded over the mesh of expert parallelism, as torchtitan has them."""

    def __init__(self, mesh: Any, w13: Tensor, w2: Tensor) -> None:
        super().__init__()
        self.w13 = nn.Parameter(distribute_tensor(w13, mesh, [Shard(0)]))
        self.w2 = nn.Parameter(distribute_tensor(w2, mesh, [Shard(0)]))
        self.group = ExpertGroup(mesh.get_group(), **EXACT)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return expert_parallel_moe(x, self.w13, self.w2, ids, weights, self.group)


def under_fsdp(mesh: Any, device: torch.device) -> None:
    """Weights that are sharded twice, over experts and by FSDP2, get the mean gradient of one device's batches."""
    outer = mesh.size() // 2 if mesh.size() % 2 == 0 else 1
    both = init_device_mesh(device.type, (outer, mesh.size() // outer), mesh_dim_names=("fsdp", "ep"))
    x, logits, w13, w2, grad = operands(device, 8 * mesh.size(), slice(3, 4))
    experts = fully_shard(Experts(both["ep"], w13, w2), mesh=both["fsdp"])
    batch, place = 8 * mesh.size() // outer, both["fsdp"].get_local_rank()
    first = place * batch + both["ep"].get_local_rank() * 8
    out = experts(x[first : first + 8], *choose_experts(logits[first : first + 8], TOP_K))
    out.backward(grad[first : first + 8])
    batches = [slice(number * batch, (number + 1) * batch) for number in range(outer)]
    right = [step(moe_layer, x[rows], logits[rows], w13, w2, grad[rows]) for rows in batches]
    assert_same("out under FSDP2", out, torch.cat([results[0] for results in right])[first : first + 8], device)
    for name, parameter in (("w13", experts.w13), ("w2", experts.w2)):
        total = torch.stack([results[NAMES.index(name)] for results in right]).sum(0) / outer
        assert isinstance(parameter.grad, DTensor)
        assert_same(f"{name} under FSDP2", parameter.grad.full_tensor(), total, device)
