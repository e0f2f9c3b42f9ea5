"""``fp8_grouped_mm`` and ``mxfp8_grouped_mm``: the recipes in plain torch, every way to call them, and refusals."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from grouped_layers import E, K, Layer, M, Make, N, assert_same, by_group, layer, run, sqnr_db, viewed
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fp8tune.measure.edges import fill_integers
from fp8tune_kernels import catalog, fp8_grouped_mm, functional, interpreter, mxfp8_grouped_mm, quantize_weights
from fp8tune_kernels.arches import default_fp8_dtype
from fp8tune_kernels.gemm import grouped_mm
from fp8tune_kernels.gemm.grouped_contraction import ALIGNMENT
from fp8tune_kernels.groups import padded_rows
from fp8tune_kernels.quantize.arithmetic import FP8_MAX
from fp8tune_kernels.runtime.lookup import running_arch
from fp8tune_kernels.spec import ROUTINGS

pytestmark = pytest.mark.usefixtures("quantizers_in_plain_torch")

Call = Callable[..., Tensor]

each_routing = pytest.mark.parametrize("routing", ROUTINGS)
both = pytest.mark.parametrize("multiply", [fp8_grouped_mm, mxfp8_grouped_mm])

IN_TORCH_S_LAYOUT = "row-major"
WAYS: dict[str, tuple[Make, dict[str, Any]]] = {
    "default": (viewed, {}),
    "padded": (viewed, {"pad_token_groups": True}),
    "A kept": (viewed, {"keep_fp8": ("A",)}),
    "B_t kept": (viewed, {"keep_fp8": ("B_t",)}),
    "both kept": (viewed, {"keep_fp8": ("A", "B_t")}),
    "weights once": (quantize_weights, {}),
    "folded": (viewed, {"recipe": "folded"}),
    "folded, weights once": (lambda w: quantize_weights(w, recipe="folded"), {}),
    "bf16": (viewed, {"precision": "bf16"}),
}
"""Name -> how ``B_t`` is made of the weights, and the other options."""

DEFAULT_BYTES = ("padded", "A kept", "B_t kept", "both kept", "weights once")
each_way = pytest.mark.parametrize("way", WAYS)


def by_way(given: Layer, way: str, change: Callable[[Call], Call] = lambda call: call) -> tuple[Tensor, ...]:
    make, options = WAYS[way]
    return run(given, change(partial(fp8_grouped_mm, **options)), make)


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


@each_routing
@pytest.mark.parametrize("recipe", ["fp8", "floor", "rceil"])
def test_output_and_gradients_are_those_of_the_recipe(recipe: str, routing: str, device: str) -> None:
    if recipe == "fp8":
        given, call, operand = layer(routing, device), fp8_grouped_mm, of_fp8
    else:
        given, operand = layer(routing, device, columns=64), of_mxfp8(recipe)
        call = partial(mxfp8_grouped_mm, pad_token_groups=True, scale_mode=recipe)
    for result, wanted, right in zip(run(given, call), by_group(given, operand), by_group(given), strict=True):
        assert sqnr_db(result, wanted) > 45  # bfloat16 rounds the results; wrong codes would leave 30
        assert sqnr_db(result, right) > sqnr_db(wanted.bfloat16(), right) - 0.1 > 20


@each_routing
@pytest.mark.parametrize("way", DEFAULT_BYTES)
def test_results_are_the_bytes_of_the_default(way: str, routing: str, device: str) -> None:
    given = layer(routing, device)
    assert_same(by_way(given, way), run(given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("way", DEFAULT_BYTES)
def test_other_dtypes_are_quantized_as_they_are(way: str, dtype: torch.dtype, device: str) -> None:
    given = layer("ragged", device, dtype)
    found = by_way(given, way)
    assert_same(found, run(given))
    for result, recipe in zip(found, by_group(given, of_fp8), strict=True):
        assert sqnr_db(result, recipe) > 45


@each_routing
@pytest.mark.parametrize("is_wild", [False, True])
def test_folded_the_output_is_the_defaults_and_gradients_are_as_near(is_wild: bool, routing: str, device: str) -> None:
    given = layer(routing, device)
    if is_wild:  # scales of tokens span twelve powers of two
        sizes = torch.exp2(torch.randint(0, 13, (2, M, 1), generator=torch.Generator().manual_seed(0)).float()).to(
            device
        )
        given = Layer(given.A * sizes[0].to(given.A), given.weights, given.offs, given.grad * sizes[1].to(given.grad))
    found, by_default = by_way(given, "folded"), run(given)
    assert torch.equal(found[0], by_default[0])
    for result, other, right in zip(found, by_default, by_group(given), strict=True):
        assert sqnr_db(result, right) > 27
        assert is_wild or sqnr_db(result, right) > sqnr_db(other, right) - 0.5
    assert_same(by_way(given, "folded, weights once"), found)


def of_integers(routing: str, device: str, *, columns: int = 80) -> Layer:
    """Operands of which no partial sum is rounded; NaN in rows of no group."""
    given = layer(routing, device, columns=columns)
    for tensor in (given.A, given.weights, given.grad):
        fill_integers(tensor, 2)
    used = int(given.offs[-1])
    given.A[used:], given.grad[used:] = float("nan"), float("nan")
    return given


@each_routing
@pytest.mark.parametrize("precision", ["fp8", "bf16", "auto"])
def test_exact_values_give_exact_bytes(precision: str, routing: str, device: str) -> None:
    given = of_integers(routing, device)
    assert_same(run(given, precision=precision), tuple(x.bfloat16() for x in by_group(given)))


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_kernels_on_the_interpreter_give_exact_bytes(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "INTERPRETED", True)
    given = of_integers("empty", "cpu")
    assert_same(run(given, precision=precision), tuple(x.bfloat16() for x in by_group(given)))


# Weights that lie as (E, K, N)


def run_row_major(
    given: Layer, call: Call = fp8_grouped_mm, *, is_once: bool = False, **options: Any
) -> tuple[Tensor, ...]:
    """Like :func:`run`, by a parameter that lies so, whose gradient does too."""
    A, w = given.A.clone().requires_grad_(), given.B_t.contiguous().requires_grad_()
    out = call(A, quantize_weights(w, layout="EKN") if is_once else w, given.offs, **options)
    out.backward(given.grad.to(out.dtype))
    assert A.grad is not None
    assert w.grad is not None
    assert w.grad.stride() == w.stride()
    used = int(given.offs[-1])
    return out.detach()[:used], A.grad[:used], w.grad.transpose(1, 2)


@pytest.mark.parametrize("way", [way for way in WAYS if "folded" not in way and "once" not in way])
def test_weights_that_lie_otherwise_give_the_same_bytes(way: str, device: str) -> None:
    given = layer("empty", device)
    assert_same(run_row_major(given, **WAYS[way][1]), by_way(given, way))


def test_weights_that_lie_otherwise_are_quantized_once_compiled_and_multiplied_in_mxfp8(device: str) -> None:
    given = layer("ragged", device, columns=64)
    right = run(given)
    assert_same(run_row_major(given, is_once=True), right)
    assert_same(run_row_major(given, torch.compile(fp8_grouped_mm, fullgraph=True, backend="aot_eager")), right)
    assert_same(run_row_major(given.of_dtype(torch.float32)), run(given.of_dtype(torch.float32)))
    padded = partial(mxfp8_grouped_mm, pad_token_groups=True)
    assert_same(run_row_major(given, padded), run(given, padded))


# Groups


@each_way
def test_rows_of_no_group_come_out_as_zeros_and_are_in_no_result(way: str, device: str) -> None:
    given = layer("balanced", device)
    given.offs.copy_(torch.tensor([7, 7, 50, 99]))
    given.A[99:], given.grad[99:] = float("nan"), float("nan")
    make, options = WAYS[way]
    A, w = given.A.requires_grad_(), given.weights.requires_grad_()
    out = fp8_grouped_mm(A, make(w), given.offs, **options)
    out.backward(given.grad)
    assert not out[99:].any()
    assert not A.grad[99:].any()
    assert not A.grad.isnan().any()
    assert not w.grad.isnan().any()
    assert not w.grad[1].any()


@each_way
def test_no_rows(way: str, device: str) -> None:
    given = layer("balanced", device)
    none = Layer(given.A[:0], given.weights, torch.zeros_like(given.offs), given.grad[:0])
    out, grad_A, grad_w = by_way(none, way)
    assert (out.shape, grad_A.shape) == ((0, N), (0, K))
    assert not grad_w.any()
    if WAYS[way][0] is viewed and way != "folded":
        assert not run_row_major(none, **WAYS[way][1])[2].any()


def test_a_nan_stays_in_its_row(device: str) -> None:
    given = layer("balanced", device)
    given.A[5, 3] = float("nan")
    out = fp8_grouped_mm(given.A, given.B_t, given.offs)
    assert out.isnan().all(1).nonzero().tolist() == [[5]]
    assert int(out.isnan().sum()) == N


def test_folded_an_infinite_or_undefined_weight_spoils_the_gradient_of_its_rows(device: str) -> None:
    given = layer("balanced", device)
    for value in (float("nan"), float("inf")):
        weights = given.weights.clone()
        weights[0, 3, 5] = value
        _, grad_A, _ = by_way(Layer(given.A, weights, given.offs, given.grad), "folded")
        assert grad_A[: int(given.offs[0]), 5].isnan().all()
        assert grad_A[int(given.offs[0]) :].isfinite().all()


# Modes of torch


@each_way
@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_one_gradient_alone(way: str, wanted: tuple[bool, bool], device: str) -> None:
    given = layer("jagged", device)
    right = by_way(given, way)
    make, options = WAYS[way]
    A, w = (x.clone().requires_grad_(each) for x, each in zip((given.A, given.weights), wanted, strict=True))
    out = fp8_grouped_mm(A, make(w), given.offs, **options)
    assert torch.equal(out, right[0])
    assert out.requires_grad == any(wanted)
    if any(wanted):
        out.backward(given.grad)
    for leaf, is_wanted, gradient in zip((A, w), wanted, right[1:], strict=True):
        assert torch.equal(leaf.grad, gradient) if is_wanted else leaf.grad is None


@pytest.mark.parametrize("way", ["default", "both kept", "folded", "bf16"])
def test_torch_compile_traces_it_whole_for_any_number_of_rows(way: str, device: str) -> None:
    torch._dynamo.reset()

    def call(A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        return fp8_grouped_mm(A * 2, B_t, offs, **WAYS[way][1]) * 3

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (M, 97):
        given = layer("ragged", device, rows=rows)
        assert_same(run(given, compiled), run(given, call))


@pytest.mark.parametrize("use_reentrant", [False, True])
@each_way
def test_activation_checkpointing_changes_nothing(way: str, use_reentrant: bool, device: str) -> None:
    given = layer("empty", device)

    def recomputed(call: Call) -> Call:
        return lambda *arguments: checkpoint(call, *arguments, use_reentrant=use_reentrant)

    assert_same(by_way(given, way, recomputed), by_way(given, way))


@pytest.mark.parametrize(("way", "is_compiled"), [*((way, False) for way in WAYS), ("default", True)])
def test_under_autocast_operands_are_cast_first(way: str, is_compiled: bool, device: str) -> None:
    given = layer("ragged", device, torch.float32)
    whole = partial(torch.compile, fullgraph=True, backend="aot_eager") if is_compiled else lambda call: call
    with torch.autocast(device, dtype=torch.bfloat16):
        found = by_way(given, way, whole)
    assert_same(tuple(x.bfloat16() for x in found), by_way(given.of_dtype(torch.bfloat16), way))


@both
@pytest.mark.parametrize("pad_token_groups", [False, True])
def test_meta_tensors_pass_forward_and_backward(multiply: Any, pad_token_groups: bool) -> None:
    given = layer("balanced", "cpu", columns=32)
    A, w, offs = (x.to("meta") for x in (given.A, given.weights, given.offs))
    A.requires_grad_()
    w.requires_grad_()
    out = multiply(A, w.mT, offs, pad_token_groups=pad_token_groups)
    assert (out.shape, out.stride(), out.dtype, out.is_meta) == ((M, 32), (32, 1), torch.bfloat16, True)
    out.sum().backward()
    for operand in (A, w):
        assert operand.grad is not None
        assert (operand.grad.shape, operand.grad.dtype) == (operand.shape, operand.dtype)


@both
@pytest.mark.parametrize("strict", [False, True])
def test_a_module_is_exported(multiply: Any, strict: bool) -> None:
    A, B_t, offs = in_32s("cpu")

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.Parameter(B_t.mT.clone())

        def forward(self, A: Tensor, offs: Tensor) -> Any:
            return multiply(A, self.weights.mT, offs, pad_token_groups=strict)

    model, inputs = Experts(), (A, offs)
    assert torch.equal(torch.export.export(model, inputs, strict=strict).module()(*inputs), model(*inputs))


@both
@pytest.mark.parametrize("options", [{}, {"pad_token_groups": True}, {"keep_fp8": ("A", "B_t")}, {"recipe": "folded"}])
def test_a_second_derivative_is_refused_in_one_line(multiply: Any, options: dict[str, Any]) -> None:
    if multiply is mxfp8_grouped_mm and not options.keys() <= {"pad_token_groups"}:
        pytest.skip("it has no such option")
    A, B_t, offs = in_32s("cpu")
    A.requires_grad_()
    out = multiply(A, B_t, offs, **options)
    [gradient] = torch.autograd.grad(out.sum(), A, create_graph=True)
    with pytest.raises(RuntimeError, match=f"^{multiply.__name__} has no second derivative: .*$"):
        gradient.float().square().sum().backward()


@pytest.mark.parametrize("recipe", ["default", "folded", "bf16"])
def test_the_operators_are_what_torch_library_expects(recipe: str) -> None:
    given, ops = of_integers("ragged", "cpu"), torch.ops.fp8tune
    for keeps in ((False, False), (True, True)):
        options = given.offs, [], recipe, None, *keeps
        calls: list[tuple[Any, tuple[Any, ...]]] = [(ops.grouped_mm_forward, (given.A, given.B_t, *options))]
        _, *kept = ops.grouped_mm_forward(given.A, given.B_t, *options)
        of_A, of_B = [given.A], [given.B_t]
        if recipe == "folded":
            of_A, of_B = kept[:-2], [kept[-2], None, kept[-1]]
        elif kept:
            of_A, of_B = kept[:2], kept[2:]
        for wanted in ((True, True), (True, False), (False, True)):
            if recipe != "folded" or of_A or not wanted[1]:
                calls.append(
                    (ops.grouped_mm_gradients, (given.grad, of_A, of_B, given.offs, recipe, None, *wanted, False))
                )
        for operator, arguments in calls:
            torch.library.opcheck(operator, arguments, test_utils=("test_faketensor", "test_aot_dispatch_dynamic"))


# What is saved between the passes


def saved_bytes(given: Layer, **options: Any) -> dict[torch.dtype, int]:
    saved: dict[torch.dtype, int] = {}

    def note(x: Tensor) -> Tensor:
        saved[x.dtype] = saved.get(x.dtype, 0) + x.nbytes
        return x

    A, w = given.A.clone().requires_grad_(), given.weights.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        fp8_grouped_mm(A, w.transpose(1, 2), given.offs, **options)
    return saved


def test_what_is_kept_is_half_of_the_activation_and_a_byte_a_weight(device: str) -> None:
    given, scales = layer("balanced", device), 4 * E * K
    offs = {torch.int32: 4 * E}
    A, B, half_A, half_B = 2 * M * K, 2 * E * N * K, padded_rows(M, E, ALIGNMENT) * K, E * N * K
    assert saved_bytes(given) == {torch.bfloat16: A + B, **offs}
    codes = torch.float8_e4m3fn
    assert saved_bytes(given, keep_fp8=("A",)) == {torch.bfloat16: B, codes: half_A, torch.float32: scales, **offs}
    assert saved_bytes(given, keep_fp8=("B_t",)) == {torch.bfloat16: A, codes: half_B, torch.float32: scales, **offs}
    assert saved_bytes(given, keep_fp8=("A", "B_t")) == {codes: half_A + half_B, torch.float32: 2 * scales, **offs}
    folded = saved_bytes(given, recipe="folded")
    assert folded[codes] == M * K + E * N * K
    assert torch.bfloat16 not in folded


# precision="auto"


@pytest.mark.parametrize(
    ("pays", "dtype", "keep_fp8", "is_fp8"),
    [
        (True, torch.bfloat16, (), True),
        (False, torch.bfloat16, (), False),
        (False, torch.float32, (), True),  # what is not bfloat16 is multiplied in FP8, and what is to be kept
        (False, torch.bfloat16, ("A",), True),
    ],
)
def test_auto_asks_the_rule(
    pays: bool,
    dtype: torch.dtype,
    keep_fp8: tuple[str, ...],
    is_fp8: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grouped_mm, "is_fp8_product", lambda *sizes: pays)
    given = layer("ragged", device, dtype)
    right = run(given, precision="fp8" if is_fp8 else "bf16")
    assert_same(run(given, precision="auto", keep_fp8=keep_fp8), right)
    assert not torch.equal(right[0], run(given, precision="bf16" if is_fp8 else "fp8")[0])


# torch's signature


def in_32s(device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Operands that both recipes take."""
    given = layer("balanced", device, columns=32)
    return given.A, given.B_t, torch.tensor([32, 96, 160, M], dtype=torch.int32, device=device)


