"""``fp8_grouped_mm``: the recipe spelled out in plain torch, every group layout, compilers, refusals."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fp8tune_kernels import fp8_grouped_mm
from fp8tune_kernels.arches import default_fp8_dtype
from fp8tune_kernels.groups import group_ends
from fp8tune_kernels.quantize.arithmetic import FP8_MAX
from fp8tune_kernels.runtime.lookup import running_arch
from fp8tune_kernels.spec import ROUTINGS

M, K, N, E = 192, 64, 48, 4
pytestmark = pytest.mark.usefixtures("quantizers_in_plain_torch")


@dataclass(frozen=True)
class Layer:
    """Operands as a layer has them, and the gradient that comes back."""

    A: torch.Tensor
    weights: torch.Tensor
    """(E, N, K)."""
    offs: torch.Tensor
    grad: torch.Tensor

    @property
    def B_t(self) -> torch.Tensor:  # noqa: N802 - the operand's name
        return self.weights.transpose(1, 2)


def layer(routing: str, device: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Layer:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(dtype)

    offs = torch.tensor(group_ends(routing, M, E, seed), dtype=torch.int32, device=device)
    spread = torch.logspace(-3, 3, M, 2, device=device)[:, None].to(dtype)  # rows of very different size
    return Layer(normal(M, K) * spread, normal(E, N, K), offs, normal(M, N).bfloat16())


Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""out (M, N), grad_A (M, K), grad_weights (E, N, K)."""


def run(call: Callable[..., torch.Tensor], given: Layer, **options: Any) -> Results:
    """Forward and backward; rows of no group are left out of what is compared."""
    A, weights = given.A.clone().requires_grad_(), given.weights.clone().requires_grad_()
    out = call(A, weights.transpose(1, 2), given.offs, **options)
    out.backward(given.grad.to(out.dtype))
    assert A.grad is not None
    assert weights.grad is not None
    assert (A.grad.dtype, weights.grad.dtype) == (A.dtype, weights.dtype)
    used = int(given.offs[-1])
    return out.detach()[:used], A.grad[:used], weights.grad


def by_group(given: Layer, rows: Callable[..., torch.Tensor]) -> Results:
    """Three products of each group in float32; ``rows(x, dim)`` is what becomes of an operand contracted over dim."""
    out, grad_A, grad_weights, start = [], [], [], 0
    for w, end in zip(given.weights.float(), given.offs.tolist(), strict=True):
        a, g = given.A[start:end].float(), given.grad[start:end].float()
        out.append(rows(a, 1) @ rows(w, 1).t())
        grad_A.append(rows(g, 1) @ rows(w, 0))
        grad_weights.append(rows(g, 0).t() @ rows(a, 0) if end > start else torch.zeros_like(w))
        start = end
    return torch.cat(out), torch.cat(grad_A), torch.stack(grad_weights)


def exactly(given: Layer) -> Results:
    return by_group(given, lambda x, dim: x)


def by_the_recipe(given: Layer) -> Results:
    """Written down without the kernels' own helpers: amax, power-of-two scale, cast, and back again."""
    dtype = getattr(torch, default_fp8_dtype(running_arch(given.A.device)))

    def quantized(x: torch.Tensor, dim: int) -> torch.Tensor:
        scale = FP8_MAX[dtype] / x.abs().amax(dim, keepdim=True).double().clamp(min=1e-12)
        scale = torch.exp2(scale.log2().floor()).float()
        return (x * scale).clamp(-FP8_MAX[dtype], FP8_MAX[dtype]).to(dtype).float() / scale

    return by_group(given, quantized)


def sqnr_db(result: torch.Tensor, right: torch.Tensor) -> float:
    """Signal over noise: 10 log10 of the sum of squares over that of the errors."""
    signal, noise = right.double(), result.double() - right.double()
    return float(10 * torch.log10(signal.square().sum() / noise.square().sum()))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_output_and_gradients_are_those_of_the_recipe(routing: str, device: str) -> None:
    given = layer(routing, device)
    for result, recipe, right in zip(run(fp8_grouped_mm, given), by_the_recipe(given), exactly(given), strict=True):
        assert sqnr_db(result, recipe) > 45  # bfloat16 rounds the results; wrong codes would leave 30
        assert sqnr_db(result, right) > sqnr_db(recipe.bfloat16(), right) - 0.1 > 20


