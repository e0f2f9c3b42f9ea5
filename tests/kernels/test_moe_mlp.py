"""``fp8_moe_mlp``: near float64, the bytes of its parts, what it holds, what it refuses."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fp8tune_kernels import ComposedActivationWarning, fp8_grouped_mm, fp8_moe_mlp, quantize_weights
from fp8tune_kernels.gemm import moe_mlp, moe_mlp_composed
from fp8tune_kernels.groups import group_ends
from fp8tune_kernels.quantize.gated import reference_gated
from fp8tune_kernels.spec import ROUTINGS

pytestmark = pytest.mark.usefixtures("quantizers_in_plain_torch")

K, N, E = 64, 48, 3
NAMES = ("x", "w13", "w2", "b13", "b2", "row_weights")


class Layer(NamedTuple):
    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    b13: torch.Tensor | None
    b2: torch.Tensor | None
    row_weights: torch.Tensor | None
    offs: torch.Tensor
    grad: torch.Tensor

    def call(self, function: Callable[..., torch.Tensor] = fp8_moe_mlp, **options: Any) -> torch.Tensor:
        beside = {"b13": self.b13, "b2": self.b2, "row_weights": self.row_weights}
        return function(self.x, self.w13, self.w2, self.offs, **beside, **options)


def layer(routing: str = "ragged", M: int = 157, *, is_full: bool = False, seed: int = 0) -> Layer:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=draw) * std).bfloat16().requires_grad_()

    x, w13, w2 = normal(M, K), normal(E, 2 * N, K, std=K**-0.5), normal(E, K, N, std=N**-0.5)
    biases = (normal(E, 2 * N), normal(E, K)) if is_full else (None, None)
    weights = torch.rand(M, generator=draw).requires_grad_() if is_full else None
    offs = torch.tensor(group_ends(routing, M, E), dtype=torch.int32)
    return Layer(x, w13, w2, *biases, weights, offs, torch.randn(M, K, generator=draw).bfloat16())


def results(given: Layer, function: Callable[..., torch.Tensor] = fp8_moe_mlp, **options: Any) -> list[torch.Tensor]:
    """The output, and the gradients of all that have one."""
    out = given.call(function, **options)
    wanted = [each for each in given[:6] if each is not None]
    return [out, *torch.autograd.grad(out, wanted, given.grad)]


def exact(given: Layer, activation: str, layout: str) -> list[torch.Tensor]:
    """The same in float64."""
    wide = [None if each is None else each.detach().double().requires_grad_() for each in given[:6]]
    x, w13, w2, b13, b2, row_weights = wide
    assert x is not None
    assert w13 is not None
    assert w2 is not None
    rows, start = [], 0
    for expert, end in enumerate(given.offs.tolist()):
        y = x[start:end] @ w13[expert].t()
        y = y if b13 is None else y + b13[expert]
        gate, up = y.chunk(2, 1) if layout == "halves" else (y[:, 0::2], y[:, 1::2])
        if activation == "gpt-oss":
            gate, up = gate.clamp(max=7), up.clamp(-7, 7)
            h = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        elif activation == "swiglu":
            h = torch.nn.functional.silu(gate) * up
        else:
            h = torch.nn.functional.gelu(gate) * up
        out = h @ w2[expert].t()
        out = out if b2 is None else out + b2[expert]
        rows.append(out if row_weights is None else out * row_weights[start:end, None])
        start = end
    out = torch.cat([*rows, x.new_zeros(len(x) - start, K)])
    return [out, *torch.autograd.grad(out, [each for each in wide if each is not None], given.grad.double())]


def sqnr(found: torch.Tensor, right: torch.Tensor) -> float:
    found, right = found.detach().double(), right.detach().double()
    return float(10 * torch.log10(right.square().sum() / (found - right).square().sum()))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_it_is_near_float64_on_every_routing(routing: str) -> None:
    given = layer(routing)
    for found, right in zip(results(given), exact(given, "swiglu", "halves"), strict=True):
        assert sqnr(found, right) > 21


@pytest.mark.parametrize(
    ("activation", "layout"),
    [("swiglu", "halves"), ("swiglu", "interleaved"), ("gpt-oss", "interleaved"), ("gpt-oss", "halves")],
)
@pytest.mark.parametrize("recompute", moe_mlp.RECOMPUTE)
def test_biases_weights_and_activations_are_near_float64(activation: str, layout: str, recompute: str) -> None:
    given = layer("empty", is_full=True)
    options = {"activation": activation, "layout": layout, "recompute": recompute}
    for found, right in zip(results(given, **options), exact(given, activation, layout), strict=True):
        assert sqnr(found, right) > 20, options


def test_the_output_is_that_of_two_grouped_gemms() -> None:
    """To the byte, but for h, which is rounded once here and twice there."""
    given = layer()
    with torch.no_grad():
        y = fp8_grouped_mm(given.x, given.w13.transpose(1, 2), given.offs)
        h = reference_gated(*y.chunk(2, 1), 0)
        right = fp8_grouped_mm(h, given.w2.transpose(1, 2), given.offs)
        assert torch.equal(given.call(), right)


def test_rows_of_no_group_are_zeros() -> None:
    given = layer("empty", is_full=True)
    last = int(given.offs[-1])
    out, grad_x, *_, grad_weights = results(given)
    for each in (out, grad_x, grad_weights):
        assert not each[last:].any()
        assert each[:last].any()


@pytest.mark.parametrize("is_full", [False, True])
def test_no_rows_at_all(is_full: bool) -> None:
    given = layer(M=0, is_full=is_full)
    out, *grads = results(given)
    assert out.shape == (0, K)
    assert not any(grad.any() for grad in grads)


def assert_same(found: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for mine, other in zip(found, right, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("recompute", moe_mlp.RECOMPUTE)
def test_weights_quantized_before_give_the_same_bytes(recompute: str) -> None:
    given = layer(is_full=True)
    right = results(given, recompute=recompute)
    w13, w2 = (quantize_weights(w, recipe="folded") for w in (given.w13, given.w2))

    def on_handles(x: torch.Tensor, _: Any, __: Any, offs: torch.Tensor, **options: Any) -> torch.Tensor:
        return fp8_moe_mlp(x, w13, w2, offs, **options)

    assert_same(results(given, on_handles, recompute=recompute), right)


def test_each_gradient_alone_is_the_same_bytes() -> None:
    given = layer(is_full=True)
    for recompute in moe_mlp.RECOMPUTE:
        whole = dict(zip(NAMES, results(given, recompute=recompute)[1:], strict=True))
        for name in NAMES:
            alone = Layer(
                *(x.detach().requires_grad_(n == name) for n, x in zip(NAMES, given[:6], strict=True)), *given[6:]
            )
            [found] = torch.autograd.grad(alone.call(recompute=recompute), [getattr(alone, name)], given.grad)
            assert torch.equal(found, whole[name]), (name, recompute)


@pytest.mark.parametrize("recompute", ["none", "gate-up"])
def test_torch_compile_traces_it_whole(recompute: str) -> None:
    given = layer(is_full=True)
    torch._dynamo.reset()

    def scaled(*arguments: Any, **options: Any) -> torch.Tensor:
        return fp8_moe_mlp(*arguments, **options) * 1

    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager")
    assert_same(results(given, compiled, recompute=recompute), results(given, recompute=recompute))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    given = layer()

    def recomputed(*arguments: Any, **options: Any) -> torch.Tensor:
        return checkpoint(lambda *each: fp8_moe_mlp(*each, **options), *arguments, use_reentrant=use_reentrant)

    found = recomputed(given.x, given.w13, given.w2, given.offs)
    assert torch.equal(found, given.call())
    found.backward(given.grad)
    for leaf, right in zip((given.x, given.w13, given.w2), results(given)[1:], strict=True):
        assert torch.equal(leaf.grad, right)


def test_autocast_casts_to_its_dtype() -> None:
    given = layer()
    wide = Layer(*(x.detach().float().requires_grad_() for x in given[:3]), *given[3:])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = wide.call()
    out, *grads = results(given)
    assert torch.equal(found, out)
    for grad, right in zip(torch.autograd.grad(found, wide[:3], given.grad), grads, strict=True):
        assert grad.dtype == torch.float32
        assert torch.equal(grad, right.float())


SHARES = {"none": 0.51, "h": 0.43, "gate-up": 0.26}
"""Of bytes that bfloat16 holds where K is 4 N / 3: (K + 3N), (K + 2N) and K over 2K + 6N, and the scales."""


@pytest.mark.parametrize("recompute", moe_mlp.RECOMPUTE)
def test_what_is_held_is_at_most_three_fifths_of_bfloat16s(recompute: str) -> None:
    given = layer(M=4096)
    held: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.data_ptr()] = tensor.nbytes
        return tensor

    w13, w2 = (quantize_weights(w, recipe="folded") for w in (given.w13, given.w2))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        fp8_moe_mlp(given.x, w13, w2, given.offs, recompute=recompute)
    codes = {tensor.data_ptr() for handle in (w13, w2) for tensor in handle.codes}
    share = sum(size for at, size in held.items() if at not in codes) / (4096 * (2 * K + 6 * N))
    assert share < SHARES[recompute] + 0.03
    assert share < 0.6


def test_other_activations_are_composed_and_say_so_once() -> None:
    given = layer(is_full=True)
    moe_mlp_composed._warned.clear()
    with pytest.warns(ComposedActivationWarning, match="'gelu' has no fused kernel"):
        found = results(given, activation="gelu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(results(given, activation="gelu"), found)
    for each, right in zip(found, exact(given, "gelu", "halves"), strict=True):
        assert sqnr(each, right) > 21

    def mine(gate: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(gate)

    with pytest.warns(ComposedActivationWarning, match="'mine' has no fused kernel"):
        assert_same(results(given, activation=mine), found)


def test_it_has_no_second_derivative() -> None:
    given = layer()
    [grad] = torch.autograd.grad(given.call(), given.x, given.grad, create_graph=True)
    with pytest.raises(RuntimeError, match="fp8_moe_mlp has no second derivative"):
        grad.sum().backward()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"layout": "thirds"}, "layout is 'thirds', wanted 'halves' or 'interleaved'"),
    ({"recompute": "x"}, "recompute is 'x', wanted 'none', 'h', 'gate-up'"),
    ({"activation": "tanh"}, "activation is 'tanh', wanted 'swiglu', 'gpt-oss', 'gelu'"),
    ({"x": torch.zeros(157, K, dtype=torch.int8)}, "x is torch.int8, wanted"),
    ({"w13": torch.zeros(E, 2 * N, K + 16)}, r"w13 has shape \(3, 96, 80\), wanted \(E, 2N, K\)"),
    ({"w2": torch.zeros(E, N, K)}, r"w2 has shape \(3, 48, 64\), wanted"),
    ({"offs": torch.zeros(4, dtype=torch.int32)}, "offs has 4 groups, wanted 3: one for each expert of w13"),
    ({"b13": torch.zeros(E, N)}, r"b13 is torch.float32 of shape \(3, 48\) on cpu, wanted"),
    ({"b2": torch.zeros(E, K, dtype=torch.int32)}, "b2 is torch.int32 of shape"),
    ({"row_weights": torch.zeros(156)}, r"row_weights is .* wanted floating-point values of shape \(157,\)"),
    ({"float8_dtype": torch.float16}, "float8_dtype is torch.float16, wanted"),
]


@pytest.mark.parametrize(("change", "says"), REFUSED, ids=[next(iter(change)) for change, _ in REFUSED])
def test_what_it_cannot_do_is_refused_in_one_line(change: dict[str, Any], says: str) -> None:
    given = layer()
    arguments = {"x": given.x, "w13": given.w13, "w2": given.w2, "offs": given.offs, **change}
    with pytest.raises(ValueError, match=says) as found:
        fp8_moe_mlp(**arguments)
    assert "\n" not in str(found.value)


def test_weights_quantized_for_another_recipe_or_layout_are_refused() -> None:
    given = layer()
    with pytest.raises(ValueError, match="w13 was quantized for recipe 'default', wanted quantize_weights"):
        fp8_moe_mlp(given.x, quantize_weights(given.w13), given.w2, given.offs)


@pytest.mark.parametrize("recompute", moe_mlp.RECOMPUTE)
def test_weights_quantized_again_give_the_same_bytes(recompute: str) -> None:
    given = layer()
    assert_same(results(given, recompute=recompute, keep_weights=False), results(given, recompute=recompute))


def test_sizes_that_are_no_multiples_of_16_are_refused() -> None:
    x, w13, w2 = torch.zeros(4, 24).bfloat16(), torch.zeros(1, 32, 24).bfloat16(), torch.zeros(1, 24, 16).bfloat16()
    with pytest.raises(ValueError, match="w13 has N=16 and K=24, wanted positive multiples of 16"):
        fp8_moe_mlp(x, w13, w2, torch.tensor([4], dtype=torch.int32))
