"""The torch references, one number at a time: what the kernels' bytes are compared with is right itself."""

from __future__ import annotations

import bisect
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from on_edges import assert_same_bits

from fp8tune.measure.edges import fill
from fp8tune_kernels import catalog, transpose_codes
from fp8tune_kernels.groups import padded_rows, taken_rows
from fp8tune_kernels.quantize import gate_and_up
from fp8tune_kernels.quantize.arithmetic import FP8_MAX, NAN_CODES, reference_cast, reference_scale
from fp8tune_kernels.quantize.factors import reference_factor
from fp8tune_kernels.quantize.gated import ACTIVATIONS, reference_gated, reference_gated_gradient
from fp8tune_kernels.quantize.mxfp8_arithmetic import SCALE_MODES, reference_blocks
from fp8tune_kernels.quantize.row_shifts import reference_shifts
from fp8tune_kernels.spec import CONTENTS, ROUTINGS, NamedInts, Problem

EVERY_BFLOAT16 = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)

# FP8 quantization from the formulas alone

FORMATS = {"float8_e4m3fn": (3, 7, 0x7E), "float8_e4m3fnuz": (3, 8, 0x7F), "float8_e5m2": (2, 15, 0x7B)}
"""Mantissa bits, exponent bias, code of the largest finite value."""

NAN = {"float8_e4m3fn": 0x7F, "float8_e4m3fnuz": 0x80, "float8_e5m2": 0x7F}


def decode(code: int, dtype: str) -> float:
    """The value of a code without sign, up to the largest finite one."""
    mantissa_bits, bias, _ = FORMATS[dtype]
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    if exponent == 0:
        return math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)


VALUES = {dtype: [decode(code, dtype) for code in range(FORMATS[dtype][2] + 1)] for dtype in FORMATS}


def encode(value: float, dtype: str) -> int:
    """The code nearest to a value that is at most the largest finite one in size; ties go to the even code."""
    values = VALUES[dtype]
    if math.isnan(value):
        return NAN[dtype]
    above = bisect.bisect_left(values, abs(value))
    code = above
    if values[above] != abs(value):
        to_below, to_above = abs(value) - values[above - 1], values[above] - abs(value)  # both exact in float64
        nearer_below = to_below < to_above or (to_below == to_above and above % 2 == 1)
        code = above - 1 if nearer_below else above
    negative = math.copysign(1, value) < 0
    if dtype == "float8_e4m3fnuz" and code == 0:
        return 0  # the only zero it has
    return code | 0x80 if negative else code


def scale_of(values: list[float], dtype: str, power_of_two: bool) -> float:
    """The scale of one slice, as a float32 value."""
    if any(math.isnan(value) for value in values):
        return math.nan
    amax = max((abs(value) for value in values), default=0.0)
    scale = float(np.float32(VALUES[dtype][-1] / max(amax, 1e-12)))
    if power_of_two and scale > 0:
        scale = math.ldexp(1, math.frexp(scale)[1] - 1)
    return scale


def cast(value: float, scale: float, dtype: str) -> int:
    """The code of one value under a scale."""
    with np.errstate(all="ignore"):
        scaled = float(np.float32(value) * np.float32(scale))
    largest = VALUES[dtype][-1]
    return encode(scaled if math.isnan(scaled) else min(max(scaled, -largest), largest), dtype)


def quantize_slices(slices: list[list[float]], dtype: str, power_of_two: bool) -> tuple[list[list[int]], list[float]]:
    """Codes and scales of independent slices."""
    scales = [scale_of(values, dtype, power_of_two) for values in slices]
    codes = [[cast(value, scale, dtype) for value in values] for values, scale in zip(slices, scales, strict=True)]
    return codes, scales


def e8m0_of(block: list[float], dtype: str, scale_mode: str) -> int:
    """The E8M0 code of one block's scale."""
    if any(math.isnan(value) for value in block):
        return 255
    amax, largest = max(abs(value) for value in block), VALUES[dtype][-1]
    if math.isinf(amax):
        return 254
    if amax == 0:
        return 0
    if scale_mode == "floor":
        exponent = math.frexp(amax)[1] - math.frexp(largest)[1]
    else:
        exponent = next(power for power in range(-300, 300) if math.ldexp(largest, power) >= amax)
    return min(max(exponent, -127), 127) + 127


