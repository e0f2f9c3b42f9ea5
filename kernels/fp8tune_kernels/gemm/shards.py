"""A grouped GEMM of DTensors: what each rank multiplies of its shards, and how the result is placed.

On each dim of the mesh the placement of the weights, ``B_t`` (E, K, N), decides:

    B_t         A                    offs        out         grad of A   grad of B_t
    Replicate   Replicate            global      Replicate   Replicate   Replicate
    Replicate   Shard(0)             global      Shard(0)    Shard(0)    Partial
    Shard(2), N Replicate            global      Shard(1)    Partial     Shard(2)
    Shard(1), K Shard(1)             global      Partial     Shard(1)    Shard(1)
    Shard(0), E Shard(0), own rows   own         Shard(0)    Shard(0)    Shard(0)
    Shard(0), E Replicate            global      Partial     Partial     Shard(0)

A in another placement is redistributed to that of the table, as torch does for its own GEMM, and weights that are
``Partial`` to ``Replicate``. *Own* rows are those of this rank's experts, as tokens lie after they were dispatched:
``offs`` has the ends within them, one for each expert of this rank. *Global* ends count from the first row of all.

A rank quantizes its shards alone. The scales are those of one device where a shard has whole rows of what a GEMM
contracts, so out and the gradients are its bytes; they are not where a pass contracts over a dim that is sharded: out
where K is, the gradient of A where N is, the gradient of B_t where a shard's end cuts a group of rows. There each rank
has scales of its own, which are at least as fine, and partial results are rounded to bfloat16 before they are added.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, cast

import torch
from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

P = ParamSpec("P")

PLAIN = (Tensor, Parameter)
"""The types whose calls go straight on: torch.distributed.tensor is imported for others alone."""


class Rule(NamedTuple):
    """Placements of operands and results on one dim of a mesh."""

    rows: Placement
    weights: Placement
    out: Placement
    grad_of_rows: Placement
    grad_of_weights: Placement


def on_shards(multiply: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """A grouped GEMM ``(A, B_t, offs, ...)`` that takes DTensors as well, differentiable as it was.

    Raises ValueError for a DTensor beside a plain A or B_t, beside quantized weights or with a bias, and for rows
    sharded on one dim of the mesh as this rank's own and on another not.
    """
    any_multiply: Callable[..., Tensor] = multiply

    @functools.wraps(multiply)
    def either(A: Tensor, B_t: Any, *rest: Any, **options: Any) -> Tensor:
        if type(A) in PLAIN and (type(B_t) in PLAIN or not isinstance(B_t, Tensor)):
            return any_multiply(A, B_t, *rest, **options)
        return _on_shards(any_multiply, A, B_t, *rest, **options)

    return cast(Callable[P, Tensor], either)


def _on_shards(multiply: Callable[..., Tensor], A: Any, B_t: Any, *rest: Any, **options: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(A, DTensor) and not isinstance(B_t, DTensor):
        return multiply(A, B_t, *rest, **options)
    if not isinstance(A, DTensor) or not isinstance(B_t, DTensor):
        names = ("A", "B_t") if isinstance(A, DTensor) else ("B_t", "A")
        raise ValueError(f"{names[0]} is a DTensor and {names[1]} is not: wanted both as DTensors, or both to_local()")
    if options.get("bias") is not None or (len(rest) > 1 and rest[1] is not None):
        raise ValueError("bias is a tensor, wanted None beside DTensors: add it to the result")
    offs, *rest_ = rest or (options.pop("offs", None),)
    if offs is None:
        raise ValueError("offs is None, wanted (E,): the end row of each expert's group")
    mesh, rows, (E, _, N) = B_t.device_mesh, A.shape[0], B_t.shape
    if A.device_mesh != mesh:
        raise ValueError(f"A is on {A.device_mesh}, wanted {mesh} as B_t")
    by_expert = [dim for dim, placement in enumerate(B_t.placements) if placement.is_shard(0)]
    are_own = bool(by_expert) and _are_own(A, B_t, offs, by_expert)
    rules = [_rule(A.placements[dim], B_t.placements[dim], are_own=are_own) for dim in range(mesh.ndim)]
    by_row = [dim for dim, rule in enumerate(rules) if rule.rows.is_shard(0) and dim not in by_expert]
    if by_row and are_own:
        raise ValueError(f"A is {A.placements}, sharded on its rows where B_t, {B_t.placements}, is on E and where not")
    local_A = local_shard(A, [rule.rows for rule in rules], [rule.grad_of_rows for rule in rules]).contiguous()
    local_B_t = local_shard(B_t, [rule.weights for rule in rules], [rule.grad_of_weights for rule in rules])
    if isinstance(offs, DTensor):
        offs = offs.to_local() if are_own else offs.redistribute(mesh, [Replicate()] * mesh.ndim).to_local()
    if by_row:
        first, count = range_of_shard(rows, mesh, by_row)
        offs = (offs - first).clamp(0, count).to(offs.dtype)
    if by_expert and not are_own:
        of_experts = range_of_shard(E, mesh, by_expert)
        out = _of_experts(multiply, local_A, local_B_t, offs, of_experts, *rest_, **options)
    else:
        out = multiply(local_A, local_B_t, offs, *rest_, **options)
    placements = [rule.out for rule in rules]
    return DTensor.from_local(out, mesh, placements, run_check=False, shape=torch.Size((rows, N)), stride=(N, 1))


def _are_own(A: DTensor, B_t: DTensor, offs: Tensor, by_expert: Sequence[int]) -> bool:
    """Return True if each rank has the rows of its own experts, and their ends."""
    from torch.distributed.tensor import DTensor

    if not all(A.placements[dim].is_shard(0) for dim in by_expert):
        return False
    if isinstance(offs, DTensor):
        return all(offs.placements[dim].is_shard(0) for dim in by_expert)
    return offs.shape[0] == B_t.to_local().shape[0]


def _rule(a: Placement, b: Placement, *, are_own: bool) -> Rule:
    """The row of the table above."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    replicated, summed = Replicate(), Partial()
    by_expert, by_k, by_n = Shard(0), Shard(1), Shard(2)
    if b == by_expert and are_own:
        return Rule(Shard(0), by_expert, Shard(0), Shard(0), by_expert)
    if b == by_expert:
        return Rule(replicated, by_expert, summed, summed, by_expert)
    if b == by_n:
        return Rule(replicated, by_n, Shard(1), summed, by_n)
    if b == by_k:
        return Rule(Shard(1), by_k, summed, Shard(1), by_k)
    if a == Shard(0):
        return Rule(Shard(0), replicated, Shard(0), Shard(0), summed)
    return Rule(replicated, replicated, replicated, replicated, replicated)


