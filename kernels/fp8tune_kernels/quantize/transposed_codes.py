"""``transposed-codes``: copy codes of rows to where a GEMM that contracts over rows reads them.

    q_transposed[place[g] + m - start[g], k] = q[m, k]                  for m in group g

    q             (M, K), row-major, FP8: the left operand of a grouped GEMM that contracts over K
    offs          (G,), int32: the end row of each group, non-decreasing, at most M; an empty group has no row
    q_transposed  (P, K), strides (1, P), P = padded_rows(M, G, 128): the layout of ``colwise``'s codes
                  place[g + 1] = place[g] + max(1, ceil(size[g] / 128)) * 128

Zeros follow a group's codes up to the next multiple of 128; what lies past the last group's is not written. It is the
half of ``rowwise-transposed`` that can be made later, where codes of rows alone were kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
import triton
import triton.language as tl

from fp8tune_kernels.edges import declared, edge
from fp8tune_kernels.groups import padded_rows
from fp8tune_kernels.inputs import dtype_named, offsets, random_matrix
from fp8tune_kernels.quantize import colwise
from fp8tune_kernels.quantize.aligned_blocks import ALIGNMENT, block_at, transpose_bytes
from fp8tune_kernels.quantize.swiglu_rowwise_transposed import write_transposed
from fp8tune_kernels.quantize.tiles import stride_of_columns
from fp8tune_kernels.runtime.checks import FP8_DTYPES, check_offsets
from fp8tune_kernels.runtime.launching import launch_kernel
from fp8tune_kernels.runtime.ops import Inputs, Tensors, register
from fp8tune_kernels.spec import DeviceLimits, KernelSpec, NamedInts, Problem, bucket

__all__ = ["SPEC", "transpose_codes"]


@triton.jit(do_not_specialize=["M", "G"])  # both change every step: neither may recompile anything
def transposed_codes_kernel(
    q_ptr: tl.tensor,  # (M, K), row-major
    offs_ptr: tl.tensor,  # (G,)
    transposed_ptr: tl.tensor,  # (P, K), strides (1, P)
    M: tl.tensor,
    K: tl.tensor,
    G: tl.tensor,
    BLOCK_SIZE_M: tl.constexpr,  # places of a program
    BLOCK_SIZE_N: tl.constexpr,  # columns of a program
    PACK: tl.constexpr,
) -> None:
    """One program: a tile of a block (:mod:`.aligned_blocks`)."""
    across = tl.cdiv(K, BLOCK_SIZE_N)
    block = block_at(offs_ptr, M, G, tl.program_id(0) // across * BLOCK_SIZE_M, BLOCK_SIZE_M)
    column = tl.program_id(0) % across * BLOCK_SIZE_N
    end = tl.where(block.group < G, tl.minimum(column + BLOCK_SIZE_N, K), 0)
    stride = stride_of_columns(M, G, 128) // PACK
    transpose_bytes(q_ptr, transposed_ptr, stride, K, column, end, block, PACK, BLOCK_SIZE_M, BLOCK_SIZE_N)


def transpose_codes(q: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Returns ``q_transposed`` as the module says."""
    return _operator(q, offs)


def reference(q: torch.Tensor, offs: torch.Tensor) -> Tensors:
    """The same in plain torch; reads ``offs`` on the host. Zeros where a launch writes nothing."""
    (transposed,) = outputs(q, offs)
    write_transposed(transposed, q, offs)
    return (transposed,)


def inputs(problem: Problem, device: str) -> Inputs:
    """``(q, offs)`` of a problem."""
    values = random_matrix(replace(problem, in_dtype="bfloat16"), problem.shape["M"], problem.shape["K"], device)
    return values.to(dtype_named(problem.in_dtype)), offsets(problem, device)


def outputs(q: torch.Tensor, offs: torch.Tensor) -> Tensors:
    """Uninitialised ``q_transposed``."""
    P = padded_rows(q.shape[0], offs.shape[0], ALIGNMENT)
    return (torch.empty_strided((P, q.shape[1]), (1, P), dtype=q.dtype, device=q.device),)


def unwritten(inputs: Inputs, outputs: Tensors) -> None:
    """Write zeros past the last group's multiple of the alignment."""
    colwise.clear_past_the_groups(outputs[0], inputs[1], ALIGNMENT)


def launch(config: Mapping[str, int], inputs: Inputs, outputs: Tensors) -> None:
    """One launch: a program a tile."""
    (q, offs), (transposed,) = inputs, outputs
    (M, K), blocks = q.shape, transposed.shape[0] // config["BLOCK_SIZE_M"]
    if programs := blocks * -(-K // config["BLOCK_SIZE_N"]):
        launch_kernel(transposed_codes_kernel, programs, (q, offs, transposed), (M, K, offs.shape[0]), (), config)


def problems(row: Mapping[str, int]) -> Iterator[NamedInts]:
    """The rows that a GEMM reads."""
    yield NamedInts(M=row["M"], K=row["K"], G=row["E"])


def invalid(config: Mapping[str, int], shape: Mapping[str, int], limits: DeviceLimits) -> str | None:
    """The hardware reason why a config cannot pay, or None."""
    values = config["BLOCK_SIZE_M"] * config["BLOCK_SIZE_N"] // (config["num_warps"] * limits.warp_size)
    if not 16 <= values <= 128:
        return f"{values} codes a thread: wanted 16 to 128"
    return None


SPEC = KernelSpec(
    name="transposed-codes",
    axes={
        "BLOCK_SIZE_M": (64, 128),
        "BLOCK_SIZE_N": (64, 128, 256),
        "PACK": (1, 4),
        "num_warps": (2, 4, 8),
    },
    default=NamedInts(BLOCK_SIZE_M=128, BLOCK_SIZE_N=128, PACK=4, num_warps=4),
    key=colwise.SPEC.key,
    problems=problems,
    inputs=inputs,
    outputs=outputs,
    launch=launch,
    reference=reference,
    unwritten=unwritten,
    interpreted={"M": 157, "K": 301, "G": 3},
    invalid=invalid,
    edges=declared(
        edge("one row, huge values", "huge", routing="ragged", M=1, K=48, G=3),
        edge("a block and one more", routing="balanced", M=513, K=144, G=1),
        edge("rows of no group, NaN", "nan", routing="empty", M=277, K=48, G=4),
        edge("empty groups, zeros", "zeros", routing="empty", M=37, K=48, G=3),
        edge("one column", routing="ragged", M=67, K=1, G=2),
        edge("an odd number of columns past an aligned address", offset=1, routing="ragged", M=131, K=129, G=2),
    ),
    routed=True,
    in_dtypes=("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
)


def _arguments(q: torch.Tensor, offs: torch.Tensor) -> Inputs:
    if q.dim() != 2 or q.dtype not in FP8_DTYPES or not q.is_contiguous():
        raise ValueError(f"q is {q.dtype} of shape {tuple(q.shape)}, strides {q.stride()}, wanted row-major FP8 codes")
    check_offsets(offs, q.device, "q")
    return q, offs


def _key(q: torch.Tensor, offs: torch.Tensor) -> tuple[int, ...]:
    return bucket(q.shape[0]), q.shape[1], offs.shape[0]


_operator = register(SPEC, transpose_codes, _arguments, _key)