def quantize_blocks(values: list[float], dtype: str, scale_mode: str) -> tuple[list[int], list[int]]:
    """Codes, and an E8M0 code for every 32 of them, of values that follow one another in memory or down a column."""
    codes, scales, largest = [], [], VALUES[dtype][-1]
    for start in range(0, len(values), 32):
        block = values[start : start + 32]
        scales.append(e8m0_of(block, dtype, scale_mode))
        for value in block:
            scaled = math.nan if scales[-1] == 255 else math.ldexp(value, 127 - scales[-1])
            codes.append(encode(scaled if math.isnan(scaled) else min(max(scaled, -largest), largest), dtype))
    return codes, scales


# Scales and casts


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_scale_of_every_amax(name: str, power_of_two: bool) -> None:
    amax = EVERY_BFLOAT16.abs().float().unique()
    scales = reference_scale(amax, getattr(torch, name), power_of_two)
    expected = torch.tensor([scale_of([value], name, power_of_two) for value in amax.tolist()])
    assert torch.equal(scales.nan_to_num(-1), expected.nan_to_num(-1))


@pytest.mark.parametrize("name", FORMATS)
def test_cast_of_every_value(name: str) -> None:
    codes = reference_cast(EVERY_BFLOAT16, torch.tensor(3.0), getattr(torch, name)).view(torch.uint8)
    assert codes.tolist() == [cast(value, 3.0, name) for value in EVERY_BFLOAT16.tolist()]


def test_the_largest_values_and_nans_are_those_of_the_formats() -> None:
    assert {str(dtype).removeprefix("torch."): largest for dtype, largest in FP8_MAX.items()} == {
        name: values[-1] for name, values in VALUES.items()
    }
    for dtype in FP8_MAX:
        assert torch.tensor(NAN_CODES[dtype], dtype=torch.uint8).view(dtype).float().isnan()


def boundaries() -> torch.Tensor:
    """Float32 values around every power of two, and around the largest FP8 values times every power of two."""
    powers = 2.0 ** torch.arange(-149, 128, dtype=torch.float64)
    values = torch.cat([(powers * largest).float() for largest in (1.0, 448.0, 240.0, 57344.0)])
    bits = values[values.isfinite() & (values > 0)].view(torch.int32)
    around = torch.cat([bits - 1, bits, bits + 1]).view(torch.float32)
    return torch.cat([around, torch.tensor([0.0, torch.inf, torch.nan])])


@pytest.mark.parametrize("scale_mode", SCALE_MODES)
@pytest.mark.parametrize("fp8_dtype", FORMATS)
def test_scales_of_blocks_at_every_boundary_of_float32(fp8_dtype: str, scale_mode: str) -> None:
    amax = boundaries()
    _, scales = reference_blocks(amax[:, None], getattr(torch, fp8_dtype), scale_mode)
    expected = [e8m0_of([value], fp8_dtype, scale_mode) for value in amax.tolist()]
    assert scales.view(torch.uint8)[:, 0].tolist() == expected


# Kernels

SLICES = {
    "colwise": NamedInts(M=33, K=7, G=4),
    "rowwise": NamedInts(N=7, M=33, G=4),
    "rowwise-2d": NamedInts(M=9, K=37),
    "colwise-3d": NamedInts(E=2, N=13, K=11),
    "transpose-3d-atomic": NamedInts(E=2, N=13, K=11),
    "transpose-3d-reduction": NamedInts(E=2, N=13, K=11),
    "mxfp8-dim0": NamedInts(M=5, K=77),
    "mxfp8-dim1": NamedInts(M=77, K=5),
    "mxfp8-dim1-3d": NamedInts(E=2, N=45, K=3),
}
"""Kernels whose outputs are codes and scales; those of the others are made of these, see below."""


