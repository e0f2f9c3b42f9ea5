"""``fp8_moe_mlp``: ``moe_layer`` on rows that are sorted by expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from fp8tune_kernels import fp8_grouped_mm, fp8_moe_mlp, quantize_down, quantize_gate_up
from fp8tune_kernels.groups import group_ends
from fp8tune_kernels.moe.layer import RECOMPUTE
from fp8tune_kernels.quantize.gated import reference_gated
from fp8tune_kernels.spec import ROUTINGS

pytestmark = pytest.mark.usefixtures("quantizers_in_plain_torch")

K, N, E = 64, 48, 3


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
        else:
            h = torch.nn.functional.silu(gate) * up
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
@pytest.mark.parametrize("recompute", RECOMPUTE)
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


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_weights_quantized_before_give_the_same_bytes(recompute: str) -> None:
    given = layer(is_full=True)
    w13, w2 = quantize_gate_up(given.w13), quantize_down(given.w2)

    def with_values(x: torch.Tensor, _: Any, __: Any, offs: torch.Tensor, **options: Any) -> torch.Tensor:
        return fp8_moe_mlp(x, w13, w2, offs, **options)

    assert_same(results(given, with_values, recompute=recompute), results(given, recompute=recompute))


def test_torch_compile_traces_it_whole() -> None:
    given = layer(is_full=True)
    torch._dynamo.reset()

    def scaled(*arguments: Any, **options: Any) -> torch.Tensor:
        return fp8_moe_mlp(*arguments, **options) * 1

    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager")
    assert_same(results(given, compiled), results(given))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"activation": "gelu"}, "activation must be 'swiglu' or 'gpt-oss', got 'gelu'"),
    ({"offs": torch.zeros(4, dtype=torch.int32)}, "offs has 4 groups, wanted 3: one for each expert of w13"),
    ({"offs": torch.tensor([5, 3, 9], dtype=torch.int32)}, "offs ends group 1 at row 3, before its start at 5"),
    ({"row_weights": torch.zeros(156)}, r"row_weights is torch.float32 of shape \(156,\) on cpu, wanted"),
]


@pytest.mark.parametrize(("change", "says"), REFUSED, ids=[next(iter(change)) for change, _ in REFUSED])
def test_operands_that_do_not_fit_are_refused_in_one_line(change: dict[str, Any], says: str) -> None:
    given = layer()
    arguments = {"x": given.x, "w13": given.w13, "w2": given.w2, "offs": given.offs, **change}
    with pytest.raises(ValueError, match=says) as found:
        fp8_moe_mlp(**arguments)
    assert "\n" not in str(found.value)
