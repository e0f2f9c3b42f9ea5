"""``moe_layer`` and ``choose_experts``: near float64, the bytes of their steps, edge cases, memory, refusals."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fp8tune_kernels import choose_experts, moe_layer
from fp8tune_kernels.gemm import grouped_contraction, grouped_rows
from fp8tune_kernels.moe import expert_sort, layer
from fp8tune_kernels.moe.expert_weights import quantize_down, quantize_gate_up
from fp8tune_kernels.quantize import (
    colwise_3d,
    row_shifts,
    rowwise_2d,
    swiglu_gradient,
    swiglu_rowwise,
    transposed_codes,
)
from fp8tune_kernels.quantize.arithmetic import reference_cast

FP8 = torch.float8_e4m3fn
T, K, N, E, TOP_K = 41, 64, 48, 5, 3
NAMES = ("x", "w13", "w2", "b13", "b2", "weights")

both_precisions = pytest.mark.parametrize("precision", ["fp8", "bf16"])
in_plain_torch = pytest.mark.usefixtures("quantizers_in_plain_torch")


class Case(NamedTuple):
    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    b13: torch.Tensor | None
    b2: torch.Tensor | None
    weights: torch.Tensor
    ids: torch.Tensor
    grad: torch.Tensor

    def call(self, function: Callable[..., torch.Tensor] = moe_layer, **options: Any) -> torch.Tensor:
        biases = {"b13": self.b13, "b2": self.b2}
        return function(self.x, self.w13, self.w2, self.ids, self.weights, **biases, **options)


def ids_of(routing: str, tokens: int, draw: torch.Generator) -> torch.Tensor:
    """Experts of each token, (tokens, TOP_K)."""
    ids = torch.stack([torch.randperm(E, generator=draw)[:TOP_K] for _ in range(tokens)]) if tokens else None
    if ids is None:
        return torch.zeros(0, TOP_K, dtype=torch.int64)
    if routing == "experts without rows":
        return torch.where(ids % 2 == 0, ids, 1)
    if routing == "one expert":
        return torch.full_like(ids, 3)
    if routing == "duplicates":
        ids[:, 1] = ids[:, 0]
        ids[::3, 2] = ids[::3, 0]
    if routing == "other devices":
        ids[::2, 0], ids[::3, 1], ids[5] = E, -1, E + 7
    if routing == "all on other devices":
        ids += E
    return ids


ROUTINGS = ("random", "experts without rows", "one expert", "duplicates", "other devices", "all on other devices")


def random_case(routing: str = "random", tokens: int = T, *, is_full: bool = False, seed: int = 0) -> Case:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=draw) * std).bfloat16().requires_grad_()

    x, w13, w2 = normal(tokens, K), normal(E, 2 * N, K, std=K**-0.5), normal(E, K, N, std=N**-0.5)
    biases = (normal(E, 2 * N), normal(E, K)) if is_full else (None, None)
    weights = torch.rand(tokens, TOP_K, generator=draw).requires_grad_()
    ids = ids_of(routing, tokens, draw)
    return Case(x, w13, w2, *biases, weights, ids, torch.randn(tokens, K, generator=draw).bfloat16())


def results(case: Case, function: Callable[..., torch.Tensor] = moe_layer, **options: Any) -> list[torch.Tensor]:
    """The output, and the gradients of all that have one."""
    out = case.call(function, **options)
    return [out.detach(), *torch.autograd.grad(out, [tensor for tensor in case[:6] if tensor is not None], case.grad)]


def exact(case: Case, activation: str = "swiglu", layout: str = "halves") -> list[torch.Tensor]:
    """Compute output and gradients in float64, expert by expert."""
    wide = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in case[:6]]
    x, w13, w2, b13, b2, weights = wide
    assert x is not None
    assert w13 is not None
    assert w2 is not None
    assert weights is not None
    out = torch.zeros_like(x)
    for expert in range(len(w13)):
        for k in range(case.ids.shape[1]):
            tokens = (case.ids[:, k] == expert).nonzero().flatten()
            y = x[tokens] @ w13[expert].t()
            y = y if b13 is None else y + b13[expert]
            gate, up = y.chunk(2, 1) if layout == "halves" else (y[:, 0::2], y[:, 1::2])
            if activation == "gpt-oss":
                gate, up = gate.clamp(max=7), up.clamp(-7, 7)
                h = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            else:
                h = torch.nn.functional.silu(gate) * up
            of_expert = h @ w2[expert].t()
            of_expert = of_expert if b2 is None else of_expert + b2[expert]
            out = out.index_add(0, tokens, of_expert * weights[tokens, k, None])
    leaves = [tensor for tensor in wide if tensor is not None]
    grads = torch.autograd.grad(out, leaves, case.grad.double(), allow_unused=True, materialize_grads=True)
    return [out.detach(), *grads]


def sqnr(result: torch.Tensor, right: torch.Tensor) -> float:
    result, right = result.detach(), right.detach()
    error = (result.double() - right).square().sum()
    return float(10 * torch.log10(right.square().sum() / error)) if error else float("inf")


def cosine(result: torch.Tensor, right: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(result.double().flatten(), right.double().flatten(), 0))


def assert_same(mine: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    for one, other in zip(mine, others, strict=True):
        assert torch.equal(one, other)


# The layer near float64

NEAR = {"fp8": 19.0, "bf16": 45.0}
"""Signal to noise in dB; the gradient of routing weights is the worst, as it is a sum of few terms."""


KINDS = (("swiglu", "halves"), ("gpt-oss", "interleaved"))


def with_options(precision: str) -> Iterator[tuple[dict[str, Any], tuple[str, str]]]:
    """Options of the layer, and its kind."""
    for kind, recompute in itertools.product(KINDS, layer.RECOMPUTE):
        yield {"activation": kind[0], "layout": kind[1], "recompute": recompute, "precision": precision}, kind


def assert_near(case: Case, precision: str) -> None:
    least = NEAR[precision] - (6 if len(case.x) == 1 else 0)  # gradients of three weights are no mean of many
    exact_results = {kind: exact(case, *kind) for kind in KINDS}
    for options, kind in with_options(precision):
        for result, right in zip(results(case, **options), exact_results[kind], strict=True):
            assert result.shape == right.shape
            assert result.isfinite().all()
            assert sqnr(result, right) > least, options


@in_plain_torch
@both_precisions
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing_with_every_option(routing: str, precision: str) -> None:
    assert_near(random_case(routing, is_full=True), precision)


def of_first_expert(case: Case) -> Case:
    """One expert in all: every choice is its."""
    names = ("w13", "w2", "b13", "b2")
    parts = {name: getattr(case, name).detach()[:1].requires_grad_() for name in names}
    return case._replace(ids=torch.zeros_like(case.ids), **parts)


def choices(case: Case, count: int) -> Case:
    """Return the case with ``count`` different experts per token."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(E, generator=draw)[:count] for _ in range(len(case.x))])
    return case._replace(ids=ids, weights=torch.rand(ids.shape, generator=draw).requires_grad_())


