"""Expert parallelism: a layer whose experts are divided among the ranks of a process group, and which sends FP8.

Rank r of R holds the experts from ``r * E`` to ``(r + 1) * E - 1``. A step has four transfers:

    forward   tokens       every rank gets those of all ranks: FP8 values, and the scale, ids and weights of each
              sums         of the rows of a rank's own experts, bfloat16, go to the token's rank, which adds R of them
    backward  gradients    of the output, as tokens: FP8 values and scales
              sums         of gradients of tokens, as above, and the gradients of weights

A token that goes to several experts of a rank travels once, and so does the sum of what they return: with 8 of 128
experts a token needs 3.6 of 4 ranks on average. So every rank gets every token, and no split depends on the routing. A
token sends 6 bytes a column to each other rank, where rows of bfloat16 send 8 bytes for each of its experts there.

Rows lie in the order of one device, by expert and then by token, and are never copied: GEMMs gather them from what was
received. All but the sums are the bytes of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from .. import interpreter
from ..gemm import passes
from ..gemm.gathered_weights import GatheredWeights
from ..gemm.shards import PLAIN
from ..quantize import swiglu_rowwise
from ..quantize.gated import LAYOUTS
from ..quantize.swiglu_gradient import quantize_swiglu_gradient
from ..runtime.checks import check_matrix, fp8_dtype_for
from ..runtime.launching import launch_kernel
from ..runtime.ops import differentiable_once, is_traced, step
from . import expert_sort, fp8_steps, gathered_rows
from .expert_sort import check_choice
from .expert_weights import ExpertWeights, check_stored, of_gathered
from .fp8_steps import Dtype, Maybe, Rows, Weights

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["ExpertGroup", "expert_parallel_moe"]

interpreter.install()

CONFIG = {"BLOCK_SIZE_K": 1024, "num_warps": 4}

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""From torch 2.13 on under the first name, with a warning under the second."""


@dataclass(frozen=True)
class ExpertGroup:
    """Ranks that divide the experts of a layer among them; all have the same settings."""

    group: ProcessGroup
    tokens: int | None = None
    """The most tokens of a rank. None: all ranks have as many as this one."""
    counts_rows: bool = False
    """Reserve memory for as many rows as this rank's experts get: the host waits for their number, while tokens travel.
    False: it waits for nothing, and memory is reserved as if all tokens chose this rank's experts alone."""
    sums: torch.dtype = torch.bfloat16
    """Sums of experts on the way to a token's rank; float32 gives the bytes of one device, but for rare
    roundings, for up to twice the traffic."""


def expert_parallel_moe(
    x: Tensor,
    w13: Tensor | ExpertWeights,
    w2: Tensor | ExpertWeights,
    topk_ids: Tensor,
    topk_weights: Tensor,
    group: ProcessGroup | ExpertGroup,
    *,
    layout: str = "halves",
) -> Tensor:
    """Run the tokens of this rank through experts of all ranks, as ``moe_layer`` does on one device, in FP8.

    x             (T, K), row-major: the tokens of this rank, maybe none
    w13, w2       (E, 2N, K) and (E, K, N): the experts of this rank, the same number on each; in the forms that
                  ``moe_layer`` takes, or DTensors that are sharded on dim 0 over ``group``
    topk_ids      (T, top_k): numbers among the experts of all ranks; others add nothing
    topk_weights  (T, top_k), floating-point

    Differentiable once, in x, weights and ``topk_weights``. All ranks take part in both passes of every call. The
    activation is SwiGLU. Not in ``torch.compile``.

    Raises ValueError, before anything is sent, naming the argument.
    """
    ranks = group if isinstance(group, ExpertGroup) else ExpertGroup(group)
    choice = topk_ids.contiguous(), topk_weights.contiguous()
    check_choice(*choice)
    of_13, of_2 = _weights("w13", w13), _weights("w2", w2)
    tokens = _check(x, of_13, of_2, choice[0], ranks, layout)
    missing = tokens - x.shape[0]
    ids, weights, x_all = *choice, x
    if missing:
        ids = functional.pad(ids, (0, 0, 0, missing), value=-1)
        x_all, weights = functional.pad(x, (0, 0, 0, missing)), functional.pad(weights, (0, 0, 0, missing))
    out = _apply(x_all, of_13.plain, of_2.plain, weights, ids, ranks, layout, of_13[1:], of_2[1:])
    return out[: x.shape[0]] if missing else out


