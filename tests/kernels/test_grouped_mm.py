"""``fp8_grouped_mm`` and ``mxfp8_grouped_mm``: the recipes in plain torch, every way to call them, and refusals."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from grouped_layers import E, K, Layer, M, Make, N, assert_same, by_group, random_layer, run, sqnr_db, viewed
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fp8tune.measure.edges import fill_integers
from fp8tune_kernels import catalog, fp8_grouped_mm, functional, interpreter, mxfp8_grouped_mm, quantize_weights
from fp8tune_kernels.arches import default_fp8_dtype
from fp8tune_kernels.gemm import grouped_mm
from fp8tune_kernels.quantize.arithmetic import FP8_MAX
from fp8tune_kernels.runtime.lookup import running_arch
from fp8tune_kernels.spec import ROUTINGS

pytestmark = pytest.mark.usefixtures("quantizers_in_plain_torch")

Call = Callable[..., Tensor]

both = pytest.mark.parametrize("multiply", [fp8_grouped_mm, mxfp8_grouped_mm])
padded_mxfp8 = partial(mxfp8_grouped_mm, pad_token_groups=True)

WAYS: dict[str, tuple[Make, dict[str, Any]]] = {
    "default": (viewed, {}),
    "weights once": (quantize_weights, {}),
    "folded": (viewed, {"recipe": "folded"}),
    "folded, weights once": (partial(quantize_weights, recipe="folded"), {}),
    "bf16": (viewed, {"precision": "bf16"}),
}
"""Name -> how ``B_t`` is made of the weights, and the other options."""

each_way = pytest.mark.parametrize("way", WAYS)


def by_way(layer: Layer, way: str, change: Callable[[Call], Call] = lambda call: call) -> tuple[Tensor, ...]:
    make, options = WAYS[way]
    return run(layer, change(partial(fp8_grouped_mm, **options)), make)


def in_32s(device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Operands that both recipes take."""
    layer = random_layer("balanced", device, columns=32)
    return layer.A, layer.B_t, torch.tensor([32, 96, 160, M], dtype=torch.int32, device=device)


# Values


def of_fp8(x: Tensor, dim: int) -> Tensor:
    """Written down without the kernels' own helpers: amax, power-of-two scale, cast, and back again."""
    dtype = getattr(torch, default_fp8_dtype(running_arch(x.device)))
    scale = FP8_MAX[dtype] / x.abs().amax(dim, keepdim=True).double().clamp(min=1e-12)
    scale = torch.exp2(scale.log2().floor()).float()
    return (x * scale).clamp(-FP8_MAX[dtype], FP8_MAX[dtype]).to(dtype).float() / scale


def of_mxfp8(scale_mode: str) -> Callable[[Tensor, int], Tensor]:
    """Each group's rows padded to whole blocks, as zeros that change no maximum."""

    def operand(x: Tensor, dim: int) -> Tensor:
        lines = x if dim == 1 else x.t()
        q, scales = catalog.load("mxfp8-dim0").reference(lines.contiguous(), torch.float8_e4m3fn, scale_mode)
        values = q.float() * scales.float().repeat_interleave(32, 1)[:, : lines.shape[1]]
        return values if dim == 1 else values.t()

    return operand


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("recipe", ["fp8", "floor", "rceil"])
def test_output_and_gradients_are_those_of_the_recipe(recipe: str, routing: str, device: str) -> None:
    if recipe == "fp8":
        layer, call, operand = random_layer(routing, device), fp8_grouped_mm, of_fp8
    else:
        layer, operand = random_layer(routing, device, columns=64), of_mxfp8(recipe)
        call = partial(padded_mxfp8, scale_mode=recipe)
    for result, expected, exact in zip(run(layer, call), by_group(layer, operand), by_group(layer), strict=True):
        assert sqnr_db(result, expected) > 45  # bfloat16 rounds the results; wrong codes would leave 30
        assert sqnr_db(result, exact) > sqnr_db(expected.bfloat16(), exact) - 0.1 > 20