SIZES = {
    "one token": random_case(tokens=1, is_full=True),
    "one expert": of_first_expert(random_case(is_full=True)),
    "one choice": choices(random_case(is_full=True), 1),
    "every expert": choices(random_case(is_full=True), E),
    "b2 alone": random_case("other devices", is_full=True)._replace(b13=None),
    "b13 alone": random_case("other devices", is_full=True)._replace(b2=None),
    "weights of zero": random_case(is_full=True)._replace(weights=torch.zeros(41, 3, requires_grad=True)),
}


@in_plain_torch
@both_precisions
@pytest.mark.parametrize("size", SIZES)
def test_sizes_at_their_ends(size: str, precision: str) -> None:
    assert_near(SIZES[size], precision)


@in_plain_torch
@both_precisions
@pytest.mark.parametrize("is_full", [False, True])
def test_no_tokens_with_every_option(is_full: bool, precision: str) -> None:
    for case in (random_case(tokens=0, is_full=is_full), transposed(random_case(tokens=0, is_full=is_full))):
        leaves = [tensor for tensor in case[:6] if tensor is not None]
        for options, _ in with_options(precision):
            out, *grads = results(case, **options)
            assert out.shape == case.x.shape
            for grad, leaf in zip(grads, leaves, strict=True):
                assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype)
                assert not grad.any()


@in_plain_torch
def test_loss_scaling_gives_tiny_gradients_the_error_of_normal_ones() -> None:
    case = random_case()

    def errors(size: float, loss_scale: float) -> list[float]:
        found = results(case._replace(grad=(case.grad.double() * size * loss_scale).bfloat16()))
        pairs = list(zip(found, exact(case), strict=True))[1:]
        return [float((mine.double() / (size * loss_scale) - right).norm() / right.norm()) for mine, right in pairs]

    normal = errors(2.0**-10, 1)
    assert max(normal) < 0.15
    assert errors(2.0**-40, 1) == pytest.approx(normal, rel=0.05)  # about 1e-12, from which on none is needed
    assert min(errors(2.0**-56, 1)[:3]) > 0.1
    assert errors(2.0**-56, 2.0**46) == normal  # the same bytes but for the exponents


