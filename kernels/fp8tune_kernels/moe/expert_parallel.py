"""Expert parallelism: a layer whose experts are divided among the ranks of a process group, and which sends FP8.

Rank r of R holds the experts from ``r * E`` to ``(r + 1) * E - 1``. A step has four transfers:

    forward   tokens       every rank gets those of all ranks: FP8 values, and the scale, ids and weights of each
              sums         of the rows of a rank's own experts, bfloat16, go to the token's rank, which adds R of them
    backward  gradients    of the output, as tokens: FP8 values and scales
              sums         of gradients of tokens, as above, and the gradients of weights

A token that goes to several experts of a rank travels once, and so does the sum of what they return: with 8 of 128
experts a token needs 3.6 of 4 ranks on average. So every rank gets every token, and no split depends on the routing. A
token sends 6 bytes a column to each other rank, where rows of bfloat16 send 8 bytes for each of its experts there.

A transfer is one matrix, with a row for each token of a rank. *Words* of 4 bytes, such as scales, follow in the memory
of further rows. So a token is a row of what was received, and GEMMs gather rows from there: only words are copied. Rows
of experts lie in the order of one device, by expert and then by token. All but the sums are the bytes of one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from .. import interpreter
from ..gemm import passes
from ..gemm.gathered_weights import GatheredWeights
from ..gemm.shards import PLAIN
from ..quantize import rowwise_2d, swiglu_gradient, swiglu_rowwise
from ..quantize.gated import LAYOUTS
from ..runtime.checks import check_matrix, fp8_dtype_for
from ..runtime.launching import launch_kernel
from ..runtime.ops import differentiable_once, step
from . import expert_sort, fp8_steps, gathered_rows
from .expert_sort import check_choice
from .expert_weights import ExpertWeights, check_stored, of_gathered
from .fp8_steps import Dtype, Maybe, Rows, Weights

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["ExpertGroup", "expert_parallel_moe"]

interpreter.install()

SUMS = {"BLOCK_SIZE_K": 1024, "num_warps": 4}
WORDS = {"BLOCK_SIZE": 512, "num_warps": 4}

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""From torch 2.13 on under the first name, with a warning under the second."""


@dataclass(frozen=True)
class ExpertGroup:
    """Ranks that divide the experts of a layer among them; all have the same settings."""

    group: ProcessGroup
    tokens: int | None = None
    """The most tokens of a rank. None: all ranks have as many as this one."""
    counts_rows: bool = False
    """Reserve memory for about as many rows as this rank's experts get: the host waits for their number."""
    capacity: float | None = None
    """Reserve memory for so many times the mean number of rows. If the experts of any rank get more, outputs and
    gradients of tokens are NaN on all ranks, and gradients of weights on that rank. None, without ``counts_rows``:
    enough for any choice of experts."""
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
    _check(x, of_13, of_2, choice[0], ranks, layout)
    return _apply(x, of_13.plain, of_2.plain, choice[1], choice[0], ranks, layout, of_13[1:], of_2[1:])


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


def _check(x: Tensor, of_13: Weights, of_2: Weights, ids: Tensor, ranks: ExpertGroup, layout: str) -> None:
    """Raise ValueError for arguments that do not fit, naming the argument."""
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
    if ranks.capacity is not None and (ranks.counts_rows or ranks.capacity <= 0):
        raise ValueError(f"capacity must be positive, and None with counts_rows, got {ranks.capacity}")


# Transfers

Pending = Callable[[], Tensor]
"""A transfer under way; returns what it brings, in the order of the current stream."""


def _begin(
    collective: Callable[..., Any], sent: Tensor, times: int, group: ProcessGroup, *, is_async: bool = True
) -> Pending:
    """Begin a transfer of rows, (S, K), which brings (times * S, K).

    ``is_async``: on a stream of its own, beside work that follows; else on the current one, in less host time.
    """
    received, work = sent.new_empty(times * sent.shape[0], sent.shape[1]), None
    if sent.numel():  # bytes: neither NCCL nor gloo needs to know FP8
        work = collective(received.view(torch.uint8), sent.view(torch.uint8), group=group, async_op=is_async)

    def wait() -> Tensor:
        if work is not None:
            work.wait()
        return received

    return wait