@pytest.mark.parametrize(
    ("routing", "dtype"), [("empty", torch.bfloat16), ("ragged", torch.float32), ("one-giant", torch.float16)]
)
def test_weights_quantized_once_give_the_same_bytes(routing: str, dtype: torch.dtype, device: str) -> None:
    """Other dtypes are quantized as they are."""
    layer = random_layer(routing, device, dtype)
    right = run(layer)
    assert_same(by_way(layer, "weights once"), right)
    for result, recipe in zip(right, by_group(layer, of_fp8), strict=True):
        assert sqnr_db(result, recipe) > 45


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("is_wild", [False, True])
def test_folded_the_output_is_the_defaults_and_gradients_are_as_near(is_wild: bool, routing: str, device: str) -> None:
    layer = random_layer(routing, device)
    if is_wild:  # scales of tokens span twelve powers of two
        draw = torch.Generator().manual_seed(0)
        sizes = torch.exp2(torch.randint(0, 13, (2, M, 1), generator=draw)).to(device, torch.bfloat16)
        layer = Layer(layer.A * sizes[0], layer.weights, layer.offs, layer.grad * sizes[1])
    results, by_default = by_way(layer, "folded"), run(layer)
    assert torch.equal(results[0], by_default[0])
    for result, default, exact in zip(results, by_default, by_group(layer), strict=True):
        assert sqnr_db(result, exact) > 27
        assert is_wild or sqnr_db(result, exact) > sqnr_db(default, exact) - 0.5
    assert_same(by_way(layer, "folded, weights once"), results)


def layer_of_integers(routing: str, device: str) -> Layer:
    """Operands of which no partial sum is rounded; NaN in rows of no group."""
    layer = random_layer(routing, device, columns=80)
    for tensor in (layer.A, layer.weights, layer.grad):
        fill_integers(tensor, 2)
    used = int(layer.offs[-1])
    layer.A[used:], layer.grad[used:] = float("nan"), float("nan")
    return layer


@pytest.mark.parametrize("routing", ROUTINGS)
def test_exact_values_give_exact_bytes(routing: str, device: str) -> None:
    layer = layer_of_integers(routing, device)
    for precision in ("fp8", "bf16", "auto"):
        assert_same(run(layer, precision=precision), tuple(x.bfloat16() for x in by_group(layer)))


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_kernels_on_the_interpreter_give_exact_bytes(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "INTERPRETED", True)
    layer = layer_of_integers("empty", "cpu")
    assert_same(run(layer, precision=precision), tuple(x.bfloat16() for x in by_group(layer)))


# Weights that lie as (E, K, N)


def run_row_major(layer: Layer, call: Call = fp8_grouped_mm, *, is_once: bool = False) -> tuple[Tensor, ...]:
    """Like :func:`run`, by a parameter that lies so, whose gradient does too."""
    A, w = layer.A.clone().requires_grad_(), layer.B_t.contiguous().requires_grad_()
    out = call(A, quantize_weights(w, layout="EKN") if is_once else w, layer.offs)
    out.backward(layer.grad.to(out.dtype))
    assert A.grad is not None
    assert w.grad is not None
    assert w.grad.stride() == w.stride()
    used = int(layer.offs[-1])
    return out.detach()[:used], A.grad[:used], w.grad.mT


def test_weights_that_lie_otherwise_give_the_same_bytes(device: str) -> None:
    layer = random_layer("empty", device, columns=64)
    none = Layer(layer.A[:0], layer.weights, torch.zeros_like(layer.offs), layer.grad[:0])
    for way, (make, options) in WAYS.items():
        if make is viewed and way != "folded":
            assert_same(run_row_major(layer, partial(fp8_grouped_mm, **options)), by_way(layer, way))
            assert not run_row_major(none, partial(fp8_grouped_mm, **options))[2].any()
    right = run(layer)
    assert_same(run_row_major(layer, is_once=True), right)
    assert_same(run_row_major(layer, torch.compile(fp8_grouped_mm, fullgraph=True, backend="aot_eager")), right)
    assert_same(run_row_major(layer.of_dtype(torch.float32)), run(layer.of_dtype(torch.float32)))
    assert_same(run_row_major(layer, padded_mxfp8), run(layer, padded_mxfp8))


# Groups


@each_way
def test_rows_of_no_group_come_out_as_zeros_and_are_in_no_result(way: str, device: str) -> None:
    layer = random_layer("balanced", device)
    layer.offs.copy_(torch.tensor([7, 7, 50, 99]))
    layer.A[99:], layer.grad[99:] = float("nan"), float("nan")
    make, options = WAYS[way]
    A, w = layer.A.clone().requires_grad_(), layer.weights.clone().requires_grad_()
    out = fp8_grouped_mm(A, make(w), layer.offs, **options)
    out.backward(layer.grad)
    assert A.grad is not None
    assert w.grad is not None
    assert not any(rest.any() for rest in (out[99:], A.grad[99:], w.grad[1]))
    assert not any(grad.isnan().any() for grad in (A.grad, w.grad))
    none = Layer(layer.A[:0], layer.weights, torch.zeros_like(layer.offs), layer.grad[:0])
    empty, grad_A, grad_w = by_way(none, way)
    assert (empty.shape, grad_A.shape) == ((0, N), (0, K))
    assert not grad_w.any()


