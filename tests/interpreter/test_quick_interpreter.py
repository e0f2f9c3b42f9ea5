"""Values that the quick interpreter caches for one operation never reach another one."""

import dataclasses
import math
import runpy
import traceback
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from fp8tune_kernels import interpreter

pytestmark = pytest.mark.skipif(not interpreter.INTERPRETED, reason="kernels are compiled here")


@triton.jit
def constants_kernel(x_ptr, out_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    x = tl.load(x_ptr + at)
    for i in range(3):  # the constants are kept from the second turn on
        to = out_ptr + i * 8 * COUNT + at
        tl.store(to, x >> 3)
        tl.store(to + COUNT, 3 - x)
        tl.store(to + 2 * COUNT, x - 3)
        tl.store(to + 3 * COUNT, (x * 1.0 / 3).to(tl.int32))
        tl.store(to + 4 * COUNT, x * 3 + 1)
        tl.store(to + 5 * COUNT, (x.to(tl.float32) * 3.5).to(tl.int32))
        tl.store(to + 6 * COUNT, tl.where(x > 3, 3, 1))
        tl.store(to + 7 * COUNT, tl.maximum(x, i) - i)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_numbers_beside_a_tensor_are_of_the_type_that_each_operation_needs(dtype: torch.dtype) -> None:
    x = torch.tensor([-9, -3, 0, 1, 3, 5, 100, 2**20], dtype=dtype)
    out = torch.zeros(3, 8, 8, dtype=dtype)
    constants_kernel[(1,)](x, out, COUNT=8)
    right = [
        x >> 3,
        3 - x,
        x - 3,
        (x.float() / 3).to(torch.int32),
        x * 3 + 1,
        (x.float() * 3.5).to(torch.int32),
        torch.where(x > 3, 3, 1),
    ]
    for count, turn in enumerate(out):
        for line, expected in zip(turn, [*right, x.clamp(min=count) - count], strict=True):
            assert torch.equal(line, expected.to(dtype))


@triton.jit
def shifting_kernel(x_ptr, y_ptr, out_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(out_ptr + at, (x >> 1).to(tl.int64))  # makes a signed array of its constant
    tl.store(out_ptr + COUNT + at, (y + 1).to(tl.int64))
    tl.store(out_ptr + 2 * COUNT + at, (y >> 1).to(tl.int64))
    tl.store(out_ptr + 3 * COUNT + at, (y + 1).to(tl.int64))


def test_an_operation_that_changes_a_constant_changes_its_own() -> None:
    x, y = torch.tensor([-2, 5], dtype=torch.int32), torch.tensor([2**31, 2**32 - 2]).to(torch.uint32)
    out = torch.zeros(4, 2, dtype=torch.int64)
    shifting_kernel[(1,)](x, y, out, COUNT=2)
    assert out.tolist() == [[-1, 2], [2**31 + 1, 2**32 - 1], [2**30, 2**31 - 1], [2**31 + 1, 2**32 - 1]]


@triton.jit
def shapes_kernel(x_ptr, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + rows)
    tile = x[:, None] + columns[None, :]
    tl.store(out_ptr + rows[:, None] * COLUMNS + columns, (tile * columns + tl.sum(x)) * x[:, None])


def test_rows_columns_and_scalars_are_broadcast() -> None:
    x, out = torch.arange(4, dtype=torch.int32), torch.zeros(4, 8, dtype=torch.int32)
    shapes_kernel[(1,)](x, out, ROWS=4, COLUMNS=8)
    columns = torch.arange(8, dtype=torch.int32)
    assert torch.equal(out, ((x[:, None] + columns) * columns + x.sum()) * x[:, None])


@triton.jit
def operators_kernel(x_ptr, y_ptr, out_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(out_ptr + at, x // y)
    tl.store(out_ptr + COUNT + at, x % y)
    tl.store(out_ptr + 2 * COUNT + at, 100 // y)
    tl.store(out_ptr + 3 * COUNT + at, tl.maximum(x, y))
    tl.store(out_ptr + 4 * COUNT + at, (x << 3) | (y >> 1))
    tl.store(out_ptr + 5 * COUNT + at, tl.where((x < y) & (y > 0), x, 7))
    tl.store(out_ptr + 6 * COUNT + at, (x.to(tl.float32) / y).to(tl.int32, bitcast=True))
    tl.store(out_ptr + 7 * COUNT + at, (x.to(tl.float32) / y).to(tl.int32))


def test_what_was_learned_of_some_values_holds_for_others() -> None:
    """On the first, all operands are positive and division is exact."""
    for x, y in (([8, 6, 4, 2], [4, 3, 2, 1]), ([-9, 7, -(2**31), 2**31 - 1], [2, -2, 3, -(2**30)])):
        x, y = torch.tensor(x, dtype=torch.int32), torch.tensor(y, dtype=torch.int32)
        out = torch.zeros(8, 4, dtype=torch.int32)
        operators_kernel[(1,)](x, y, out, COUNT=4)
        right = [
            torch.div(x, y, rounding_mode="trunc"),
            torch.fmod(x, y),
            torch.div(torch.full_like(y, 100), y, rounding_mode="trunc"),
            torch.maximum(x, y),
            (x << 3) | (y >> 1),
            torch.where((x < y) & (y > 0), x, 7),
            (x.float() / y.float()).view(torch.int32),
            (x.float() / y.float()).to(torch.int32),
        ]
        for line, expected in zip(out, right, strict=True):
            assert torch.equal(line, expected)


@triton.jit
def floats_kernel(x_ptr, out_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, tl.maximum(x, 0.5))
    tl.store(out_ptr + COUNT + at, tl.minimum(x, 0.5))
    tl.store(out_ptr + 2 * COUNT + at, tl.full((COUNT,), 0.0, tl.float32) * x)
    tl.store(out_ptr + 3 * COUNT + at, tl.full((COUNT,), -0.0, tl.float32) * x)
    tl.store(out_ptr + 4 * COUNT + at, x * 0.0)
    tl.store(out_ptr + 5 * COUNT + at, x * -0.0)


def test_a_nan_is_left_out_of_maxima_and_zeros_have_the_sign_of_compiled_ones() -> None:
    """Triton before 3.9 compiles a negative zero as a positive one: as a number it is what ``tl.full`` makes of it."""
    for values in ([1.0, 2.0], [math.nan, 3.0]):
        x, out = torch.tensor(values), torch.zeros(6, 2)
        floats_kernel[(1,)](x, out, COUNT=2)
        assert out[0].tolist() == [max(0.5, value) for value in values]
        assert out[1].tolist() == [0.5, 0.5]
        assert not out.signbit()[[2, 4], 1].any()
        assert out.signbit()[3].equal(out.signbit()[5])


COPIED = """
import triton
import triton.language as tl

ADDED = tl.constexpr({added})
{blank}

@triton.jit
def copied_kernel(out_ptr):
    tl.static_assert(ADDED < 9)
    tl.store(out_ptr, ADDED)
"""


def test_functions_of_one_text_have_the_names_and_the_lines_of_their_own_file(tmp_path: Path) -> None:
    """They are rewritten once: a copy of a kernel's file may differ in a constant alone."""
    for number, added in enumerate((3, 5, 9)):
        file = tmp_path / f"copy_{number}.py"
        file.write_text(COPIED.format(added=added, blank="\n" * number))
        kernel = runpy.run_path(str(file))["copied_kernel"]
        out = torch.zeros(1, dtype=torch.int32)
        if added < 9:
            kernel[(1,)](out)
            assert out.item() == added
            continue
        with pytest.raises(Exception, match="AssertionError") as raised:
            kernel[(1,)](out)
        assert raised.value.__cause__ is not None
        frames = traceback.extract_tb(raised.value.__cause__.__traceback__)
        raised_at = [(frame.filename, frame.lineno) for frame in frames]
        assert (str(file), file.read_text().splitlines().index("    tl.static_assert(ADDED < 9)") + 1) in raised_at


@triton.jit
def row_sums_kernel(x_ptr, y_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + columns[:, None] * ROWS + rows[None, :])
    tl.store(y_ptr + rows, tl.sum(tl.trans(x), 1))


def test_the_first_launch_adds_up_in_the_order_of_all_others() -> None:
    x = torch.randn(16 * 256, generator=torch.Generator().manual_seed(0))
    sums = [torch.empty(16) for _ in range(3)]
    for y in sums:
        row_sums_kernel[(1,)](x, y, 16, 256)
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[1], sums[2])


@triton.jit
def increment_kernel(x_ptr, out_ptr):
    tl.store(out_ptr + tl.arange(0, 2), tl.load(x_ptr + tl.arange(0, 2)) + 1)


def test_overflow_is_reported_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter as tritons

    x = torch.tensor([1, 2**31 - 1], dtype=torch.int32)
    out = torch.empty_like(x)
    increment_kernel[(1,)](x, out)
    assert out.tolist() == [2, -(2**31)]
    in_debug = dataclasses.replace(tritons.interpreter_builder.options, debug=True)
    monkeypatch.setattr(tritons.interpreter_builder, "options", in_debug)
    with pytest.raises(Exception, match="overflow detected for operation add"):
        increment_kernel[(1,)](x, out)


@triton.jit
def chosen_kernel(x_ptr, out_ptr, OTHER: tl.constexpr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, tl.where(x > 1, x, OTHER))


def test_a_number_that_triton_refuses_is_refused_after_others() -> None:
    x, out = torch.arange(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    for number in (7, 255):
        chosen_kernel[(1,)](x, out, OTHER=number, COUNT=4)
        assert out.tolist() == [number, number, 2, 3]
    for number in (-1, 256):
        with pytest.raises(Exception, match=r"out of range|negative scalar"):
            chosen_kernel[(1,)](x, out, OTHER=number, COUNT=4)
