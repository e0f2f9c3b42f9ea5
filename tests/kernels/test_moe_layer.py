"""``moe_layer`` and ``choose_experts``: near float64, the bytes of their steps, edge cases, memory, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from grouped_layers import sqnr_db
from torch.utils.checkpoint import checkpoint

from fp8tune_kernels import choose_experts, moe_layer
from fp8tune_kernels.gemm import grouped_contraction, grouped_rows
from fp8tune_kernels.moe import choose_experts as router
from fp8tune_kernels.moe import expert_sort
from fp8tune_kernels.moe.expert_weights import quantize_down, quantize_gate_up
from fp8tune_kernels.moe.layer import RECOMPUTE
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

    def leaves(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in zip(NAMES, self[:6], strict=True) if tensor is not None}

    def with_leaves(self, change: Callable[[torch.Tensor], torch.Tensor], *names: str) -> Case:
        """Copy of the case with some leaves changed, all where none is named."""
        leaves = {name: change(x.detach()).requires_grad_() for name, x in self.leaves().items()}
        return self._replace(**{name: x for name, x in leaves.items() if name in (names or NAMES)})


def ids_of(routing: str, tokens: int, draw: torch.Generator) -> torch.Tensor:
    """Experts of each token, (tokens, TOP_K)."""
    if not tokens:
        return torch.zeros(0, TOP_K, dtype=torch.int64)
    ids = torch.stack([torch.randperm(E, generator=draw)[:TOP_K] for _ in range(tokens)])
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


def random_case(routing: str = "random", tokens: int = T, *, is_full: bool = False, seed: int = 0) -> Case:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=draw) * std).bfloat16().requires_grad_()

    x, w13, w2 = normal(tokens, K), normal(E, 2 * N, K, std=K**-0.5), normal(E, K, N, std=N**-0.5)
    biases = (normal(E, 2 * N), normal(E, K)) if is_full else (None, None)
    weights = torch.rand(tokens, TOP_K, generator=draw).requires_grad_()
    ids = ids_of(routing, tokens, draw)
    return Case(x, w13, w2, *biases, weights, ids, torch.randn(tokens, K, generator=draw).bfloat16())


def transposed(w: torch.Tensor) -> torch.Tensor:
    """Weights that lie as (E, columns, rows)."""
    return w.mT.contiguous().mT


def results(case: Case, function: Callable[..., torch.Tensor] = moe_layer, **options: Any) -> list[torch.Tensor]:
    """The output, and the gradients of all that have one."""
    out = case.call(function, **options)
    return [out.detach(), *torch.autograd.grad(out, [*case.leaves().values()], case.grad)]


def exact(case: Case, activation: str = "swiglu", layout: str = "halves") -> list[torch.Tensor]:
    """Compute output and gradients in float64, expert by expert."""
    wide = case.with_leaves(torch.Tensor.double)
    x, w13, w2, b13, b2, weights = wide[:6]
    out = torch.zeros_like(x)
    for expert in range(len(w13)):
        for k in range(case.ids.shape[1]):
            tokens = (case.ids[:, k] == expert).nonzero().flatten()
            y = x[tokens] @ w13[expert].t() + (0 if b13 is None else b13[expert])
            gate, up = y.chunk(2, 1) if layout == "halves" else (y[:, 0::2], y[:, 1::2])
            if activation == "gpt-oss":
                gate, up = gate.clamp(max=7), up.clamp(-7, 7)
                h = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            else:
                h = torch.nn.functional.silu(gate) * up
            of_expert = h @ w2[expert].t() + (0 if b2 is None else b2[expert])
            out = out.index_add(0, tokens, of_expert * weights[tokens, k, None])
    leaves = [*wide.leaves().values()]
    grads = torch.autograd.grad(out, leaves, case.grad.double(), allow_unused=True, materialize_grads=True)
    return [out.detach(), *grads]


def assert_same(results: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert all(map(torch.equal, results, right))


# The layer near float64

NEAR = {"fp8": 19.0, "bf16": 45.0}
"""Signal to noise in dB; the gradient of routing weights is the worst, as it is a sum of few terms."""

KINDS = (("swiglu", "halves"), ("gpt-oss", "interleaved"))


def choices(case: Case, count: int) -> Case:
    """Copy of the case with ``count`` different experts per token."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(E, generator=draw)[:count] for _ in range(len(case.x))])
    return case._replace(ids=ids, weights=torch.rand(ids.shape, generator=draw).requires_grad_())