def test_a_nan_stays_in_its_row_and_folded_a_weight_spoils_the_gradient_of_its_rows(device: str) -> None:
    layer = random_layer("balanced", device)
    spoiled = layer.A.clone()
    spoiled[5, 3] = float("nan")
    out = fp8_grouped_mm(spoiled, layer.B_t, layer.offs)
    assert out.isnan().all(1).nonzero().tolist() == [[5]]
    assert int(out.isnan().sum()) == N
    for value in (float("nan"), float("inf")):
        weights = layer.weights.clone()
        weights[0, 3, 5] = value
        _, grad_A, _ = by_way(Layer(layer.A, weights, layer.offs, layer.grad), "folded")
        assert grad_A[: int(layer.offs[0]), 5].isnan().all()
        assert grad_A[int(layer.offs[0]) :].isfinite().all()


# Modes of torch


@each_way
def test_checkpointing_single_gradients_and_autocast_change_nothing(way: str, device: str) -> None:
    layer, (make, options) = random_layer("empty", device), WAYS[way]
    right = by_way(layer, way)
    for use_reentrant in (False, True):
        recomputed = partial(partial, checkpoint, use_reentrant=use_reentrant)
        assert_same(by_way(layer, way, recomputed), right)
    for needs_grad in ((True, False), (False, True), (False, False)):
        A, w = (x.clone().requires_grad_(flag) for x, flag in zip((layer.A, layer.weights), needs_grad, strict=True))
        out = fp8_grouped_mm(A, make(w), layer.offs, **options)
        assert out.requires_grad == any(needs_grad)
        if any(needs_grad):
            out.backward(layer.grad)
        used = len(right[0])
        assert torch.equal(out[:used], right[0])
        assert torch.equal(A.grad[:used], right[1]) if needs_grad[0] else A.grad is None
        assert torch.equal(w.grad, right[2]) if needs_grad[1] else w.grad is None
    wide = layer.of_dtype(torch.float32)
    for change in (lambda call: call, partial(torch.compile, fullgraph=True, backend="aot_eager"))[: 1 + (not options)]:
        with torch.autocast(device, dtype=torch.bfloat16):
            results = by_way(wide, way, change)
        assert_same(tuple(x.bfloat16() for x in results), by_way(wide.of_dtype(torch.bfloat16), way))


