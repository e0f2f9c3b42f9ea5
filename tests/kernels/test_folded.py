"""``fp8_grouped_mm(..., recipe="folded")``: which bytes it multiplies, how near the gradients are, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import assert_same_bits, poisoned
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from test_grouped_mm import Layer, layer, run
from torch.utils.checkpoint import checkpoint

from fp8tune_kernels import (
    fp8_grouped_mm,
    interpreter,
    quantize_colwise_3d,
    quantize_rowwise_2d,
    quantize_rowwise_factored,
    quantize_weights,
    transpose_codes,
    transpose_codes_3d,
)
from fp8tune_kernels.quantize import transposed_codes
from fp8tune_kernels.quantize.factors import reference_factor
from fp8tune_kernels.quantize.row_shifts import reference_shifts, shifts_and_scales, shifts_of_rows
from fp8tune_kernels.spec import ROUTINGS, NamedInts, Problem

pytestmark = [
    pytest.mark.usefixtures("quantizers_in_plain_torch"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy on 1 / 0, in the interpreter
]

folded = partial(fp8_grouped_mm, recipe="folded")

Call = Callable[..., torch.Tensor]


def sqnr(result: torch.Tensor, right: torch.Tensor) -> float:
    """Decibels; infinite where nothing differs."""
    right = right.double()
    return float(10 * torch.log10(right.square().sum() / (result.double() - right).square().sum()))


def exact(given: Layer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output and both gradients in float64."""
    A, weights, grad = (x.detach().double() for x in (given.A, given.weights, given.grad))
    out, grad_A, grad_w = A.new_zeros(grad.shape), torch.zeros_like(A), torch.zeros_like(weights)
    start = 0
    for expert, end in enumerate(given.offs.tolist()):
        rows = slice(start, end)
        out[rows], grad_A[rows] = A[rows] @ weights[expert].t(), grad[rows] @ weights[expert]
        grad_w[expert] = grad[rows].t() @ A[rows]
        start = end
    return out[:start], grad_A[:start], grad_w


@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_output_is_the_defaults_and_gradients_are_as_near(routing: str, device: str) -> None:
    given = layer(routing, device)
    found, by_default = run(folded, given), run(fp8_grouped_mm, given)
    assert torch.equal(found[0], by_default[0])
    for result, other, right in zip(found, by_default, exact(given), strict=True):
        assert sqnr(result, right) > 27
        assert sqnr(result, right) > sqnr(other, right) - 0.5


def test_tokens_whose_scales_span_twelve_powers_of_two(device: str) -> None:
    given = layer("ragged", device)
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.randint(0, 13, (2, len(given.A), 1), generator=generator).float()).to(device)
    wild = Layer(given.A * sizes[0].to(given.A), given.weights, given.offs, given.grad * sizes[1].to(given.grad))
    for result, right in zip(run(folded, wild), exact(wild), strict=True):
        assert sqnr(result, right) > 27


def test_no_tokens_at_all(device: str) -> None:
    given = layer("balanced", device)
    none = Layer(given.A[:0], given.weights, torch.zeros_like(given.offs), given.grad[:0])
    for result, right in zip(run(folded, none), run(fp8_grouped_mm, none), strict=True):
        assert torch.equal(result, right)


def assert_unchanged(given: Layer, change: Callable[[Call], Call]) -> None:
    for result, right in zip(run(change(folded), given), run(folded, given), strict=True):
        assert torch.equal(result, right)


def test_torch_compile_traces_it_whole(device: str) -> None:
    assert_unchanged(
        layer("balanced", device),
        lambda call: torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True),
    )


def test_activation_checkpointing_recomputes_it(device: str) -> None:
    assert_unchanged(
        layer("empty", device), lambda call: lambda *arguments: checkpoint(call, *arguments, use_reentrant=False)
    )


def test_under_autocast_operands_are_cast_first(device: str) -> None:
    given = layer("ragged", device, torch.float32)
    cast = Layer(given.A.bfloat16(), given.weights.bfloat16(), given.offs, given.grad)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = run(folded, given)
    for result, right in zip(found, run(folded, cast), strict=True):
        assert torch.equal(result.bfloat16(), right)


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_one_gradient_alone(wanted: tuple[bool, bool], device: str) -> None:
    given = layer("ragged", device)
    out, *gradients = run(folded, given)
    A, weights = (
        x.detach().clone().requires_grad_(each) for x, each in zip((given.A, given.weights), wanted, strict=True)
    )
    found = folded(A, weights.transpose(1, 2), given.offs)
    assert torch.equal(found, out)
    assert found.requires_grad == any(wanted)
    if any(wanted):
        found.backward(given.grad)
    for leaf, each, right in zip((A, weights), wanted, gradients, strict=True):
        assert torch.equal(leaf.grad, right) if each else leaf.grad is None