def test_stand_ins_have_all_the_names_of_torch_s_functions(device: str) -> None:
    given = layer("ragged", device)
    bias = torch.randn(E, N, device=device, dtype=torch.bfloat16)
    right = fp8_grouped_mm(given.A, given.B_t, given.offs, bias, torch.float32)
    named: dict[str, Any] = {"offs": given.offs, "bias": bias, "out_dtype": torch.float32}
    assert torch.equal(functional.grouped_mm(mat_a=given.A, mat_b=given.B_t, **named), right)
    assert torch.equal(functional._grouped_mm(input=given.A, mat2=given.B_t, **named), right)
    assert torch.equal(functional._grouped_mm(given.A, given.B_t, *named.values()), right)
    if hasattr(torch.nn.functional, "grouped_mm"):  # from torch 2.10 on
        theirs, ours = (
            [(name, each.kind, each.default) for name, each in inspect.signature(function).parameters.items()]
            for function in (torch.nn.functional.grouped_mm, functional.grouped_mm)
        )
        assert ours[:-1] == theirs


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_out_dtype_is_a_cast_of_the_result(multiply: Any, dtype: torch.dtype, device: str) -> None:
    A, B_t, offs = in_32s(device)
    out = multiply(A.requires_grad_(), B_t, offs, out_dtype=dtype)
    assert out.dtype == dtype
    assert torch.equal(out, multiply(A, B_t, offs).to(dtype))
    out.sum().backward()


