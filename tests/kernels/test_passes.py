"""The three passes of a step in both precisions: exact where sums are exact, near float64 elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8tune.measure.edges import fill_integers
from fp8tune_kernels import fp8_grouped_mm, interpreter
from fp8tune_kernels.arches import default_fp8_dtype
from fp8tune_kernels.gemm import grouped_mm, passes, token_groups
from fp8tune_kernels.gemm.grouped_contraction import ALIGNMENT
from fp8tune_kernels.groups import group_ends
from fp8tune_kernels.quantize.colwise import quantize_colwise
from fp8tune_kernels.quantize.colwise_3d import quantize_colwise_3d
from fp8tune_kernels.quantize.rowwise_2d import quantize_rowwise_2d
from fp8tune_kernels.quantize.transpose_3d_atomic import quantize_transpose_3d_atomic
from fp8tune_kernels.runtime.lookup import running_arch
from fp8tune_kernels.spec import ROUTINGS

M, K, N, E = 77, 48, 80, 3
PRECISIONS = ("fp8", "bf16")

Tensors = tuple[torch.Tensor, ...]


def dtype_of(device: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, default_fp8_dtype(running_arch(torch.device(device))))
    return found


def operands(routing: str, device: str, *, exact: bool) -> Tensors:
    """A, B_t, offs and grad; exact: integers of which no partial sum is rounded, NaN in rows of no group."""
    generator = torch.Generator(device).manual_seed(1)
    A, weights, grad = (
        torch.randn(shape, device=device, generator=generator).bfloat16() for shape in ((M, K), (E, N, K), (M, N))
    )
    offs = torch.tensor(group_ends(routing, M, E, 1), dtype=torch.int32, device=device)
    if exact:
        for tensor in (A, weights, grad):
            fill_integers(tensor, 2)
        used = int(offs[-1])
        A[used:], grad[used:] = float("nan"), float("nan")
    return A, weights.transpose(1, 2), offs, grad


def in_float64(A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor, grad: torch.Tensor) -> Tensors:
    out, grad_A = A.new_zeros(M, N, dtype=torch.float64), A.new_zeros(M, K, dtype=torch.float64)
    grad_B = A.new_zeros(E, N, K, dtype=torch.float64)
    start = 0
    for group, end in enumerate(offs.tolist()):
        a, g, w = A[start:end].double(), grad[start:end].double(), B_t[group].double()
        out[start:end], grad_A[start:end], grad_B[group] = a @ w, g @ w.t(), g.t() @ a
        start = end
    return out, grad_A, grad_B


def step(precision: str, given: Tensors, dtype: torch.dtype) -> Tensors:
    A, B_t, offs, grad = given
    if precision == "bf16":
        return (
            passes.multiply_bf16(A, B_t, offs),
            passes.multiply_bf16(grad, B_t.mT, offs),
            passes.contract_bf16(grad, A, offs),
        )
    return (
        passes.multiply(passes.quantize_rows(A, dtype), passes.quantize_stored(B_t.mT, dtype), offs),
        passes.multiply(passes.quantize_rows(grad, dtype), passes.quantize_stored(B_t, dtype), offs),
        passes.contract(*passes.quantize_both_columns(grad, A, offs, dtype), offs, grad.shape[0]),
    )


BOTH = [(precision, routing) for precision in PRECISIONS for routing in ROUTINGS]


@pytest.mark.parametrize(("precision", "routing"), BOTH)
def test_exact_values_give_exact_bytes(precision: str, routing: str, device: str) -> None:
    assert_exact(precision, routing, device)


@pytest.mark.parametrize(("precision", "routing"), BOTH)
def test_references_on_a_cpu_are_exact_too(precision: str, routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "INTERPRETED", False)
    assert_exact(precision, routing, "cpu")


def assert_exact(precision: str, routing: str, device: str) -> None:
    given = operands(routing, device, exact=True)
    for result, right in zip(step(precision, given, dtype_of(device)), in_float64(*given), strict=True):
        assert result.dtype == torch.bfloat16
        assert result.is_contiguous()
        assert torch.equal(result, right.bfloat16())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_random_values_come_out_near_float64(precision: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "INTERPRETED", False)
    given = operands("ragged", device, exact=False)
    for result, right in zip(step(precision, given, dtype_of(device)), in_float64(*given), strict=True):
        noise = (result.double() - right).square().sum()
        assert 10 * torch.log10(right.square().sum() / noise) > 25


@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_rows_at_all(precision: str, device: str) -> None:
    A, B_t, offs, grad = operands("balanced", device, exact=True)
    out, grad_A, grad_B = step(precision, (A[:0], B_t, torch.zeros_like(offs), grad[:0]), dtype_of(device))
    assert (out.shape, grad_A.shape, grad_B.shape) == ((0, N), (0, K), (E, N, K))
    assert not grad_B.any()


# The operators


@pytest.mark.usefixtures("quantizers_in_plain_torch")
@pytest.mark.parametrize("is_fp8", [True, False])
def test_the_operators_are_what_torch_library_expects(is_fp8: bool, device: str) -> None:
    A, B_t, offs, grad = operands("ragged", device, exact=True)
    options, none = (offs, None, is_fp8), (None,) * 4
    rows, weights = quantize_rowwise_2d(A), quantize_transpose_3d_atomic(B_t)
    columns = [quantize_colwise(x, offs, alignment=ALIGNMENT) for x in (grad, A)]
    ops = torch.ops.fp8tune
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.grouped_mm_forward, (A, B_t, *options, *none)),
        (ops.grouped_mm_forward, (A, B_t, *options, *rows, *quantize_colwise_3d(B_t))),
        (ops.grouped_mm_input_gradient, (grad, B_t, *options, *none)),
        (ops.grouped_mm_weight_gradient, (grad, A, *options, *none)),
    ]
    if is_fp8:
        rows = quantize_rowwise_2d(grad)
        calls += [
            (ops.grouped_mm_input_gradient, (grad, None, *options, *rows, *weights)),
            (ops.grouped_mm_weight_gradient, (grad, None, *options, *columns[0], *columns[1])),
            (ops.grouped_mm_gradients, (grad, None, *columns[1], B_t, None, None, *options, True, True, False)),
        ]
    for wanted in ((True, True), (True, False), (False, True)):
        given = A if wanted[1] else None, None, None, B_t if wanted[0] else None, None, None
        calls.append((ops.grouped_mm_gradients, (grad, *given, *options, *wanted, False)))
    for operator, arguments in calls:
        checks = ["test_faketensor"]
        if is_fp8:  # the other one is dispatched no differently
            checks.append("test_aot_dispatch_dynamic")
        if arguments[-1] is None:  # it multiplies codes to find one that was written to, and torch multiplies none
            checks.append("test_schema")
        torch.library.opcheck(operator, arguments, test_utils=checks)


@pytest.mark.usefixtures("quantizers_in_plain_torch")
@pytest.mark.parametrize("is_row_major", [False, True])
@pytest.mark.parametrize("precision", ["fp8", "bf16", "auto"])
def test_the_op_is_exact_in_each_precision(precision: str, is_row_major: bool, device: str) -> None:
    A, B_t, offs, grad = operands("ragged", device, exact=True)
    used = int(offs[-1])
    A[used:], grad[used:] = 0, 0
    A.requires_grad_()
    B_t = (B_t.contiguous() if is_row_major else B_t).detach().requires_grad_()
    out = fp8_grouped_mm(A, B_t, offs, precision=precision)
    grads = torch.autograd.grad(out, (A, B_t), grad)
    for result, right in zip((out, *grads), in_float64(A.detach(), B_t.detach(), offs, grad), strict=True):
        right = right.mT.bfloat16() if right.dim() == 3 else right.bfloat16()
        assert torch.equal(result, right)
        assert result.stride() == (B_t.stride() if right.dim() == 3 else right.stride())


def fp8_calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list to which each forward pass adds whether it multiplies in FP8."""
    calls: list[bool] = []
    original = grouped_mm.forward
    monkeypatch.setattr(grouped_mm, "forward", lambda *given: calls.append(given[4]) or original(*given))
    return calls


