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

import functools
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
    gradients of tokens are NaN on all ranks. None, without ``counts_rows``: enough for any choice of experts."""
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


def _gather(sent: Tensor, group: ProcessGroup, is_async: bool) -> Pending:
    """Begin to gather rows of all ranks: (T, ...) -> (ranks * T, ...)."""
    received = sent.new_empty(dist.get_world_size(group) * sent.shape[0], *sent.shape[1:])
    return _begin(_all_gather, received, sent, group, is_async)


def _send_back(sent: Tensor, group: ProcessGroup, is_async: bool) -> Pending:
    """Begin to give each rank its rows: (ranks * T, ...) -> (ranks * T, ...), of which those of rank r come from it."""
    return _begin(dist.all_to_all_single, torch.empty_like(sent), sent, group, is_async)


def _begin(
    transfer: Callable[..., Any], received: Tensor, sent: Tensor, group: ProcessGroup, is_async: bool
) -> Pending:
    """``is_async``: on a stream of its own, for work that follows; else on the current one, in less host time."""
    work = None
    if sent.numel():  # bytes: neither NCCL nor gloo needs to know FP8
        work = transfer(received.view(torch.uint8), sent.view(torch.uint8), group=group, async_op=is_async)

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


def _scales_of_gradients(received: Tensor, offs: Tensor, M: int, T: int, padded: int) -> Tensor:
    """Return scales by row of what was received, (S,); NaN if the experts of this rank got more than M rows."""
    scales = received.new_empty(received.shape[0], dtype=torch.float32)
    if not _is_plain(received):
        _unpack((received, offs, scales, None, None), T, padded, 0, M, 1)
    elif T:
        words = _words_of_ranks(received, len(received) // padded, T)
        scales.view(-1, padded)[:, :T] = words[:, :T] if offs[-1] <= M else torch.nan
    return scales


def _arrange(received: Tensor, T: int, padded: int, top_k: int, first: int, experts: int) -> list[Tensor]:
    """Return scales by row of what was received, and the order of rows of the experts from ``first`` on."""
    S = received.shape[0]
    scales, weights = (received.new_empty(*shape, dtype=torch.float32) for shape in ((S,), (S, top_k)))
    ids = received.new_empty(S, top_k, dtype=torch.int32)
    if not _is_plain(received):
        _unpack((received, None, scales, ids, weights), T, padded, first, 0, top_k)
    elif S:
        words, shape = _words_of_ranks(received, S // padded, T), (-1, T, top_k)
        scales.view(-1, padded)[:, :T] = words[:, :T]
        of_ids, of_weights = words[:, T : T + 2 * T * top_k].chunk(2, 1)
        ids.fill_(-1).view(-1, padded, top_k)[:, :T] = of_ids.view(torch.int32).view(shape) - first
        weights.view(-1, padded, top_k)[:, :T] = of_weights.view(shape)
    return [scales, *expert_sort.SPEC(ids, weights, experts)]


def _unpack(tensors: Sequence[Maybe], T: int, padded: int, first: int, M: int, top_k: int) -> None:
    received, offs, *_ = tensors
    assert received is not None
    S, G = received.shape[0], 0 if offs is None else offs.shape[0]
    if programs := -(-S * top_k // WORDS["BLOCK_SIZE"]):
        sizes = S, T, padded, first, M, G, received.shape[1] // 4
        launch_kernel(unpack_kernel, programs, (received.view(torch.int32), *tensors[1:]), sizes, (top_k,), WORDS)


# Sums of the rows of a rank, and over ranks


@triton.jit(do_not_specialize=["T", "padded", "sent", "M", "G"])
def sum_local_rows_kernel(
    rows_ptr: tl.tensor,  # (M, K), row-major
    row_of_ptr: tl.tensor,  # (ranks * padded, TOP_K)
    offs_ptr: tl.tensor,  # (G,)
    of_rows_ptr: tl.tensor,  # (M,), or None
    out_ptr: tl.tensor,  # (ranks * sent, K), row-major
    words_ptr: tl.tensor,  # (ranks * sent, WORDS): out, as float32
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
    end = tl.load(offs_ptr + G - 1)
    start = tl.where(end > M, float("nan"), 0.0)
    end = tl.minimum(end, M)
    total = tl.zeros((BLOCK_SIZE_K,), tl.float32) + start
    for k in tl.static_range(TOP_K):
        row = tl.load(row_of_ptr + (rank * padded + token) * TOP_K + k)
        at = rows_ptr + row.to(tl.int64) * K + columns
        total += tl.load(at, mask=(columns < K) & (row < end), other=0.0).to(tl.float32)
        if of_rows_ptr is not None:
            value = start + tl.load(of_rows_ptr + row, mask=(row < end) & (part == 0), other=0.0)
            word = (rank * sent + T).to(tl.int64) * WORDS + token * TOP_K + k
            tl.store(words_ptr + word, value, mask=part == 0)
    to_ptr = out_ptr + (rank * sent + token).to(tl.int64) * K
    tl.store(to_ptr + columns, total.to(out_ptr.dtype.element_ty), mask=columns < K)


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
    if not S:
        return out
    if not _is_plain(rows):
        sizes = T, padded, sent, M, offs.shape[0], K, K * size // 4
        tensors = rows, row_of, offs, of_rows, out, out.view(torch.float32)
        programs = ranks * T * -(-K // SUMS["BLOCK_SIZE_K"])
        launch_kernel(sum_local_rows_kernel, programs, tensors, sizes, (top_k,), SUMS)
        return out
    row_of = row_of.view(ranks, padded, top_k)[:, :T].reshape(-1, top_k)
    start = 0.0 if offs[-1] <= M else torch.nan
    total, values = torch.full((ranks * T, K), start), torch.full(row_of.shape, start)
    is_here = row_of < min(int(offs[-1]), M)
    for k in range(top_k):
        tokens = is_here[:, k].nonzero().view(-1)
        here = row_of[tokens, k].long()
        total.index_add_(0, tokens, rows[here].float())
        if of_rows is not None:
            values[tokens, k] += of_rows[here]
    out.view(ranks, sent, K)[:, :T] = total.view(ranks, T, K)
    if of_rows is not None:
        _words_of_ranks(out, ranks, T)[:, : T * top_k] = values.view(ranks, -1)
    return out


@triton.jit(do_not_specialize=["ranks", "T", "sent"])
def sum_of_ranks_kernel(
    received_ptr: tl.tensor,  # (ranks * sent, K), row-major
    words_ptr: tl.tensor,  # (ranks * sent, WORDS): received, as float32
    out_ptr: tl.tensor,  # (tokens, K), row-major
    values_ptr: tl.tensor,  # (tokens, TOP_K), or None
    ranks: tl.tensor,
    T: tl.tensor,
    sent: tl.tensor,
    K: tl.tensor,
    WORDS: tl.tensor,
    TOP_K: tl.constexpr,
    BINS: tl.constexpr,  # a power of two, at least TOP_K
    BLOCK_SIZE_K: tl.constexpr,
) -> None:
    """Sum what ranks sent for one token in BLOCK_SIZE_K columns, in their order; its first program also sums words."""
    across = tl.cdiv(K, BLOCK_SIZE_K)
    token, part = tl.program_id(0) // across, tl.program_id(0) % across
    columns, k = part * BLOCK_SIZE_K + tl.arange(0, BLOCK_SIZE_K), tl.arange(0, BINS)
    total, value = tl.zeros((BLOCK_SIZE_K,), tl.float32), tl.zeros((BINS,), tl.float32)
    for rank in range(ranks):
        row = (rank * sent).to(tl.int64)
        total += tl.load(received_ptr + (row + token) * K + columns, mask=columns < K, other=0.0).to(tl.float32)
        if values_ptr is not None:
            at = words_ptr + (row + T) * WORDS + token * TOP_K + k
            value += tl.load(at, mask=(k < TOP_K) & (part == 0), other=0.0)
    tl.store(out_ptr + token.to(tl.int64) * K + columns, total.to(out_ptr.dtype.element_ty), mask=columns < K)
    if values_ptr is not None:
        tl.store(values_ptr + token * TOP_K + k, value, mask=(k < TOP_K) & (part == 0))


def _sum_of_ranks(received: Tensor, ranks: int, own: int, T: int, top_k: int) -> list[Tensor]:
    """Return the sum over ranks for each of this rank's tokens, bfloat16, and that of ``top_k`` words of each."""
    (S, K), sent = received.shape, received.shape[0] // ranks
    out = received.new_empty(own, K, dtype=torch.bfloat16)
    values = received.new_empty(own, top_k, dtype=torch.float32)
    if not S:
        return [out, values]
    if _is_plain(received):
        out.copy_(sum(part.float() for part in received.view(ranks, sent, K)[:, :own]))
        words = _words_of_ranks(received, ranks, T)[:, : own * top_k]
        return [out, values.copy_(words.sum(0).view(own, top_k))]
    tensors = received, received.view(torch.float32), out, values if top_k else None
    sizes = ranks, T, sent, K, K * received.element_size() // 4
    constants = top_k, 1 << max(top_k - 1, 0).bit_length()
    if programs := own * -(-K // SUMS["BLOCK_SIZE_K"]):
        launch_kernel(sum_of_ranks_kernel, programs, tensors, sizes, constants, SUMS)
    return [out, values]


# Steps


def _quantize(w: Tensor, one_scale: bool, is_differentiated: bool, float8_dtype: Dtype) -> list[Tensor]:
    """Return the fields of weights past the first, with transposed values if there is a backward pass."""
    dtype = fp8_dtype_for(w.device, float8_dtype)
    if is_differentiated:
        return [*fp8_steps.quantized_both_ways(w, one_scale, dtype)]
    return [*passes.quantize_stored(w, dtype)]


def _experts(
    q: Tensor,
    scales: Tensor,
    rows_: Sequence[Tensor],
    row_weights: Tensor,
    of_13: Sequence[Tensor],
    of_2: Sequence[Tensor],
    row_of: Tensor,
    offs: Tensor,
    T: int,
    padded: int,
    layout: str,
    is_differentiated: bool,
    sums: Dtype,
) -> list[Tensor]:
    """Return the sums of each token's rows; FP8 values and scales of the activation, and those of gate and up."""
    order, (q_13, scales_13) = Rows(*rows_), of_13
    y = gathered_rows.SPEC(q, q_13.mT, order.offs, order.token_of_row, scales, scales_13)[0]
    gate = None, None, row_weights, "swiglu", layout, is_differentiated, q.dtype
    q_h, scales_h, q_y, scales_y = swiglu_rowwise.SPEC(y, order.offs, *gate)
    del y
    rows = passes.multiply((q_h, scales_h), (of_2[0], of_2[1]), order.offs)
    return [_sum_local_rows(rows, None, row_of, offs, T, padded, sums), q_h, scales_h, q_y, scales_y]


def _gate_gradient(
    received: Tensor,
    rows_: Sequence[Tensor],
    row_weights: Tensor,
    of_2: Sequence[Tensor],
    of_y: Sequence[Tensor],
    scales_13: Tensor,
    offs: Tensor,
    T: int,
    padded: int,
    layout: str,
) -> list[Tensor]:
    """Return scales of the output's gradient; FP8 values and scales of that of gate and up; gradients of weights."""
    order, (transposed, columns), (q_y, scales_y) = Rows(*rows_), of_2, of_y
    scales = _scales_of_gradients(received, offs, row_weights.shape[0], T, padded)
    dh = gathered_rows.SPEC(received, transposed.mT, order.offs, order.token_of_row, scales, columns)[0]
    gate = scales_13, scales_y, None, row_weights, "swiglu", layout, False, received.dtype
    return [scales, *swiglu_gradient.SPEC(q_y, dh, order.offs, *gate)[:3]]


def _input_gradient(
    q: Tensor,
    scales: Tensor,
    of_rows: Tensor,
    transposed: Tensor,
    row_of: Tensor,
    ends: Tensor,
    offs: Tensor,
    T: int,
    padded: int,
    sums: Dtype,
) -> Tensor:
    """Return the sums of gradients of each token on this rank, and those of its weights."""
    E, _, K = transposed.shape
    rows = passes.multiply((q, scales), (transposed, scales.new_ones(E, 1, K)), ends)
    return _sum_local_rows(rows, of_rows, row_of, offs, T, padded, sums)


outgoing = step("moe_parallel_outgoing", _outgoing)
arrange = step("moe_parallel_arrange", _arrange)
quantize = step("moe_parallel_weights", _quantize)
experts_of_rows = step("moe_parallel_experts", _experts)
gate_gradient = step("moe_parallel_gate_gradient", _gate_gradient)
input_gradient = step("moe_parallel_input_gradient", _input_gradient)
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
        tokens = _gather(outgoing(x, ids, weights, T, padded, dtype), group, True)
        of_2 = _codes(Weights(w2, *codes_2), True, is_differentiated, dtype)  # while tokens travel
        q = tokens()
        scales, offs, row_of, token_of_row, row_weights = arrange(q, T, padded, top_k, dist.get_rank(group) * E, E)
        M = _reserved_rows(ranks, offs, T * top_k, size)
        of_13 = _codes(Weights(w13, *codes_13), False, is_differentiated, dtype)  # while the host waits
        rows = Rows(offs if ranks.capacity is None else offs.clamp(max=M()), token_of_row[: M()])
        row_weights = row_weights[: M()]
        codes_of_13: Any = [of_13.codes, of_13.scales]
        codes_of_2: Any = [of_2.codes, of_2.scales]
        sizes = T, padded, layout, is_differentiated, ranks.sums
        sums, *saved = experts_of_rows(q, scales, rows, row_weights, codes_of_13, codes_of_2, row_of, offs, *sizes)
        if is_differentiated:
            of_weights = of_13.scales, of_13.transposed, of_2.transposed, of_2.transposed_scales
            ctx.save_for_backward(*rows, offs, row_of, row_weights, q, scales, *saved, *of_weights)
            ctx.ranks, ctx.layout, ctx.sizes = ranks, layout, (T, padded)
            ctx.are_transposed = not w13.is_contiguous(), not w2.is_contiguous()
            ctx.dtypes = x.dtype, w13.dtype, w2.dtype, weights.dtype
        del saved, q, rows
        return sum_of_ranks(_send_back(sums, group, False)(), size, own, T, 0)[0]

    @staticmethod
    @differentiable_once("expert_parallel_moe")
    def backward(ctx: Any, grad: Tensor) -> tuple[Maybe, ...]:
        needs_x, needs_13, needs_2, needs_weights, *others = ctx.needs_input_grad
        group, (T, padded) = ctx.ranks.group, ctx.sizes
        ends, tokens, offs, row_of, row_weights, q_x, scales_x, q_h, scales_h, *of_y, scales_13 = ctx.saved_tensors[:12]
        transposed_13, *of_2 = ctx.saved_tensors[12:]
        ctx.maybe_clear_saved_tensors()  # or all live until this function returns
        rows = Rows(ends, tokens)
        d_out = _gather(outgoing(grad.contiguous(), None, None, T, padded, q_x.dtype), group, False)()
        scales, q, scales_q, of_rows = gate_gradient(
            d_out, rows, row_weights, of_2, of_y, scales_13, offs, T, padded, ctx.layout
        )
        del of_2, of_y
        d_x: Maybe = None
        d_13: Maybe = None
        d_2: Maybe = None
        d_weights: Maybe = None
        sums = None
        if needs_x or needs_weights:
            sizes = T, padded, ctx.ranks.sums
            sent = input_gradient(q, scales_q, of_rows, transposed_13, row_of, ends, offs, *sizes)
            sums = _send_back(sent, group, True)
            del sent
        del transposed_13
        if needs_2:  # while the sums travel
            d_2 = fp8_steps.down_weight_gradient(d_out, scales, q_h, scales_h, rows, ctx.are_transposed[1])
        del q_h, d_out
        if needs_13:
            operands = q, scales_q, scales_13, q_x, scales_x, rows, ctx.are_transposed[0]
            d_13 = fp8_steps.gate_up_weight_gradient(*operands)
        if sums is not None:
            d_x, d_weights = sum_of_ranks(sums(), dist.get_world_size(group), grad.shape[0], T, row_of.shape[1])
        gradients = zip((d_x, d_13, d_2, d_weights), ctx.dtypes, ctx.needs_input_grad[:4], strict=True)
        cast = [None if grad is None or not needs else grad.to(dtype) for grad, dtype, needs in gradients]
        return *cast, *[None] * len(others)


_apply: Callable[..., Tensor] = _ExpertParallel.apply


def _reserved_rows(ranks: ExpertGroup, offs: Tensor, mean: int, size: int) -> Callable[[], int]:
    """Return what returns the number of rows to reserve memory for; with ``counts_rows`` it waits for the device."""
    most = size * mean
    if ranks.capacity is not None:
        most = min(most, math.ceil(ranks.capacity * mean))
    if not ranks.counts_rows:
        return lambda: most
    count, copied = offs[-1:], None
    if offs.is_cuda:
        count = torch.empty(1, dtype=offs.dtype, pin_memory=True).copy_(count, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

    @functools.cache
    def counted() -> int:
        if copied is not None:
            copied.synchronize()
        unit = max(mean // 32, 1)  # of few sizes, blocks are used again, and steps are replayed
        return min(-(-int(count) // unit) * unit, most)

    return counted


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