def slices_of(kernel: str, x: torch.Tensor, ends: list[int]) -> list[torch.Tensor]:
    """Matrices of which each row has scales of its own, in the order of the scales; a view, of inputs or codes."""
    groups = itertools.pairwise([0, *ends])
    if kernel == "colwise":
        return [x[start:end].t() for start, end in groups]
    if kernel == "rowwise":
        return [x[:, start:end] for start, end in groups]
    if kernel == "mxfp8-dim1":
        return [x.t()]
    if kernel in ("mxfp8-dim0", "rowwise-2d"):
        return [x]
    return [item.t() for item in x]


@pytest.mark.parametrize("kernel", SLICES)
@pytest.mark.parametrize("fp8_dtype", FORMATS)
def test_codes_and_scales_are_those_of_the_formulas(kernel: str, fp8_dtype: str) -> None:
    """Check each content in each scale mode, with the group layouts in turn."""
    spec = catalog.load(kernel)
    cases = itertools.product(spec.scale_modes, [item for item in CONTENTS if item != "integers"])
    for number, (mode, content) in enumerate(cases):
        routing, layout = (
            ROUTINGS[number % 6] if spec.routed else "none",
            spec.input_layouts[number % len(spec.input_layouts)],
        )
        in_dtype = "bfloat16" if spec.routed else "float32"
        inputs = spec.inputs(Problem(kernel, SLICES[kernel], routing, layout, in_dtype, fp8_dtype, mode), "cpu")
        x, ends = inputs[0], inputs[1].tolist() if spec.routed else []
        fill(x, content)
        q, scales = spec.reference(*inputs)
        values = x.transpose(1, 2) if kernel.startswith("transpose-3d") else x  # as its codes lie
        result = [line.view(torch.uint8).tolist() for item in slices_of(kernel, q, ends) for line in item]
        lines = [line.double().tolist() for item in slices_of(kernel, values, ends) for line in item]
        if kernel.startswith("mxfp8"):
            pairs = [quantize_blocks(line, fp8_dtype, mode) for line in lines]
            assert result == [pair[0] for pair in pairs], (mode, content)
            assert scales.flatten(0, -2).view(torch.uint8).tolist() == [pair[1] for pair in pairs], (mode, content)
            continue
        expected, of_lines = quantize_slices(lines, fp8_dtype, mode == "power-of-two")
        assert result == expected, (mode, content)
        right = torch.tensor(of_lines, dtype=torch.float32)
        assert torch.equal(scales.flatten().nan_to_num(-1), right.nan_to_num(-1)), (mode, content)
        if ends:  # rows of no group
            rest = q[ends[-1] :] if kernel == "colwise" else q[:, ends[-1] :]
            assert not rest.view(torch.uint8).any()


def test_what_two_kernels_write_at_once_is_what_they_write() -> None:
    """``colwise-dual``; ``rowwise`` writes ``colwise``, and ``mxfp8-dim1-3d-via-2d`` takes two steps."""
    reference = {kernel: catalog.load(kernel).reference for kernel in catalog.QUANTIZERS}
    x, y, *rest = catalog.load("colwise-dual").inputs(Problem("", NamedInts(M=33, N=7, K=5, G=4), "ragged"), "cpu")
    of_x, of_y = (reference["colwise"](matrix, *rest) for matrix in (x, y))
    assert_same_bits(reference["colwise-dual"](x, y, *rest), (*of_x, *of_y))
    q, scales = reference["rowwise"](x.t(), *rest[:3])
    assert torch.equal(q.t().float(), of_x[0].float())
    assert torch.equal(scales, of_x[1])
    one_step, two_steps = catalog.load("mxfp8-dim1-3d"), catalog.load("mxfp8-dim1-3d-via-2d")
    inputs = one_step.inputs(Problem("", NamedInts(E=2, N=45, K=3), scale_mode="floor"), "cpu")
    assert_same_bits(one_step.reference(*inputs), two_steps.reference(*inputs))


