"""Weights that lie as (E, K, N): the bytes of those that lie as (E, N, K), and gradients that lie as they do."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from test_grouped_mm import E, K, Layer, N, layer
from torch import nn

from fp8tune_kernels import fp8_grouped_mm, mxfp8_grouped_mm, quantize_weights
from fp8tune_kernels.gemm import passes
from fp8tune_kernels.spec import ROUTINGS

pytestmark = pytest.mark.usefixtures("quantizers_in_plain_torch")

OPTIONS = [{}, {"keep_fp8": ("A",)}, {"keep_fp8": ("B_t",)}, {"keep_fp8": ("A", "B_t")}, {"precision": "bf16"}]


def run(given: Layer, is_row_major: bool, call: Any = fp8_grouped_mm, once: bool = False, **options: Any) -> Any:
    """Output, and the gradients of A and of the weights, these as (E, K, N)."""
    A = given.A.clone().requires_grad_()
    w = (given.B_t.contiguous() if is_row_major else given.weights.clone()).requires_grad_()
    B_t = w if is_row_major else w.transpose(1, 2)
    if once:
        B_t = quantize_weights(w, layout="EKN" if is_row_major else "ENK")  # type: ignore[assignment]
    out = call(A, B_t, given.offs, **options)
    out.backward(given.grad.to(out.dtype))
    assert w.grad is not None
    assert w.grad.stride() == w.stride()
    return out.detach(), A.grad, w.grad if is_row_major else w.grad.transpose(1, 2)


def assert_same(given: Layer, **options: Any) -> None:
    for found, right in zip(run(given, True, **options), run(given, False, **options), strict=True):
        assert found.dtype == right.dtype
        assert torch.equal(found, right)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_results_are_the_bytes_of_the_other_layout(routing: str, options: dict[str, Any], device: str) -> None:
    assert_same(layer(routing, device), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_of_other_dtypes_too(dtype: torch.dtype, device: str) -> None:
    assert_same(layer("ragged", device, dtype))


@pytest.mark.parametrize("precision", ["fp8", "auto"])
def test_of_weights_quantized_once_too(precision: str, device: str) -> None:
    assert_same(layer("ragged", device), once=True, precision=precision)


def test_the_kept_rows_alone_make_the_weight_gradient(device: str) -> None:
    given = layer("ragged", device)
    right = run(given, True)[2]
    w = given.B_t.contiguous().requires_grad_()
    fp8_grouped_mm(given.A, w, given.offs, keep_fp8=("A",)).backward(given.grad)  # A wants no gradient
    assert torch.equal(w.grad, right)


def test_no_copy_of_the_weights_is_made(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def runs(spec: Any, key: Any, inputs: Any, *rest: Any) -> Any:
        if spec.name in ("transpose-3d-atomic", "colwise-3d"):
            seen.append((spec.name, inputs[0].data_ptr()))
        return original(spec, key, inputs, *rest)

    original = passes.run
    monkeypatch.setattr(passes, "run", runs)
    given = layer("ragged", device)
    w = given.B_t.contiguous().requires_grad_()
    fp8_grouped_mm(given.A.clone().requires_grad_(), w, given.offs).backward(given.grad)
    assert seen == [("transpose-3d-atomic", w.data_ptr()), ("colwise-3d", w.data_ptr())]


def test_codes_of_the_other_pass_would_be_seen(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: a forward pass that multiplies what the input gradient should."""
    given = layer("ragged", device)
    square = Layer(given.A, given.weights[:, :, :N].contiguous(), given.offs, given.grad)
    square = Layer(given.A[:, :N].contiguous(), square.weights, given.offs, given.grad)
    quantize = passes.quantize_stored
    monkeypatch.setattr(
        passes, "quantize_stored", lambda w, dtype: quantize(w.mT if w.mT.is_contiguous() else w, dtype)
    )
    with pytest.raises(AssertionError):
        assert_same(square)


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_torch_compile_traces_it_whole(backend: str, device: str) -> None:
    given = layer("ragged", device)
    compiled = torch.compile(fp8_grouped_mm, fullgraph=True, backend=backend)
    for found, right in zip(run(given, True, compiled), run(given, True), strict=True):
        assert torch.equal(found, right)


def test_mxfp8_takes_them_too(device: str) -> None:
    given = layer("balanced", device)
    given = Layer(given.A, given.weights[:, :32].contiguous(), given.offs, given.grad[:, :32].contiguous())
    results = [run(given, is_row_major, mxfp8_grouped_mm, pad_token_groups=True) for is_row_major in (True, False)]
    for found, right in zip(*results, strict=True):
        assert torch.equal(found, right)


def test_a_copy_and_a_pickle_keep_the_layout(device: str) -> None:
    given = layer("ragged", device)
    quantized = quantize_weights(nn.Parameter(given.B_t.contiguous()), layout="EKN")
    right = fp8_grouped_mm(given.A, quantized, given.offs)
    for other in (copy.deepcopy(quantized), pickle.loads(pickle.dumps(quantized))):
        assert other.layout == "EKN"
        assert torch.equal(fp8_grouped_mm(given.A, other, given.offs), right)


def test_a_layout_that_is_none_is_refused(device: str) -> None:
    w = torch.zeros(E, N, K, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match=r"^layout is 'KN', wanted 'ENK' or 'EKN'"):
        quantize_weights(w, layout="KN")
    with pytest.raises(ValueError, match=r"^w has strides .*wanted row-major for layout 'EKN'"):
        quantize_weights(w.transpose(1, 2), layout="EKN")


def test_other_strides_are_refused(device: str) -> None:
    given = layer("ragged", device)
    with pytest.raises(ValueError, match=r"^B_t has strides .*; or row-major"):
        fp8_grouped_mm(given.A, given.weights.repeat(1, 1, 2)[:, :, :K].transpose(1, 2), given.offs)
