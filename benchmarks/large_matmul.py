"""A matrix product with a grid of 8,000 configs, for a short search against a long one.

fp8tune sweep --kernel benchmarks/large_matmul.py:SPEC --shapes benchmarks/large_matmul.toml --budget 2m
"""

# mypy: ignore-errors
# A spec as a user writes one, without types.

import torch
import triton
import triton.language as tl

from fp8tune_kernels.edges import declared, edge
from fp8tune_kernels.spec import KernelSpec, NamedInts, Tolerance


@triton.jit
def matmul_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Multiply bfloat16 matrices: c[M, N] = a[M, K] @ b[K, N], summed in float32."""
    program, columns = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    first = program // (GROUP_M * columns) * GROUP_M
    group = min(tl.cdiv(M, BLOCK_M) - first, GROUP_M)
    inside = program % (GROUP_M * columns)
    m = (first + inside % group) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = inside // group * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + m * K + k[None, :], mask=(m < M) & (k[None, :] < K), other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + n, mask=(k[:, None] < K) & (n < N), other=0.0)
        total = tl.dot(a, b, total)
    tl.store(c_ptr + m * N + n, total.to(tl.bfloat16), mask=(m < M) & (n < N))


def launch(config, inputs, outputs):
    """Launch one program for each block of the output."""
    (a, b), (c,) = inputs, outputs
    blocks = triton.cdiv(c.shape[0], config["BLOCK_M"]) * triton.cdiv(c.shape[1], config["BLOCK_N"])
    matmul_kernel[(blocks,)](a, b, c, *c.shape, a.shape[1], **config)


def inputs(problem, device):
    """Return normal numbers; on ``meta`` their shapes."""
    M, N, K = (problem.shape[dim] for dim in "MNK")
    if device == "meta":
        return tuple(torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in ((M, K), (K, N)))
    generator = torch.Generator("cpu").manual_seed(problem.seed)
    return tuple(torch.randn(shape, generator=generator).bfloat16().to(device) for shape in ((M, K), (K, N)))


def invalid(config, shape, limits):
    """Prune what has no room in shared memory, and tiles that leave a thread too many or too few elements."""
    tile, threads = config["BLOCK_M"] * config["BLOCK_N"], 32 * config["num_warps"]
    staged = 2 * config["num_stages"] * config["BLOCK_K"] * (config["BLOCK_M"] + config["BLOCK_N"])
    if staged > limits.shared_bytes_per_block:
        return f"{staged} bytes of shared memory"
    return None if 8 <= tile // threads <= 256 else f"{tile // threads} elements of the output for a thread"


SPEC = KernelSpec(
    name="large-matmul",
    axes={
        "BLOCK_M": (16, 32, 64, 128, 256),
        "BLOCK_N": (16, 32, 64, 128, 256),
        "BLOCK_K": (16, 32, 64, 128, 256),
        "GROUP_M": (1, 4, 8, 16),
        "num_warps": (2, 4, 8, 16),
        "num_stages": (2, 3, 4, 5),
    },
    default=NamedInts(BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, GROUP_M=8, num_warps=4, num_stages=3),
    key=("M", "N", "K"),
    problems=lambda row: iter([NamedInts(M=row["M"], N=row["N"], K=row["K"])]),
    inputs=inputs,
    outputs=lambda a, b: (torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device),),
    launch=launch,
    reference=lambda a, b: (a.double() @ b.double(),),
    check="tolerance",
    tolerance=Tolerance(relative=8e-3, rms=1e-3),  # bfloat16 rounds by up to 4e-3; sums may cancel
    flops=lambda shape: 2 * shape["M"] * shape["N"] * shape["K"],
    invalid=invalid,
    edges=declared(edge("one row and odd sizes", M=1, N=77, K=33), edge("a tail of each block", M=129, N=131, K=65)),
)