@pytest.mark.parametrize("routing", ROUTINGS)
def test_padding_that_is_asked_for_changes_nothing(routing: str, device: str) -> None:
    given = layer(routing, device)
    for result, right in zip(
        run(fp8_grouped_mm, given, pad_token_groups=True), run(fp8_grouped_mm, given), strict=True
    ):
        assert torch.equal(result, right)


def test_rows_of_no_group_come_out_as_zeros_and_are_in_no_result(device: str) -> None:
    given = layer("balanced", device)
    given.offs.copy_(torch.tensor([7, 7, 50, 99]))
    given.A[99:], given.grad[99:] = float("nan"), float("nan")
    A, weights = given.A.requires_grad_(), given.weights.requires_grad_()
    out = fp8_grouped_mm(A, weights.transpose(1, 2), given.offs)
    out.backward(given.grad)
    assert not out[99:].any()
    assert not A.grad[99:].any()
    assert not A.grad.isnan().any()
    assert not weights.grad.isnan().any()
    assert not weights.grad[1].any()


def test_no_tokens_at_all(device: str) -> None:
    given = layer("balanced", device)
    A, weights = given.A[:0].requires_grad_(), given.weights.clone().requires_grad_()
    out = fp8_grouped_mm(A, weights.transpose(1, 2), torch.zeros_like(given.offs))
    assert out.shape == (0, N)
    out.sum().backward()
    assert A.grad.shape == A.shape
    assert not weights.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_quantized_as_they_are(dtype: torch.dtype, device: str) -> None:
    given = layer("balanced", device, dtype)
    for result, recipe in zip(run(fp8_grouped_mm, given), by_the_recipe(given), strict=True):
        assert sqnr_db(result, recipe) > 45


def test_only_the_gradients_asked_for_are_made(device: str) -> None:
    given = layer("balanced", device)
    A = given.A.requires_grad_()
    fp8_grouped_mm(A, given.B_t, given.offs).backward(given.grad)
    assert A.grad is not None
    weights = given.weights.requires_grad_()
    fp8_grouped_mm(given.A.detach(), given.B_t, given.offs).sum().backward()
    assert weights.grad is not None


