"""``expert-sort``: order the (token, expert) pairs of a layer by expert, with a stable counting sort.

    offs[e]          end row of expert e's group
    row_of[t, k]     row of the pair (t, k); pairs of one expert keep their order
    token_of_row[r]  token of row r
    row_weights[r]   weight of row r, float32

    ids      (T, TOP_K), int32 or int64: the experts of each token, also one expert several times
    weights  (T, TOP_K), any floating-point dtype

Pairs whose id is negative or past the last expert belong to experts of other devices. Their rows follow ``offs[-1]``.
Three launches: count experts in each block of pairs, add the counts up per expert, place the pairs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .. import interpreter
from ..edges import edge
from ..runtime import declare
from ..runtime.declare import Call, Config, Shape
from ..spec import DeviceLimits, Problem

interpreter.install()

TOP_K = 8
"""Experts a token in problems whose shape does not name ``TOP_K``: that of most models in ``sweeps/models.toml``."""

LEAST_BINS = 256
"""So that few experts, which are checked, run the binary of many, which are timed."""

SCAN_WIDTH = 1024
"""Counts that the second launch adds up at a time."""


@triton.jit
def _expert_of(ids_ptr: tl.tensor, pairs: tl.tensor, N: tl.tensor, E: tl.tensor) -> tl.tensor:
    """Experts of some pairs, int32; E for a pair whose expert is on another device."""
    ids = tl.load(ids_ptr + pairs, mask=pairs < N, other=0)
    return tl.where((ids < 0) | (ids > E), E, ids).to(tl.int32)


@triton.jit(do_not_specialize=["N", "E"])  # N changes every step and must not cause a recompilation
def count_kernel(
    ids_ptr: tl.tensor,  # (N,)
    counts_ptr: tl.tensor,  # (E + 1, blocks)
    N: tl.tensor,
    E: tl.tensor,
    BINS: tl.constexpr,  # a power of two above E + 1
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """Count the pairs of each expert in one block of pairs."""
    block, blocks = tl.program_id(0), tl.num_programs(0)
    pairs = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    experts = tl.where(pairs < N, _expert_of(ids_ptr, pairs, N, E), BINS - 1)
    bins = tl.arange(0, BINS)
    tl.store(counts_ptr + bins * blocks + block, tl.histogram(experts, BINS), mask=bins <= E)


@triton.jit(do_not_specialize=["BLOCKS"])
def scan_kernel(
    counts_ptr: tl.tensor,  # (E + 1, BLOCKS); replaced by the sums of all earlier blocks
    totals_ptr: tl.tensor,  # (E + 1,)
    BLOCKS: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """Add up one expert's counts over all blocks."""
    expert, lanes = tl.program_id(0), tl.arange(0, WIDTH)
    total = tl.cast(0, tl.int32)
    for start in range(0, BLOCKS, WIDTH):
        at = counts_ptr + expert * BLOCKS + start + lanes
        inside = start + lanes < BLOCKS
        counts = tl.load(at, mask=inside, other=0)
        tl.store(at, total + tl.cumsum(counts, 0) - counts, mask=inside)
        total += tl.sum(counts, 0)
    tl.store(totals_ptr + expert, total)