@both
def test_a_bias_is_added_to_the_rows_of_its_expert(multiply: Any, device: str) -> None:
    A, B_t, offs = in_32s(device)
    bias = torch.randn(E, 32, device=device).bfloat16().requires_grad_()
    expert_of_row = torch.bucketize(torch.arange(M, device=device, dtype=torch.int32), offs, right=True)
    out = multiply(A, B_t, offs, bias)
    assert torch.equal(out, multiply(A, B_t, offs) + bias[expert_of_row])
    grad = torch.randn(out.shape, device=device).bfloat16()
    out.backward(grad)
    sums = torch.zeros(E, 32, device=device).index_add(0, expert_of_row, grad.float())
    torch.testing.assert_close(bias.grad.float(), sums, rtol=2**-7, atol=1e-6)
    compiled = torch.compile(multiply, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(A, B_t, offs, bias, torch.float32), multiply(A, B_t, offs, bias, torch.float32))


# Refusals


def refused() -> list[tuple[tuple[Any, ...], dict[str, Any], str]]:
    A = torch.zeros(M, K, dtype=torch.bfloat16)
    B_t = torch.zeros(E, 32, K, dtype=torch.bfloat16).transpose(1, 2)
    offs, bias = torch.tensor([32, 64, 96, M], dtype=torch.int32), torch.zeros(E, 32)
    return [
        ((A.view(E, M // E, K), B_t, offs), {}, r"^A has shape .*two dimensions"),
        ((A.t(), B_t, offs), {}, "^A has strides"),
        ((A[:, :32].contiguous(), B_t, offs), {}, r"^A has shape \(192, 32\)"),
        ((A, A.t(), offs), {}, r"^B_t has shape .*three dimensions"),
        ((A, B_t[:, ::2], offs), {}, r"^B_t has strides .*; or row-major"),
        ((A, B_t[:, :, :24].mT.contiguous().mT, offs), {}, "^B_t has K=64 and N=24, wanted multiples of"),
        ((A, B_t), {}, r"^offs is None, wanted \(E,\)"),
        ((A, B_t, offs.long()), {}, r"^offs is torch\.int64"),
        ((A, B_t, torch.tensor([-16, 32, 64, 96], dtype=torch.int32)), {}, "group 0 at row -16, before"),
        ((A, B_t, offs.flip(0).contiguous()), {"pad_token_groups": True}, "group 1 at row 96, before"),
        ((A, B_t, offs, bias[0]), {}, r"^bias has shape \(32,\), wanted \(4, 32\)"),
        ((A, B_t, offs, bias.int()), {}, r"^bias is torch\.int32"),
        ((A, B_t, offs, None, torch.float64), {}, r"^out_dtype is torch\.float64"),
    ]


@both
@pytest.mark.parametrize(("arguments", "options", "says"), refused())
def test_wrong_arguments_are_refused(multiply: Any, arguments: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as refusal:
        multiply(*arguments, **options)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("multiply", "options", "says"),
    [
        (fp8_grouped_mm, {"float8_dtype": torch.float8_e5m2}, "^float8_dtype is"),
        (fp8_grouped_mm, {"precision": "fp4"}, "^precision is 'fp4'"),
        (fp8_grouped_mm, {"recipe": "linen"}, "^recipe is 'linen', wanted 'default' or 'folded'"),
        (fp8_grouped_mm, {"recipe": "folded", "precision": "auto"}, "^precision is 'auto', wanted 'fp8'"),
        (fp8_grouped_mm, {"recipe": "folded", "keep_fp8": ("A",)}, "^keep_fp8 has names, wanted none"),
        (fp8_grouped_mm, {"keep_fp8": ("grad", "A", "B")}, "^keep_fp8 has 'B', 'grad', wanted 'A' and 'B_t'"),
        (mxfp8_grouped_mm, {"scale_mode": "ceil"}, "^scale_mode is 'ceil', wanted floor or rceil$"),
    ],
)
def test_options_that_are_none_are_refused(multiply: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        multiply(*in_32s("cpu"), **options)


def test_the_folded_recipe_wants_its_own_weights(device: str) -> None:
    given = layer("balanced", device)
    with pytest.raises(ValueError, match=r"^recipe is 'default', wanted 'folded': B_t was quantized for it"):
        fp8_grouped_mm(given.A, quantize_weights(given.weights, recipe="folded"), given.offs, recipe="default")
    with pytest.raises(ValueError, match=r"^B_t is row-major, wanted weights"):
        fp8_grouped_mm(given.A, given.B_t.contiguous(), given.offs, recipe="folded")


@pytest.mark.parametrize("ends", [(30, 64, 96, M), (0, 64, 96, M), (40, 80, 96, M)])
def test_sizes_that_no_weight_gradient_of_mxfp8_takes_are_refused(ends: tuple[int, ...]) -> None:
    A, B_t, _ = in_32s("cpu")
    offs = torch.tensor(ends, dtype=torch.int32)
    B_t.requires_grad_()
    with pytest.raises(ValueError, match="wanted a positive multiple of 32 for the weight gradient"):
        mxfp8_grouped_mm(A, B_t, offs).sum().backward()
    mxfp8_grouped_mm(A, B_t, offs, pad_token_groups=True).sum().backward()
    fp8_grouped_mm(A, B_t, offs).sum().backward()  # it has no such sizes
