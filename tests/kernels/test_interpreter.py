"""The repairs to Triton's interpreter work, and are still needed."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from fp8tune.interpreter import quick
from fp8tune_kernels import interpreter, quantize_rowwise_2d

pytestmark = pytest.mark.skipif(not interpreter.INTERPRETED, reason="kernels are compiled here")

EVERY_BFLOAT16 = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
FINITE = EVERY_BFLOAT16[EVERY_BFLOAT16.isfinite()].float()


@triton.jit
def cast_kernel(x_ptr, q_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(q_ptr + at, tl.load(x_ptr + at).to(q_ptr.dtype.element_ty))


FLOATS = [torch.float32, torch.float16, torch.bfloat16, *interpreter.TORCH_DTYPES.values()]


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """Return all values of a narrow type, and of float32 those beside every bfloat16 value and between two."""
    if dtype.itemsize == 1:
        return torch.arange(2**8, dtype=torch.uint8).view(dtype)
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    middle = (EVERY_BFLOAT16.view(torch.int16).int() << 16) + 2**15
    return torch.cat([middle - 1, middle, middle + 1, middle + 2**14]).view(dtype)


@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_every_cast_between_floating_point_types_is_torchs(source: torch.dtype, target: torch.dtype) -> None:
    """A kernel of somebody else may cast bfloat16 or float16 straight to FP8, or FP8 to bfloat16."""
    values = every_value(source)
    right = values.float()
    if target == torch.float8_e4m3fn:  # torch before 2.13 does not saturate
        right = right.clamp(-448, 448)
    right = right.to(target)
    interpreter.install()
    result = torch.empty(values.shape, dtype=target)
    cast_kernel[(1,)](values, result, COUNT=values.numel())
    same = result.view(torch.int8).view(len(values), -1) == right.view(torch.int8).view(len(values), -1)
    assert (same.all(1) | (result.float().isnan() & right.float().isnan())).all()


def test_infinities_in_a_kernel_do_not_warn() -> None:
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        interpreter.quiet()
        quick.quiet()
        quantize_rowwise_2d(torch.full((1, 32), float("inf")))
    assert not messages


@triton.jit
def count_kernel(count_ptr, out_ptr):
    for i in range(0, tl.load(count_ptr)):
        tl.store(out_ptr + i, i)


def test_a_loop_ends_at_a_number_from_memory() -> None:
    """Triton 3.6 converts an array of one element, which numpy 2.4 refuses, and warns of before."""
    interpreter.install()
    out = torch.full((5,), -1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        count_kernel[(1,)](torch.tensor([3]), out)
    assert out.tolist() == [0, 1, 2, -1, -1]


@triton.jit
def arithmetic_kernel(x_ptr, y_ptr, out_ptr, wide_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    half = tl.full([COUNT], 0.5, x_ptr.dtype.element_ty)
    tl.store(out_ptr + at, x + y)
    tl.store(out_ptr + COUNT + at, x - y)
    tl.store(out_ptr + 2 * COUNT + at, x * y)
    tl.store(out_ptr + 3 * COUNT + at, tl.where((x < y) & (x != 0), x, half))
    tl.store(out_ptr + 4 * COUNT + at, tl.maximum(x, y))
    tl.store(out_ptr + 5 * COUNT + at, tl.abs(x) * 2.0)
    tl.store(wide_ptr + at, x / y)
    tl.store(wide_ptr + COUNT + at, (x > y).to(tl.float32) + tl.exp(x.to(tl.float32)))


def test_each_operation_on_bfloat16_is_rounded_as_torchs() -> None:
    interpreter.install()
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(512, generator=generator, dtype=torch.float64).to(torch.bfloat16) for _ in range(2))
    out, wide = torch.empty(6, 512, dtype=torch.bfloat16), torch.empty(2, 512)
    arithmetic_kernel[(1,)](x, y, out, wide, COUNT=512)
    chosen = torch.where((x < y) & (x != 0), x, torch.tensor(0.5, dtype=torch.bfloat16))
    assert torch.equal(out, torch.stack([x + y, x - y, x * y, chosen, torch.maximum(x, y), x.abs() * 2]))
    assert torch.equal(wide[0], x.float() / y.float())
    torch.testing.assert_close(wide[1], (x > y).float() + x.float().exp())


@triton.jit
def masked_kernel(x_ptr, low_ptr, out_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    x, low = tl.load(x_ptr), tl.load(low_ptr)
    tl.store(out_ptr + at, at, mask=(at < 3) & (x > low))
    tl.store(out_ptr + at, at, mask=(at >= 6) & (x < low))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bfloat16], ids=str)
def test_a_mask_may_rest_on_a_comparison_of_scalars(dtype: torch.dtype) -> None:
    """Triton keeps the operands' type for the result, and 3.9 refuses a mask of integers."""
    interpreter.install()
    out = torch.full((8,), -1)
    masked_kernel[(1,)](torch.tensor([2], dtype=dtype), torch.tensor([1], dtype=dtype), out, COUNT=8)
    assert out.tolist() == [0, 1, 2, -1, -1, -1, -1, -1]


