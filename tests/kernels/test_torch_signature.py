"""What ``torch._grouped_mm`` and ``torch.nn.functional.grouped_mm`` take: done, or refused in one line."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from test_grouped_mm import E, K, M, N, layer
from torch import Tensor

from fp8tune_kernels import fp8_grouped_mm, functional, mxfp8_grouped_mm
from fp8tune_kernels.spec import ROUTINGS

pytestmark = pytest.mark.usefixtures("quantizers_in_plain_torch")

both = pytest.mark.parametrize("multiply", [fp8_grouped_mm, mxfp8_grouped_mm])


def in_32s(device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Operands that both recipes take."""
    offs = torch.tensor([32, 96, 160, M], dtype=torch.int32, device=device)
    given = layer("balanced", device)
    return given.A, given.weights[:, :32].contiguous().transpose(1, 2), offs


@both
def test_arguments_are_in_torch_s_order_and_have_its_names(multiply: Any, device: str) -> None:
    schema = torch.ops.aten._grouped_mm.default._schema
    assert [argument.name for argument in schema.arguments[2:]] == ["offs", "bias", "out_dtype"]
    A, B_t, offs = in_32s(device)
    right = multiply(A, B_t, offs)
    assert torch.equal(multiply(A, B_t, offs, None, torch.bfloat16), right)
    assert torch.equal(multiply(A, B_t, offs=offs, bias=None, out_dtype=None), right)


def test_stand_ins_have_all_the_names_of_torch_s_functions(device: str) -> None:
    given = layer("ragged", device)
    bias = torch.randn(E, N, device=device, dtype=torch.bfloat16)
    right = fp8_grouped_mm(given.A, given.B_t, given.offs, bias, torch.float32)
    named: dict[str, Any] = {"offs": given.offs, "bias": bias, "out_dtype": torch.float32}
    assert torch.equal(functional.grouped_mm(mat_a=given.A, mat_b=given.B_t, **named), right)
    assert torch.equal(functional._grouped_mm(input=given.A, mat2=given.B_t, **named), right)
    assert torch.equal(functional._grouped_mm(given.A, given.B_t, *named.values()), right)
    kept = functional.grouped_mm(given.A.requires_grad_(), given.B_t, offs=given.offs, recipe="folded")
    assert torch.equal(kept, fp8_grouped_mm(given.A, given.B_t, given.offs))
    if not hasattr(torch.nn.functional, "grouped_mm"):
        return  # before torch 2.10
    theirs = inspect.signature(torch.nn.functional.grouped_mm).parameters
    ours = list(inspect.signature(functional.grouped_mm).parameters.items())
    assert [(name, each.kind, each.default) for name, each in ours[:-1]] == [
        (name, each.kind, each.default) for name, each in theirs.items()
    ]


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_out_dtype_is_a_cast_of_the_result(multiply: Any, dtype: torch.dtype, device: str) -> None:
    A, B_t, offs = in_32s(device)
    out = multiply(A.requires_grad_(), B_t, offs, out_dtype=dtype)
    assert out.dtype == dtype
    assert torch.equal(out, multiply(A, B_t, offs).to(dtype))
    out.sum().backward()


@both
def test_a_bias_is_added_to_the_rows_of_its_expert(multiply: Any, device: str) -> None:
    A, B_t, offs = in_32s(device)
    bias = torch.randn(E, 32, device=device, dtype=torch.bfloat16)
    expert_of_row = torch.bucketize(torch.arange(M, device=device, dtype=torch.int32), offs, right=True)
    assert torch.equal(multiply(A, B_t, offs, bias), multiply(A, B_t, offs) + bias[expert_of_row])


@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_gradient_of_a_bias_is_the_sum_over_its_group(routing: str, device: str) -> None:
    given = layer(routing, device)
    bias = torch.randn(E, N, device=device).requires_grad_()
    out = fp8_grouped_mm(given.A, given.B_t, given.offs, bias)
    out.backward(given.grad)
    start, sums = 0, []
    for end in given.offs.tolist():
        sums.append(given.grad[start:end].float().sum(0))
        start = end
    assert bias.grad is not None
    torch.testing.assert_close(bias.grad, torch.stack(sums).bfloat16().float(), rtol=2**-7, atol=1e-6)
    assert not out[start:].any()  # rows of no group


def test_torch_compile_traces_a_bias(device: str) -> None:
    given = layer("ragged", device)
    bias = torch.randn(E, N, device=device, dtype=torch.bfloat16)
    compiled = torch.compile(fp8_grouped_mm, fullgraph=True, backend="aot_eager")
    found = compiled(given.A, given.B_t, given.offs, bias, torch.float32)
    assert torch.equal(found, fp8_grouped_mm(given.A, given.B_t, given.offs, bias, torch.float32))


def refused() -> list[Any]:
    A = torch.zeros(M, K, dtype=torch.bfloat16)
    B_t = torch.zeros(E, 32, K, dtype=torch.bfloat16).transpose(1, 2)
    offs = torch.tensor([32, 64, 96, M], dtype=torch.int32)
    experts_of_A = A.view(E, M // E, K)
    bias = torch.zeros(E, 32)
    return [
        pytest.param((A, B_t), r"^offs is None, wanted \(E,\)", id="no offs"),
        pytest.param((A.t(), A, offs), r"^A has strides", id="2D by 2D"),
        pytest.param((A, A.t(), offs), r"^B_t has shape .*three dimensions", id="2D by 2D, row-major"),
        pytest.param((experts_of_A, B_t), r"^A has shape .*two dimensions", id="3D by 3D"),
        pytest.param((experts_of_A, A.t(), offs), r"^A has shape .*two dimensions", id="3D by 2D"),
        pytest.param((A.to(torch.int8), B_t, offs), r"^A is torch\.int8", id="A of integers"),
        pytest.param((A, B_t, offs, bias[0]), r"^bias has shape \(32,\), wanted \(4, 32\)", id="one bias for all"),
        pytest.param((A, B_t, offs, bias.int()), r"^bias is torch\.int32", id="bias of integers"),
        pytest.param((A, B_t, offs, bias.to("meta")), r"^bias is on meta", id="bias elsewhere"),
        pytest.param((A, B_t, offs, None, torch.float64), r"^out_dtype is torch\.float64", id="result in float64"),
        pytest.param((A, B_t, offs, None, torch.int32), r"^out_dtype is torch\.int32", id="result in integers"),
    ]


@both
@pytest.mark.parametrize(("arguments", "says"), refused())
def test_the_rest_is_refused(multiply: Any, arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says) as refusal:
        multiply(*arguments)
    assert "\n" not in str(refusal.value)
