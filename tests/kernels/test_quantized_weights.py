"""``quantize_weights``: the same bytes as without it, in every mode of torch; old codes are never multiplied."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from grouped_layers import E, K, Layer, Make, N, Results, random_layer, viewed
from on_edges import assert_same_bits as assert_same
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8tune_kernels import (
    QuantizedWeights,
    catalog,
    quantize_colwise_3d,
    quantize_transpose_3d_atomic,
    quantize_weights,
)
from fp8tune_kernels import fp8_grouped_mm as multiply

pytestmark = pytest.mark.usefixtures("quantizers_in_plain_torch")

refused = partial(pytest.raises, RuntimeError)
CHANGED = r"^w changed after quantization"


def run(layer: Layer, make: Make, call: Callable[..., torch.Tensor] = multiply, w: Any = None) -> Results:
    """Output and both gradients, with ``B_t`` as ``make`` gives it from the parameter."""
    A, w = layer.A.clone().requires_grad_(), layer.weights.clone().requires_grad_() if w is None else w
    w.grad = None
    out = call(A, make(w), layer.offs)
    out.backward(layer.grad.to(out.dtype))
    assert A.grad is not None
    return out.detach(), A.grad, w.grad


def test_codes_are_those_of_the_two_kernels(device: str) -> None:
    layer = random_layer("balanced", device)
    quantized = quantize_weights(layer.weights)
    assert_same(quantized.codes, (*quantize_colwise_3d(layer.B_t), *quantize_transpose_3d_atomic(layer.B_t)))
    assert quantized.weights.data_ptr() == layer.weights.data_ptr()


@pytest.mark.parametrize("layout", ["ENK", "EKN"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_are_those_of_all_experts_as_one_matrix(layout: str, dtype: torch.dtype) -> None:
    """By the references of casts of rows, and of columns in equal groups."""
    w = torch.randn(E, 48, 80, generator=torch.Generator().manual_seed(0)).to(dtype)
    matrix, options = w.view(E * 48, 80), (torch.float8_e4m3fn, True)
    q, scales = catalog.load("rowwise-2d").reference(matrix, *options)
    of_rows = q.view(w.shape).mT, scales.view(E, 1, 48)
    q, scales = catalog.load("colwise").reference(matrix, 48 * torch.arange(1, E + 1).int(), *options)
    of_columns = q.view(w.shape), scales.view(E, 1, 80)
    right = (*of_rows, *of_columns) if layout == "ENK" else (*of_columns, *of_rows)
    codes = quantize_weights(w, layout=layout, float8_dtype=options[0]).codes
    assert_same([x.contiguous() for x in codes], [x.contiguous() for x in right])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_made_and_used_without_gradients(mode: Any, device: str) -> None:
    layer = random_layer("ragged", device)
    w = nn.Parameter(layer.weights.clone())
    with mode():
        quantized = quantize_weights(w)
        assert torch.equal(multiply(layer.A, quantized, layer.offs), multiply(layer.A, viewed(w), layer.offs))
    assert_same(run(layer, lambda _: quantized, w=w), run(layer, viewed))
    with mode():
        w.mul_(2)
        with refused(match=CHANGED):
            multiply(layer.A, quantized, layer.offs)
        quantized.requantize()
    assert_same(run(layer, lambda _: quantized, w=w), run(layer, viewed, w=w))


def test_autocast_casts_before_it_quantizes(device: str) -> None:
    layer = random_layer("ragged", device, torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        quantized = quantize_weights(layer.weights)
        assert_same(run(layer, quantize_weights), run(layer, viewed))
    with refused(match=r"^w was quantized from torch\.bfloat16 and would be cast to torch\.float32"):
        multiply(layer.A, quantized, layer.offs)


# Changes


class Module(nn.Module):
    def __init__(self, w: torch.Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w)


def by_optimizer(module: Module, **options: Any) -> None:
    module.w.grad = torch.ones_like(module.w)
    torch.optim.AdamW(module.parameters(), lr=0.1, **options).step()


@torch.no_grad()
def in_place(module: Module) -> None:
    module.w.mul_(2)


def by_data(module: Module) -> None:
    module.w.data = module.w.data * 2


@torch.no_grad()
def by_set(module: Module) -> None:
    module.w.set_(module.w.detach() * 2)


def by_state(module: Module) -> None:
    module.load_state_dict({"w": module.w.detach() * 2})


CHANGES: dict[str, tuple[Callable[[Module], None], bool]] = {
    "AdamW": (partial(by_optimizer, fused=False, foreach=False), True),
    "foreach AdamW": (partial(by_optimizer, foreach=True), True),
    "fused AdamW": (partial(by_optimizer, fused=True), False),
    "in place": (in_place, True),
    "data": (by_data, True),
    "set_": (by_set, False),
    "load_state_dict": (by_state, True),
}
"""Name -> the change, and whether torch counts it, so that the next use is refused and not the end of a block."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_until_weights_are_quantized_again(change: str, device: str) -> None:
    apply, is_counted = CHANGES[change]
    layer = random_layer("ragged", device, torch.float32)
    for make in (lambda w: w, viewed):
        module = Module(layer.weights.clone())
        quantized = quantize_weights(make(module.w))
        quantized.check()
        before = [tensor.data_ptr() for tensor in quantized.codes]
        apply(module)
        with refused(match=CHANGED):
            quantized.check()
        if is_counted:
            with refused(match=CHANGED):
                multiply(layer.A, quantized, layer.offs)
        quantized.requantize()
        quantized.check()
        assert before == [tensor.data_ptr() for tensor in quantized.codes]
    assert_same(run(layer, lambda _: quantized, w=module.w), run(layer, viewed, w=module.w))


