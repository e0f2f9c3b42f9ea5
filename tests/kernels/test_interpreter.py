"""The repairs to Triton's interpreter work, and are still needed."""

import dataclasses

import pytest
import torch
import triton
import triton.language as tl

from fp8tune_kernels import interpreter

pytestmark = pytest.mark.skipif(not interpreter.INTERPRETED, reason="kernels are compiled here")

EVERY_BFLOAT16 = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
FINITE = EVERY_BFLOAT16[EVERY_BFLOAT16.isfinite()].float()


@triton.jit
def cast_kernel(x_ptr, q_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(q_ptr + at, tl.load(x_ptr + at).to(q_ptr.dtype.element_ty))


def codes(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    interpreter.install()
    q = torch.empty(values.shape, dtype=dtype)
    cast_kernel[(1,)](values, q, COUNT=values.numel())
    return q.view(torch.uint8)


@pytest.mark.parametrize("dtype", interpreter.TORCH_DTYPES.values())
def test_the_cast_is_torchs_on_every_bfloat16_value(dtype: torch.dtype) -> None:
    values = EVERY_BFLOAT16.float()
    assert torch.equal(codes(values, dtype), values.to(dtype).view(torch.uint8))


def test_bfloat16_widens_to_its_own_value() -> None:
    interpreter.install()
    widened = torch.empty(EVERY_BFLOAT16.shape)
    cast_kernel[(1,)](EVERY_BFLOAT16, widened, COUNT=EVERY_BFLOAT16.numel())
    assert torch.equal(widened.view(torch.int32), EVERY_BFLOAT16.float().view(torch.int32))


FLOATS = [torch.float32, torch.float16, torch.bfloat16, *interpreter.TORCH_DTYPES.values()]


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """Of a narrow type all values; of float32 those on either side of every bfloat16 value and between two."""
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
    right = values.float().to(target)
    interpreter.install()
    found = torch.empty(values.shape, dtype=target)
    cast_kernel[(1,)](values, found, COUNT=values.numel())
    same = found.view(torch.int8).view(len(values), -1) == right.view(torch.int8).view(len(values), -1)
    assert (same.all(1) | (found.float().isnan() & right.float().isnan())).all()


@triton.jit
def doubled(x):
    return tl.sum(tl.where(tl.arange(0, 2)[:, None] >= 0, x[None, :], 0.0), 0)


@triton.jit
def doubling_kernel(x_ptr, out_ptr, COUNT: tl.constexpr, TIMES: tl.constexpr):
    at = tl.arange(0, COUNT)
    x = tl.load(x_ptr + at)
    for _ in range(TIMES):
        x = doubled(x)
    tl.store(out_ptr + at, x)


def patches_of(times: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a launch patches a module or class, with so many calls of a device function that calls another."""
    from triton.runtime import interpreter as tritons

    interpreter.install()
    patched: list[object] = []
    patch = tritons._patch_builtin
    monkeypatch.setattr(tritons, "_patch_builtin", lambda *given: patched.append(given[0]) or patch(*given))
    x, out = torch.ones(8), torch.empty(8)
    doubling_kernel[(3,)](x, out, COUNT=8, TIMES=times)
    assert torch.equal(out, 2**times * x)
    monkeypatch.undo()
    return len(patched)


def test_device_functions_find_the_language_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    patches_of(times=1, monkeypatch=monkeypatch)  # the first launch rewrites the functions, which adds a name to each
    assert patches_of(times=9, monkeypatch=monkeypatch) == patches_of(times=1, monkeypatch=monkeypatch)


def test_a_launch_leaves_the_language_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    patches_of(times=1, monkeypatch=monkeypatch)
    places = (tl, tl.core, tl.math, tl.tensor, tl.dtype)
    before = [dict(vars(place)) for place in places]
    patches_of(times=2, monkeypatch=monkeypatch)
    assert [dict(vars(place)) for place in places] == before


@triton.jit
def increment_kernel(x_ptr, out_ptr):
    tl.store(out_ptr + tl.arange(0, 2), tl.load(x_ptr + tl.arange(0, 2)) + 1)


def test_overflow_is_looked_for_only_where_it_would_be_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when Triton's own check costs nothing where it says nothing, or reports: then drop ours."""
    from triton.runtime import interpreter as tritons

    interpreter.install()
    x = torch.tensor([1, 2**31 - 1], dtype=torch.int32)
    out = torch.empty_like(x)
    ours = tritons.interpreter_semantic.binary_op_sanitize_overflow_impl
    monkeypatch.setattr(tritons.interpreter_semantic, "binary_op_sanitize_overflow_impl", ours.__wrapped__)
    increment_kernel[(1,)](x, out)  # Triton's own looks, and does not say
    assert out.tolist() == [2, -(2**31)]
    monkeypatch.undo()
    increment_kernel[(1,)](x, out)
    assert out.tolist() == [2, -(2**31)]
    in_debug = dataclasses.replace(tritons.interpreter_builder.options, debug=True)
    monkeypatch.setattr(tritons.interpreter_builder, "options", in_debug)
    with pytest.raises(Exception, match="overflow detected for operation add"):
        increment_kernel[(1,)](x, out)


def test_installing_twice_wraps_once() -> None:
    from triton.runtime import interpreter as tritons

    interpreter.install()
    once = tritons._convert_float
    interpreter.install()
    assert tritons._convert_float is once


@pytest.mark.parametrize("triton_dtype", [tl.float8e4nv, tl.float8e5])
def test_the_repair_is_still_needed(triton_dtype: tl.dtype) -> None:
    """Fails when Triton has mended its cast: then drop the repair for the versions that have the mended one."""
    from triton.runtime import interpreter as tritons

    interpreter.install()
    unrepaired = tritons._convert_float.__wrapped__
    values = FINITE[FINITE.abs() <= 448]
    theirs = unrepaired(values.numpy(), tl.float32, triton_dtype, tritons._ir.ROUNDING_MODE.RTNE)
    right = values.to(interpreter.TORCH_DTYPES[triton_dtype]).view(torch.uint8)
    assert not torch.equal(torch.from_numpy(theirs), right)


def test_the_repair_of_bfloat16_is_still_needed() -> None:
    """Fails when Triton widens subnormals right: then drop the repair for the versions that do."""
    from triton.runtime import interpreter as tritons

    interpreter.install()
    subnormals = EVERY_BFLOAT16[(EVERY_BFLOAT16 != 0) & (EVERY_BFLOAT16.abs() < 2.0**-126)]
    bits = subnormals.view(torch.int16).numpy().view("uint16")
    theirs = tritons._convert_float.__wrapped__(bits, tl.bfloat16, tl.float32, None)
    assert not torch.equal(torch.from_numpy(theirs.view("float32")), subnormals.float())