@pytest.mark.usefixtures("quantizers_in_plain_torch")
@pytest.mark.parametrize("pays", [True, False])
def test_auto_asks_the_rule(pays: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(grouped_mm, "is_fp8_product", lambda *sizes: asked.append(sizes) or pays)
    calls = fp8_calls(monkeypatch)
    A, B_t, offs, _ = operands("balanced", device, exact=False)
    fp8_grouped_mm(A, B_t, offs, precision="auto")
    assert calls == [pays]
    assert asked == [(M, K, N, E, A.device)]


@pytest.mark.usefixtures("quantizers_in_plain_torch")
@pytest.mark.parametrize(
    ("dtype", "keep_fp8"),
    [(torch.float32, ()), (torch.float16, ()), (torch.bfloat16, ("A",)), (torch.bfloat16, ("B_t",))],
)
def test_auto_multiplies_in_fp8_what_is_not_bfloat16_or_is_kept(
    dtype: torch.dtype, keep_fp8: tuple[str, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_mm, "is_fp8_product", lambda *sizes: False)
    calls = fp8_calls(monkeypatch)
    A, B_t, offs, grad = operands("balanced", device, exact=False)
    A, B_t = A.to(dtype).requires_grad_(), B_t.to(dtype).requires_grad_()
    fp8_grouped_mm(A, B_t, offs, precision="auto", keep_fp8=keep_fp8).backward(grad)
    assert calls == [True]


def test_bf16_casts_other_dtypes(device: str) -> None:
    A, B_t, offs, grad = operands("balanced", device, exact=False)
    wide_A, wide_B = A.float().requires_grad_(), B_t.float().requires_grad_()
    out = fp8_grouped_mm(wide_A, wide_B, offs, precision="bf16")
    grads = torch.autograd.grad(out, (wide_A, wide_B), grad)
    assert torch.equal(out, passes.multiply_bf16(A, B_t, offs))
    assert [gradient.dtype for gradient in grads] == [torch.float32, torch.float32]
    assert grads[1].stride() == B_t.stride()


# What torch's GEMMs leave undone


@pytest.mark.parametrize("ends", [[3, 3, 40], [0, 0, 0], [45, 45, 45], [1, 1, 45]])
def test_rows_past_the_last_group_become_zeros(ends: list[int], device: str) -> None:
    offs = torch.tensor(ends, dtype=torch.int32, device=device)
    x = torch.full((45, 208), float("nan"), dtype=torch.bfloat16, device=device)
    token_groups.zero_rows(x, offs)
    assert not x[ends[-1] :].any()
    assert x[: ends[-1]].isnan().all()


@pytest.mark.parametrize("ends", [[3, 3, 40], [0, 0, 0], [1, 2, 3], [0, 1, 1]])
def test_groups_without_rows_become_zeros(ends: list[int], device: str) -> None:
    offs = torch.tensor(ends, dtype=torch.int32, device=device)
    x = torch.full((3, 112, 48), float("nan"), dtype=torch.bfloat16, device=device)
    token_groups.zero_empty_groups(x, offs)
    for start, end, group in zip([0, *ends], ends, x, strict=False):
        assert group.isnan().all() if end > start else not group.any()


@pytest.mark.parametrize("groups", [1, 3, 130])
def test_padded_ends_are_those_of_padding(groups: int, device: str) -> None:
    offs = torch.tensor(group_ends("jagged", 400, groups, 1), dtype=torch.int32, device=device)
    x = torch.zeros(400, 1, device=device)
    for alignment in (16, ALIGNMENT):
        assert torch.equal(token_groups.padded_ends(offs, alignment), token_groups.reference_pad(x, offs, alignment)[1])