@pytest.mark.parametrize("layout", ["ENK", "EKN"])
@pytest.mark.parametrize("shape", [(1, 4096, 2048), (3, 64, 48), (300, 16, 16)])
def test_every_expert_and_every_column_is_sampled(shape: tuple[int, ...], layout: str, device: str) -> None:
    w = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    quantized = quantize_weights(w, layout=layout)
    experts = ((expert,) for expert in {0, shape[0] // 2, shape[0] - 1})
    columns = ((..., column) for column in range(0, shape[2], max(5, shape[2] // 16)))
    for place in (*experts, *columns):
        w.data[place] = 1
        assert quantized.fingerprint.changed()
        w.data[place] = 0
        assert not quantized.fingerprint.changed()


def test_a_block_checks_at_its_end_and_is_closed_then(device: str) -> None:
    layer = random_layer("ragged", device)
    w = nn.Parameter(layer.weights.clone())
    with quantize_weights(w) as quantized:
        assert_same(run(layer, lambda _: quantized, w=w), run(layer, viewed))
    with refused(match=r"^w is used after its with block ended"):
        multiply(layer.A, quantized, layer.offs)
    with refused(match=CHANGED), quantize_weights(w):
        w.data.copy_(w.data * 2)
    w.data.copy_(w.data * 2)
    quantized.__exit__(KeyError)  # which it does not hide


def test_a_module_cast_is_noticed(device: str) -> None:
    module = Module(random_layer("ragged", device, torch.float32).weights)
    quantized = quantize_weights(module.w)
    module.bfloat16()
    with refused(match=r"would be cast to torch\.bfloat16 here"):
        _ = quantized.codes
    with refused(match=CHANGED):
        quantized.check()
    quantized.requantize()
    quantized.check()
    assert_same(quantized.codes[:2], quantize_colwise_3d(viewed(module.w.detach())))
    module.w.data = module.w.data[:2].clone()
    with refused(match=CHANGED):
        quantized.check()
    with refused(match=r"^w is \(2, .*: quantize it anew"):
        quantized.requantize()


def test_codes_made_again_between_the_passes_are_no_gradient(device: str) -> None:
    layer = random_layer("ragged", device)
    quantized = quantize_weights(layer.weights)
    out = multiply(layer.A.requires_grad_(), quantized, layer.offs)
    quantized.requantize()
    with refused(match="modified by an inplace operation"):
        out.backward(layer.grad)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_weights_that_change_before_activations_are_recomputed_are_refused(use_reentrant: bool, device: str) -> None:
    layer = random_layer("empty", device)
    w = nn.Parameter(layer.weights.clone())
    operands = layer.A.requires_grad_(), quantize_weights(w), layer.offs
    out = checkpoint(multiply, *operands, use_reentrant=use_reentrant)
    in_place(Module(w))
    with refused(match=CHANGED):
        out.backward(layer.grad)


# Compilers and copies


def scaled(A: torch.Tensor, B_t: QuantizedWeights, offs: torch.Tensor) -> torch.Tensor:
    return multiply(A * 2, B_t, offs) * 3


def test_torch_compile_traces_it_whole_and_once(device: str) -> None:
    """Over steps of an optimizer, with new FP8 values or with new ones in the same memory."""
    torch._dynamo.reset()
    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager")
    layer = random_layer("ragged", device)
    module = Module(layer.weights.clone())
    quantized = quantize_weights(module.w)
    run(layer, lambda _: quantized, compiled, w=module.w)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for is_in_place in (False, True, False):
            by_optimizer(module, fused=True)
            if is_in_place:
                quantized.requantize()
            else:
                quantized = quantize_weights(module.w)
            results = run(layer, lambda _: quantized, compiled, w=module.w)  # noqa: B023 - called at once
            assert_same(results, run(layer, viewed, scaled, w=module.w))


@pytest.mark.gpu
def test_a_cuda_graph_reads_codes_made_again(device: str) -> None:
    """Made again within the graph, or in place before it is replayed."""
    layer = random_layer("ragged", device)
    w = layer.weights.clone()
    quantized = quantize_weights(w)
    graphs = []
    for within in (True, False):

        def call(within: bool = within) -> torch.Tensor:
            if within:
                quantized.requantize()
            return multiply(layer.A, quantized, layer.offs)

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
                assert torch.equal(out, multiply(layer.A, viewed(w), layer.offs))
            graphs.append(graph)
        quantized.requantize()


def test_copies_are_of_the_weights_copied_with_them(device: str) -> None:
    module = Module(random_layer("ragged", device).weights.clone())
    module.quantized = quantize_weights(module.w)  # type: ignore[assignment]
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert copied.quantized.weights.data_ptr() == copied.w.data_ptr() != module.w.data_ptr()
        assert_same(copied.quantized.codes, module.quantized.codes)
        in_place(copied)
        module.quantized.check()
        with refused(match=CHANGED):
            copied.quantized.check()
    in_place(module)
    assert_same(copy.copy(module.quantized).codes[:2], quantize_colwise_3d(viewed(module.w.detach())))


def test_wrong_weights_are_refused() -> None:
    w = torch.zeros(E, N, K, dtype=torch.bfloat16)
    with torch.inference_mode():
        in_inference = torch.zeros(E, N, K)
    cases: list[tuple[str, torch.Tensor, dict[str, Any]]] = [
        *(("w", wrong, {}) for wrong in (w[0], w[:, :, ::2], w[:, :40].contiguous(), in_inference)),
        ("float8_dtype", w, {"float8_dtype": torch.float8_e5m2}),
        ("recipe", w, {"recipe": "linen"}),
        ("layout", w, {"layout": "KN"}),
        ("recipe", w, {"layout": "EKN", "recipe": "folded"}),
    ]
    for name, weights, options in cases:
        with pytest.raises(ValueError, match=f"^{name} (is|has|was)"):
            quantize_weights(weights, **options)
