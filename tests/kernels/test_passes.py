"""The three passes of a step by each method: the same bytes where sums are exact, near float64 elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8tune.measure.edges import fill_integers
from fp8tune_kernels import fp8_grouped_mm, interpreter
from fp8tune_kernels.arches import default_fp8_dtype
from fp8tune_kernels.gemm import grouped_mm_operators, passes, token_groups
from fp8tune_kernels.gemm.grouped_contraction import ALIGNMENT
from fp8tune_kernels.groups import group_ends
from fp8tune_kernels.quantize.colwise import quantize_colwise
from fp8tune_kernels.quantize.colwise_3d import quantize_colwise_3d
from fp8tune_kernels.quantize.rowwise_2d import quantize_rowwise_2d
from fp8tune_kernels.quantize.transpose_3d_atomic import quantize_transpose_3d_atomic
from fp8tune_kernels.runtime.lookup import running_arch
from fp8tune_kernels.spec import ROUTINGS

M, K, N, E = 77, 48, 80, 3
METHODS = range(len(passes.METHODS))

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


def step(method: int, given: Tensors, dtype: torch.dtype) -> Tensors:
    A, B_t, offs, grad = given
    return (
        passes.forward(A, B_t, offs, method, dtype),
        passes.input_gradient(grad, B_t, offs, method, dtype),
        passes.weight_gradient(grad, A, offs, method, dtype),
    )


BY_KERNELS = [
    (method, routing)
    for method in METHODS
    for number, routing in enumerate(ROUTINGS)
    if torch.cuda.is_available() or (method + number) % 2
]
"""On the interpreter every second routing: a method whose products are in FP8 takes half a second, and two have each
routing."""

ALL = [(method, routing) for method in METHODS for routing in ROUTINGS]


@pytest.mark.parametrize(("method", "routing"), BY_KERNELS)
def test_exact_values_give_the_same_bytes_by_each_method(method: int, routing: str, device: str) -> None:
    assert_exact(method, routing, device)


@pytest.mark.parametrize(("method", "routing"), [] if torch.cuda.is_available() else ALL)
def test_so_does_what_stands_for_kernels_on_a_cpu(method: int, routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "INTERPRETED", False)
    assert_exact(method, routing, "cpu")


def assert_exact(method: int, routing: str, device: str) -> None:
    given = operands(routing, device, exact=True)
    for result, right in zip(step(method, given, dtype_of(device)), in_float64(*given), strict=True):
        assert result.dtype == torch.bfloat16
        assert result.is_contiguous()
        assert torch.equal(result, right.bfloat16())


@pytest.mark.parametrize("method", METHODS)
def test_random_values_come_out_near_float64(method: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "INTERPRETED", False)
    given = operands("ragged", device, exact=False)
    for result, right in zip(step(method, given, dtype_of(device)), in_float64(*given), strict=True):
        noise = (result.double() - right).square().sum()
        assert 10 * torch.log10(right.square().sum() / noise) > 25


@pytest.mark.parametrize("method", METHODS)
def test_no_rows_at_all(method: int, device: str) -> None:
    A, B_t, offs, grad = operands("balanced", device, exact=True)
    out, grad_A, grad_B = step(method, (A[:0], B_t, torch.zeros_like(offs), grad[:0]), dtype_of(device))
    assert (out.shape, grad_A.shape, grad_B.shape) == ((0, N), (0, K), (E, N, K))
    assert not grad_B.any()


@pytest.mark.usefixtures("quantizers_in_plain_torch")
@pytest.mark.parametrize("method", [passes.FP8_TORCH, passes.FP8])
def test_codes_that_were_made_before_give_the_same(method: int, device: str) -> None:
    A, B_t, offs, grad = operands("empty", device, exact=False)
    dtype = dtype_of(device)
    found = (
        passes.forward(A, None, offs, method, dtype, quantize_colwise_3d(B_t), quantize_rowwise_2d(A)),
        passes.input_gradient(
            grad, None, offs, method, dtype, quantize_transpose_3d_atomic(B_t), quantize_rowwise_2d(grad)
        ),
        passes.weight_gradient(
            grad, None, offs, method, dtype, *(quantize_colwise(x, offs, alignment=ALIGNMENT) for x in (grad, A))
        ),
    )
    for result, right in zip(found, step(method, (A, B_t, offs, grad), dtype), strict=True):
        assert torch.equal(result, right)


# The operators


@pytest.mark.usefixtures("quantizers_in_plain_torch")
@pytest.mark.parametrize("precision", [0, 1])
def test_the_operators_are_what_torch_library_expects(precision: int, device: str) -> None:
    A, B_t, offs, grad = operands("ragged", device, exact=True)
    options, none = (offs, None, precision), (None,) * 4
    rows, weights = quantize_rowwise_2d(A), quantize_transpose_3d_atomic(B_t)
    columns = [quantize_colwise(x, offs, alignment=ALIGNMENT) for x in (grad, A)]
    ops = torch.ops.fp8tune
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.grouped_mm_forward, (A, B_t, *options, *none)),
        (ops.grouped_mm_forward, (A, B_t, *options, *rows, *quantize_colwise_3d(B_t))),
        (ops.grouped_mm_input_gradient, (grad, B_t, *options, *none)),
        (ops.grouped_mm_weight_gradient, (grad, A, *options, *none)),
    ]
    if precision == 0:
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
        if precision == 0:  # the other one is dispatched no differently
            checks.append("test_aot_dispatch_dynamic")
        if arguments[-1] is None:  # it multiplies codes to find one that was written to, and torch multiplies none
            checks.append("test_schema")
        torch.library.opcheck(operator, arguments, test_utils=checks)


@pytest.mark.usefixtures("quantizers_in_plain_torch")
@pytest.mark.parametrize("method", METHODS)
def test_the_op_takes_the_method_of_each_pass_from_the_table(
    method: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def chosen(*given: Any) -> int:
        asked.append(given[:-1])
        return method

    monkeypatch.setattr(grouped_mm_operators, "method_for", chosen)
    A, B_t, offs, grad = operands("ragged", device, exact=True)
    used = int(offs[-1])
    A[used:], grad[used:] = 0, 0
    for precision, flag in (("fp8", 0), ("auto", 1)):
        asked.clear()
        A.requires_grad_()
        B_t = B_t.detach().requires_grad_()
        out = fp8_grouped_mm(A, B_t, offs, precision=precision)
        grads = torch.autograd.grad(out, (A, B_t), grad)
        sizes = (M, N, K, E, flag)
        assert asked == [(name, *sizes) for name in ("forward", "input-gradient", "weight-gradient")]
        for result, right in zip((out, *grads), in_float64(A.detach(), B_t.detach(), offs, grad), strict=True):
            right = right.mT if right.dim() == 3 else right
            assert torch.equal(result, right.bfloat16())
            assert result.stride() == right.stride()


@pytest.mark.usefixtures("quantizers_in_plain_torch")
@pytest.mark.parametrize(
    ("dtype", "keep_fp8"),
    [(torch.float32, ()), (torch.float16, ()), (torch.bfloat16, ("A",)), (torch.bfloat16, ("B_t",))],
)
def test_auto_multiplies_in_fp8_what_is_not_bfloat16_or_is_kept(
    dtype: torch.dtype, keep_fp8: tuple[str, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def chosen(*given: Any) -> int:
        asked.append(given[-2])
        return passes.FP8

    monkeypatch.setattr(grouped_mm_operators, "method_for", chosen)
    A, B_t, offs, grad = operands("balanced", device, exact=False)
    A, B_t = A.to(dtype).requires_grad_(), B_t.to(dtype).requires_grad_()
    fp8_grouped_mm(A, B_t, offs, precision="auto", keep_fp8=keep_fp8).backward(grad)
    assert asked == [0, 0, 0]


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