# The bytes of its steps


@in_plain_torch
@pytest.mark.parametrize("routing", ["random", "experts without rows", "other devices"])
def test_the_gradients_are_those_of_quantized_steps_on_copied_rows(routing: str) -> None:
    case = random_case(routing)
    with torch.no_grad():
        right = gradients_of_copied_rows(case)
    _, d_x, d_w13, d_w2, d_weights = results(case)
    for mine, other in zip((d_x, d_w13, d_w2, d_weights), right, strict=True):
        assert torch.equal(mine, other)


def gradients_of_copied_rows(case: Case) -> tuple[torch.Tensor, ...]:
    x, w13, w2, weights = (tensor.detach() for tensor in (case.x, case.w13, case.w2, case.weights))
    offs, row_of, token_of_row, row_weights = expert_sort.SPEC.reference(case.ids, weights, E)
    tokens = token_of_row.long()
    q_x, scales_x = rowwise_2d.SPEC.reference(x[tokens], FP8, True)
    q_d, scales_d = rowwise_2d.SPEC.reference(case.grad[tokens], FP8, True)
    q_13, scales_13 = colwise_3d.SPEC.reference(w13.transpose(1, 2), FP8, True)
    q_2, scales_2 = colwise_3d.SPEC.reference(w2.transpose(1, 2), FP8, True)
    (y,) = grouped_rows.SPEC.reference(q_x, q_13.mT, offs, scales_x, scales_13)
    q_h, scales_h, q_y, scales_y = swiglu_rowwise.SPEC.reference(
        y, offs, None, None, row_weights, "swiglu", "halves", True, FP8
    )
    # w2 at one scale an expert
    least = scales_2.view(E, K).amin(1)
    at_one_scale = reference_cast(q_2.mT, (least[:, None] / scales_2.view(E, K))[:, :, None], FP8)
    transposed = at_one_scale.view(torch.uint8).mT.contiguous().view(FP8)
    (dh,) = grouped_rows.SPEC.reference(q_d, transposed, offs, scales_d, least[:, None].expand(E, N).contiguous())
    q_dy, scales_dy, d_row_weights, _ = swiglu_gradient.SPEC.reference(
        q_y, dh, offs, scales_13, scales_y, None, row_weights, "swiglu", "halves", False, FP8
    )
    (rows,) = grouped_rows.SPEC.reference(
        q_dy, q_13.view(torch.uint8).contiguous().view(FP8), offs, scales_dy, torch.ones(E, K)
    )
    d_x = torch.zeros(len(x), K)
    for k in range(TOP_K):
        d_x += rows[row_of[:, k].long()].float()

    def contracted(q: Any, of_q: Any, other: Any, of_other: Any, factors: torch.Tensor) -> torch.Tensor:
        shifts, least = row_shifts.reference_shifts(of_q, of_other, offs)
        (a,), (b,) = (
            transposed_codes.SPEC.reference(q, offs, shifts),
            transposed_codes.SPEC.reference(other, offs, None),
        )
        scales = (least[:, None] / factors).flatten(), torch.ones(E * other.shape[1])
        return grouped_contraction.SPEC.reference(a, b, offs, *scales, transposed_codes.ALIGNMENT, None)[0]

    d_w13 = contracted(q_dy, scales_dy, q_x, scales_x, scales_13.view(E, 2 * N))
    d_w2 = contracted(q_d, scales_d, q_h, scales_h, torch.ones(E, K))
    return d_x.bfloat16(), d_w13, d_w2, d_row_weights[row_of.long()]