def under_checkpoint(A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = checkpoint(fp8_grouped_mm, A, B_t, offs, use_reentrant=False)
    return out


@pytest.mark.parametrize("options", [{}, {"keep_fp8": ("A", "B_t")}, {"precision": "auto"}], ids=str)
def test_torch_compile_traces_it_whole_for_any_number_of_rows(options: dict[str, Any], device: str) -> None:
    def call(A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return fp8_grouped_mm(A * 2, B_t, offs, **options) * 3

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (M, 97):
        given = layer("balanced", device)
        given.offs.copy_(torch.tensor([17, 17, 48, rows - 3]))
        given = Layer(given.A[:rows], given.weights, given.offs, given.grad[:rows])
        for result, right in zip(run(compiled, given), run(call, given), strict=True):
            assert torch.equal(result, right)


@pytest.mark.parametrize("routing", ["balanced", "empty"])
def test_activation_checkpointing_changes_nothing(routing: str, device: str) -> None:
    given = layer(routing, device)
    for result, right in zip(run(under_checkpoint, given), run(fp8_grouped_mm, given), strict=True):
        assert torch.equal(result, right)


@pytest.mark.parametrize("whole", [False, True])
def test_under_autocast_operands_are_cast_first(whole: bool, device: str) -> None:
    given = layer("ragged", device, torch.float32)
    call = torch.compile(fp8_grouped_mm, fullgraph=True, backend="aot_eager") if whole else fp8_grouped_mm
    with torch.autocast(device, dtype=torch.bfloat16):
        results = run(call, given)
    in_bfloat16 = Layer(given.A.bfloat16(), given.weights.bfloat16(), given.offs, given.grad)
    for result, right in zip(results, run(fp8_grouped_mm, in_bfloat16), strict=True):
        assert torch.equal(result.bfloat16(), right)


def wrong_arguments() -> list[Any]:
    A = torch.zeros(M, K, dtype=torch.bfloat16)
    B_t = torch.zeros(E, N, K, dtype=torch.bfloat16).transpose(1, 2)
    offs = torch.tensor([16, 32, 48, M], dtype=torch.int32)
    return [
        pytest.param((A[0], B_t, offs), {}, "A has shape", id="A of one dimension"),
        pytest.param((A.t(), B_t, offs), {}, "A has strides", id="A transposed"),
        pytest.param((A.double(), B_t, offs), {}, r"A is torch\.float64", id="A in float64"),
        pytest.param((A[:, :48].contiguous(), B_t, offs), {}, r"A has shape \(192, 48\)", id="A of another K"),
        pytest.param((A, B_t[0], offs), {}, "B_t has shape", id="B_t of two dimensions"),
        pytest.param((A, B_t[:, ::2], offs), {}, "B_t has strides", id="B_t of every other row"),
        pytest.param((A, B_t.to(torch.int8), offs), {}, r"B_t is torch\.int8", id="B_t of integers"),
        pytest.param((A, B_t[:, :, :40].mT.contiguous().mT, offs), {}, "B_t has K=64 and N=40", id="N of 40"),
        pytest.param((A, B_t, offs[:3]), {}, "offs has 3 groups", id="fewer groups than experts"),
        pytest.param((A, B_t, offs.long()), {}, r"offs is torch\.int64", id="offs in int64"),
        pytest.param((A, B_t, offs.to("meta")), {}, "offs is on meta", id="offs elsewhere"),
        pytest.param((A, B_t, offs), {"out_dtype": torch.float64}, r"out_dtype is torch\.float64", id="out_dtype"),
        pytest.param((A, B_t, offs), {"float8_dtype": torch.float8_e5m2}, "float8_dtype is", id="float8_dtype"),
        pytest.param(
            (A, B_t, offs),
            {"precision": "fp4"},
            "precision is 'fp4'",
            id="precision",
        ),
    ]


@pytest.mark.parametrize(("arguments", "options", "named"), wrong_arguments())
def test_wrong_arguments_are_refused(
    arguments: tuple[torch.Tensor, ...], options: dict[str, Any], named: str, device: str
) -> None:
    here = [argument if argument.is_meta else argument.to(device) for argument in arguments]
    with pytest.raises(ValueError, match=f"^{named}.*wanted"):
        fp8_grouped_mm(*here, **options)


def test_a_nan_stays_in_its_row(device: str) -> None:
    given = layer("balanced", device)
    given.A[5, 3] = float("nan")
    out = fp8_grouped_mm(given.A, given.B_t, given.offs)
    assert out.isnan().all(1).nonzero().tolist() == [[5]]
    assert int(out.isnan().sum()) == N


@pytest.mark.parametrize("is_row_major", [False, True])
@pytest.mark.parametrize("options", [{}, {"keep_fp8": ("A", "B_t")}, {"precision": "auto"}, {"recipe": "folded"}])
def test_no_rows(options: dict[str, Any], is_row_major: bool, device: str) -> None:
    if is_row_major and "recipe" in options:
        pytest.skip("no kernel folds their scales")
    A = torch.zeros(0, K, dtype=torch.bfloat16, device=device, requires_grad=True)
    w = torch.ones((E, K, N) if is_row_major else (E, N, K), dtype=torch.bfloat16, device=device, requires_grad=True)
    offs = torch.zeros(E, dtype=torch.int32, device=device)
    out = fp8_grouped_mm(A, w if is_row_major else w.transpose(1, 2), offs, **options)
    out.sum().backward()
    assert (out.shape, A.grad.shape) == ((0, N), (0, K))  # type: ignore[union-attr]
    assert torch.equal(w.grad, torch.zeros_like(w))  # type: ignore[arg-type]