FULL, ELSEWHERE = random_case(is_full=True), random_case("other devices", is_full=True)
CASES = {
    "random": FULL,
    "experts without rows": random_case("experts without rows", is_full=True),
    "every token to one expert": random_case("one expert", is_full=True),
    "duplicates": random_case("duplicates", is_full=True),
    "other devices": ELSEWHERE,
    "all on other devices": random_case("all on other devices", is_full=True),
    "one token": random_case(tokens=1, is_full=True),
    "one expert": FULL.with_leaves(lambda w: w[:1], "w13", "w2", "b13", "b2")._replace(ids=torch.zeros_like(FULL.ids)),
    "one choice": choices(FULL, 1),
    "every expert": choices(FULL, E),
    "b2 alone": ELSEWHERE._replace(b13=None),
    "b13 alone": ELSEWHERE._replace(b2=None),
    "weights of zero": FULL.with_leaves(torch.zeros_like, "weights"),
    "no tokens": random_case(tokens=0, is_full=True),
    "no tokens, no biases, transposed": random_case(tokens=0).with_leaves(transposed, "w13", "w2"),
}


@in_plain_torch
@both_precisions
@pytest.mark.parametrize("name", CASES)
def test_every_case_is_near_float64(name: str, precision: str) -> None:
    """By both activations, and each way to save memory in turn."""
    case, number = CASES[name], [*CASES].index(name)
    least = NEAR[precision] - (6 if name == "one token" else 0)  # gradients of three weights are no mean of many
    for turn, (activation, layout) in enumerate(KINDS):
        recompute = RECOMPUTE[(number + turn) % len(RECOMPUTE)]
        options = {"activation": activation, "layout": layout, "recompute": recompute, "precision": precision}
        dtypes = [torch.bfloat16, *(leaf.dtype for leaf in case.leaves().values())]
        for result, right, dtype in zip(results(case, **options), exact(case, activation, layout), dtypes, strict=True):
            assert (result.shape, result.dtype) == (right.shape, dtype)
            assert result.isfinite().all()
            assert torch.equal(result.double(), right) or sqnr_db(result, right) > least, options


@in_plain_torch
def test_loss_scaling_gives_tiny_gradients_the_error_of_normal_ones() -> None:
    case = random_case()

    def errors(size: float, loss_scale: float) -> list[float]:
        scaled = results(case._replace(grad=(case.grad.double() * size * loss_scale).bfloat16()))
        pairs = list(zip(scaled, exact(case), strict=True))[1:]
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
    assert_same([d_x, d_w13, d_w2, d_weights], [*right])


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
    q_2_rows = at_one_scale.view(torch.uint8).mT.contiguous().view(FP8)
    (dh,) = grouped_rows.SPEC.reference(q_d, q_2_rows, offs, scales_d, least[:, None].expand(E, N).contiguous())
    q_dy, scales_dy, d_row_weights, _ = swiglu_gradient.SPEC.reference(
        q_y, dh, offs, scales_13, scales_y, None, row_weights, "swiglu", "halves", False, FP8
    )
    (rows,) = grouped_rows.SPEC.reference(
        q_dy, q_13.view(torch.uint8).contiguous().view(FP8), offs, scales_dy, torch.ones(E, K)
    )
    d_x = torch.zeros(len(x), K)
    for k in range(TOP_K):
        d_x += rows[row_of[:, k].long()].float()

    def contracted(q: Any, of_q: Any, second: Any, of_second: Any, factors: torch.Tensor) -> torch.Tensor:
        shifts, least = row_shifts.reference_shifts(of_q, of_second, offs)
        (a,) = transposed_codes.SPEC.reference(q, offs, shifts)
        (b,) = transposed_codes.SPEC.reference(second, offs, None)
        scales = (least[:, None] / factors).flatten(), torch.ones(E * second.shape[1])
        return grouped_contraction.SPEC.reference(a, b, offs, *scales, transposed_codes.ALIGNMENT, None)[0]

    d_w13 = contracted(q_dy, scales_dy, q_x, scales_x, scales_13.view(E, 2 * N))
    d_w2 = contracted(q_d, scales_d, q_h, scales_h, torch.ones(E, K))
    return d_x.bfloat16(), d_w13, d_w2, d_row_weights[row_of.long()]


