"""On Hopper: the Gluon kernels give the bits of the Triton kernels, in all elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8tune_kernels import catalog, choose_experts, moe_layer
from fp8tune_kernels.gemm import passes
from fp8tune_kernels.gemm.warp_specialized import CONFIGS, is_supported
from fp8tune_kernels.runtime import lookup
from fp8tune_kernels.spec import ROUTINGS, NamedInts, Problem

pytestmark = pytest.mark.gpu

TRITON, PING_PONG = CONFIGS[-1], CONFIGS[0]

LAYERS = {
    "several tiles a program": NamedInts(M=16384, N=1536, K=2048, G=64),
    "few rows a group": NamedInts(M=9000, N=512, K=512, G=200),
    "sizes that no tile divides": NamedInts(M=8191, N=272, K=400, G=8),
    "more groups than programs, one tile each": NamedInts(M=20000, N=48, K=80, G=600),
    "one group": NamedInts(M=4099, N=2048, K=144, G=1),
}


def bits(kernel: str, config: NamedInts, inputs: tuple[Any, ...]) -> torch.Tensor:
    """The result over memory that was NaN before."""
    spec = catalog.load(kernel)
    outputs = spec.outputs(*inputs)
    outputs[0].fill_(float("nan"))
    spec.launch(config, inputs, outputs)
    return outputs[0].view(torch.int16 if outputs[0].dtype == torch.bfloat16 else torch.int32)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kernel", catalog.ON_HOPPER)
def test_all_elements_have_the_bits_of_the_triton_kernel(kernel: str, layer: str) -> None:
    if not is_supported(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("runs on Hopper alone")
    spec = catalog.load(kernel)
    for number, routing in enumerate(ROUTINGS):
        for added in (0, 1, 2) if "contraction" in kernel else (0,):
            shape = NamedInts({**LAYERS[layer], "added": added}) if added else LAYERS[layer]
            inputs = spec.inputs(Problem(kernel, shape, routing, in_dtype="float8_e4m3fn", seed=number), "cuda")
            inputs[3].mul_(torch.rand_like(inputs[3]) + 0.5)  # reciprocals of powers of two need no rounding
            right = bits(kernel, TRITON, inputs)
            for config in CONFIGS[:-1] if routing == "jagged" else (PING_PONG,):
                assert torch.equal(bits(kernel, config, inputs), right), (routing, added, config)


def test_a_layer_has_the_bits_that_it_has_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_supported(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("runs on Hopper alone")
    monkeypatch.setattr(passes, "is_requested", lambda _: True)
    draw = torch.Generator("cuda").manual_seed(0)
    T, K, N, E, TOP_K = 3001, 512, 272, 40, 4
    shapes = (T, K), (E, 2 * N, K), (E, K, N), (T, E)
    tensors = [torch.randn(shape, device="cuda", generator=draw).mul_(0.1).bfloat16() for shape in shapes]
    inputs = [tensor.requires_grad_() for tensor in tensors]

    def step() -> tuple[torch.Tensor, ...]:
        out = moe_layer(*inputs[:3], *choose_experts(inputs[3], TOP_K))
        return out, *torch.autograd.grad(out, inputs, out.detach())

    results = step()
    monkeypatch.setattr(passes, "is_requested", lambda _: False)
    lookup.forget()  # replays would launch the same kernels again
    assert all(map(torch.equal, results, step()))
    lookup.forget()
