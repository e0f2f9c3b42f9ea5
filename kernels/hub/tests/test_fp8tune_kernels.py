"""Tests of a built kernel, which ``kernels`` loads. LOCAL_KERNELS=fp8tune/fp8tune-kernels=FOLDER takes a local one."""

from itertools import pairwise

import kernels
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
fp8 = kernels.get_kernel("fp8tune/fp8tune-kernels", version=0, trust_remote_code=True)


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(64, 128, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    w = torch.randn(4, 32, 128, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    return x, w, torch.tensor([16, 16, 48, 64], dtype=torch.int32, device=DEVICE)


def product(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return fp8.fp8_grouped_mm(x, w.transpose(1, 2), offs=offs)


@pytest.mark.kernels_ci
def test_a_product_is_close_to_that_of_bf16() -> None:
    x, w, offs = operands()
    starts = [0, *offs.tolist()]
    parts = [x[begin:end] @ w[e].T for e, (begin, end) in enumerate(pairwise(starts))]
    expected = torch.cat(parts).detach().float()
    difference = product(x, w, offs).detach().float() - expected
    assert difference.norm() < 0.05 * expected.norm()


@pytest.mark.kernels_ci
def test_compiled_code_has_the_bits_of_eager_code() -> None:
    results = []
    for function in (product, torch.compile(product, fullgraph=True, backend="aot_eager")):
        x, w, offs = operands()
        out = function(x, w, offs)
        out.float().square().sum().backward()
        results.append([out, x.grad, w.grad])
    assert all(torch.equal(eager, compiled) for eager, compiled in zip(*results, strict=True))


@pytest.mark.kernels_ci
def test_operators_are_in_the_namespace_of_this_build() -> None:
    fp8.quantize_rowwise_2d(operands()[0].detach())
    namespace = getattr(torch.ops, fp8.__name__)
    operator = namespace.quantize_rowwise_2d.default
    codes = operator(operands()[0].detach(), torch.float8_e4m3fn, True)[0]
    assert codes.dtype == torch.float8_e4m3fn
