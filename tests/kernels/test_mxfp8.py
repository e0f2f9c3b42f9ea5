"""The MXFP8 kernels: scales of every kind of block, references against the slow loop, and what the wrappers refuse."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CONTENTS, assert_same_bits, inputs_of, poisoned
from slow_loop import FORMATS, e8m0_of, quantize_blocks

from fp8tune_kernels import (
    catalog,
    quantize_mxfp8_dim0,
    quantize_mxfp8_dim1,
    quantize_mxfp8_dim1_3d,
    quantize_mxfp8_dim1_3d_via_2d,
)
from fp8tune_kernels.quantize.mxfp8_arithmetic import SCALE_MODES, reference_blocks
from fp8tune_kernels.spec import NamedInts, Problem

OF_MATRICES = (quantize_mxfp8_dim0, quantize_mxfp8_dim1)
OF_WEIGHTS = (quantize_mxfp8_dim1_3d, quantize_mxfp8_dim1_3d_via_2d)
EVERY_BFLOAT16 = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities, in the interpreter


def around(values: torch.Tensor) -> torch.Tensor:
    """Positive float32 values with both neighbours of each."""
    bits = values.view(torch.int32)
    return torch.cat([bits - 1, bits, bits + 1]).view(torch.float32)


def boundaries() -> torch.Tensor:
    """Float32 values around every power of two, and around the largest FP8 values times every power of two."""
    powers = 2.0 ** torch.arange(-149, 128, dtype=torch.float64)
    scaled = [(powers * largest).float() for largest in (1.0, 448.0, 240.0, 57344.0)]
    values = torch.cat(scaled)
    return torch.cat([around(values[values.isfinite() & (values > 0)]), torch.tensor([0.0, torch.inf, torch.nan])])


@pytest.mark.parametrize("scale_mode", SCALE_MODES)
@pytest.mark.parametrize("fp8_dtype", FORMATS)
def test_scales_at_every_boundary_of_float32(fp8_dtype: str, scale_mode: str) -> None:
    amax = boundaries()
    _, scales = reference_blocks(amax[:, None], getattr(torch, fp8_dtype), scale_mode)
    wanted = [e8m0_of([value], fp8_dtype, scale_mode) for value in amax.tolist()]
    assert scales.view(torch.uint8)[:, 0].tolist() == wanted


@pytest.mark.parametrize("scale_mode", SCALE_MODES)
@pytest.mark.parametrize("fp8_dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("values", [EVERY_BFLOAT16, boundaries()], ids=["every bfloat16", "float32 boundaries"])
def test_kernel_on_every_value_as_a_block_of_its_own(
    values: torch.Tensor, fp8_dtype: str, scale_mode: str, device: str
) -> None:
    spec = catalog.load("mxfp8-dim0")
    inputs = (values[:, None].to(device), getattr(torch, fp8_dtype), scale_mode)
    expected = spec.reference(*inputs)
    outputs = poisoned(spec, inputs, expected)
    spec.launch(NamedInts(BLOCK_SIZE_M=2048, BLOCK_SIZE_K=32, num_warps=8, num_stages=1), inputs, outputs)
    assert_same_bits(outputs, expected)

    @functools.cache  # the slow loop takes each magnitude once
    def code(magnitude: float) -> int:
        return quantize_blocks([magnitude], fp8_dtype, scale_mode)[0][0]

    signs = (values.signbit() & ~values.isnan()).tolist()
    codes = [code(value) | (0x80 if sign else 0) for value, sign in zip(values.abs().tolist(), signs, strict=True)]
    assert outputs[0].view(torch.uint8)[:, 0].tolist() == codes


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("scale_mode", SCALE_MODES)
@pytest.mark.parametrize("fp8_dtype", FORMATS)
def test_references_are_the_slow_loop(fp8_dtype: str, scale_mode: str, content: str) -> None:
    shapes = {
        "mxfp8-dim0": NamedInts(M=5, K=77),
        "mxfp8-dim1": NamedInts(M=77, K=5),
        "mxfp8-dim1-3d": NamedInts(E=2, N=45, K=3),
    }
    for kernel, shape in shapes.items():
        spec = catalog.load(kernel)
        one = Problem(kernel, shape, in_dtype="float32", fp8_dtype=fp8_dtype, scale_mode=scale_mode)
        inputs = inputs_of(spec, one, content, "cpu")
        q, scales = spec.reference(*inputs)
        along = (lambda tensor: tensor) if kernel == "mxfp8-dim0" else (lambda tensor: tensor.mT)
        lines = along(inputs[0]).flatten(0, -2).double().tolist()
        wanted = [quantize_blocks(line, fp8_dtype, scale_mode) for line in lines]
        assert along(q).flatten(0, -2).view(torch.uint8).tolist() == [codes for codes, _ in wanted]
        assert scales.flatten(0, -2).view(torch.uint8).tolist() == [blocks for _, blocks in wanted]


def test_via_2d_has_the_contract_of_3d() -> None:
    one_step, two_steps = catalog.load("mxfp8-dim1-3d"), catalog.load("mxfp8-dim1-3d-via-2d")
    for field in ("key", "problems", "inputs", "outputs", "reference", "interpreted", "scale_modes"):
        assert getattr(one_step, field) == getattr(two_steps, field)


@pytest.fixture
def x(device: str) -> torch.Tensor:
    return torch.randn(70, 50, dtype=torch.bfloat16, device=device, generator=torch.Generator(device).manual_seed(0))


def test_layouts_are_what_a_block_scaled_gemm_takes(x: torch.Tensor) -> None:
    q, scales = quantize_mxfp8_dim0(x)
    assert (q.shape, q.stride(), scales.shape, scales.stride()) == ((70, 50), (50, 1), (70, 2), (2, 1))
    q, scales = quantize_mxfp8_dim1(x)
    assert (q.shape, q.stride(), scales.shape, scales.stride()) == ((70, 50), (1, 80), (50, 3), (3, 1))
    for quantize in OF_WEIGHTS:
        q, scales = quantize(x.view(2, 35, 50))
        assert (q.shape, q.stride()) == ((2, 35, 50), (35 * 50, 1, 35))
        assert (scales.shape, scales.stride()) == ((2, 50, 2), (100, 2, 1))
        assert scales.dtype == torch.float8_e8m0fnu


@pytest.mark.parametrize("scale_mode", SCALE_MODES)
def test_codes_times_scales_are_the_values(x: torch.Tensor, scale_mode: str) -> None:
    q, scales = quantize_mxfp8_dim0(x, float8_dtype=torch.float8_e4m3fn, scale_mode=scale_mode)
    scale = scales.float().repeat_interleave(32, 1)[:, :50]
    clamped = x.float().clamp(-448 * scale, 448 * scale)
    assert (torch.equal(clamped, x.float())) == (scale_mode == "rceil")
    error = (q.float() * scale - clamped).abs()
    assert (error <= torch.maximum(clamped.abs() / 16, scale * 2.0**-10)).all()


def test_a_nan_and_an_infinity_stay_in_their_blocks(x: torch.Tensor) -> None:
    x[40, 3], x[40, 35] = -float("nan"), -float("inf")
    q, scales = (tensor.view(torch.uint8) for tensor in quantize_mxfp8_dim0(x, float8_dtype=torch.float8_e4m3fn))
    assert scales[40].tolist() == [255, 254]
    assert (q[40, :32] == 0x7F).all()
    assert q[40, 35] == 0xFE
    assert ((q & 0x7F) == 0x7F).sum() == 32
    assert (scales > 200).sum() == 2


def test_zeros_have_the_smallest_scale_and_keep_their_sign(x: torch.Tensor) -> None:
    x.zero_()
    x[:, 1] = -0.0
    q, scales = (tensor.view(torch.uint8) for tensor in quantize_mxfp8_dim1(x, float8_dtype=torch.float8_e4m3fn))
    assert not scales.any()
    assert (q[:, 1] == 0x80).all()
    assert not q[:, 2:].any()


@pytest.mark.parametrize("shape", [(0, 24), (50, 0), (0, 0)])
@pytest.mark.parametrize("quantize", OF_MATRICES)
def test_nothing_to_do(quantize: Callable[..., Any], shape: tuple[int, int], device: str) -> None:
    q, scales = quantize(torch.empty(shape, dtype=torch.bfloat16, device=device))
    assert q.shape == shape
    assert scales.numel() == 0


def test_no_expert_is_nothing_to_do(device: str) -> None:
    for quantize in OF_WEIGHTS:
        q, scales = quantize(torch.empty(0, 64, 24, device=device))
        assert (q.shape, scales.shape) == ((0, 64, 24), (0, 24, 2))


def wrong(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Message -> what a wrapper that takes ``tensor`` refuses with it."""
    return {
        "has shape": tensor[0],
        "is torch.float64": tensor.double(),
        "is torch.int32": tensor.to(torch.int32),
        "has strides": tensor.mT,
    }