def test_a_byte_an_element_is_held_of_either_operand(device: str) -> None:
    given = layer("balanced", device)
    held: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x) or x, lambda x: x):
        folded(given.A.detach().requires_grad_(), given.weights.detach().requires_grad_().transpose(1, 2), given.offs)
    codes = [x for x in held if x.element_size() == 1]
    assert sum(x.numel() for x in codes) == given.A.numel() + given.weights.numel()
    assert sum(x.nbytes for x in held) < 1.2 * (given.A.numel() + given.weights.numel()) + 4096


def test_weights_once_give_the_same_bytes_and_know_their_recipe(device: str) -> None:
    given = layer("ragged", device)
    weights = given.weights.detach().clone().requires_grad_()
    experts = quantize_weights(weights, recipe="folded")
    assert experts.recipe == "folded"
    A = given.A.detach().clone().requires_grad_()
    out = fp8_grouped_mm(A, experts, given.offs)
    out.backward(given.grad)
    for result, right in zip((out, A.grad, weights.grad), run(folded, given), strict=True):
        assert torch.equal(result, right)
    q, scales, transposed = experts.codes
    assert_same_bits((q, scales), quantize_colwise_3d(given.weights.detach().transpose(1, 2)))
    assert_same_bits((transposed,), (transpose_codes_3d(q),))
    with torch.no_grad():
        weights.mul_(2)
    experts.requantize()
    assert torch.equal(experts.codes[1], scales)  # the same memory
    with pytest.raises(ValueError, match="recipe is 'default', wanted 'folded': B_t was quantized for it"):
        fp8_grouped_mm(A, experts, given.offs, recipe="default")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"recipe": "linen"}, "recipe is 'linen', wanted 'default' or 'folded'"),
        ({"recipe": "folded", "precision": "auto"}, "precision is 'auto', wanted 'fp8'"),
        ({"recipe": "folded", "keep_fp8": ("A",)}, "keep_fp8 has names, wanted none"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], says: str, device: str) -> None:
    given = layer("balanced", device)
    with pytest.raises(ValueError, match=says):
        fp8_grouped_mm(given.A, given.weights.transpose(1, 2), given.offs, **options)


def test_weights_for_no_recipe_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match="recipe is 'linen', wanted 'default' or 'folded'"):
        quantize_weights(layer("balanced", device).weights, recipe="linen")


# Factors, shifts and transposes, as the docstrings have them


def test_factors_go_by_the_exponent() -> None:
    scale = torch.tensor([1.0, 2.0, 3.99, 2.0**48, 2.0**-120, 0.0, float("inf"), float("nan")])
    right = torch.tensor([1.0, 0.5, 0.5, 2.0**-48, 2.0**120, 2.0**127, 0.0, 0.0])
    assert torch.equal(reference_factor(scale), right)


def test_an_infinite_or_undefined_weight_spoils_the_gradient_of_its_rows(device: str) -> None:
    given = layer("balanced", device)
    for value in (float("nan"), float("inf")):
        weights = given.weights.detach().clone()
        weights[0, 3, 5] = value
        _, grad_A, _ = run(folded, Layer(given.A, weights, given.offs, given.grad))
        assert grad_A[: int(given.offs[0]), 5].isnan().all()
        assert grad_A[int(given.offs[0]) :].isfinite().all()


@settings(max_examples=15, deadline=None)
@drawn(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 4), st.randoms(use_true_random=False))
def test_shifts_bring_rows_to_the_least_of_their_group(sizes: list[int], beyond: int, random: Any) -> None:
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    M = int(offs[-1]) + beyond
    values = [random.choice([2.0 ** random.randint(-20, 40), 0.0, float("nan")]) for _ in range(2 * M)]
    scales, others = torch.tensor(values[:M]), torch.tensor(values[M:])
    shifts, least = reference_shifts(scales, others, offs)
    start = 0
    for group, end in enumerate(offs.tolist()):
        usable = [p for p in (scales * others)[start:end].tolist() if p > 0]
        assert least[group] == min(usable, default=1.0)
        for shift, product in zip(shifts[start:end].tolist(), (scales * others)[start:end].tolist(), strict=True):
            if product > 0:
                assert shift == float(least[group]) / product <= 1
        start = end
    assert bool((shifts[start:] == 1).all())