def _rows_with_words(tokens: int, words: int, row_bytes: int) -> int:
    """Return the rows of one rank in a transfer: of tokens, and of memory for ``words`` a token."""
    return tokens - (-4 * tokens * words // row_bytes)


def _words_of_ranks(matrix: Tensor, ranks: int, tokens: int) -> Tensor:
    """Return the view (ranks, words) of what follows the tokens of each rank in a transfer, as float32."""
    words = matrix.view(torch.float32)
    return words.view(ranks, -1)[:, tokens * words.shape[1] :]


def _is_plain(tensor: Tensor) -> bool:
    """Return True where plain torch does what kernels do elsewhere."""
    return tensor.is_cpu and not interpreter.INTERPRETED


@triton.jit(do_not_specialize=["own", "pairs", "tokens"])  # they change with the batch: none may recompile anything
def pack_kernel(
    ids_ptr: tl.tensor,  # (own,)
    weights_ptr: tl.tensor,  # (own,)
    words_ptr: tl.tensor,  # int32: scales of tokens, then the ids of pairs, and then their weights
    own: tl.tensor,
    pairs: tl.tensor,
    tokens: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """Write ids and weights; ids of no expert for tokens that this rank lacks."""
    places = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    ids = tl.load(ids_ptr + places, mask=places < own, other=-1)
    ids = tl.minimum(tl.maximum(ids, -1), 0x7FFFFFFF).to(tl.int32)
    weights = tl.load(weights_ptr + places, mask=places < own, other=0.0).to(tl.float32)
    at = words_ptr + tokens + places
    tl.store(at, ids, mask=places < pairs)
    tl.store(at + pairs, weights.to(tl.int32, bitcast=True), mask=places < pairs)


def _outgoing(x: Tensor, ids: Maybe, weights: Maybe, tokens: int, rows: int, float8_dtype: Dtype) -> Tensor:
    """Return what other ranks get of tokens, (rows, K): FP8 values, then the words that ``pack_kernel`` names."""
    (own, K), dtype = x.shape, fp8_dtype_for(x.device, float8_dtype)
    out = x.new_empty(rows, K, dtype=dtype)
    if not tokens:
        return out
    words = out[tokens:].view(torch.int32).view(-1)
    rowwise_2d.SPEC(x, dtype, True, outputs=(out[:own], words[:own].view(torch.float32).view(own, 1)))
    if ids is None or weights is None:
        return out
    pairs = tokens * ids.shape[1]
    if _is_plain(x):
        of_ids, of_weights = words[tokens : tokens + 2 * pairs].view(2, pairs)
        of_ids.fill_(-1)[: ids.numel()] = ids.view(-1).clamp(-1, 0x7FFFFFFF)
        of_weights.view(torch.float32)[: ids.numel()] = weights.view(-1)
    else:
        programs = -(-pairs // WORDS["BLOCK_SIZE"])
        launch_kernel(pack_kernel, programs, (ids, weights, words), (ids.numel(), pairs, tokens), (), WORDS)
    return out


@triton.jit(do_not_specialize=["S", "T", "padded", "first", "M", "G"])
def unpack_kernel(
    words_ptr: tl.tensor,  # (S, WORDS), int32: what was received
    offs_ptr: tl.tensor,  # (G,), or None
    scales_ptr: tl.tensor,  # (S,)
    ids_ptr: tl.tensor,  # (S, TOP_K), or None
    weights_ptr: tl.tensor,  # (S, TOP_K), or None
    S: tl.tensor,
    T: tl.tensor,  # tokens of a rank
    padded: tl.tensor,  # rows of a rank
    first: tl.tensor,  # expert of this rank
    M: tl.tensor,
    G: tl.tensor,
    WORDS: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """Copy the words of all ranks; rows that are no token choose no expert. Scales are NaN if M rows are too few."""
    pairs = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    row, k = pairs // TOP_K, pairs % TOP_K
    token, is_row = row % padded, row < S
    is_token = is_row & (token < T)
    words = words_ptr + (row - token + T).to(tl.int64) * WORDS
    scale = tl.load(words + token, mask=is_token & (k == 0), other=0).to(tl.float32, bitcast=True)
    if offs_ptr is not None:
        scale = tl.where(tl.load(offs_ptr + G - 1) > M, float("nan"), scale)
    tl.store(scales_ptr + row, scale, mask=is_row & (k == 0))
    if ids_ptr is not None:
        at = words + T + token * TOP_K + k
        tl.store(ids_ptr + pairs, tl.load(at, mask=is_token, other=-1) - first, mask=is_row)
        weights = tl.load(at + T * TOP_K, mask=is_token, other=0).to(tl.float32, bitcast=True)
        tl.store(weights_ptr + pairs, weights, mask=is_row)


def _unpacked(received: Tensor, offs: Maybe, M: int, T: int, padded: int, top_k: int, first: int) -> list[Tensor]:
    """Return scales, ids and weights by row of what was received: (S,), (S, top_k) and (S, top_k)."""
    S = received.shape[0]
    scales, weights = (received.new_empty(shape, dtype=torch.float32) for shape in ((S,), (S, top_k)))
    ids = received.new_empty(S, top_k, dtype=torch.int32)
    if S and _is_plain(received):
        words, shape = _words_of_ranks(received, S // padded, T), (S // padded, padded, top_k)
        scales.view(shape[:2])[:, :T] = words[:, :T] if offs is None or offs[-1] <= M else torch.nan
        of_ids, of_weights = words[:, T : T + 2 * T * top_k].unflatten(1, (2, T, top_k)).unbind(1)
        ids.fill_(-1).view(shape)[:, :T] = of_ids.view(torch.int32) - first
        weights.view(shape)[:, :T] = of_weights
    elif programs := -(-S * max(top_k, 1) // WORDS["BLOCK_SIZE"]):
        tensors = received.view(torch.int32), offs, scales, *((ids, weights) if top_k else (None, None))
        sizes = S, T, padded, first, M, 0 if offs is None else offs.shape[0], received.shape[1] // 4
        launch_kernel(unpack_kernel, programs, tensors, sizes, (max(top_k, 1),), WORDS)
    return [scales, ids, weights]


def _arrange(received: Tensor, T: int, padded: int, top_k: int, first: int, experts: int) -> list[Tensor]:
    """Return scales by row of what was received, and the order of rows of the experts from ``first`` on."""
    scales, *choice = _unpacked(received, None, 0, T, padded, top_k, first)
    return [scales, *expert_sort.SPEC(*choice, experts)]


# Sums of the rows of a rank, and over ranks


@triton.jit(do_not_specialize=["T", "padded", "sent", "M", "G"])
def sum_rows_kernel(
    rows_ptr: tl.tensor,  # (M, K), row-major
    row_of_ptr: tl.tensor,  # (ranks * padded, TOP_K); None: the rows of a token are ``sent`` apart
    offs_ptr: tl.tensor,  # (G,), or None beside it
    of_rows_ptr: tl.tensor,  # (M,), or None
    out_ptr: tl.tensor,  # (ranks * sent, K), row-major
    words_ptr: tl.tensor,  # (ranks * sent, WORDS): out, as float32; or None beside None
    T: tl.tensor,
    padded: tl.tensor,
    sent: tl.tensor,
    M: tl.tensor,
    G: tl.tensor,
    K: tl.tensor,
    WORDS: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
) -> None:
    """Sum the rows of one token in BLOCK_SIZE_K columns; those past the last group's are of other ranks.

    The first program of a token writes values of its rows behind the tokens of its rank. NaN if M rows are too few.
    """
    across = tl.cdiv(K, BLOCK_SIZE_K)
    number, part = tl.program_id(0) // across, tl.program_id(0) % across
    rank, token = number // T, number % T
    columns = part * BLOCK_SIZE_K + tl.arange(0, BLOCK_SIZE_K)
    end, start = M, 0.0
    if offs_ptr is not None:
        last = tl.load(offs_ptr + G - 1)
        end, start = tl.minimum(last, M), tl.where(last > M, float("nan"), 0.0)
    total = tl.zeros((BLOCK_SIZE_K,), tl.float32) + start
    for k in tl.static_range(TOP_K):
        row = number + k * sent
        if row_of_ptr is not None:
            row = tl.load(row_of_ptr + (rank * padded + token) * TOP_K + k)
        at = rows_ptr + row.to(tl.int64) * K + columns
        total += tl.load(at, mask=(columns < K) & (row < end), other=0.0).to(tl.float32)
        if of_rows_ptr is not None:
            value = start + tl.load(of_rows_ptr + row, mask=(row < end) & (part == 0), other=0.0)
            word = (rank * sent + T).to(tl.int64) * WORDS + token * TOP_K + k
            tl.store(words_ptr + word, value, mask=part == 0)
    to_ptr = out_ptr + (rank * sent + token).to(tl.int64) * K
    tl.store(to_ptr + columns, total.to(out_ptr.dtype.element_ty), mask=columns < K)


def _launch_sums(tokens: int, tensors: Sequence[Maybe], sizes: tuple[int, ...], K: int, top_k: int) -> None:
    if programs := tokens * -(-K // SUMS["BLOCK_SIZE_K"]):
        launch_kernel(sum_rows_kernel, programs, tensors, sizes, (top_k,), SUMS)


def _sum_local_rows(
    rows: Tensor, of_rows: Maybe, row_of: Tensor, offs: Tensor, T: int, padded: int, dtype: Dtype
) -> Tensor:
    """Return the sum of each token's rows on this rank, zeros for a token that has none, as a transfer to all ranks.

    ``of_rows``, (M,): values that follow as words, (T, top_k) of each rank; zeros where a row is on another rank.
    """
    assert dtype is not None
    (M, K), (S, top_k), size = rows.shape, row_of.shape, dtype.itemsize
    ranks, sent = S // max(padded, 1), _rows_with_words(T, 0 if of_rows is None else top_k, K * size)
    out = rows.new_empty(ranks * sent, K, dtype=dtype)
    if not _is_plain(rows):
        tensors = rows, row_of, offs, of_rows, out, None if of_rows is None else out.view(torch.float32)
        _launch_sums(ranks * T, tensors, (T, padded, sent, M, offs.shape[0], K, K * size // 4), K, top_k)
    elif S:
        start, row_of = 0.0 if offs[-1] <= M else torch.nan, row_of.view(ranks, padded, top_k)[:, :T].flatten(0, 1)
        total, values = torch.full((ranks * T, K), start), torch.full(row_of.shape, start)
        for k in range(top_k):
            tokens = (row_of[:, k] < offs[-1].clamp(max=M)).nonzero().view(-1)
            here = row_of[tokens, k].long()
            total.index_add_(0, tokens, rows[here].float())
            values[tokens, k] += 0.0 if of_rows is None else of_rows[here]
        out.view(ranks, sent, K)[:, :T] = total.view(ranks, T, K)
        if of_rows is not None:
            _words_of_ranks(out, ranks, T)[:, : T * top_k] = values.view(ranks, -1)
    return out


def _sum_of_ranks(received: Tensor, ranks: int, tokens: int) -> Tensor:
    """Return the sum over ranks of what they sent for each of this rank's first tokens, bfloat16, in their order."""
    (S, K), out = received.shape, received.new_empty(tokens, received.shape[1], dtype=torch.bfloat16)
    if _is_plain(received):
        return out.copy_(sum(part.float() for part in received.view(ranks, -1, K)[:, :tokens]))
    sizes = tokens, 0, S // ranks, S, 0, K, 0
    _launch_sums(tokens, (received, None, None, None, out, None), sizes, K, ranks)
    return out


# Steps


def _quantize(w: Tensor, one_scale: bool, is_differentiated: bool, float8_dtype: Dtype) -> list[Tensor]:
    """Return the fields of weights past the first, with transposed values if there is a backward pass."""
    dtype = fp8_dtype_for(w.device, float8_dtype)
    if is_differentiated:
        return [*fp8_steps.quantized_both_ways(w, one_scale, dtype)]
    return [*passes.quantize_stored(w, dtype)]


def _activate(
    q: Tensor, scales: Tensor, w: Tensor, of_w: Tensor, order: Sequence[Tensor], layout: str, is_differentiated: bool
) -> list[Tensor]:
    """Return FP8 values and scales of the activation, and those of gate and up; ``w``: w13."""
    ends, tokens, row_weights, *_ = order
    y = gathered_rows.SPEC(q, w.mT, ends, tokens, scales, of_w)[0]
    gate = None, None, row_weights, "swiglu", layout, is_differentiated, q.dtype
    return list(swiglu_rowwise.SPEC(y, ends, *gate))


def _gate_gradient(
    received: Tensor,
    order: Sequence[Tensor],
    of_2: Sequence[Tensor],
    of_y: Sequence[Tensor],
    scales_13: Tensor,
    T: int,
    padded: int,
    layout: str,
) -> list[Tensor]:
    """Return scales of the output's gradient; FP8 values and scales of that of gate and up; gradients of weights."""
    (ends, tokens, row_weights, _, offs), (transposed, columns), (q_y, scales_y) = order, of_2, of_y
    scales = _unpacked(received, offs, row_weights.shape[0], T, padded, 0, 0)[0]
    dh = gathered_rows.SPEC(received, transposed.mT, ends, tokens, scales, columns)[0]
    gate = scales_13, scales_y, None, row_weights, "swiglu", layout, False, received.dtype
    return [scales, *swiglu_gradient.SPEC(q_y, dh, ends, *gate)[:3]]


def _multiply_and_sum(
    q: Tensor,
    scales: Tensor,
    w: Tensor,
    of_w: Maybe,
    of_rows: Maybe,
    order: Sequence[Tensor],
    T: int,
    padded: int,
    sums: Dtype,
) -> Tensor:
    """Return :func:`_sum_local_rows` of rows times weights, whose scales may be ones."""
    of_w = scales.new_ones(w.shape[0], 1, w.shape[2]) if of_w is None else of_w
    rows = passes.multiply((q, scales), (w, of_w), order[0])
    return _sum_local_rows(rows, of_rows, order[3], order[4], T, padded, sums)


outgoing = step("moe_parallel_outgoing", _outgoing)
arrange = step("moe_parallel_arrange", _arrange)
quantize = step("moe_parallel_weights", _quantize)
activate = step("moe_parallel_activate", _activate)
gate_gradient = step("moe_parallel_gate_gradient", _gate_gradient)
multiply_and_sum = step("moe_parallel_multiply_and_sum", _multiply_and_sum)
sum_of_ranks = step("moe_parallel_sum_of_ranks", _sum_of_ranks)


class _ExpertParallel(torch.autograd.Function):
    """``codes``: fields of :class:`.fp8_steps.Weights` past the first."""

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
        group, E, (own, K), top_k = ranks.group, w13.shape[0], x.shape, ids.shape[1]
        size, T = dist.get_world_size(group), own if ranks.tokens is None else ranks.tokens
        padded = _rows_with_words(T, 1 + 2 * top_k, K)
        is_differentiated = any(ctx.needs_input_grad[:4])
        codes = codes_13[0] if codes_2[0] is None else codes_2[0]
        dtype = fp8_dtype_for(x.device, None if codes is None else codes.dtype)
        tokens = _begin(_all_gather, outgoing(x, ids, weights, T, padded, dtype), size, group)
        of_2 = _codes(Weights(w2, *codes_2), True, is_differentiated, dtype)  # while tokens travel
        q = tokens()
        scales, offs, row_of, token_of_row, row_weights = arrange(q, T, padded, top_k, dist.get_rank(group) * E, E)
        count = _begin_count(offs) if ranks.counts_rows else None
        of_13 = _codes(Weights(w13, *codes_13), False, is_differentiated, dtype)  # while the host waits
        mean, M, ends = T * top_k, size * T * top_k, offs
        if count is not None:
            unit = max(mean // 32, 1)  # of few sizes, blocks are used again, and steps are replayed
            M = min(-(-count() // unit) * unit, M)
        if ranks.capacity is not None:
            M = min(math.ceil(ranks.capacity * mean), M)
            ends = offs.clamp(max=M)
        order = [ends, token_of_row[:M], row_weights[:M], row_of, offs]
        assert of_13.codes is not None
        assert of_13.scales is not None
        assert of_2.codes is not None
        q_h, scales_h, *of_y = activate(q, scales, of_13.codes, of_13.scales, order, layout, is_differentiated)
        of_13 = of_13._replace(codes=None)  # or it is part of the peak
        sums = multiply_and_sum(q_h, scales_h, of_2.codes, of_2.scales, None, order, T, padded, ranks.sums)
        if is_differentiated:
            of_weights = of_13.scales, of_13.transposed, of_2.transposed, of_2.transposed_scales
            ctx.save_for_backward(*order, q, scales, q_h, scales_h, *of_y, *of_weights)
            ctx.ranks, ctx.layout, ctx.sizes = ranks, layout, (T, padded, size)
            ctx.are_transposed = not w13.is_contiguous(), not w2.is_contiguous()
            ctx.dtypes = x.dtype, w13.dtype, w2.dtype, weights.dtype
        del q_h, of_y, q, order
        return sum_of_ranks(_begin(dist.all_to_all_single, sums, 1, group, is_async=False)(), size, own)

    @staticmethod
    @differentiable_once("expert_parallel_moe")
    def backward(ctx: Any, grad: Tensor) -> tuple[Maybe, ...]:
        needs_x, needs_13, needs_2, needs_weights = ctx.needs_input_grad[:4]
        group, (T, padded, size), own, others = ctx.ranks.group, ctx.sizes, grad.shape[0], ctx.needs_input_grad[4:]
        order, (q_x, scales_x, q_h, scales_h, *of_y) = ctx.saved_tensors[:5], ctx.saved_tensors[5:11]
        scales_13, transposed_13, *of_2 = ctx.saved_tensors[11:]
        ctx.maybe_clear_saved_tensors()  # or all live until this function returns
        rows, top_k = Rows(*order[:2]), order[3].shape[1]
        sent = outgoing(grad.contiguous(), None, None, T, padded, q_x.dtype)
        d_out = _begin(_all_gather, sent, size, group, is_async=False)()
        of_gate = d_out, order, of_2, of_y, scales_13, T, padded, ctx.layout
        scales, q, scales_q, of_rows = gate_gradient(*of_gate)
        del of_gate, of_2, of_y
        d_x: Maybe = None
        d_13: Maybe = None
        d_2: Maybe = None
        d_weights: Maybe = None
        sums = None
        if needs_x or needs_weights:
            sent = multiply_and_sum(q, scales_q, transposed_13, None, of_rows, order, T, padded, ctx.ranks.sums)
            sums = _begin(dist.all_to_all_single, sent, 1, group)
        del sent, transposed_13
        if needs_2:  # while the sums travel
            d_2 = fp8_steps.down_weight_gradient(d_out, scales, q_h, scales_h, rows, ctx.are_transposed[1])
        del q_h, d_out
        if needs_13:
            operands = q, scales_q, scales_13, q_x, scales_x, rows, ctx.are_transposed[0]
            d_13 = fp8_steps.gate_up_weight_gradient(*operands)
        if sums is not None:
            received = sums()
            d_x = sum_of_ranks(received, size, own) if needs_x else None
            if needs_weights:  # one rank has the expert, others sent zeros
                d_weights = _words_of_ranks(received, size, T)[:, : own * top_k].sum(0).view(own, top_k)
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


def _codes(w: Weights, one_scale: bool, is_differentiated: bool, dtype: torch.dtype) -> Weights:
    """Return weights with all FP8 values that the passes read."""
    if w.codes is None or w.scales is None:
        assert w.plain is not None
        return Weights(None, *quantize(w.plain, one_scale, is_differentiated, dtype))
    if is_differentiated and w.transposed is None and not one_scale:
        return w._replace(transposed=passes.transpose_stored(w.codes))
    if is_differentiated and w.transposed_scales is None and one_scale:
        transposed, columns = fp8_steps.transposed_to_one_scale(w.codes, w.scales)
        return w._replace(transposed=transposed, transposed_scales=columns)
    return w
