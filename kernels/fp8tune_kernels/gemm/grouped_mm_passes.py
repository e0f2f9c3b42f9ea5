"""What the specs of the three passes of ``fp8_grouped_mm`` share.

A pass is swept like a kernel. Its one axis is METHOD, and a launch is the whole pass, casts included: see
:mod:`.passes`. The kernels of a method are launched with the configs of the table that is installed, so they are swept
and exported before.

Besides sizes a shape has a precision: what may multiply, see :mod:`.methods`. With ANY_ONCE the codes of the weights
are inputs, made before the clock starts.

The methods agree to the byte on values of a few bits: casts of powers of two are exact, and so are the sums. Infinity
and subnormals are left out, for FP8 has neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.edges import declared, edge
from fp8tune_kernels.gemm.operands import ADDRESS_BYTES, random_operand
from fp8tune_kernels.gemm.passes import BF16, BF16_TORCH, FP8, FP8_TORCH, Codes
from fp8tune_kernels.inputs import dtype_named
from fp8tune_kernels.runtime.ops import Inputs, Tensors
from fp8tune_kernels.spec import PRECISION_FLAG, DeviceLimits, NamedInts, Problem

__all__ = [
    "ANY",
    "ANY_ONCE",
    "AXES",
    "DEFAULT",
    "EDGES",
    "FP8_ONLY",
    "INTERPRETED",
    "KEY",
    "codes_of",
    "excluded",
    "invalid",
    "multiplied_rows",
    "problems_with",
    "quantize_again",
    "quantized_before",
    "random_weights",
    "result",
]

FP8_ONLY, ANY, ANY_ONCE = range(3)
"""A precision: methods that multiply in FP8; all; all, and the weights were quantized before."""

Quantize = Callable[..., Codes]

AXES: dict[str, tuple[int, ...]] = {"METHOD": (BF16_TORCH, BF16, FP8_TORCH, FP8)}

DEFAULT = NamedInts(METHOD=FP8)

KEY = ("M_bucket", "N", "K", "G", PRECISION_FLAG)

INTERPRETED = {"M": 109, "N": 80, "K": 48, "G": 3, PRECISION_FLAG: ANY_ONCE}

SCALED_GROUPED_MM = ("sm_90", "sm_100", "gfx942", "gfx950")
"""Where ``torch._scaled_grouped_mm`` takes a scale a row."""

EDGES = declared(
    edge("one row, huge values", "huge", routing="ragged", M=1, N=48, K=80, G=3),
    edge("a tile and one more", routing="balanced", M=513, N=272, K=144, G=1),
    edge("rows of no group, NaN", "nan", routing="empty", M=277, N=48, K=80, G=4),
    edge("empty groups, zeros", "zeros", routing="empty", M=37, N=48, K=48, G=3),
)


def problems_with(*precisions: int) -> Callable[[Mapping[str, int]], Iterator[NamedInts]]:
    """The ``problems`` of a pass: each layer with these precisions, but for one that no grouped GEMM takes."""

    def problems(row: Mapping[str, int]) -> Iterator[NamedInts]:
        M, N, K, G = row["M"], row["N"], row["K"], row["E"]
        for precision in precisions:
            if N % ADDRESS_BYTES == K % ADDRESS_BYTES == 0:
                yield NamedInts(M=M, N=N, K=K, G=G, precision=precision)

    return problems


def excluded(config: Mapping[str, int], shape: Mapping[str, int]) -> str | None:
    """A method that a precision does not allow."""
    if shape[PRECISION_FLAG] == FP8_ONLY and config["METHOD"] in (BF16_TORCH, BF16):
        return "precision fp8 multiplies in FP8"
    return None


def invalid(config: Mapping[str, int], shape: Mapping[str, int], limits: DeviceLimits) -> str | None:
    """A method that does not run on the arch."""
    if config["METHOD"] == FP8_TORCH and limits.arch in ARCHES and limits.arch not in SCALED_GROUPED_MM:
        return f"torch's FP8 grouped GEMM does not run on {limits.arch}"
    return None


def random_weights(problem: Problem, device: str) -> torch.Tensor:
    """``B_t`` of a problem: (G, K, N), the view of row-major (G, N, K).

    Its rows and columns are of several magnitudes: the largest of thousands of normal values nearly always has the same
    power of two, and scales that are all equal are no data to time with.
    """
    N, K, G = (problem.shape[dim] for dim in "NKG")
    weights = random_operand(problem, G * N, K, device, 1).view(G, N, K)
    if weights.device.type != "meta":
        generator = torch.Generator(device).manual_seed(problem.seed)
        for sizes in ((N, 1), (K,)):
            exponents = torch.randint(-1, 2, sizes, device=device, generator=generator)
            weights.mul_(torch.exp2(exponents.float()).to(weights.dtype))
    return weights.transpose(1, 2)


def quantized_before(problem: Problem, B_t: torch.Tensor, quantize: Quantize) -> tuple[torch.Tensor | None, ...]:
    """Codes and scales of the weights where the precision has them, else None twice."""
    if problem.shape[PRECISION_FLAG] != ANY_ONCE:
        return None, None
    return tuple(quantize(B_t, float8_dtype=dtype_named(problem.fp8_dtype)))


def quantize_again(inputs: Inputs, quantize: Quantize) -> None:
    """Put into the codes what the weights came to hold."""
    _, B_t, _, codes, scales, float8_dtype = inputs
    if codes is not None and B_t.device.type != "meta":
        for old, new in zip((codes, scales), quantize(B_t, float8_dtype=float8_dtype), strict=True):
            old.copy_(new)


def codes_of(inputs: Inputs) -> Codes | None:
    """Those among the inputs of a pass over rows, as it takes them."""
    codes, scales = inputs[3:5]
    return None if codes is None else (codes, scales)


def result(*shape: int, like: torch.Tensor) -> Tensors:
    """An uninitialised output."""
    return (torch.empty(shape, dtype=torch.bfloat16, device=like.device),)


def multiplied_rows(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> Tensors:
    """(M, X) x (G, X, Y) -> (M, Y) in plain torch, in float32; reads ``offs`` on the host."""
    (out,) = result(a.shape[0], b.shape[2], like=a)
    out.zero_()
    start = 0
    with torch.autocast(a.device.type, enabled=False):  # a caller's would multiply in its own dtype
        for group, end in enumerate(offs.tolist()):
            out[start:end] = a[start:end].float() @ b[group].float()
            start = end
    return (out,)
