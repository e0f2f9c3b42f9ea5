"""``gather-sum``: add up the rows of each token, in float32 and in a fixed order.

    out[t] = bfloat16( sum over k of rows[row_of[t, k]] + weights[t, k] * bias[ids[t, k]] )

    rows     (M, K), row-major, bfloat16
    row_of   (T, TOP_K), int32, T * TOP_K = M: see :mod:`.expert_sort`
    bias     (E, K), row-major, bfloat16; or None, as are then
    ids      (T, TOP_K), int32 or int64; an id of no expert here adds no bias
    weights  (T, TOP_K), float32
    out      (T, K), row-major, bfloat16

It ends the forward pass, and the backward pass of tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from .. import interpreter
from ..edges import edge, past_half
from ..inputs import random_matrix
from ..quantize.limits import idle_columns, wrong_tile
from ..runtime import declare
from ..runtime.declare import Call, Config, Shape
from ..spec import DeviceLimits, Problem
from .expert_sort import TOP_K

interpreter.install()

DEFAULT = {"BLOCK_SIZE_T": 1, "BLOCK_SIZE_K": 1024, "num_warps": 4, "num_stages": 1}


@triton.jit(do_not_specialize=["T", "E"])  # T changes every step and must not cause a recompilation
def gather_sum_kernel(
    rows_ptr: tl.tensor,  # (M, K), row-major
    row_of_ptr: tl.tensor,  # (T, TOP_K)
    bias_ptr: tl.tensor,  # (E, K), row-major, or None
    ids_ptr: tl.tensor,  # (T, TOP_K), or None
    weights_ptr: tl.tensor,  # (T, TOP_K), or None
    out_ptr: tl.tensor,  # (T, K), row-major
    T: tl.tensor,
    K: tl.tensor,
    E: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK_SIZE_T: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
) -> None:
    """Sum the rows of BLOCK_SIZE_T tokens in BLOCK_SIZE_K columns."""
    across = tl.cdiv(K, BLOCK_SIZE_K)
    tokens = tl.program_id(0) // across * BLOCK_SIZE_T + tl.arange(0, BLOCK_SIZE_T)
    columns = (tl.program_id(0) % across * BLOCK_SIZE_K + tl.arange(0, BLOCK_SIZE_K))[None, :]
    is_token = tokens < T
    inside = is_token[:, None] & (columns < K)
    total = tl.zeros((BLOCK_SIZE_T, BLOCK_SIZE_K), tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(row_of_ptr + tokens * TOP_K + k, mask=is_token, other=0).to(tl.int64)
        total += tl.load(rows_ptr + row[:, None] * K + columns, mask=inside, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            expert = tl.load(ids_ptr + tokens * TOP_K + k, mask=is_token, other=-1).to(tl.int64)
            weight = tl.load(weights_ptr + tokens * TOP_K + k, mask=is_token, other=0.0)
            has_bias = inside & ((expert >= 0) & (expert < E))[:, None]
            bias = tl.load(bias_ptr + expert[:, None] * K + columns, mask=has_bias, other=0.0).to(tl.float32)
            total += tl.where(has_bias, weight[:, None] * bias, 0.0)
    at = out_ptr + tokens.to(tl.int64)[:, None] * K + columns
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=inside)


def launch(config: Config, call: Call) -> None:
    """Launch one program per tile of the output."""
    programs = -(-call.T // config["BLOCK_SIZE_T"]) * -(-call.K // config["BLOCK_SIZE_K"])
    call.run(gather_sum_kernel, programs, config, E=0 if call.bias is None else call.bias.shape[0])


def reference(call: Call) -> None:
    """Sum in plain torch, in the same order."""
    total, bias = torch.zeros_like(call.out, dtype=torch.float32), call.bias
    for k in range(call.TOP_K):
        total += call.rows[call.row_of[:, k].long()].float()
        if bias is not None:
            expert = call.ids[:, k].long()
            is_here = (expert >= 0) & (expert < len(bias))
            term = call.weights[:, k, None] * bias[expert.clamp(0, len(bias) - 1)].float()
            total += torch.where(is_here[:, None], term, 0.0)
    call.out.copy_(total)


def inputs(problem: Problem, device: str) -> dict[str, Any]:
    """Return random arguments; with ``bias`` in the shape, a bias of 5 experts."""
    top_k = problem.shape.get("TOP_K", TOP_K)
    tokens, K, experts = -(-problem.shape["M"] // top_k), problem.shape["K"], 5
    made: dict[str, Any] = {"rows": random_matrix(problem, tokens * top_k, K, device)}
    if torch.device(device).type == "meta":
        made["row_of"] = torch.empty(tokens, top_k, dtype=torch.int32, device=device)
    else:
        generator = torch.Generator(device).manual_seed(problem.seed)
        row_of = torch.randperm(tokens * top_k, device=device, generator=generator).int()
        made["row_of"] = row_of.view(tokens, top_k)
    if problem.shape.get("bias"):
        made["bias"] = random_matrix(replace(problem, seed=problem.seed + 1), experts, K, device)
        made["ids"] = made["row_of"] % (experts + 2) - 1
        of_weights = replace(problem, seed=problem.seed + 2, in_dtype="float32")
        made["weights"] = random_matrix(of_weights, tokens, top_k, device)
    return made


def invalid(config: Config, shape: Shape, limits: DeviceLimits) -> str | None:
    """Return the hardware reason why a config cannot pay, or None. The default has to run, not to pay."""
    if config == DEFAULT:
        return None
    tile = config["BLOCK_SIZE_T"] * config["BLOCK_SIZE_K"]
    few = "too few for one 8-byte load of bfloat16"
    return wrong_tile(config, tile, limits, least=4, too_few=few) or idle_columns(config["BLOCK_SIZE_K"], shape["K"])


def bytes_moved(shape: Shape) -> int:
    """Return the bytes of all rows, read once, and of the tokens, written once."""
    top_k = shape.get("TOP_K", TOP_K)
    return 2 * -(-shape["M"] // top_k) * (top_k + 1) * shape["K"]


def check(
    rows: torch.Tensor,
    row_of: torch.Tensor,
    bias: torch.Tensor | None,
    ids: torch.Tensor | None,
    weights: torch.Tensor | None,
) -> None:
    """Raise ValueError for arguments that do not belong together."""
    if row_of.numel() != len(rows):
        raise ValueError(f"row_of must have shape (T, TOP_K) with {len(rows)} elements, got {tuple(row_of.shape)}")
    if (bias is None) != (ids is None) or (bias is None) != (weights is None):
        raise ValueError("bias, ids and weights must be given together")
    if bias is not None and (bias.shape[1:] != rows.shape[1:] or bias.dtype != rows.dtype or not bias.is_contiguous()):
        raise ValueError(f"bias must be row-major (E, {rows.shape[1]}) of {rows.dtype}, got {bias.dtype} {bias.shape}")


def check_matrix_of_rows(rows: torch.Tensor) -> None:
    """Raise ValueError unless rows are those of a GEMM."""
    if rows.dim() != 2 or rows.dtype != torch.bfloat16 or not rows.is_contiguous():
        layout = f"{rows.dtype} of shape {tuple(rows.shape)}, strides {rows.stride()}"
        raise ValueError(f"rows must be row-major (M, K) of torch.bfloat16, got {layout}")


SPEC = declare.kernel(
    name="gather-sum",
    arguments=(
        declare.Argument("rows", dims=("M", "K"), check=check_matrix_of_rows),
        declare.Argument("row_of", dims=("T", "TOP_K"), check='check_row_numbers("row_of", row_of, device, 2)'),
        declare.Argument("bias", "Tensor?"),
        declare.Argument("ids", "Tensor?"),
        declare.Argument("weights", "Tensor?"),
    ),
    outputs=(declare.Output("out", ("T", "K"), "torch.bfloat16"),),
    check=check,
    inputs=inputs,
    launch=launch,
    reference=reference,
    axes={
        "BLOCK_SIZE_T": (1, 2, 4, 8),
        "BLOCK_SIZE_K": (256, 512, 1024, 2048, 4096),
        "num_warps": (1, 2, 4, 8),
        "num_stages": (1,),
    },
    default=DEFAULT,
    key=("M_bucket", "K"),
    problems=({"M": "M", "K": "K"}, {"M": "M", "K": "N"}),  # rows of the input gradient, and of the output
    invalid=invalid,
    interpreted={"M": 157, "K": 101},
    bytes_moved=bytes_moved,
    edges=(
        edge("one token, huge values", "huge", M=3, K=48, TOP_K=3),
        edge("a block and one more, infinity", "infinite", M=9, K=past_half("K", 16), TOP_K=1),
        edge("a prime, NaN", "nan", M=268, K=272, TOP_K=4),
        edge("one column, tiny values", "tiny", M=66, K=1, TOP_K=6),
        edge("a block of columns and one more past an aligned address", offset=1, M=26, K=past_half("K"), TOP_K=2),
        edge("a bias", "integers", M=131, K=272, TOP_K=5, bias=1),
    ),
)

sum_rows_of_tokens = SPEC.define("sum_rows_of_tokens")