@both_precisions
def test_kernels_agree_with_plain_torch(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole layer on Triton's interpreter."""
    options = {"precision": precision, "activation": "gpt-oss", "layout": "interleaved"}
    by_kernels = results(ELSEWHERE, **options)
    monkeypatch.setattr("fp8tune_kernels.interpreter.INTERPRETED", False)
    for mine, right in zip(by_kernels, results(ELSEWHERE, **options), strict=True):
        assert sqnr_db(mine, right) > 37


# Options


@in_plain_torch
def test_ids_of_32_bits_and_weights_of_bfloat16_are_taken() -> None:
    rounded = ELSEWHERE.with_leaves(torch.Tensor.bfloat16, "weights")
    right = results(rounded.with_leaves(torch.Tensor.float, "weights"))
    right[-1] = right[-1].bfloat16()
    assert_same(results(rounded._replace(ids=ELSEWHERE.ids.int())), right)


@in_plain_torch
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_weights_quantized_before_or_again_give_the_same_bytes(recompute: str) -> None:
    right = results(FULL, recompute=recompute)
    assert_same(results(FULL, recompute=recompute, keep_weights=False), right)
    before = quantize_gate_up(FULL.w13), quantize_down(FULL.w2)

    def on_quantized(x: Any, _: Any, __: Any, *rest: Any, **options: Any) -> torch.Tensor:
        return moe_layer(x, *before, *rest, **options)

    assert_same(results(FULL, on_quantized, recompute=recompute), right)


@in_plain_torch
@pytest.mark.parametrize(
    "options", [{}, {"keep_weights": False, "recompute": "gate-up"}, {"precision": "bf16"}], ids=str
)
def test_weights_that_lie_as_their_transpose_give_the_same_results(options: dict[str, Any]) -> None:
    mine = results(ELSEWHERE.with_leaves(transposed, "w13", "w2"), **options)
    for index, (result, right) in enumerate(zip(mine, results(ELSEWHERE, **options), strict=True)):
        if index in (2, 3):  # sums of the weight gradients in another order
            assert sqnr_db(result, right) > 45
            assert "precision" in options or result.mT.is_contiguous()
        else:
            assert torch.equal(result, right)


@in_plain_torch
@both_precisions
def test_each_gradient_alone_is_the_same_bytes(precision: str) -> None:
    for number, name in enumerate(NAMES):
        options = {"recompute": RECOMPUTE[number % 3], "precision": precision}
        right = results(FULL, **options)[1 + number]
        alone = Case(*(leaf.detach().requires_grad_(n == name) for n, leaf in FULL.leaves().items()), *FULL[6:])
        [grad] = torch.autograd.grad(alone.call(**options), [getattr(alone, name)], FULL.grad)
        assert torch.equal(grad, right), (name, options)


@in_plain_torch
@pytest.mark.parametrize(
    ("precision", "dtype", "is_before"),
    [("fp8", torch.float32, False), ("fp8", torch.bfloat16, True), ("bf16", torch.float32, False)],
)
def test_gradients_of_weights_are_added_to_buffers(precision: str, dtype: torch.dtype, is_before: bool) -> None:
    """Over two micro-batches; ``is_before``: by FP8 values of one block of memory."""
    case = random_case()
    _, d_x, d_w13, d_w2, d_weights = results(case, precision=precision)
    sums = [torch.zeros_like(w, dtype=torch.float32) for w in (case.w13, case.w2)]
    case.call(precision=precision, grad_w13=sums[0], grad_w2=sums[1]).backward(case.grad)
    assert_same([total.bfloat16() for total in sums], [d_w13, d_w2])
    # in FP8 sums are added before they are rounded
    assert torch.equal(sums[0], d_w13.float()) is (precision == "bf16")
    buffers = {f"grad_{name}": torch.ones_like(getattr(case, name), dtype=dtype) for name in ("w13", "w2")}
    right = [buffer.clone() for buffer in buffers.values()]
    before = quantize_gate_up(case.w13), quantize_down(case.w2)
    for _ in range(2):
        leaves = case.with_leaves(torch.clone)
        weights = before if is_before else (leaves.w13, leaves.w2)
        moe_layer(leaves.x, *weights, case.ids, leaves.weights, precision=precision, **buffers).backward(case.grad)
        assert leaves.w13.grad is leaves.w2.grad is case.w13.grad is None
        assert_same([leaves.x.grad, leaves.weights.grad], [d_x, d_weights])
        for buffer, total in zip(right, sums, strict=True):
            buffer += total
        assert_same([*buffers.values()], right)


@in_plain_torch
@pytest.mark.parametrize(
    ("precision", "recompute", "use_reentrant"), [("fp8", "gate-up", False), ("bf16", "none", True)]
)
def test_compiling_checkpointing_and_autocast_change_nothing(
    precision: str, recompute: str, use_reentrant: bool
) -> None:
    def scaled(*arguments: Any, **options: Any) -> torch.Tensor:
        return moe_layer(*arguments, **options) * 1

    def recomputed(*arguments: Any, b13: Any, b2: Any, **options: Any) -> torch.Tensor:
        def call(*tensors: Any) -> torch.Tensor:
            return moe_layer(*tensors[:5], b13=tensors[5], b2=tensors[6], **options)

        return checkpoint(call, *arguments, b13, b2, use_reentrant=use_reentrant)

    torch._dynamo.reset()
    options: dict[str, Any] = {"precision": precision, "recompute": recompute}
    right = results(ELSEWHERE, **options)
    assert_same(results(ELSEWHERE, torch.compile(scaled, fullgraph=True, backend="aot_eager"), **options), right)
    leaves = ELSEWHERE.with_leaves(torch.clone)
    out = leaves.call(recomputed, **options)
    out.backward(leaves.grad)
    assert_same([out, *(leaf.grad for leaf in leaves.leaves().values())], right)
    wide = ELSEWHERE.with_leaves(torch.Tensor.float, "x", "w13", "w2")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = wide.call(**options)
    grads = torch.autograd.grad(out, wide[:3], wide.grad)
    assert {grad.dtype for grad in grads} == {torch.float32}
    assert_same([out, *grads], [right[0], *(grad.float() for grad in right[1:4])])


SHARES = {"none": 0.46, "h": 0.35, "gate-up": 0.1}
"""Of bytes that bfloat16 holds in rows, 2K + 6N: 3N, 2N and nothing by row; K / TOP_K by token; scales and order."""


@in_plain_torch
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_little_is_held_between_the_passes(recompute: str) -> None:
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
    for chosen, shares in ((ids, weights), router.reference(logits, TOP_K)):
        assert torch.equal(chosen, right_ids[:, :TOP_K].int())
        assert torch.allclose(shares.double(), right, atol=1e-6)
    [mine], [expected] = (torch.autograd.grad(w, logits, grad.to(w.dtype)) for w in (weights, right))
    assert mine.dtype == dtype
    assert torch.allclose(mine.double(), expected.double(), atol=1e-6 if dtype == torch.float32 else 4e-3)


def test_equal_logits_choose_the_first_expert_and_none_twice() -> None:
    ids, weights = choose_experts(torch.zeros(9, E), 4)
    assert torch.equal(ids, torch.arange(4, dtype=torch.int32).expand(9, 4))
    assert torch.equal(weights, torch.full((9, 4), 0.25))


# Refusals


def test_wrong_operands_are_refused_by_name_in_one_line() -> None:
    case = random_case()
    operands = {"x": case.x, "w13": case.w13, "w2": case.w2, "topk_ids": case.ids, "topk_weights": case.weights}
    for name, wrong in (
        *(("layout", "thirds"), ("recompute", "x"), ("activation", "tanh"), ("precision", "int8")),
        *(("w13", torch.zeros(E, 2 * N, K + 16)), ("w13", torch.zeros(E, 2 * N + 2, K)), ("w2", torch.zeros(E, N, K))),
        *(("topk_ids", torch.zeros(T, TOP_K)), ("topk_weights", torch.zeros(T, TOP_K + 1))),
        *(("b13", torch.zeros(E, N)), ("grad_w13", torch.zeros(E, 2 * N, K, dtype=torch.float16))),
        ("float8_dtype", torch.float16),
    ):
        with pytest.raises(ValueError, match=f"^{name} (is|must)[^\n]*$"):
            moe_layer(**{**operands, name: wrong})
    for logits, top_k in (
        (torch.zeros(2, E), 0),
        (torch.zeros(2, E), 6),
        (torch.zeros(E), 1),
        (torch.zeros(1, 4096), 1),
    ):
        with pytest.raises(ValueError, match=r"^(top_k|logits) must"):
            choose_experts(logits, top_k)


@in_plain_torch
def test_quantized_weights_decide_the_fp8_dtype() -> None:
    case, dtype = random_case(), torch.float8_e4m3fnuz
    before = quantize_gate_up(case.w13, dtype), quantize_down(case.w2, dtype)
    operands = case.x, *before, case.ids, case.weights
    assert torch.equal(moe_layer(*operands), case.call(float8_dtype=dtype))
    with pytest.raises(ValueError, match=r"float8_dtype must be .*fnuz, to which w13 was quantized"):
        moe_layer(*operands, float8_dtype=FP8)
    with pytest.raises(ValueError, match="precision must be 'fp8'"):
        moe_layer(*operands, precision="bf16")


@in_plain_torch
def test_it_has_no_second_derivative() -> None:
    case = random_case()
    [grad] = torch.autograd.grad(case.call(), case.x, case.grad, create_graph=True)
    with pytest.raises(RuntimeError, match="moe_layer has no second derivative"):
        grad.sum().backward()
