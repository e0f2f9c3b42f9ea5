"""The three functions that quantize expert weights: what they refuse, what they return, that compilers trace them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_same_bits, poisoned

import fp8tune_kernels
from fp8tune_kernels import catalog
from fp8tune_kernels.quantize import weights
from fp8tune_kernels.spec import NamedInts, Problem

KERNELS = ("colwise-3d", "transpose-3d-atomic", "transpose-3d-reduction")
E, N, K = 3, 20, 24


@pytest.fixture
def w(device: str) -> torch.Tensor:
    return weights.inputs(Problem("", NamedInts(E=E, N=N, K=K)), device)[0]


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    return request.param


def function(kernel: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return getattr(fp8tune_kernels, f"quantize_{kernel.replace('-', '_')}")


def test_it_is_the_reference(kernel: str, w: torch.Tensor) -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for power_of_two in (True, False):
            outputs = function(kernel)(w, float8_dtype=dtype, power_of_two=power_of_two)
            assert_same_bits(outputs, catalog.load(kernel).reference(w, dtype, power_of_two))


def test_the_layouts_are_what_a_grouped_gemm_takes(kernel: str, w: torch.Tensor) -> None:
    q, scales = function(kernel)(w)
    assert w.stride() == (K * N, 1, K)
    if kernel == "colwise-3d":
        assert (q.shape, q.stride(), scales.shape) == ((E, K, N), (K * N, 1, K), (E, 1, N))
    else:
        assert (q.shape, q.stride(), scales.shape) == ((E, N, K), (N * K, 1, N), (E, 1, K))


def test_a_nan_stays_in_its_slice(kernel: str, w: torch.Tensor) -> None:
    w[1, 7, 5] = -float("nan")
    q, scales = function(kernel)(w, float8_dtype=torch.float8_e4m3fn)
    at = 5 if kernel == "colwise-3d" else 7
    assert scales.isnan().nonzero().tolist() == [[1, 0, at]]
    codes = q.view(torch.uint8)
    assert (codes[1, :, at] == 0x7F).all()
    assert ((codes & 0x7F) == 0x7F).sum() == codes.shape[1]


@pytest.mark.parametrize("shape", [(0, K, N), (E, K, 0), (E, 0, N), (E, 0, 0)])
def test_nothing_to_do(kernel: str, shape: tuple[int, int, int], device: str) -> None:
    empty = torch.empty(shape[0], shape[2], shape[1], dtype=torch.bfloat16, device=device).transpose(1, 2)
    q, scales = function(kernel)(empty)
    assert q.numel() == 0
    assert (scales == 2.0**48).all()  # of an all-zero slice: 448 / 1e-12, rounded down to a power of two


def wrong_w() -> list[Any]:
    w = torch.zeros(E, N, K, dtype=torch.bfloat16).transpose(1, 2)
    return [
        pytest.param(w[0], "w has shape", id="two dimensions"),
        pytest.param(w[None], "w has shape", id="four dimensions"),
        pytest.param(w.to(torch.int32), "w is torch.int32", id="integers"),
        pytest.param(w.double(), "w is torch.float64", id="float64"),
        pytest.param(w.contiguous(), r"w has strides \(480, 20, 1\), wanted \(480, 1, 24\)", id="N contiguous"),
        pytest.param(w[:, :8], "w has strides", id="a slice of K"),
        pytest.param(w[:, :, ::2], "w has strides", id="every other column"),
        pytest.param(w.flip(0)[:1].expand(E, K, N), "w has strides", id="one expert repeated"),
    ]


@pytest.mark.parametrize(("wrong", "named"), wrong_w())
def test_wrong_w_is_refused(kernel: str, wrong: torch.Tensor, named: str, device: str) -> None:
    moved = torch.empty_strided(wrong.shape, wrong.stride(), dtype=wrong.dtype, device=device)
    with pytest.raises(ValueError, match=f"^{named}.*wanted" if "wanted" not in named else f"^{named}"):
        function(kernel)(moved)


@pytest.mark.parametrize("kernel", [*KERNELS, "colwise-transpose-3d"], indirect=True)
def test_experts_of_one_row_are_taken_on_a_cpu(kernel: str) -> None:
    w = torch.randn(E, 1, K).transpose(1, 2)
    assert_same_bits(function(kernel)(w), catalog.load(kernel).reference(w, torch.float8_e4m3fn, True))


def test_some_experts_of_many_are_taken(kernel: str, w: torch.Tensor) -> None:
    outputs = function(kernel)(w[1:], float8_dtype=torch.float8_e5m2)
    assert_same_bits(outputs, catalog.load(kernel).reference(w[1:], torch.float8_e5m2, True))


def test_torch_compile_traces_them_whole(w: torch.Tensor) -> None:
    def all_three(w: torch.Tensor) -> list[torch.Tensor]:
        return [output for kernel in KERNELS for output in function(kernel)(w * 2)]

    compiled = torch.compile(all_three, fullgraph=True, backend="aot_eager", dynamic=True)
    assert_same_bits(compiled(w), all_three(w))
    assert_same_bits(compiled(w[:2]), all_three(w[:2]))


def test_the_operators_are_what_torch_library_expects(kernel: str, w: torch.Tensor) -> None:
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    operator = getattr(torch.ops.fp8tune, f"quantize_{kernel.replace('-', '_')}")
    function(kernel)  # registers it
    torch.library.opcheck(operator, (w, torch.float8_e5m2, False), test_utils=checks)


def test_w1_and_w2_of_a_layer_are_two_problems(kernel: str) -> None:
    problems = catalog.load(kernel).problems
    first = list(problems({"M": 16640, "K": 5120, "N": 8192, "E": 16}))
    assert first == list(problems({"M": 131072, "K": 5120, "N": 8192, "E": 16}))
    assert first == [NamedInts(E=16, N=8192, K=5120)]
    assert list(problems({"M": 16640, "K": 8192, "N": 5120, "E": 16})) == [NamedInts(E=16, N=5120, K=8192)]


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(kernel: str) -> None:
    spec = catalog.load(kernel)
    w, dtype, power_of_two = spec.inputs(Problem(kernel, NamedInts(E=33, N=8192, K=8200)), "cuda")
    outputs = spec.outputs(w, dtype, power_of_two)
    spec.launch(spec.default, (w, dtype, power_of_two), outputs)
    last = (w[-1:], dtype, power_of_two)
    expected = spec.reference(*last)
    assert_same_bits(tuple(output[-1:] for output in outputs), expected)
    again = poisoned(spec, last, expected)
    spec.launch(spec.default, last, again)
    assert_same_bits(again, expected)