@pytest.mark.parametrize("way", ["default", "folded", "bf16"])
def test_torch_compile_traces_it_whole_for_any_number_of_rows(way: str, device: str) -> None:
    torch._dynamo.reset()

    def call(A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        return fp8_grouped_mm(A * 2, B_t, offs, **WAYS[way][1]) * 3

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (M, 97):
        layer = random_layer("ragged", device, rows=rows)
        assert_same(run(layer, compiled), run(layer, call))


@pytest.mark.parametrize(
    ("multiply", "is_strict"), [(fp8_grouped_mm, False), (mxfp8_grouped_mm, False), (padded_mxfp8, True)]
)
def test_meta_tensors_pass_and_a_module_is_exported(multiply: Any, is_strict: bool) -> None:
    A, w, offs = (x.to("meta") for x in (in_32s("cpu")[0], torch.zeros(E, 32, K).bfloat16(), in_32s("cpu")[2]))
    A.requires_grad_()
    w.requires_grad_()
    out = multiply(A, w.mT, offs)
    assert (out.shape, out.stride(), out.dtype, out.is_meta) == ((M, 32), (32, 1), torch.bfloat16, True)
    out.sum().backward()
    for operand in (A, w):
        assert operand.grad is not None
        assert (operand.grad.shape, operand.grad.dtype) == (operand.shape, operand.dtype)

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.Parameter(in_32s("cpu")[1].mT.clone())

        def forward(self, A: Tensor, offs: Tensor) -> Any:
            return multiply(A, self.weights.mT, offs)

    model, inputs = Experts(), (in_32s("cpu")[0], in_32s("cpu")[2])
    exported = torch.export.export(model, inputs, strict=is_strict).module()
    assert torch.equal(exported(*inputs), model(*inputs))


@pytest.mark.parametrize(
    ("multiply", "options"),
    [
        *((fp8_grouped_mm, WAYS[way][1]) for way in ("default", "folded")),
        *((mxfp8_grouped_mm, {"pad_token_groups": is_padded}) for is_padded in (False, True)),
    ],
)
def test_a_second_derivative_is_refused_in_one_line(multiply: Any, options: dict[str, Any]) -> None:
    A, B_t, offs = in_32s("cpu")
    A.requires_grad_()
    [gradient] = torch.autograd.grad(multiply(A, B_t, offs, **options).sum(), A, create_graph=True)
    with pytest.raises(RuntimeError, match=f"^{multiply.__name__} has no second derivative: .*$"):
        gradient.float().square().sum().backward()


@pytest.mark.parametrize("recipe", ["default", "folded", "bf16"])
def test_the_operators_are_what_torch_library_expects(recipe: str) -> None:
    """Keep both operands, and want one gradient, in turn."""
    layer, ops = layer_of_integers("ragged", "cpu"), torch.ops.fp8tune
    for keeps, needs_grad in (((False, False), (True, False)), ((True, True), (False, True))):
        forward = layer.A, layer.B_t, layer.offs, [], recipe, None, *keeps
        _, *saved = ops.grouped_mm_forward(*forward)
        of_A, of_B = [layer.A], [layer.B_t]
        if recipe == "folded":
            of_A, of_B = saved[:-2], [saved[-2], None, saved[-1]]
        needs_grad = needs_grad if of_A else (True, False)
        backward = layer.grad, of_A, of_B, layer.offs, recipe, None, *needs_grad, False
        for operator, arguments in ((ops.grouped_mm_forward, forward), (ops.grouped_mm_gradients, backward)):
            torch.library.opcheck(operator, arguments, test_utils=("test_faketensor", "test_aot_dispatch_dynamic"))


# What is saved between the passes


def saved_bytes(layer: Layer, **options: Any) -> dict[torch.dtype, int]:
    saved: dict[torch.dtype, int] = {}

    def note(x: Tensor) -> Tensor:
        saved[x.dtype] = saved.get(x.dtype, 0) + x.nbytes
        return x

    A, w = layer.A.clone().requires_grad_(), layer.weights.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        fp8_grouped_mm(A, w.mT, layer.offs, **options)
    return saved


def test_the_folded_recipe_keeps_a_byte_of_each_operand_and_the_default_both(device: str) -> None:
    layer = random_layer("balanced", device)
    assert saved_bytes(layer) == {torch.bfloat16: 2 * (M * K + E * N * K), torch.int32: 4 * E}
    folded = saved_bytes(layer, recipe="folded")
    assert folded[torch.float8_e4m3fn] == M * K + E * N * K
    assert torch.bfloat16 not in folded


# precision="auto", and torch's signature


@pytest.mark.parametrize(
    ("pays", "dtype", "is_fp8"),
    [
        (True, torch.bfloat16, True),
        (False, torch.bfloat16, False),
        (False, torch.float32, True),  # what is not bfloat16 is multiplied in FP8
    ],
)
def test_auto_asks_the_rule(pays: bool, dtype: torch.dtype, is_fp8: bool, device: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(grouped_mm, "is_fp8_product", lambda *sizes: pays)
    layer = random_layer("ragged", device, dtype)
    right = run(layer, precision="fp8" if is_fp8 else "bf16")
    assert_same(run(layer, precision="auto"), right)
    assert not torch.equal(right[0], run(layer, precision="bf16" if is_fp8 else "fp8")[0])


def test_stand_ins_have_all_the_names_of_torch_s_functions(device: str) -> None:
    layer = random_layer("ragged", device)
    bias = torch.randn(E, N, device=device, dtype=torch.bfloat16)
    right = fp8_grouped_mm(layer.A, layer.B_t, layer.offs, bias, torch.float32)
    named: dict[str, Any] = {"offs": layer.offs, "bias": bias, "out_dtype": torch.float32}
    assert torch.equal(functional.grouped_mm(mat_a=layer.A, mat_b=layer.B_t, **named), right)
    assert torch.equal(functional._grouped_mm(input=layer.A, mat2=layer.B_t, **named), right)
    assert torch.equal(functional._grouped_mm(layer.A, layer.B_t, *named.values()), right)
    theirs, ours = (
        [(name, entry.kind, entry.default) for name, entry in inspect.signature(function).parameters.items()]
        for function in (torch.nn.functional.grouped_mm, functional.grouped_mm)
    )
    assert ours[:-1] == theirs


@both
def test_a_bias_is_added_to_the_rows_of_its_expert_and_out_dtype_is_a_cast(multiply: Any, device: str) -> None:
    A, B_t, offs = in_32s(device)
    bias = torch.randn(E, 32, device=device).bfloat16().requires_grad_()
    expert_of_row = torch.bucketize(torch.arange(M, device=device, dtype=torch.int32), offs, right=True)
    out, plain = multiply(A, B_t, offs, bias), multiply(A, B_t, offs)
    assert torch.equal(out, plain + bias[expert_of_row])
    grad = torch.randn(out.shape, device=device).bfloat16()
    out.backward(grad)
    sums = torch.zeros(E, 32, device=device).index_add(0, expert_of_row, grad.float())
    torch.testing.assert_close(bias.grad.float(), sums, rtol=2**-7, atol=1e-6)
    compiled = torch.compile(multiply, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(A, B_t, offs, bias, torch.float32), multiply(A, B_t, offs, bias, torch.float32))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        cast = multiply(A.requires_grad_(), B_t, offs, out_dtype=dtype)
        assert cast.dtype == dtype
        assert torch.equal(cast, plain.to(dtype))
        cast.sum().backward()


# Refusals


@both
def test_wrong_arguments_are_refused_by_name_in_one_line(multiply: Any) -> None:
    A = torch.zeros(M, K, dtype=torch.bfloat16)
    B_t = torch.zeros(E, 32, K, dtype=torch.bfloat16).mT
    offs, bias = torch.tensor([32, 64, 96, M], dtype=torch.int32), torch.zeros(E, 32)
    cases: list[tuple[str, tuple[Any, ...]]] = [
        ("A", (A.view(E, M // E, K), B_t, offs)),
        ("A", (A.t(), B_t, offs)),
        ("A", (A[:, :32].contiguous(), B_t, offs)),
        ("B_t", (A, A.t(), offs)),
        ("B_t", (A, B_t[:, ::2], offs)),
        ("B_t", (A, B_t[:, :, :24].mT.contiguous().mT, offs)),
        ("offs", (A, B_t)),
        ("offs", (A, B_t, offs.long())),
        ("offs", (A, B_t, torch.tensor([-16, 32, 64, 96], dtype=torch.int32))),
        ("offs", (A, B_t, offs.flip(0).contiguous())),
        ("bias", (A, B_t, offs, bias[0])),
        ("bias", (A, B_t, offs, bias.int())),
        ("out_dtype", (A, B_t, offs, None, torch.float64)),
    ]
    for name, arguments in cases:
        with pytest.raises(ValueError, match=f"^{name} (is|has|ends)[^\n]*$"):
            multiply(*arguments)


def test_wrong_options_are_refused(device: str) -> None:
    layer = random_layer("balanced", device, columns=32)
    folded = quantize_weights(layer.weights, recipe="folded")
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("float8_dtype", layer.B_t, {"float8_dtype": torch.float8_e5m2}),
        ("precision", layer.B_t, {"precision": "fp4"}),
        ("recipe", layer.B_t, {"recipe": "linen"}),
        ("precision", layer.B_t, {"recipe": "folded", "precision": "auto"}),
        ("recipe", folded, {"recipe": "default"}),
        ("B_t", layer.B_t.contiguous(), {"recipe": "folded"}),
    ]
    for name, B_t, options in cases:
        with pytest.raises(ValueError, match=f"^{name} (is|has)"):
            fp8_grouped_mm(layer.A, B_t, layer.offs, **options)
    with pytest.raises(ValueError, match=r"^scale_mode is 'ceil'"):
        mxfp8_grouped_mm(layer.A, layer.B_t, layer.offs, scale_mode="ceil")


@pytest.mark.parametrize("ends", [(30, 64, 96, M), (0, 64, 96, M), (40, 80, 96, M)])
def test_sizes_that_no_weight_gradient_of_mxfp8_takes_are_refused(ends: tuple[int, ...]) -> None:
    A, B_t, _ = in_32s("cpu")
    offs = torch.tensor(ends, dtype=torch.int32)
    B_t.requires_grad_()
    with pytest.raises(ValueError, match="wanted a positive multiple of 32 for the weight gradient"):
        mxfp8_grouped_mm(A, B_t, offs).sum().backward()
    padded_mxfp8(A, B_t, offs).sum().backward()
    fp8_grouped_mm(A, B_t, offs).sum().backward()  # it has no such sizes
