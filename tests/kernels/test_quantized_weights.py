"""``quantize_weights``: the same bytes as without it, in every mode of torch; old codes are never multiplied."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from grouped_layers import E, K, Layer, Make, N, Results, layer, viewed
from on_edges import assert_same_bits as assert_same
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8tune_kernels import (
    QuantizedWeights,
    fp8_grouped_mm,
    interpreter,
    quantize_colwise_3d,
    quantize_transpose_3d_atomic,
    quantize_weights,
)

pytestmark = pytest.mark.usefixtures("quantizers_in_plain_torch")

Call = Callable[..., torch.Tensor]


def multiply(A: torch.Tensor, B_t: torch.Tensor | QuantizedWeights, offs: torch.Tensor, **options: Any) -> torch.Tensor:
    return fp8_grouped_mm(A, B_t, offs, pad_token_groups=True, **options)  # type: ignore[arg-type]


def run(given: Layer, make: Make, call: Call = multiply, w: torch.Tensor | None = None, **options: Any) -> Results:
    """Output and both gradients, with ``B_t`` as ``make`` gives it from the parameter."""
    A, w = given.A.clone().requires_grad_(), given.weights.clone().requires_grad_() if w is None else w
    w.grad = None
    out = call(A, make(w), given.offs, **options)
    out.backward(given.grad.to(out.dtype))
    assert A.grad is not None
    assert w.grad is not None
    return out.detach(), A.grad, w.grad


# Bytes


def test_codes_are_those_of_the_two_kernels(device: str) -> None:
    given = layer("balanced", device)
    quantized = quantize_weights(given.weights)
    assert_same(quantized.forward, quantize_colwise_3d(given.B_t))
    assert_same(quantized.transposed, quantize_transpose_3d_atomic(given.B_t))
    assert_same(quantized.codes, (*quantized.forward, *quantized.transposed))
    assert quantized.nbytes == 2 * E * N * K + 4 * E * (N + K)
    assert quantized.weights.data_ptr() == given.weights.data_ptr()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_made_and_used_without_gradients(mode: Any, device: str) -> None:
    given = layer("ragged", device)
    w = nn.Parameter(given.weights.clone())
    with mode():
        quantized = quantize_weights(w)
        assert torch.equal(multiply(given.A, quantized, given.offs), multiply(given.A, viewed(w), given.offs))
    assert_same(run(given, lambda _: quantized, w=w), run(given, viewed))
    with mode():
        w.mul_(2)
        with pytest.raises(RuntimeError, match="w changed after quantization"):
            multiply(given.A, quantized, given.offs)
        quantized.requantize()
    assert_same(run(given, lambda _: quantized, w=w), run(given, viewed, w=w))


def test_autocast_casts_before_it_quantizes(device: str) -> None:
    given = layer("ragged", device, torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        quantized = quantize_weights(given.weights)
        assert quantized.dtype == torch.bfloat16
        assert_same(run(given, quantize_weights), run(given, viewed))
    with pytest.raises(
        RuntimeError, match=r"^w was quantized from torch\.bfloat16 and would be cast to torch\.float32"
    ):
        multiply(given.A, quantized, given.offs)


# Changes


class Module(nn.Module):
    def __init__(self, w: torch.Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w)


def by_optimizer(**options: Any) -> Callable[[Module], None]:
    def change(module: Module) -> None:
        module.w.grad = torch.ones_like(module.w)
        torch.optim.AdamW(module.parameters(), lr=0.1, **options).step()

    return change


def in_place(module: Module) -> None:
    with torch.no_grad():
        module.w.mul_(2)


def by_data(module: Module) -> None:
    module.w.data = module.w.data * 2


def by_set(module: Module) -> None:
    with torch.no_grad():
        module.w.set_(module.w.detach() * 2)


def by_state(module: Module) -> None:
    module.load_state_dict({"w": module.w.detach() * 2})


CHANGES = {
    "AdamW": by_optimizer(fused=False, foreach=False),
    "foreach AdamW": by_optimizer(foreach=True),
    "fused AdamW": by_optimizer(fused=True),
    "in place": in_place,
    "data": by_data,
    "set_": by_set,
    "load_state_dict": by_state,
}

COUNTED_BY_TORCH = ("AdamW", "foreach AdamW", "in place", "data", "load_state_dict")
"""Refused at use; the others at the end of a block."""


@pytest.mark.parametrize("make", [lambda w: w, viewed], ids=["parameter", "view"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_until_weights_are_quantized_again(change: str, make: Make, device: str) -> None:
    given = layer("ragged", device, torch.float32)
    module = Module(given.weights.clone())
    quantized = quantize_weights(make(module.w))  # type: ignore[arg-type]
    quantized.check()
    before = [tensor.data_ptr() for tensor in quantized.codes]
    CHANGES[change](module)
    with pytest.raises(RuntimeError, match=r"^w changed after quantization"):
        quantized.check()
    if change in COUNTED_BY_TORCH:
        with pytest.raises(RuntimeError, match=r"^w changed after quantization"):
            multiply(given.A, quantized, given.offs)
    quantized.requantize()
    quantized.check()
    assert before == [tensor.data_ptr() for tensor in quantized.codes]
    assert_same(run(given, lambda _: quantized, w=module.w), run(given, viewed, w=module.w))


@pytest.mark.parametrize("layout", ["ENK", "EKN"])
@pytest.mark.parametrize("shape", [(1, 4096, 2048), (3, 64, 48), (300, 16, 16)])
def test_every_expert_and_every_column_is_sampled(shape: tuple[int, ...], layout: str, device: str) -> None:
    w = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    quantized = quantize_weights(w, layout=layout)
    for expert in {0, shape[0] // 2, shape[0] - 1}:
        w.data[expert] = 1
        assert quantized.fingerprint.changed()
        w.data[expert] = 0
        assert not quantized.fingerprint.changed()
    for column in range(0, shape[2], max(5, shape[2] // 16)):
        w.data[:, :, column] = 1
        assert quantized.fingerprint.changed()
        w.data[:, :, column] = 0


def test_a_block_checks_at_its_end_and_is_closed_then(device: str) -> None:
    given = layer("ragged", device)
    w = nn.Parameter(given.weights.clone())
    with quantize_weights(w) as quantized:
        assert_same(run(given, lambda _: quantized, w=w), run(given, viewed))
    with pytest.raises(RuntimeError, match=r"^w is used after its with block ended"):
        multiply(given.A, quantized, given.offs)
    with pytest.raises(RuntimeError, match=r"^w changed after"), quantize_weights(w):
        w.data.copy_(w.data * 2)
    w.data.copy_(w.data * 2)
    quantized.__exit__(KeyError)  # which it does not hide


def test_a_module_cast_is_noticed(device: str) -> None:
    module = Module(layer("ragged", device, torch.float32).weights)
    quantized = quantize_weights(module.w)
    module.bfloat16()
    with pytest.raises(RuntimeError, match=r"would be cast to torch\.bfloat16 here"):
        _ = quantized.codes
    with pytest.raises(RuntimeError, match=r"^w changed after"):
        quantized.check()
    quantized.requantize()
    quantized.check()
    assert_same(quantized.forward, quantize_colwise_3d(viewed(module.w.detach())))
    module.w.data = module.w.data[:2].clone()
    with pytest.raises(RuntimeError, match=r"^w changed after"):
        quantized.check()
    with pytest.raises(RuntimeError, match=r"^w is \(2, .*: quantize it anew"):
        quantized.requantize()


def test_codes_made_again_between_the_passes_are_no_gradient(device: str) -> None:
    given = layer("ragged", device)
    quantized = quantize_weights(given.weights)
    out = multiply(given.A.requires_grad_(), quantized, given.offs)
    quantized.requantize()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(given.grad)


# Checkpointing


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant: bool, device: str) -> None:
    given = layer("empty", device)

    def recomputed(*arguments: Any) -> torch.Tensor:
        out: torch.Tensor = checkpoint(multiply, *arguments, use_reentrant=use_reentrant)
        return out

    assert_same(run(given, quantize_weights, recomputed), run(given, viewed))
    w = nn.Parameter(given.weights.clone())
    out = recomputed(given.A.requires_grad_(), quantize_weights(w), given.offs)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match=r"^w changed after quantization"):
        out.backward(given.grad)


# Compilers


def whole(call: Call) -> Call:
    torch._dynamo.reset()
    return torch.compile(call, fullgraph=True, backend="aot_eager")


def scaled(A: torch.Tensor, B_t: QuantizedWeights, offs: torch.Tensor) -> torch.Tensor:
    return multiply(A * 2, B_t, offs) * 3


def test_torch_compile_traces_it_whole_and_once(device: str) -> None:
    """Over steps of an optimizer, with new FP8 values or with new ones in the same memory."""
    compiled = whole(scaled)
    given = layer("ragged", device, torch.bfloat16)
    module = Module(given.weights.clone())
    quantized = quantize_weights(module.w)
    run(given, lambda _: quantized, compiled, w=module.w)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for is_in_place in (False, True, False):
            CHANGES["fused AdamW"](module)
            if is_in_place:
                quantized.requantize()
            else:
                quantized = quantize_weights(module.w)
            found = run(given, lambda _: quantized, compiled, w=module.w)  # noqa: B023 - called at once
            assert_same(found, run(given, viewed, scaled, w=module.w))


@pytest.mark.gpu
def test_a_cuda_graph_reads_codes_made_again(device: str) -> None:
    """Made again within the graph, or in place before it is replayed."""
    given = layer("ragged", device)
    w = given.weights.clone()
    quantized = quantize_weights(w)
    found = []
    for within in (True, False):

        def call(within: bool = within) -> torch.Tensor:
            if within:
                quantized.requantize()
            return multiply(given.A, quantized, given.offs)

        with torch.no_grad():
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                call()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = call()
            for _ in range(2):
                w.mul_(-2)
                if not within:
                    quantized.requantize()
                graph.replay()
                assert torch.equal(out, multiply(given.A, viewed(w), given.offs))
            found.append(graph)
        quantized.requantize()


# Copies


def test_copies_are_of_the_weights_copied_with_them(device: str) -> None:
    module = Module(layer("ragged", device).weights.clone())
    module.quantized = quantize_weights(module.w)  # type: ignore[assignment]
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert copied.quantized.weights.data_ptr() == copied.w.data_ptr() != module.w.data_ptr()
        assert_same(copied.quantized.forward, module.quantized.forward)
        in_place(copied)
        module.quantized.check()
        with pytest.raises(RuntimeError, match=r"^w changed after"):
            copied.quantized.check()
    in_place(module)
    assert_same(copy.copy(module.quantized).forward, quantize_colwise_3d(viewed(module.w.detach())))


# Refusals


def wrong_weights() -> list[Any]:
    w = torch.zeros(E, N, K, dtype=torch.bfloat16)
    with torch.inference_mode():
        in_inference = torch.zeros(E, N, K)
    return [
        pytest.param(w[0], {}, "w has shape", id="two dimensions"),
        pytest.param(w[:, :, ::2], {}, r"w has strides .* or its view weights\.transpose\(1, 2\)", id="gaps"),
        pytest.param(w[:, :40].contiguous(), {}, "w has N=40 and K=64, wanted positive multiples of 16", id="N of 40"),
        pytest.param(w, {"float8_dtype": torch.float8_e5m2}, "float8_dtype is", id="float8_dtype"),
        pytest.param(w, {"recipe": "linen"}, "recipe is 'linen', wanted 'default' or 'folded'", id="recipe"),
        pytest.param(w, {"layout": "KN"}, "layout is 'KN', wanted 'ENK' or 'EKN'", id="layout"),
        pytest.param(w, {"layout": "EKN", "recipe": "folded"}, "recipe is 'folded', wanted 'default'", id="both"),
        pytest.param(in_inference, {}, "w was made in inference mode", id="inference"),
    ]


@pytest.mark.parametrize(("w", "options", "named"), wrong_weights())
def test_wrong_weights_are_refused(w: torch.Tensor, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}"):
        quantize_weights(w, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there every test launches the kernel")
def test_the_kernel_writes_the_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(2, 16, 32)
    right = quantize_weights(w)
    monkeypatch.setattr(interpreter, "INTERPRETED", True)
    launched = quantize_weights(w)
    assert_same(launched.codes, right.codes)