@triton.jit(do_not_specialize=["N", "E"])
def place_kernel(
    ids_ptr: tl.tensor,  # (N,)
    weights_ptr: tl.tensor,  # (N,)
    counts_ptr: tl.tensor,  # (E + 1, blocks): pairs of an expert in earlier blocks
    totals_ptr: tl.tensor,  # (E + 1,)
    offs_ptr: tl.tensor,  # (E,)
    row_of_ptr: tl.tensor,  # (N,)
    token_of_row_ptr: tl.tensor,  # (N,)
    row_weights_ptr: tl.tensor,  # (N,)
    N: tl.tensor,
    E: tl.tensor,
    TOP_K: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """Place the pairs of one block."""
    block, blocks = tl.program_id(0), tl.num_programs(0)
    bins, lanes = tl.arange(0, BINS), tl.arange(0, BLOCK_SIZE)
    totals = tl.load(totals_ptr + bins, mask=bins <= E, other=0)
    ends = tl.cumsum(totals, 0)
    if block == 0:
        tl.store(offs_ptr + bins, ends, mask=bins < E)
    pairs = block * BLOCK_SIZE + lanes
    inside = pairs < N
    experts = _expert_of(ids_ptr, pairs, N, E)
    is_earlier = (experts[None, :] == experts[:, None]) & (lanes[None, :] < lanes[:, None])
    rank = tl.sum(is_earlier.to(tl.int32), 1)
    before = tl.load(counts_ptr + experts * blocks + block, mask=inside, other=0)
    row = tl.gather(ends - totals, experts, 0) + before + rank
    tl.store(row_of_ptr + pairs, row, mask=inside)
    tl.store(token_of_row_ptr + row, pairs // TOP_K, mask=inside)
    weights = tl.load(weights_ptr + pairs, mask=inside, other=0.0)
    tl.store(row_weights_ptr + row, weights.to(tl.float32), mask=inside)


def launch(config: Config, call: Call) -> None:
    """Launch three kernels; for no pairs, fill ``offs`` with zeros."""
    if not call.M:
        call.offs.zero_()
        return
    blocks, E = -(-call.M // config["BLOCK_SIZE"]), call.G
    counts, totals = call.offs.new_empty(E + 1, blocks), call.offs.new_empty(E + 1)
    bins = max(LEAST_BINS, 1 << (E + 1).bit_length())  # also holds other devices, and lanes past the last pair
    call.run(count_kernel, blocks, config, counts=counts, N=call.M, E=E, BINS=bins)
    call.run(scan_kernel, E + 1, {"num_warps": 4}, totals=totals, BLOCKS=blocks, WIDTH=SCAN_WIDTH)
    call.run(place_kernel, blocks, config)


def reference(call: Call) -> None:
    """Sort in plain torch."""
    pairs, E = call.ids.reshape(-1), call.experts
    local, order = torch.where((pairs < 0) | (pairs >= E), E, pairs).sort(stable=True)
    last = torch.arange(E, dtype=local.dtype, device=call.device)
    rows = torch.arange(len(order), dtype=torch.int32, device=call.device)
    call.row_of.view(-1).scatter_(0, order, rows)
    call.offs.copy_(torch.searchsorted(local, last, right=True))
    call.token_of_row.copy_(order // call.TOP_K)
    call.row_weights.copy_(call.weights.reshape(-1)[order])


def inputs(problem: Problem, device: str) -> dict[str, Any]:
    """Return random arguments. With ``absent`` in the shape, some ids are past the last expert, or -1."""
    experts, top_k = problem.shape["G"], problem.shape.get("TOP_K", TOP_K)
    shape = (-(-problem.shape["M"] // top_k), top_k)
    if torch.device(device).type == "meta":
        ids, weights = torch.empty(shape, dtype=torch.int32, device=device), torch.empty(shape, device=device)
        return {"ids": ids, "weights": weights, "experts": experts}
    generator = torch.Generator(device).manual_seed(problem.seed)
    least, most = (-1, experts + 2) if problem.shape.get("absent") else (0, experts)
    ids = torch.randint(least, most, shape, dtype=torch.int32, device=device, generator=generator)
    return {"ids": ids, "weights": torch.randn(shape, device=device, generator=generator), "experts": experts}


def invalid(config: Config, shape: Shape, limits: DeviceLimits) -> str | None:
    """Return the hardware reason why a config cannot pay, or None."""
    threads = config["num_warps"] * limits.warp_size
    if threads > limits.max_threads_per_block:
        return f"{threads} threads a block, {limits.arch} has at most {limits.max_threads_per_block}"
    return None


def check_choice(ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Raise ValueError unless ids and weights are the experts of tokens and their weights."""
    check_ids(ids)
    if weights.shape != ids.shape or not weights.is_floating_point() or not weights.is_contiguous():
        layout = f"{weights.dtype} of shape {tuple(weights.shape)}, strides {weights.stride()}"
        raise ValueError(f"topk_weights must be contiguous floating-point values {tuple(ids.shape)}, got {layout}")
    if weights.device != ids.device:
        raise ValueError(f"topk_weights must be on {ids.device} like topk_ids, got {weights.device}")


def check_ids(ids: torch.Tensor) -> None:
    """Raise ValueError unless ids name experts for each token."""
    if ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64) or not ids.is_contiguous() or not ids.shape[1]:
        layout = f"{ids.dtype} of shape {tuple(ids.shape)}, strides {ids.stride()}"
        raise ValueError(f"topk_ids must be contiguous int32 or int64 (T, top_k), got {layout}")


def check(ids: torch.Tensor, weights: torch.Tensor, experts: int) -> None:
    """Raise ValueError for arguments that the kernels cannot take."""
    check_choice(ids, weights)
    if experts < 1:
        raise ValueError(f"experts must be at least 1, got {experts}")


SPEC = declare.kernel(
    name="expert-sort",
    arguments=(
        declare.Argument("ids", dims=("T", "TOP_K"), check=check_ids),
        declare.Argument("weights"),
        declare.Argument("experts", "int"),
    ),
    outputs=(
        declare.Output("offs", ("experts",), "torch.int32"),
        declare.Output("row_of", ("T", "TOP_K"), "torch.int32"),
        declare.Output("token_of_row", ("T * TOP_K",), "torch.int32"),
        declare.float32("row_weights", "T * TOP_K"),
    ),
    sizes={"M": lambda T, TOP_K: T * TOP_K, "G": lambda experts: experts},
    check=check,
    inputs=inputs,
    launch=launch,
    reference=reference,
    axes={"BLOCK_SIZE": (16, 32, 64, 128), "num_warps": (1, 2, 4, 8), "num_stages": (1,)},
    default={"BLOCK_SIZE": 32, "num_warps": 4, "num_stages": 1},
    key=("M_bucket", "G"),
    problems=({"M": "M", "G": "E"},),  # M is tokens times top-k
    invalid=invalid,
    interpreted={"M": 157, "G": 3},
    # ids and weights are read by two launches, but need to be read once: 8 bytes a pair, 12 written
    bytes_moved=lambda shape: 20 * shape["M"] + 4 * shape["G"],
    edges=(
        edge("one token", M=2, G=3, TOP_K=2),
        edge("a block and one more pair", M=129, G=5, TOP_K=1),
        edge("experts of other devices", M=1030, G=7, TOP_K=5, absent=1),
        edge("one expert", M=261, G=1, TOP_K=3),
        edge("more experts than pairs", M=6, G=200, TOP_K=2),
        edge("more blocks than a scan takes at a time", M=133_000, G=2),
    ),
)

sort_by_expert = SPEC.define("sort_by_expert")
