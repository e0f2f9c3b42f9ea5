"""What a program in the wild does to operators on a CPU: parameters, export, meta tensors, offsets that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8tune.bench.kernel_contenders import HOST_ROW, public_wrapper
from fp8tune.plan.problems import problems
from fp8tune.replay.loading import load_spec
from fp8tune_kernels import fp8_grouped_mm, mxfp8_grouped_mm
from fp8tune_kernels.catalog import QUANTIZERS
from fp8tune_kernels.gemm.token_groups import pad, unpad

pytestmark = pytest.mark.usefixtures("quantizers_in_plain_torch")

ROUTED = [kernel for kernel in QUANTIZERS if load_spec(kernel).routed]
each_kernel = pytest.mark.parametrize("kernel", QUANTIZERS)
each_operation = pytest.mark.parametrize("multiply", [fp8_grouped_mm, mxfp8_grouped_mm])
padded_or_not = pytest.mark.parametrize("pad_token_groups", [False, True])


def given(kernel: str) -> tuple[Callable[..., Any], list[torch.Tensor], tuple[torch.Tensor, ...]]:
    """Its wrapper, small inputs, and the bytes that are right."""
    spec = load_spec(kernel)
    inputs = spec.inputs(problems(spec, [HOST_ROW])[0], "cpu")
    return public_wrapper(spec), [x for x in inputs if isinstance(x, torch.Tensor)], spec.reference(*inputs)


def assert_same_bytes(outputs: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    for output, right in zip(outputs, wanted, strict=True):
        assert torch.equal(output.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@each_kernel
def test_a_parameter_is_quantized_to_codes_that_are_not_differentiable(kernel: str) -> None:
    quantize, tensors, wanted = given(kernel)
    leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in tensors]
    views = [x * 1 if x.is_floating_point() else x for x in leaves]  # what autograd follows already
    for of in (leaves, views):
        outputs = quantize(*of)
        assert_same_bytes(outputs, wanted)
        assert not any(output.requires_grad for output in outputs)


@each_kernel
def test_meta_tensors_have_the_shapes_strides_and_dtypes(kernel: str) -> None:
    quantize, tensors, _ = given(kernel)
    spec = load_spec(kernel)
    wanted = spec.outputs(*spec.inputs(problems(spec, [HOST_ROW])[0], "meta"))
    for output, right in zip(quantize(*(x.to("meta") for x in tensors)), wanted, strict=True):
        assert (output.shape, output.stride(), output.dtype) == (right.shape, right.stride(), right.dtype)
        assert output.is_meta


@pytest.mark.parametrize("kernel", ["colwise-3d", "colwise-transpose-3d", "mxfp8-dim1-3d"])
def test_a_module_that_quantizes_its_parameter_is_exported(kernel: str) -> None:
    quantize, (weights,), wanted = given(kernel)

    class Cast(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.Parameter(weights.clone())

        def forward(self) -> Any:
            return quantize(self.weights)

    assert_same_bytes(torch.export.export(Cast(), ()).module()(), wanted)


@pytest.mark.parametrize("kernel", ROUTED)
@pytest.mark.parametrize(
    ("ends", "says"), [((40, 24), "group 1 at row 24, before"), ((24, 65), "group 1 at row 65 of 64")]
)
def test_offsets_that_cut_no_groups_are_refused_on_a_cpu(kernel: str, ends: tuple[int, int], says: str) -> None:
    quantize, tensors, _ = given(kernel)
    offs = torch.tensor(ends, dtype=torch.int32)
    with pytest.raises(ValueError, match=says):
        quantize(*[offs if x.dtype == torch.int32 else x.repeat(2, 1, 1) if x.dim() == 3 else x for x in tensors])


# The grouped GEMMs


def layer(*ends: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """96 rows, experts of 32 x 64, and where their groups end."""
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(96, 64, dtype=torch.bfloat16, generator=generator)
    weights = torch.randn(3, 32, 64, dtype=torch.bfloat16, generator=generator)
    return A.requires_grad_(), weights.requires_grad_(), torch.tensor(ends or (32, 64, 96), dtype=torch.int32)


@each_operation
@padded_or_not
def test_a_second_derivative_is_refused_in_one_line(multiply: Callable[..., Any], pad_token_groups: bool) -> None:
    A, weights, offs = layer()
    options = [{}, {"keep_fp8": ("A", "B_t")}] if multiply is fp8_grouped_mm else [{}]
    for option in options:
        out = multiply(A, weights.mT, offs, pad_token_groups=pad_token_groups, **option)
        once = torch.autograd.grad(out.sum(), (A, weights), retain_graph=True)
        found = torch.autograd.grad(out.sum(), (A, weights), create_graph=True)
        assert all(torch.equal(one, other) for one, other in zip(once, found, strict=True))
        with pytest.raises(RuntimeError, match=f"^{multiply.__name__} has no second derivative: .*$"):
            sum(gradient.float().square().sum() for gradient in found).backward()


@each_operation
@padded_or_not
def test_meta_tensors_pass_forward_and_backward(multiply: Callable[..., Any], pad_token_groups: bool) -> None:
    A, weights, offs = (x.detach().to("meta") for x in layer())
    A.requires_grad_()
    weights.requires_grad_()
    out = multiply(A, weights.mT, offs, pad_token_groups=pad_token_groups)
    assert (out.shape, out.stride(), out.dtype, out.is_meta) == ((96, 32), (32, 1), torch.bfloat16, True)
    out.sum().backward()
    for operand in (A, weights):
        assert operand.grad is not None
        assert (operand.grad.shape, operand.grad.dtype) == (operand.shape, operand.dtype)


@each_operation
@pytest.mark.parametrize("strict", [False, True])
def test_a_module_is_exported(multiply: Callable[..., Any], strict: bool) -> None:
    A, weights, offs = layer()

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.Parameter(weights.detach().clone())

        def forward(self, A: torch.Tensor, offs: torch.Tensor) -> Any:
            return multiply(A, self.weights.mT, offs, pad_token_groups=strict)

    model, inputs = Experts(), (A.detach(), offs)
    assert torch.equal(torch.export.export(model, inputs, strict=strict).module()(*inputs), model(*inputs))


@each_operation
@padded_or_not
@pytest.mark.parametrize(
    ("ends", "says"),
    [
        ((32, 16, 96), "group 1 at row 16, before"),
        ((-16, 32, 96), "group 0 at row -16, before"),
        ((32, 64, 112), "group 2 at row 112 of 96"),
    ],
)
def test_offsets_that_cut_no_groups_are_refused(
    multiply: Callable[..., Any], pad_token_groups: bool, ends: tuple[int, ...], says: str
) -> None:
    A, weights, offs = layer(*ends)
    with pytest.raises(ValueError, match=says):
        multiply(A, weights.mT, offs, pad_token_groups=pad_token_groups)


@pytest.mark.parametrize("ends", [(30, 64, 96), (0, 64, 96), (40, 80, 96)])
def test_sizes_that_no_weight_gradient_takes_are_refused_of_mxfp8(ends: tuple[int, ...]) -> None:
    A, weights, offs = layer(*ends)
    out = mxfp8_grouped_mm(A, weights.mT, offs)
    with pytest.raises(ValueError, match="wanted a positive multiple of 32 for the weight gradient"):
        out.sum().backward()
    mxfp8_grouped_mm(A, weights.mT, offs, pad_token_groups=True).sum().backward()
    fp8_grouped_mm(A, weights.mT, offs).sum().backward()  # it has no such sizes


@pytest.mark.parametrize("ends", [(32, 16), (32, 97)])
def test_padding_refuses_them_too(ends: tuple[int, ...]) -> None:
    x, offs = torch.randn(96, 64), torch.tensor(ends, dtype=torch.int32)
    with pytest.raises(ValueError, match="offs ends group 1"):
        pad(x, offs)
    with pytest.raises(ValueError, match="offs ends group 1"):
        unpad(torch.randn(128, 64), offs, 96)