@settings(max_examples=20)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.sampled_from([16, 32, 64]), st.integers(0, 9))
def test_aligned_groups_begin_where_they_must_with_zeros_between(sizes: list[int], alignment: int, beyond: int) -> None:
    ends = list(itertools.accumulate(sizes))
    x = torch.randn(ends[-1] + beyond, 3, generator=torch.Generator().manual_seed(sum(sizes))) + 8
    inputs = x, torch.tensor(ends, dtype=torch.int32), torch.float8_e5m2, True
    plain, aligned = (catalog.load("colwise").reference(*inputs, item) for item in (1, alignment))
    assert aligned[0].shape == (padded_rows(len(x), len(sizes), alignment), 3)
    assert aligned[0].stride() == (1, len(aligned[0]))
    assert torch.equal(plain[1], aligned[1])
    place = 0
    for end, size in zip(ends, sizes, strict=True):
        taken = taken_rows(size, alignment)
        assert taken % alignment == 0
        assert 0 < taken == max(alignment, taken) < size + alignment + (size == 0)
        codes = aligned[0][place : place + taken].float()
        assert torch.equal(codes[:size], plain[0][end - size : end].float())
        assert not codes[size:].any()
        place += taken


# Gated activations


def exact_gate(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "gpt-oss":
        # Not clamp: from 2.15 on, torch's gradient of it at the limit is 0.
        clamped, up = (x.where(x <= 7, 7.0) for x in (gate, up))
        return (up.where(up >= -7, -7.0) + 1) * clamped * torch.sigmoid(1.702 * clamped)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("activation", range(len(ACTIVATIONS)), ids=ACTIVATIONS)
def test_activations_and_their_gradients_are_autograds_to_bfloat16(activation: int) -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up = ((4 * torch.randn(4096, generator=generator)).bfloat16() for _ in range(2))
    leaves = [item.double().requires_grad_() for item in (gate, up)]
    right = exact_gate(*leaves, ACTIVATIONS[activation])
    torch.testing.assert_close(reference_gated(gate, up, activation).double(), right.detach(), rtol=2**-8, atol=1e-5)
    result = reference_gated_gradient(gate, up, torch.ones_like(gate), activation)
    for mine, exact in zip(result, torch.autograd.grad(right.sum(), leaves), strict=False):
        torch.testing.assert_close(mine.double(), exact, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("kernel", catalog.GATED)
def test_the_reference_is_the_same_in_blocks_of_rows(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of a large problem at once took 75 GB: no config of it could be checked on an H100."""
    spec = catalog.load(kernel)
    inputs = spec.inputs(Problem(kernel, NamedInts(M=61, N=48, G=3), "empty"), "cpu")
    whole = spec.reference(*inputs)
    monkeypatch.setattr(gate_and_up, "VALUES_AT_ONCE", 1000)  # blocks of 20 rows
    assert_same_bits(spec.reference(*inputs), whole)


# The folded recipe: factors and shifts


def test_factors_go_by_the_exponent() -> None:
    scale = torch.tensor([1.0, 2.0, 3.99, 2.0**48, 2.0**-120, 0.0, float("inf"), float("nan")])
    right = torch.tensor([1.0, 0.5, 0.5, 2.0**-48, 2.0**120, 2.0**127, 0.0, 0.0])
    assert torch.equal(reference_factor(scale), right)


def test_shifts_bring_rows_to_the_least_of_their_group() -> None:
    offs, generator = torch.tensor([0, 5, 9], dtype=torch.int32), torch.Generator().manual_seed(0)
    scales, others = (torch.exp2(torch.randint(-20, 40, (11,), generator=generator)).float() for _ in range(2))
    scales[1], others[6], scales[7] = 0, float("nan"), 0
    shifts, least = reference_shifts(scales, others, offs)
    products = scales * others
    for group, (start, end) in enumerate(((0, 0), (0, 5), (5, 9))):
        usable = [product for product in products[start:end].tolist() if product > 0]
        assert least[group] == min(usable, default=1.0)
        for shift, product in zip(shifts[start:end].tolist(), products[start:end].tolist(), strict=True):
            assert not product > 0 or shift == float(least[group]) / product <= 1
    assert bool((shifts[9:] == 1).all())


def test_a_shift_changes_the_exponent_alone_until_codes_are_subnormal() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(16, 1)
    codes[codes & 0x7F == 0x7F] = 0
    q, offs = codes.view(torch.float8_e4m3fn), torch.tensor([16], dtype=torch.int32)
    shifts = torch.exp2(-torch.arange(16.0))
    (shifted,) = catalog.load("transposed-codes").reference(q, offs, shifts)
    expected = q.float() * shifts[:, None]
    normal = expected.abs() >= 2.0**-6
    assert torch.equal(shifted[:16].float()[normal], expected[normal])
    assert bool((shifted[:16].float() - expected).abs().max() <= 2.0**-10)
    assert torch.equal(transpose_codes(q, offs)[:16].float(), q.float())


def test_one_scale_an_expert_stands_for_the_same_values() -> None:
    """Check values of which none becomes subnormal."""
    draw = torch.Generator().manual_seed(1)
    q = torch.randint(1, 16, (2, 32, 48), generator=draw).float().to(torch.float8_e4m3fn).transpose(1, 2)  # (E, K, N)
    scales = torch.exp2(torch.randint(-2, 3, (2, 32), generator=draw).float())
    transposed, of_columns = catalog.load("shifted-transpose-3d").reference(q, scales)
    assert torch.equal(of_columns.view(2, -1), scales.amin(1, keepdim=True).expand(2, 48))
    assert torch.equal(transposed.float() / of_columns.view(2, 1, -1), (q.float() / scales[:, None, :]).mT)


# The grouped GEMMs, in float64


@pytest.mark.parametrize("in_dtype", ["float8_e4m3fn", "float8_e4m3fnuz", "bfloat16"])
def test_products_of_groups_are_those_of_what_codes_stand_for(in_dtype: str) -> None:
    def operands(kernel: str) -> tuple:
        return catalog.load(kernel).inputs(
            Problem(kernel, NamedInts(M=75, N=32, K=48, G=3), "ragged", in_dtype=in_dtype), "cpu"
        )

    def assert_close(kernel: str, inputs: tuple, right: torch.Tensor) -> torch.Tensor:
        (result,) = catalog.load(kernel).reference(*inputs)
        atol = 1e-5 * float(right.abs().max())  # float32's rounding, where terms cancel
        torch.testing.assert_close(result.double(), right, rtol=2**-8, atol=atol)
        return result

    inputs = operands("grouped-rows")
    a, b, offs, scale_a, scale_b = inputs
    x, w = a.double(), b.double()
    if scale_a is not None:
        x, w = x / scale_a[:, None].double(), w / scale_b[:, :, None].double()
    groups = [slice(*item) for item in itertools.pairwise([0, *offs.tolist()])]
    assert_close("grouped-rows", inputs, torch.cat([x[rows] @ w[group].t() for group, rows in enumerate(groups)]))

    *inputs, _ = operands("grouped-contraction")
    a, b, offs, scale_a, scale_b, alignment = inputs
    products, place = [], 0
    for group, size in enumerate(rows.stop - rows.start for rows in groups):
        product = a[place : place + size].double().t() @ b[place : place + size].double()
        if scale_a is not None:
            product = product / scale_a.view(3, -1, 1)[group].double() / scale_b.view(3, 1, -1)[group].double()
        products.append(product)
        place += taken_rows(size, alignment) if alignment > 1 else size
    plain = assert_close("grouped-contraction", (*inputs, None), torch.stack(products))
    sums = catalog.load("grouped-contraction").reference(*inputs, torch.zeros(3, 32, 48))[0]
    assert torch.equal(sums.bfloat16(), plain)
    for dtype in (torch.bfloat16, torch.float32):  # added before it is rounded
        added = torch.randn(3, 32, 48).to(dtype)
        (result,) = catalog.load("grouped-contraction").reference(*inputs, added)
        assert torch.equal(result, (added.float() + sums).to(dtype))
