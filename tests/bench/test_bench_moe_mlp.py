"""What ``bench --op moe-mlp`` times: the steps of an expert MLP, and parts that put together are one."""

from __future__ import annotations

import pytest
import torch
from test_bench_grouped_steps import all_of_ours

from fp8tune.bench import grouped_contenders as steps
from fp8tune.bench.layers import Layer, layers_of
from fp8tune.bench.operation import BOTH, FORWARD, QUANTIZE_WEIGHTS
from fp8tune.bench.operation_mlp import MOE_MLP, ONCE
from fp8tune.bench.options import BenchOptions, OperationName
from fp8tune.records import NamedInts

pytestmark = pytest.mark.usefixtures("quantizers_in_plain_torch")

ROUTINGS = pytest.mark.parametrize("routing", ["balanced", "ragged", "empty"])


def small(routing: str) -> Layer:
    return Layer(MOE_MLP.name, NamedInts(M=64, N=32, K=48, G=3), routing)


@ROUTINGS
def test_the_parts_put_together_are_the_step(routing: str) -> None:
    one = small(routing)
    given = steps.operands_of(one, "cpu")
    parts = {part: steps.part_call(MOE_MLP, part, given)() for part in steps.parts_of(one)}
    assert torch.equal(parts["GEMM out"], steps.step_call(MOE_MLP, MOE_MLP.ours, FORWARD, given)())
    grads = steps.step_call(MOE_MLP, MOE_MLP.ours, BOTH, given)()
    for name, grad in zip(("x", "w13", "w2"), grads, strict=True):
        assert torch.equal(parts[f"GEMM grad_{name}"], grad)


@ROUTINGS
def test_right_results_pass(routing: str) -> None:
    given = steps.operands_of(small(routing), "cpu")
    for name in all_of_ours(MOE_MLP):
        found = steps.accuracy_of(MOE_MLP, name, given)
        assert found.reason == ""
        assert found.sqnr_db is not None
        assert tuple(found.sqnr_db) == ("out", "grad_x", "grad_w13", "grad_w2")
        assert min(found.sqnr_db.values()) > 20


def test_weights_quantized_once_give_our_step_to_the_bit() -> None:
    given = steps.operands_of(small("ragged"), "cpu")
    ours = steps.step_call(MOE_MLP, MOE_MLP.ours, BOTH, given)()
    for result, right in zip(steps.step_call(MOE_MLP, ONCE, BOTH, given)(), ours, strict=True):
        assert torch.equal(result, right)
    handles = steps.step_call(MOE_MLP, MOE_MLP.ours, QUANTIZE_WEIGHTS, given)()
    assert [handle.recipe for handle in handles] == ["folded", "folded"]


def test_a_layer_is_a_gemm_down_of_a_shape_set() -> None:
    layers = layers_of(BenchOptions(op=OperationName.MOE_MLP, shapes=("models",)), MOE_MLP)
    assert len(layers) == 20
    assert all("down" in layer.label for layer in layers)
    [mixtral] = [layer for layer in layers if "Mixtral" in layer.label and layer.shape["M"] == 8192]
    assert mixtral.shape == NamedInts(M=8192, N=14336, K=4096, G=8)