@triton.jit
def reducing_kernel(a_ptr, b_ptr, product_ptr, sum_ptr, total_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    square = at[:, None] * SIZE + at[None, :]
    a, b = tl.load(a_ptr + square), tl.load(b_ptr + square)
    tl.store(product_ptr + square, tl.dot(a, b))
    tl.store(sum_ptr + at, tl.sum(a, 1))
    tl.store(sum_ptr + SIZE + at, tl.max(a, 1))
    tl.store(total_ptr, tl.sum(a))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_and_products_are_of_values(dtype: torch.dtype) -> None:
    interpreter.install()
    a, b = (torch.randint(-3, 4, (16, 16), generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(2))
    product, sums, total = torch.empty(16, 16), torch.empty(2, 16, dtype=dtype), torch.empty(1, dtype=dtype)
    reducing_kernel[(1,)](a, b, product, sums, total, SIZE=16)
    assert torch.equal(product, a.float() @ b.float())
    assert torch.equal(sums, torch.stack([a.sum(1), a.amax(1)]))
    assert torch.equal(total[0], a.sum())


@triton.jit
def casting_kernel(out_ptr, start, scale, COUNT: tl.constexpr):
    for i in range(COUNT):
        at = start.to(tl.int64) + i.to(tl.int64)
        tl.store(out_ptr + at, i * scale.to(tl.float32) + start)


def test_arguments_and_what_a_loop_counts_with_can_be_cast() -> None:
    interpreter.install()
    out = torch.zeros(4)
    casting_kernel[(1,)](out, 1, 0.5, COUNT=3)
    assert out.tolist() == [0, 1, 1.5, 2]


ALONE = """
import sys
import torch
from fp8tune_kernels import choose_experts, interpreter, moe_layer
from fp8tune_kernels.gemm import grouped_rows

for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.bfloat16):
    scales = () if dtype == torch.bfloat16 else (torch.ones(256), torch.ones(1, 16))
    a = torch.zeros(256, 16, dtype=dtype)
    if scales:
        a.view(torch.uint8)[:, 3] = torch.arange(256, dtype=torch.uint8)
    else:
        a[:, 3] = torch.arange(256) * float("inf")
    b = torch.zeros(1, 16, 16, dtype=dtype)
    b[0, 5, 3] = 1
    inputs = (a, b, torch.tensor([256], dtype=torch.int32), *(scales or (None, None)))
    for descriptors in (0, 2):
        out = grouped_rows.SPEC.outputs(*inputs)
        grouped_rows.SPEC.launch({**grouped_rows.SPEC.default, "DESCRIPTORS": descriptors}, inputs, out)
        right = a[:, 3].float().bfloat16()
        assert torch.allclose(out[0][:, 5], right, 0, 0, equal_nan=True), (dtype, out[0][:, 5])
        assert out[0][:, 5].isnan().sum() == (2 if dtype == torch.float8_e4m3fn else 1)

interpreter.INTERPRETED = False  # a step of training
x, router = torch.randn(6, 32).bfloat16().requires_grad_(), torch.randn(2, 32).bfloat16()
w13, w2 = torch.randn(2, 32, 32).bfloat16(), torch.randn(2, 32, 16).bfloat16()
moe_layer(x, w13, w2, *choose_experts(x @ router.t(), 1)).sum().backward()
assert x.grad.isfinite().all()
tuner = {"fp8tune", "typer", "rich", "sqlalchemy", "pandas"} & {name.partition(".")[0] for name in sys.modules}
assert not tuner, tuner
"""


def test_kernels_alone_multiply_every_code_as_torch_reads_it_and_import_no_tuner() -> None:
    """The interpreter takes NaN for 480 and bfloat16 for its bits unless it was repaired."""
    kernels = Path(interpreter.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(kernels), "TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", ALONE], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