@pytest.mark.parametrize("quantize", OF_MATRICES + OF_WEIGHTS)
def test_wrong_arguments_are_refused(quantize: Callable[..., Any], x: torch.Tensor) -> None:
    right = x if quantize in OF_MATRICES else x.view(2, 35, 50)
    for message, given in wrong(right).items():
        with pytest.raises(ValueError, match=f"^[xw] {message}.*wanted"):
            quantize(given)
    with pytest.raises(ValueError, match=r"^scale_mode is 'ceil', wanted floor or rceil$"):
        quantize(right, scale_mode="ceil")
    with pytest.raises(ValueError, match=r"^float8_dtype is torch\.float8_e8m0fnu, wanted"):
        quantize(right, float8_dtype=torch.float8_e8m0fnu)


def test_torch_compile_traces_all_whole(x: torch.Tensor) -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        matrices = [tensor for quantize in OF_MATRICES for tensor in quantize(x * 2)]
        return *matrices, *quantize_mxfp8_dim1_3d((x * 2).view(2, -1, 50), scale_mode="rceil")

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    assert_same_bits(compiled(x), run(x))
    assert_same_bits(compiled(x[:34].contiguous()), run(x[:34].contiguous()))


def test_the_operators_are_what_torch_library_expects(x: torch.Tensor) -> None:
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    operators, weights = torch.ops.fp8tune, x.view(2, 35, 50)
    torch.library.opcheck(operators.quantize_mxfp8_dim0, (x, None, "floor"), test_utils=checks)
    torch.library.opcheck(operators.quantize_mxfp8_dim1, (x, torch.float8_e5m2, "rceil"), test_utils=checks)
    torch.library.opcheck(operators.quantize_mxfp8_dim1_3d, (weights, None, "floor"), test_utils=checks)
    torch.library.opcheck(operators.quantize_mxfp8_dim1_3d_via_2d, (weights, None, "floor"), test_utils=checks)
