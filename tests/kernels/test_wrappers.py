"""The public functions: what they refuse, what they return, that compilers can trace them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_same_bits

import fp8tune_kernels
from fp8tune.bench.kernel_contenders import public_wrapper
from fp8tune_kernels import catalog, quantize_colwise, quantize_rowwise_2d
from fp8tune_kernels.groups import group_ends

M, K = 50, 24


@pytest.fixture
def x(device: str) -> torch.Tensor:
    return torch.randn(M, K, dtype=torch.bfloat16, device=device, generator=torch.Generator(device).manual_seed(0))


def offsets(device: str, *ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=device)


def test_colwise_is_the_reference(x: torch.Tensor, device: str) -> None:
    offs = offsets(device, 3, 3, 40, M)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for power_of_two in (True, False):
            outputs = quantize_colwise(x, offs, float8_dtype=dtype, power_of_two=power_of_two)
            assert_same_bits(outputs, catalog.load("colwise").reference(x, offs, dtype, power_of_two))


def test_colwise_layout_is_what_a_grouped_gemm_takes(x: torch.Tensor, device: str) -> None:
    q, scales = quantize_colwise(x, offsets(device, 20, M))
    assert q.shape == (M, K)
    assert q.stride() == (1, 64)
    assert scales.shape == (2 * K,)
    assert scales.dtype == torch.float32


@pytest.mark.parametrize("used", [0, 1, 16, 33, M - 1])
def test_rows_past_the_last_group_are_zeros_and_in_no_scale(x: torch.Tensor, device: str, used: int) -> None:
    offs = offsets(device, used // 2, used)
    x[used:] = float("nan")
    outputs = quantize_colwise(x, offs, float8_dtype=torch.float8_e4m3fn)
    assert not outputs[0][used:].view(torch.uint8).any()
    assert not outputs[1].isnan().any()
    assert_same_bits(outputs, catalog.load("colwise").reference(x, offs, torch.float8_e4m3fn, True))


def test_a_nan_stays_in_its_slice(x: torch.Tensor, device: str) -> None:
    x[7, 5] = -float("nan")
    q, scales = quantize_colwise(x, offsets(device, 20, M), float8_dtype=torch.float8_e4m3fn)
    assert scales.isnan().nonzero().tolist() == [[5]]
    codes = q.view(torch.uint8)
    assert (codes[:20, 5] == 0x7F).all()
    assert ((codes & 0x7F) == 0x7F).sum() == 20
    q, scales = quantize_rowwise_2d(x, float8_dtype=torch.float8_e4m3fn)
    assert scales.isnan().nonzero().tolist() == [[7, 0]]
    assert (q.view(torch.uint8)[7] == 0x7F).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on inf * 0, in the interpreter
def test_an_infinity_makes_its_scale_zero(x: torch.Tensor) -> None:
    x[7, 5] = -float("inf")
    q, scales = quantize_rowwise_2d(x, float8_dtype=torch.float8_e4m3fn)
    assert scales[7] == 0
    assert (q.view(torch.uint8)[7] & 0x7F).nonzero().tolist() == [[5]]
    assert q.view(torch.uint8)[7, 5] == 0x7F


@pytest.mark.parametrize("shape", [(0, K), (M, 0), (0, 0)])
def test_nothing_to_do(shape: tuple[int, int], device: str) -> None:
    empty = torch.empty(shape, dtype=torch.bfloat16, device=device)
    q, scales = quantize_colwise(empty, offsets(device, 0, shape[0]))
    assert q.shape == shape
    assert (scales == 2.0**48).all()  # of an all-zero slice: 448 / 1e-12, rounded down to a power of two
    q, scales = quantize_rowwise_2d(empty)
    assert q.shape == shape
    assert scales.shape == (shape[0], 1)
    assert (scales == 2.0**48).all()


def wrong_x() -> list[Any]:
    x = torch.zeros(M, K, dtype=torch.bfloat16)
    return [
        pytest.param(x[0], "x has shape", id="one dimension"),
        pytest.param(x[None], "x has shape", id="three dimensions"),
        pytest.param(x.to(torch.int32), "x is torch.int32", id="integers"),
        pytest.param(x.double(), "x is torch.float64", id="float64"),
        pytest.param(x.t(), "x has strides", id="transposed"),
        pytest.param(x[:, ::2], "x has strides", id="every other column"),
        pytest.param(x[:, :8], "x has strides", id="a slice of columns"),
    ]


def wrong_offs() -> list[Any]:
    offs = torch.tensor([10, M], dtype=torch.int32)
    return [
        pytest.param(offs.long(), "offs is torch.int64", id="int64"),
        pytest.param(offs[None], "offs has shape", id="two dimensions"),
        pytest.param(offs[:0], "offs has shape", id="no group"),
        pytest.param(offs.repeat(2)[::2], "offs has strides", id="strided"),
        pytest.param(offs.to("meta"), "offs is on meta", id="other device"),
    ]


@pytest.mark.parametrize("quantize", [lambda x: quantize_colwise(x, offsets(x.device, M)), quantize_rowwise_2d])
@pytest.mark.parametrize(("wrong", "named"), wrong_x())
def test_wrong_x_is_refused(quantize: Callable[..., Any], wrong: torch.Tensor, named: str, device: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}.*wanted"):
        quantize(wrong.to(device))


@pytest.mark.parametrize(("wrong", "named"), wrong_offs())
def test_wrong_offs_are_refused(x: torch.Tensor, wrong: torch.Tensor, named: str, device: str) -> None:
    offs = wrong if wrong.is_meta else wrong.to(device)
    with pytest.raises(ValueError, match=f"^{named}.*wanted"):
        quantize_colwise(x, offs)


def test_wrong_float8_dtype_is_refused(x: torch.Tensor, device: str) -> None:
    with pytest.raises(ValueError, match=r"float8_dtype is torch\.float16, wanted one of torch\.float8_e4m3fn"):
        quantize_rowwise_2d(x, float8_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"float8_dtype is torch\.float8_e5m2fnuz"):
        quantize_colwise(x, offsets(device, M), float8_dtype=torch.float8_e5m2fnuz)


def test_torch_compile_traces_both_whole(x: torch.Tensor, device: str) -> None:
    def both(x: torch.Tensor, offs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *quantize_colwise(x * 2, offs), *quantize_rowwise_2d(x * 2)

    offs = offsets(device, 7, M)
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=True)
    assert_same_bits(compiled(x, offs), both(x, offs))
    assert_same_bits(compiled(x[:33], offsets(device, 33)), both(x[:33], offsets(device, 33)))


def test_the_operators_are_what_torch_library_expects(x: torch.Tensor, device: str) -> None:
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    operators = torch.ops.fp8tune
    torch.library.opcheck(operators.quantize_colwise, (x, offsets(device, 7, M), None, True), test_utils=checks)
    torch.library.opcheck(operators.quantize_rowwise_2d, (x, torch.float8_e5m2, False), test_utils=checks)


def test_skewed_routing_of_few_columns(device: str) -> None:
    """A kernel chosen by the mean group size, or a mask without the block's offset, gets these wrong."""
    x = torch.randn(1600, 40, device=device)
    offs = offsets(device, *group_ends("one-giant", 1600, 15))
    outputs = quantize_colwise(x, offs, float8_dtype=torch.float8_e4m3fn)
    assert_same_bits(outputs, catalog.load("colwise").reference(x, offs, torch.float8_e4m3fn, True))


def test_every_kernel_is_exported_by_the_package() -> None:
    for kernel in catalog.KERNELS:
        name = public_wrapper(catalog.load(kernel)).__name__
        assert name.startswith("quantize_") == (kernel in (*catalog.QUANTIZERS, *catalog.GATED))
        assert name in fp8tune_kernels.__all__
        assert callable(getattr(fp8tune_kernels, name))
    assert set(fp8tune_kernels.__all__) <= set(dir(fp8tune_kernels))
    with pytest.raises(AttributeError, match="quantize_nothing"):
        fp8tune_kernels.quantize_nothing  # noqa: B018
