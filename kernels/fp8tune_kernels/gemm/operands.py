"""Operands of the grouped GEMMs: random ones to check and time with, and the checks of given ones."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..inputs import dtype_named
from ..runtime.checks import FP8_DTYPES, check_offsets
from ..runtime.lookup import running_arch
from ..spec import Problem
from .grouped_configs import WITHOUT_FP8

__all__ = ["check_operands", "random_operand", "random_scales"]

SPREAD = 64.0
"""The standard deviation of random codes: a row of normal values is scaled until its largest is about 448."""

ADDRESS_BYTES = 16
"""Where memory begins that tensor descriptors and wide loads read."""


def random_operand(problem: Problem, rows: int, columns: int, device: str, number: int = 0) -> torch.Tensor:
    """``(rows, columns)``, row-major, of the problem's input dtype: codes or bfloat16. ``number``: which operand."""
    dtype = dtype_named(problem.in_dtype)
    if torch.device(device).type == "meta":
        return torch.empty(rows, columns, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(2 * problem.seed + number)
    values = torch.randn(rows, columns, dtype=torch.bfloat16, device=device, generator=generator)
    if dtype in FP8_DTYPES:
        limit = torch.finfo(dtype).max
        return values.mul_(SPREAD).clamp_(-limit, limit).to(dtype)
    return values.to(dtype)


def random_scales(problem: Problem, shapes: Sequence[int | tuple[int, ...]], device: str) -> list[torch.Tensor | None]:
    """Powers of two from 1/8 to 8, float32, of each shape; None beside operands that are not FP8."""
    if dtype_named(problem.in_dtype) not in FP8_DTYPES:
        return [None] * len(shapes)
    found: list[torch.Tensor | None] = []
    for number, shape in enumerate(shapes, 2):
        sizes = (shape,) if isinstance(shape, int) else shape
        if torch.device(device).type == "meta":
            found.append(torch.empty(sizes, device=device))
            continue
        generator = torch.Generator(device).manual_seed(problem.seed + number)
        exponents = torch.randint(-3, 4, (math.prod(sizes),), device=device, generator=generator)
        found.append(torch.exp2(exponents.float()).view(sizes))
    return found


def check_operands(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
) -> None:
    """Raise ValueError unless ``grouped-rows`` can multiply these."""
    if a.dim() != 2 or not a.is_contiguous():
        raise ValueError(f"a has shape {tuple(a.shape)} and strides {a.stride()}, wanted row-major (M, K)")
    if b.dim() != 3 or not b.is_contiguous():
        raise ValueError(f"b has shape {tuple(b.shape)} and strides {b.stride()}, wanted row-major (E, N, K)")
    check_offsets(offs, a.device, "a")
    G, N, K = b.shape
    if a.shape[1] != K:
        raise ValueError(f"a has shape {tuple(a.shape)}, wanted (M, {K}): K of b, which is {tuple(b.shape)}")
    if offs.shape[0] != G:
        raise ValueError(f"offs has {offs.shape[0]} groups, wanted {G}: one for each expert of b")
    check_dtypes(a, b)
    check_multiples("b", N=N, K=K)
    check_scales(a, scale_a, scale_b, a.shape[0], G * N)
    check_addresses(a=a, b=b)


def check_dtypes(a: torch.Tensor, b: torch.Tensor) -> None:
    """Raise ValueError unless both operands are of one dtype that a grouped GEMM multiplies, on one device."""
    if a.dtype not in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        raise ValueError(f"a is {a.dtype}, wanted torch.bfloat16, torch.float8_e4m3fn or torch.float8_e4m3fnuz")
    if refusal := _refusal(a.dtype, running_arch(a.device)):
        raise ValueError(f"a is {a.dtype}, {refusal}")
    if b.dtype != a.dtype:
        raise ValueError(f"b is {b.dtype}, wanted {a.dtype} as a")
    if b.device != a.device:
        raise ValueError(f"b is on {b.device}, wanted {a.device} as a")


@functools.cache
def _refusal(dtype: torch.dtype, arch: str) -> str | None:
    """Why an arch does not multiply operands of a dtype."""
    if dtype == torch.float8_e4m3fnuz and arch.startswith("sm_"):
        return "an AMD format, on an NVIDIA GPU: wanted torch.float8_e4m3fn"
    if dtype == torch.float8_e4m3fn and arch in WITHOUT_FP8:
        return f"which Triton does not compile for {arch}: wanted torch.bfloat16"
    return None


def are_multiples(*sizes: int) -> bool:
    """Whether sizes are positive multiples of 16: rows then begin at 16 bytes."""
    return all(size > 0 and size % ADDRESS_BYTES == 0 for size in sizes)


def check_multiples(name: str, **sizes: int) -> None:
    """Raise ValueError unless :func:`are_multiples`."""
    if not are_multiples(*sizes.values()):
        given = " and ".join(f"{dim}={size}" for dim, size in sizes.items())
        raise ValueError(f"{name} has {given}, wanted positive multiples of {ADDRESS_BYTES}")


def check_scales(
    a: torch.Tensor, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None, of_a: int, of_b: int
) -> None:
    """Raise ValueError unless scales are float32, contiguous and as many as wanted, and there just beside FP8."""
    for name, scale, count in (("scale_a", scale_a, of_a), ("scale_b", scale_b, of_b)):
        if scale is None:
            if a.dtype != torch.bfloat16:
                raise ValueError(f"{name} is None, wanted {count} scales beside {a.dtype}")
            continue
        if a.dtype == torch.bfloat16:
            raise ValueError(f"{name} is a tensor, wanted None: bfloat16 has no scales")
        if scale.dtype != torch.float32 or scale.numel() != count or not scale.is_contiguous():
            given = f"{scale.dtype} of shape {tuple(scale.shape)} and strides {scale.stride()}"
            raise ValueError(f"{name} is {given}, wanted {count} contiguous values of torch.float32")
        if scale.device != a.device:
            raise ValueError(f"{name} is on {scale.device}, wanted {a.device} as a")


def check_addresses(**tensors: torch.Tensor) -> None:
    """Raise ValueError unless each tensor on a GPU begins at a multiple of 16 bytes."""
    for name, tensor in tensors.items():
        if isinstance(tensor, FakeTensor):  # of a traced call: it has no address
            continue
        if tensor.is_cuda and tensor.data_ptr() % ADDRESS_BYTES:
            raise ValueError(f"{name} begins {tensor.data_ptr() % ADDRESS_BYTES} bytes past a multiple of 16: copy it")