@both_precisions
def test_kernels_agree_with_plain_torch(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole layer on Triton's interpreter."""
    case = random_case("other devices", is_full=True)
    options = {"precision": precision, "activation": "gpt-oss", "layout": "interleaved"}
    by_kernels = results(case, **options)
    monkeypatch.setattr("fp8tune_kernels.interpreter.INTERPRETED", False)
    for mine, right in zip(by_kernels, results(case, **options), strict=True):
        assert cosine(mine, right) > 0.9999


# Edge cases


@in_plain_torch
def test_ids_of_32_bits_and_weights_of_bfloat16_are_taken() -> None:
    case = random_case("other devices", is_full=True)
    rounded = case.weights.detach().bfloat16()
    right = results(case._replace(weights=rounded.float().requires_grad_()))
    mine = results(case._replace(ids=case.ids.int(), weights=rounded.requires_grad_()))
    assert_same(mine[:-1], right[:-1])
    assert torch.equal(mine[-1], right[-1].bfloat16())


# Options


@in_plain_torch
@pytest.mark.parametrize("recompute", layer.RECOMPUTE)
def test_weights_quantized_before_or_again_give_the_same_bytes(recompute: str) -> None:
    case = random_case(is_full=True)
    right = results(case, recompute=recompute)
    assert_same(results(case, recompute=recompute, keep_weights=False), right)
    before = quantize_gate_up(case.w13), quantize_down(case.w2)

    def on_quantized(x: Any, _: Any, __: Any, *rest: Any, **options: Any) -> torch.Tensor:
        return moe_layer(x, *before, *rest, **options)

    assert_same(results(case, on_quantized, recompute=recompute), right)


def transposed(case: Case) -> Case:
    """Return a case whose weights lie as (E, columns, rows)."""
    w13, w2 = (w.detach().mT.contiguous().mT.requires_grad_() for w in (case.w13, case.w2))
    return case._replace(w13=w13, w2=w2)


@in_plain_torch
@pytest.mark.parametrize(
    "options", [{}, {"keep_weights": False, "recompute": "gate-up"}, {"precision": "bf16"}], ids=str
)
def test_weights_that_lie_as_their_transpose_give_the_same_results(options: dict[str, Any]) -> None:
    case = random_case("other devices", is_full=True)
    mine, right = results(transposed(case), **options), results(case, **options)
    for index, (one, other) in enumerate(zip(mine, right, strict=True)):
        if index in (2, 3):  # sums of the weight gradients in another order
            assert sqnr(one, other.double()) > 45
            assert "precision" in options or one.mT.is_contiguous()
        else:
            assert torch.equal(one, other)


@in_plain_torch
@both_precisions
def test_each_gradient_alone_is_the_same_bytes(precision: str) -> None:
    case = random_case(is_full=True)
    for recompute in layer.RECOMPUTE:
        options = {"recompute": recompute, "precision": precision}
        whole = dict(zip(NAMES, results(case, **options)[1:], strict=True))
        for name in NAMES:
            leaves = (tensor.detach().requires_grad_(n == name) for n, tensor in zip(NAMES, case[:6], strict=True))
            alone = Case(*leaves, *case[6:])
            [grad] = torch.autograd.grad(alone.call(**options), [getattr(alone, name)], case.grad)
            assert torch.equal(grad, whole[name]), (name, options)


@in_plain_torch
@both_precisions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_weights_are_added_to_buffers(precision: str, dtype: torch.dtype) -> None:
    case = random_case()
    _, d_x, d_w13, d_w2, d_weights = results(case, precision=precision)
    exact = [torch.zeros_like(w, dtype=torch.float32) for w in (case.w13, case.w2)]
    case.call(precision=precision, grad_w13=exact[0], grad_w2=exact[1]).backward(case.grad)
    assert torch.equal(exact[0].bfloat16(), d_w13)
    assert torch.equal(exact[1].bfloat16(), d_w2)
    assert torch.equal(exact[0], d_w13.float()) is (
        precision == "bf16"
    )  # in FP8 sums are added before they are rounded
    buffers = {f"grad_{name}": torch.ones_like(getattr(case, name), dtype=dtype) for name in ("w13", "w2")}
    for number in (1, 2):
        leaves = [tensor.detach().requires_grad_() for tensor in (case.x, case.w13, case.w2, case.weights)]
        x, w13, w2, weights = leaves
        moe_layer(x, w13, w2, case.ids, weights, precision=precision, **buffers).backward(case.grad)
        assert w13.grad is None
        assert w2.grad is None
        assert torch.equal(x.grad, d_x)
        assert torch.equal(weights.grad, d_weights)
        for name, grad in zip(("w13", "w2"), exact, strict=True):
            right = torch.ones_like(grad, dtype=dtype)
            for _ in range(number):
                right += grad
            assert torch.equal(buffers[f"grad_{name}"], right)


@in_plain_torch
def test_gradients_of_weights_that_were_quantized_before_are_added_to_buffers() -> None:
    """Two micro-batches by FP8 values of one block of memory: the sum of both, not rounded first."""
    cases = [random_case("other devices", seed=seed) for seed in (0, 1)]
    w13, w2 = (getattr(cases[0], name).detach().requires_grad_() for name in ("w13", "w2"))
    before = quantize_gate_up(w13), quantize_down(w2)
    buffers = {f"grad_{name}": torch.zeros_like(w, dtype=torch.float32) for name, w in (("w13", w13), ("w2", w2))}
    sums = [torch.zeros_like(buffer) for buffer in buffers.values()]
    sizes = [torch.zeros_like(buffer) for buffer in buffers.values()]
    for case in cases:
        whole = case._replace(w13=w13, w2=w2)
        _, d_x, *d_weights = results(whole)
        for total, size, grad in zip(sums, sizes, d_weights, strict=False):
            total += grad
            size += grad.abs()
        x = case.x.detach().requires_grad_()
        moe_layer(x, *before, case.ids, case.weights.detach(), **buffers).backward(case.grad)
        assert torch.equal(x.grad, d_x)
    assert w13.grad is w2.grad is None
    for buffer, total, size in zip(buffers.values(), sums, sizes, strict=True):
        assert total.abs().sum() > 0
        assert ((buffer - total).abs() <= size / 256).all()  # half a unit in the last place of bfloat16, 8 bits


@in_plain_torch
@pytest.mark.parametrize(("recompute", "precision"), [("gate-up", "fp8"), ("none", "bf16")])
def test_torch_compile_traces_it_whole(recompute: str, precision: str) -> None:
    case = random_case("other devices", is_full=True)
    torch._dynamo.reset()

    def scaled(*arguments: Any, **options: Any) -> torch.Tensor:
        return moe_layer(*arguments, **options) * 1

    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager")
    options = {"recompute": recompute, "precision": precision}
    assert_same(results(case, compiled, **options), results(case, **options))


@in_plain_torch
@pytest.mark.parametrize(("use_reentrant", "precision"), [(False, "fp8"), (True, "bf16")])
def test_activation_checkpointing(use_reentrant: bool, precision: str) -> None:
    case = random_case()

    def recomputed(*arguments: Any, **options: Any) -> torch.Tensor:
        return checkpoint(lambda *tensor: moe_layer(*tensor, **options), *arguments, use_reentrant=use_reentrant)

    out = recomputed(case.x, case.w13, case.w2, case.ids, case.weights, precision=precision)
    assert torch.equal(out, case.call(precision=precision))
    out.backward(case.grad)
    leaves = case.x, case.w13, case.w2, case.weights
    assert_same([leaf.grad for leaf in leaves], results(case, precision=precision)[1:])


@in_plain_torch
@both_precisions
def test_autocast_casts_to_its_dtype(precision: str) -> None:
    case = random_case()
    wide = case._replace(**{name: getattr(case, name).detach().float().requires_grad_() for name in ("x", "w13", "w2")})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = wide.call(precision=precision)
    right, *grads = results(case, precision=precision)
    assert torch.equal(out, right)
    for grad, other in zip(torch.autograd.grad(out, wide[:3], case.grad), grads[:3], strict=True):
        assert grad.dtype == torch.float32
        assert torch.equal(grad, other.float())


# Memory


SHARES = {"none": 0.46, "h": 0.35, "gate-up": 0.1}
"""Of bytes that bfloat16 holds in rows, 2K + 6N: 3N, 2N and nothing by row; K / TOP_K by token; scales and order."""


@in_plain_torch
@pytest.mark.parametrize("recompute", layer.RECOMPUTE)
def test_what_is_held_between_the_passes(recompute: str) -> None:
    case = random_case(tokens=1024)
    held: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.data_ptr()] = tensor.nbytes
        return tensor

    before = quantize_gate_up(case.w13), quantize_down(case.w2)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        moe_layer(case.x, *before, case.ids, case.weights, recompute=recompute)
    of_weights = {tensor.data_ptr() for w in before for tensor in vars(w).values() if tensor is not None}
    share = sum(size for at, size in held.items() if at not in of_weights) / (1024 * TOP_K * (2 * K + 6 * N))
    assert share < SHARES[recompute]