# Checks


def _weights(name: str, w: Any) -> Weights:
    """Return this rank's weights, with FP8 values where there are any."""
    if isinstance(w, ExpertWeights):
        return Weights(w.weights, w.codes, w.scales, w.transposed, w.transposed_scales)
    if type(w) not in PLAIN and hasattr(w, "to_local"):
        if not all(placement.is_shard(0) for placement in w.placements):
            raise ValueError(f"{name} must be sharded on dim 0, its experts, got {w.placements}")
        w = w.to_local()
    return _weights(name, of_gathered(name, w)) if isinstance(w, GatheredWeights) else Weights(w)


def _check(x: Tensor, of_13: Weights, of_2: Weights, ids: Tensor, ranks: ExpertGroup, layout: str) -> int:
    """Return the number of tokens of each rank. Raises ValueError, naming the argument."""
    assert of_13.plain is not None
    assert of_2.plain is not None
    check_matrix("x", x)
    check_stored("w13", of_13.plain)
    check_stored("w2", of_2.plain)
    (T, K), (E, C, _) = x.shape, of_13.plain.shape
    if C % 32 or K % 16:
        raise ValueError(f"w13 must be (E, 2N, K) with N and K multiples of 16, got {tuple(of_13.plain.shape)}")
    for name, w, shape in (("w13", of_13.plain, (E, C, K)), ("w2", of_2.plain, (E, K, C // 2))):
        if tuple(w.shape) != shape or w.device != x.device:
            raise ValueError(f"{name} must have shape {shape} on {x.device}, got {tuple(w.shape)} on {w.device}")
    if ids.shape[0] != T or ids.device != x.device:
        raise ValueError(f"topk_ids must have {T} rows on {x.device}, got {ids.shape[0]} on {ids.device}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be {' or '.join(map(repr, LAYOUTS))}, got {layout!r}")
    if ranks.sums not in (torch.bfloat16, torch.float32):
        raise ValueError(f"sums must be torch.bfloat16 or torch.float32, got {ranks.sums}")
    if ranks.tokens is not None and ranks.tokens < T:
        raise ValueError(f"tokens must be at least {T}, the rows of x, got {ranks.tokens}")
    return T if ranks.tokens is None else ranks.tokens


# Transfers

Pending = Callable[[], Tensor]
"""A transfer under way; returns what it brings, in the order of the current stream."""


def _gather(sent: Tensor, group: ProcessGroup) -> Pending:
    """Begin to gather rows of all ranks: (T, ...) -> (ranks * T, ...)."""
    received = sent.new_empty(dist.get_world_size(group) * sent.shape[0], *sent.shape[1:])
    return _begin(_all_gather, received, sent, group)


def _send_back(sent: Tensor, group: ProcessGroup) -> Pending:
    """Begin to give each rank its rows: (ranks * T, ...) -> (ranks * T, ...), of which those of rank r come from it."""
    return _begin(dist.all_to_all_single, torch.empty_like(sent), sent, group)


def _begin(transfer: Callable[..., Any], received: Tensor, sent: Tensor, group: ProcessGroup) -> Pending:
    work = None
    if sent.numel():  # bytes: neither NCCL nor gloo needs to know FP8
        arguments = received.view(torch.uint8), sent.contiguous().view(torch.uint8)
        work = transfer(*arguments, group=group, async_op=True)

    def wait() -> Tensor:
        if work is not None:
            work.wait()
        return received

    return wait


# Sums of the rows of a rank


@triton.jit(do_not_specialize=["S", "G"])  # S changes with the batch and must not cause a recompilation
def sum_local_rows_kernel(
    rows_ptr: tl.tensor,  # (M, K), row-major
    row_of_ptr: tl.tensor,  # (S, TOP_K)
    offs_ptr: tl.tensor,  # (G,)
    out_ptr: tl.tensor,  # (S, K), row-major
    S: tl.tensor,
    K: tl.tensor,
    G: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
) -> None:
    """Sum the rows of one token in BLOCK_SIZE_K columns; those past the last group's are of other ranks."""
    across = tl.cdiv(K, BLOCK_SIZE_K)
    token = tl.program_id(0) // across
    columns = tl.program_id(0) % across * BLOCK_SIZE_K + tl.arange(0, BLOCK_SIZE_K)
    end = tl.load(offs_ptr + G - 1)
    total = tl.zeros((BLOCK_SIZE_K,), tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(row_of_ptr + token * TOP_K + k)
        at = rows_ptr + row.to(tl.int64) * K + columns
        total += tl.load(at, mask=(columns < K) & (row < end), other=0.0).to(tl.float32)
    tl.store(out_ptr + token.to(tl.int64) * K + columns, total.to(out_ptr.dtype.element_ty), mask=columns < K)


def _sum_local_rows(rows: Tensor, row_of: Tensor, offs: Tensor, dtype: Dtype) -> Tensor:
    """Return the sum of each token's rows on this rank, (S, K); zeros for a token that has none."""
    (S, top_k), K = row_of.shape, rows.shape[1]
    out = rows.new_empty(S, K, dtype=dtype)
    if is_traced(rows):
        return out
    if rows.is_cpu and not interpreter.INTERPRETED:
        total, is_here = torch.zeros(S, K), row_of < offs[-1]
        for k in range(top_k):
            tokens = is_here[:, k].nonzero().view(-1)
            total.index_add_(0, tokens, rows[row_of[tokens, k].long()].float())
        return out.copy_(total)
    if programs := S * -(-K // CONFIG["BLOCK_SIZE_K"]):
        launch_kernel(
            sum_local_rows_kernel, programs, (rows, row_of, offs, out), (S, K, offs.shape[0]), (top_k,), CONFIG
        )
    return out


# Steps


def _outgoing(x: Tensor, ids: Tensor, weights: Tensor, float8_dtype: Dtype) -> list[Tensor]:
    """Return what other ranks get of tokens: FP8 values; scales, ids and weights, which float32 holds."""
    q, scales = passes.quantize_rows(x, fp8_dtype_for(x.device, float8_dtype))
    return [q, torch.cat([scales, ids.float(), weights.float()], 1)]


def _arrange(words: Tensor, first: int, experts: int) -> list[Tensor]:
    """Return the scales of all tokens, and the order of rows of the experts from ``first`` on."""
    scales, ids, weights = words.split([1, *[words.shape[1] // 2] * 2], 1)
    order = expert_sort.SPEC((ids - first).int(), weights.clone(memory_format=torch.contiguous_format), experts)
    return [scales.clone(memory_format=torch.contiguous_format), *order]


def _quantize(w13: Tensor, w2: Tensor, is_differentiated: bool, float8_dtype: Dtype) -> list[Tensor]:
    """Return the fields of both weights past the first, each with its transposed values if there is a backward pass."""
    dtype = fp8_dtype_for(w13.device, float8_dtype)
    if not is_differentiated:
        return [*passes.quantize_stored(w13, dtype), *passes.quantize_stored(w2, dtype)]
    of_13, of_2 = (fp8_steps.quantized_both_ways(w, one_scale, dtype) for w, one_scale in ((w13, False), (w2, True)))
    return [*of_13[:3], *of_2]


def _experts(
    q: Tensor,
    scales: Tensor,
    rows_: Sequence[Tensor],
    row_weights: Tensor,
    of_13: Sequence[Tensor],
    of_2: Sequence[Tensor],
    layout: str,
    is_differentiated: bool,
) -> list[Tensor]:
    """Return the output of each row, FP8 values and scales of the activation, and those of gate and up."""
    order, (q_13, scales_13) = Rows(*rows_), of_13
    y = gathered_rows.SPEC(q, q_13.mT, order.offs, order.token_of_row, scales, scales_13)[0]
    gate = None, None, row_weights, "swiglu", layout, is_differentiated, q.dtype
    q_h, scales_h, q_y, scales_y = swiglu_rowwise.SPEC(y, order.offs, *gate)
    del y
    return [passes.multiply((q_h, scales_h), (of_2[0], of_2[1]), order.offs), q_h, scales_h, q_y, scales_y]


def _activation_gradient(
    q: Tensor, scales: Tensor, rows_: Sequence[Tensor], transposed: Tensor, of_columns: Tensor
) -> Tensor:
    """Return the gradient of the activation, (M, N), from that of the output by token."""
    order = Rows(*rows_)
    return gathered_rows.SPEC(q, transposed.mT, order.offs, order.token_of_row, scales, of_columns)[0]


def _sum_of_ranks(received: Tensor, ranks: int) -> Tensor:
    """Return the sum over ranks of what they sent for each token, bfloat16, added in float32 in their order."""
    S, K = received.shape
    if received.dtype == torch.float32:
        return received.view(ranks, S // ranks, K).sum(0).bfloat16()
    places = torch.arange(S, dtype=torch.int32, device=received.device)
    return fp8_steps.sum_of_rows(received, places.view(ranks, S // ranks).t().contiguous())


def _of_tokens(of_rows: Tensor, row_of: Tensor, offs: Tensor) -> Tensor:
    """Return a value of each row as (S, top_k), zeros where the row is on another rank."""
    if not of_rows.numel():
        return of_rows.new_zeros(row_of.shape)
    values = of_rows.index_select(0, row_of.view(-1).clamp(max=of_rows.numel() - 1)).view(row_of.shape)
    return values.masked_fill(row_of >= offs[-1], 0)


outgoing = step("moe_parallel_outgoing", _outgoing)
arrange = step("moe_parallel_arrange", _arrange)
quantize = step("moe_parallel_weights", _quantize)
experts_of_rows = step("moe_parallel_experts", _experts)
activation_gradient = step("moe_parallel_activation_gradient", _activation_gradient)
sum_local_rows = step("moe_parallel_sum", _sum_local_rows)
sum_of_ranks = step("moe_parallel_sum_of_ranks", _sum_of_ranks)
of_tokens = step("moe_parallel_of_tokens", _of_tokens)


class _ExpertParallel(torch.autograd.Function):
    """Layer of equally many tokens on each rank. ``codes``: fields of :class:`.fp8_steps.Weights` past the first."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w13: Tensor,
        w2: Tensor,
        weights: Tensor,
        ids: Tensor,
        ranks: ExpertGroup,
        layout: str,
        codes_13: tuple[Maybe, ...],
        codes_2: tuple[Maybe, ...],
    ) -> Tensor:
        group, E = ranks.group, w13.shape[0]
        is_differentiated = any(ctx.needs_input_grad[:4])
        codes = codes_13[0] if codes_2[0] is None else codes_2[0]
        dtype = fp8_dtype_for(x.device, None if codes is None else codes.dtype)
        q, words = outgoing(x, ids, weights, dtype)
        headers, values = _gather(words, group), _gather(q, group)
        scales, offs, row_of, token_of_row, row_weights = arrange(headers(), dist.get_rank(group) * E, E)
        count = _begin_count(offs) if ranks.counts_rows else row_of.numel
        of_13, of_2 = _all_codes(Weights(w13, *codes_13), Weights(w2, *codes_2), is_differentiated, dtype)
        rows = Rows(offs, token_of_row[: count()])
        row_weights, q = row_weights[: rows.token_of_row.shape[0]], values()
        codes_of_13: Any = [of_13.codes, of_13.scales]
        codes_of_2: Any = [of_2.codes, of_2.scales]
        out, *saved = experts_of_rows(q, scales, rows, row_weights, codes_of_13, codes_of_2, layout, is_differentiated)
        sums = sum_local_rows(out, row_of, offs, ranks.sums)
        del out
        if is_differentiated:
            of_weights = of_13.scales, of_13.transposed, of_2.transposed, of_2.transposed_scales
            ctx.save_for_backward(*rows, row_of, row_weights, q, scales, *saved, *of_weights)
            ctx.ranks, ctx.layout = ranks, layout
            ctx.are_transposed = not w13.is_contiguous(), not w2.is_contiguous()
            ctx.dtypes = x.dtype, w13.dtype, w2.dtype, weights.dtype
        del saved, q, rows
        return sum_of_ranks(_send_back(sums, group)(), dist.get_world_size(group))

    @staticmethod
    @differentiable_once("expert_parallel_moe")
    def backward(ctx: Any, grad: Tensor) -> tuple[Maybe, ...]:
        needs_x, needs_13, needs_2, needs_weights, *others = ctx.needs_input_grad
        group, size = ctx.ranks.group, dist.get_world_size(ctx.ranks.group)
        offs, tokens, row_of, row_weights, q_x, scales_x, q_h, scales_h, q_y, scales_y, *of_weights = ctx.saved_tensors
        scales_13, transposed_13, transposed_2, columns_2 = of_weights
        ctx.maybe_clear_saved_tensors()  # or all live until this function returns
        del of_weights
        q, scales = passes.quantize_rows(grad.contiguous(), q_x.dtype)
        all_scales, values, rows = _gather(scales, group), _gather(q, group), Rows(offs, tokens)
        scales, q = all_scales(), values()
        d_x: Maybe = None
        d_13: Maybe = None
        d_2: Maybe = None
        d_weights: Maybe = None
        dh = activation_gradient(q, scales, rows, transposed_2, columns_2)
        del transposed_2
        if needs_2:
            d_2 = fp8_steps.down_weight_gradient(q, scales, q_h, scales_h, rows, ctx.are_transposed[1])
        del q_h, q, values
        gate = scales_13, scales_y, None, row_weights, "swiglu", ctx.layout, False, q_x.dtype
        q, scales, of_rows, _ = quantize_swiglu_gradient(q_y, dh, offs, *gate)
        del q_y, dh
        sums = per_token = None
        if needs_x:
            d_rows = fp8_steps.input_gradient(q, scales, (offs, tokens), Weights(None, None, None, transposed_13))
            sums = _send_back(sum_local_rows(d_rows, row_of, offs, ctx.ranks.sums), group)
            del d_rows
        if needs_weights:
            per_token = _send_back(of_tokens(of_rows, row_of, offs), group)
        del transposed_13
        if needs_13:  # while the sums travel
            operands = q, scales, scales_13, q_x, scales_x, rows, ctx.are_transposed[0]
            d_13 = fp8_steps.gate_up_weight_gradient(*operands)
        if sums is not None:
            d_x = sum_of_ranks(sums(), size)
        if per_token is not None:  # one rank has the expert, others sent zeros
            d_weights = per_token().view(size, len(row_of) // size, row_of.shape[1]).sum(0)
        gradients = zip((d_x, d_13, d_2, d_weights), ctx.dtypes, strict=True)
        return *[None if grad is None else grad.to(dtype) for grad, dtype in gradients], *[None] * len(others)


_apply: Callable[..., Tensor] = _ExpertParallel.apply


def _begin_count(offs: Tensor) -> Callable[[], int]:
    """Begin to copy the number of rows to the host, and return what waits for it."""
    if not offs.is_cuda:
        return lambda: int(offs[-1])
    count = torch.empty(1, dtype=offs.dtype, pin_memory=True).copy_(offs[-1:], non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> int:
        copied.synchronize()
        return int(count)

    return wait


def _all_codes(of_13: Weights, of_2: Weights, is_differentiated: bool, dtype: torch.dtype) -> tuple[Weights, Weights]:
    """Return weights with all FP8 values that the passes read."""
    if of_13.codes is None and of_2.codes is None:
        assert of_13.plain is not None
        assert of_2.plain is not None
        q_13, scales_13, *rest = quantize(of_13.plain, of_2.plain, is_differentiated, dtype)
        if not is_differentiated:
            return Weights(None, q_13, scales_13), Weights(None, *rest)
        return Weights(None, q_13, scales_13, rest[0]), Weights(None, *rest[1:])
    if of_13.codes is None:
        assert of_13.plain is not None
        of_13 = Weights(None, *passes.quantize_stored(of_13.plain, dtype))
    if of_2.codes is None:
        assert of_2.plain is not None
        of_2 = Weights(None, *passes.quantize_stored(of_2.plain, dtype))
    if is_differentiated and of_13.transposed is None:
        assert of_13.codes is not None
        of_13 = of_13._replace(transposed=passes.transpose_stored(of_13.codes))
    if is_differentiated and of_2.transposed_scales is None:
        assert of_2.codes is not None
        assert of_2.scales is not None
        transposed, columns = fp8_steps.transposed_to_one_scale(of_2.codes, of_2.scales)
        of_2 = of_2._replace(transposed=transposed, transposed_scales=columns)
    return of_13, of_2