def local_shard(x: DTensor, expected: Sequence[Placement], grads: Sequence[Placement]) -> Tensor:
    """Return this rank's shard of ``x`` in placements ``wanted``; its gradient will lie as ``grads`` say."""
    if x.placements != tuple(expected):
        x = x.redistribute(x.device_mesh, expected)
    return x.to_local(grad_placements=grads)


def range_of_shard(size: int, mesh: DeviceMesh, dims: Sequence[int]) -> tuple[int, int]:
    """Return the first element that this rank has of a tensor's dim, and how many: dims of the mesh cut it in turn."""
    first = 0
    for dim in dims:
        share = -(-size // mesh.size(dim))
        start = min(mesh.get_local_rank(dim) * share, size)
        first, size = first + start, min(share, size - start)
    return first, size


def _of_experts(
    multiply: Callable[..., Tensor],
    A: Tensor,
    B_t: Tensor,
    offs: Tensor,
    experts: tuple[int, int],
    *rest: Any,
    **options: Any,
) -> Tensor:
    """Multiply the rows of some experts, the first and how many, among the rows of all; zeros in others.

    The rows are turned until those of the first expert are on top, and the result back: where they begin is known on
    the device alone.
    """
    first, count = experts
    begin = offs[first - 1] if first else offs.new_zeros(())
    places, rows = torch.arange(A.shape[0], device=A.device), max(A.shape[0], 1)
    turned = A.index_select(0, (places + begin) % rows)
    out = multiply(turned, B_t, offs[first : first + count] - begin, *rest, **options)
    return out.index_select(0, (places - begin) % rows)