# The router


@pytest.mark.parametrize("experts", [3, 5, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chosen_experts_are_the_softmax_of_the_largest(experts: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(37, experts, generator=draw).to(dtype).requires_grad_()
    ids, weights = choose_experts(logits, TOP_K)
    grad = torch.randn(weights.shape, generator=draw)
    values, right_ids = logits.double().sort(dim=1, descending=True, stable=True)
    right = values[:, :TOP_K].softmax(1)
    assert torch.equal(ids, right_ids[:, :TOP_K].int())
    assert torch.allclose(weights.double(), right, atol=1e-6)
    [mine], [other] = (torch.autograd.grad(w, logits, grad.to(w.dtype)) for w in (weights, right))
    assert mine.dtype == dtype
    assert torch.allclose(mine.double(), other.double(), atol=1e-6 if dtype == torch.float32 else 4e-3)


def test_equal_logits_choose_the_first_expert_and_none_twice() -> None:
    ids, weights = choose_experts(torch.zeros(9, E), 4)
    assert torch.equal(ids, torch.arange(4, dtype=torch.int32).expand(9, 4))
    assert torch.equal(weights, torch.full((9, 4), 0.25))


@pytest.mark.parametrize(
    ("logits", "top_k", "says"),
    [
        (torch.zeros(2, E), 0, "top_k must be from 1 to 5"),
        (torch.zeros(2, E), 6, "top_k must be from 1 to 5"),
        (torch.zeros(E), 1, "logits must be floating-point"),
        (torch.zeros(2, E, dtype=torch.int32), 1, "logits must be floating-point"),
        (torch.zeros(1, 4096), 1, "logits must have at most 2048 experts"),
    ],
)
def test_what_cannot_be_chosen_from_is_refused(logits: torch.Tensor, top_k: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        choose_experts(logits, top_k)


# Refusals

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"layout": "thirds"}, "layout must be 'halves' or 'interleaved', got 'thirds'"),
    ({"recompute": "x"}, "recompute must be 'none' or 'h' or 'gate-up', got 'x'"),
    ({"activation": "tanh"}, "activation must be 'swiglu' or 'gpt-oss', got 'tanh'"),
    ({"precision": "int8"}, "precision must be 'fp8' or 'bf16' or 'auto', got 'int8'"),
    ({"w13": torch.zeros(E, 2 * N, K + 16)}, "w13 must have shape"),
    ({"w13": torch.zeros(E, 2 * N + 2, K)}, "w13 must be .* multiples of 16"),
    ({"w2": torch.zeros(E, N, K)}, "w2 must have shape"),
    ({"topk_ids": torch.zeros(T, TOP_K)}, "topk_ids must be contiguous int32 or int64"),
    ({"topk_weights": torch.zeros(T, TOP_K + 1)}, "topk_weights must be"),
    ({"b13": torch.zeros(E, N)}, "b13 must be floating-point values"),
    ({"grad_w13": torch.zeros(E, 2 * N, K, dtype=torch.float16)}, "grad_w13 must be bfloat16 or float32"),
    ({"float8_dtype": torch.float16}, "float8_dtype is torch.float16, wanted"),
]


@pytest.mark.parametrize(("change", "says"), REFUSED, ids=[" ".join(change) for change, _ in REFUSED])
def test_what_it_cannot_do_is_refused_in_one_line(change: dict[str, Any], says: str) -> None:
    case = random_case()
    operands = {"x": case.x, "w13": case.w13, "w2": case.w2, "topk_ids": case.ids, "topk_weights": case.weights}
    with pytest.raises(ValueError, match=says) as refusal:
        moe_layer(**{**operands, **change})
    assert "\n" not in str(refusal.value)


def test_quantized_weights_are_refused_in_bfloat16() -> None:
    case = random_case()
    with pytest.raises(ValueError, match="precision must be 'fp8'"):
        moe_layer(case.x, quantize_gate_up(case.w13), case.w2, case.ids, case.weights, precision="bf16")


@in_plain_torch
def test_quantized_weights_decide_the_fp8_dtype() -> None:
    case, dtype = random_case(), torch.float8_e4m3fnuz
    before = quantize_gate_up(case.w13, dtype), quantize_down(case.w2, dtype)
    operands = case.x, *before, case.ids, case.weights
    assert torch.equal(moe_layer(*operands), case.call(float8_dtype=dtype))
    with pytest.raises(ValueError, match=r"float8_dtype must be .*fnuz, to which w13 was quantized"):
        moe_layer(*operands, float8_dtype=FP8)


@in_plain_torch
def test_it_has_no_second_derivative() -> None:
    case = random_case()
    [grad] = torch.autograd.grad(case.call(), case.x, case.grad, create_graph=True)
    with pytest.raises(RuntimeError, match="moe_layer has no second derivative"):
        grad.sum().backward()