@pytest.mark.parametrize("sizes", [[0, 5, 0], [3], [4096, 1, 5000]])
def test_the_kernel_of_shifts_gives_the_references_bits(
    sizes: list[int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreter, "INTERPRETED", True)  # else both are the reference
    offs = torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
    M = int(offs[-1]) + 7
    generator = torch.Generator().manual_seed(0)
    scales, others = (torch.exp2(torch.randint(-20, 49, (M,), generator=generator)).to(device) for _ in range(2))
    scales[:2], others[1:2] = 0, float("nan")
    shifts, least = reference_shifts(scales, others, offs)
    assert_same_bits(shifts_of_rows(scales, others, offs), (shifts, least))
    column_scales = torch.exp2(torch.randint(-9, 9, (len(sizes), 1, 2064), generator=generator)).to(device)
    wanted = shifts, (least[:, None] / column_scales.view(len(sizes), -1)).view(-1), least.new_ones(len(sizes) * 48)
    assert_same_bits(shifts_and_scales(scales, others, offs, column_scales, 2064, 48), wanted)
    tokens = torch.randperm(M, generator=generator).to(device, torch.int32)
    by_token = torch.empty_like(others).scatter_(0, tokens.long(), others)
    wanted = shifts, least.repeat_interleave(96), wanted[2]
    assert_same_bits(shifts_and_scales(scales, by_token, offs, None, 96, 48, tokens), wanted)


@pytest.mark.parametrize("G", [128, 131, 260])
def test_more_groups_than_are_counted_at_once(G: int, device: str) -> None:
    one = Problem("transposed-codes", NamedInts(M=700, K=16, G=G), routing="empty", in_dtype="float8_e4m3fn")
    inputs = transposed_codes.inputs(one, device)
    expected = transposed_codes.reference(*inputs)
    outputs = poisoned(transposed_codes.SPEC, inputs, expected)
    transposed_codes.launch(transposed_codes.SPEC.default, inputs, outputs)
    transposed_codes.unwritten(inputs, outputs)
    assert_same_bits(outputs, expected)


def test_a_shift_changes_the_exponent_alone_until_codes_are_subnormal(device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device).repeat(16, 1)
    codes[codes & 0x7F == 0x7F] = 0
    offs = torch.tensor([16], dtype=torch.int32, device=device)
    shifts = torch.exp2(-torch.arange(16.0, device=device))
    q = codes.view(torch.float8_e4m3fn)
    shifted = transpose_codes(q, offs, shifts)[:16].float()
    wanted = q.float() * shifts[:, None]
    normal = wanted.abs() >= 2.0**-6
    assert torch.equal(shifted[normal], wanted[normal])
    assert bool((shifted - wanted).abs().max() <= 2.0**-10)
    assert torch.equal(transpose_codes(q, offs)[:16].float(), q.float())


def test_what_kernels_do_not_take_is_refused(device: str) -> None:
    x = torch.randn(48, 32, device=device)
    offs = torch.tensor([16, 48], dtype=torch.int32, device=device)
    q, scales = quantize_rowwise_2d(x)
    with pytest.raises(ValueError, match=r"q is torch.float32 of shape \(48, 32\)"):
        transpose_codes(x, offs)
    with pytest.raises(ValueError, match=r"q has K=24, wanted a multiple of 16"):
        transpose_codes(q[:, :24].contiguous(), offs)
    with pytest.raises(ValueError, match=r"shifts is torch.float32 of shape"):
        transpose_codes(q, offs, scales[:3])
    with pytest.raises(ValueError, match=r"column_scales is torch.float32 of shape"):
        quantize_rowwise_factored(x, offs, scales)
    with pytest.raises(ValueError, match="q has N=24, wanted a multiple of 16"):
        transpose_codes_3d(q[:, :24].contiguous().view(2, 24, 24).transpose(1, 2))
