"""``fp8_grouped_mm(..., keep_fp8=...)``: the default path's bytes in and out, and what is saved in between."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from test_grouped_mm import E, K, Layer, M, N, layer, run
from torch.utils.checkpoint import checkpoint

from fp8tune_kernels import fp8_grouped_mm
from fp8tune_kernels.gemm.grouped_contraction import ALIGNMENT
from fp8tune_kernels.groups import padded_rows
from fp8tune_kernels.spec import ROUTINGS

pytestmark = pytest.mark.usefixtures("quantizers_in_plain_torch")

KEPT = (("A",), ("B_t",), ("A", "B_t"))

Call = Callable[..., torch.Tensor]


def assert_same(given: Layer, keep_fp8: tuple[str, ...], change: Callable[[Call], Call] = lambda f: f) -> None:
    """Output and both gradients, bit for bit."""
    kept = change(partial(fp8_grouped_mm, keep_fp8=keep_fp8))
    for result, right in zip(run(kept, given), run(fp8_grouped_mm, given), strict=True):
        assert torch.equal(result, right)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("keep_fp8", KEPT)
def test_results_are_those_of_the_default_path(keep_fp8: tuple[str, ...], routing: str, device: str) -> None:
    assert_same(layer(routing, device), keep_fp8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("keep_fp8", KEPT)
def test_operands_of_another_dtype_than_the_gradient(
    keep_fp8: tuple[str, ...], dtype: torch.dtype, device: str
) -> None:
    assert_same(layer("ragged", device, dtype), keep_fp8)


@pytest.mark.parametrize("keep_fp8", KEPT)
def test_no_tokens_at_all(keep_fp8: tuple[str, ...], device: str) -> None:
    given = layer("balanced", device)
    none = Layer(given.A[:0], given.weights, torch.zeros_like(given.offs), given.grad[:0])
    assert_same(none, keep_fp8)


def test_torch_compile_traces_it_whole(device: str) -> None:
    def whole(call: Call) -> Call:
        return torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)

    for keep_fp8 in KEPT:
        assert_same(layer("balanced", device), keep_fp8, whole)


@pytest.mark.parametrize("keep_fp8", KEPT)
def test_activation_checkpointing_recomputes_it(keep_fp8: tuple[str, ...], device: str) -> None:
    def recomputed(call: Call) -> Call:
        return lambda *arguments: checkpoint(call, *arguments, use_reentrant=False)

    assert_same(layer("empty", device), keep_fp8, recomputed)


def test_under_autocast_operands_are_cast_first(device: str) -> None:
    given = layer("ragged", device, torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert_same(given, ("A", "B_t"))


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
@pytest.mark.parametrize("keep_fp8", KEPT)
def test_one_gradient_alone(keep_fp8: tuple[str, ...], wanted: tuple[bool, bool], device: str) -> None:
    given = layer("ragged", device)
    found = []
    for keep in (keep_fp8, ()):
        operands = [given.A.clone().requires_grad_(wanted[0]), given.weights.clone().requires_grad_(wanted[1])]
        out = fp8_grouped_mm(operands[0], operands[1].transpose(1, 2), given.offs, keep_fp8=keep)
        out.backward(given.grad)
        assert [operand.grad is not None for operand in operands] == list(wanted)
        found.append([out, *(operand.grad for operand in operands if operand.grad is not None)])
    for result, right in zip(*found, strict=True):
        assert torch.equal(result, right)


# What is saved


@contextmanager
def saved_tensors() -> Iterator[list[torch.Tensor]]:
    """Every tensor that a forward pass keeps for its backward pass."""
    found: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: found.append(tensor) or tensor, lambda tensor: tensor):
        yield found


def saved_bytes(given: Layer, **options: object) -> dict[torch.dtype, int]:
    A, weights = given.A.clone().requires_grad_(), given.weights.clone().requires_grad_()
    with saved_tensors() as found:
        fp8_grouped_mm(A, weights.transpose(1, 2), given.offs, **options)  # type: ignore[arg-type]
    return {
        dtype: sum(tensor.nbytes for tensor in tensors)
        for dtype, tensors in itertools.groupby(
            sorted(found, key=lambda tensor: str(tensor.dtype)), lambda tensor: tensor.dtype
        )
    }


def test_what_is_kept_is_half_of_the_activation_and_a_byte_a_weight(device: str) -> None:
    given, scales = layer("balanced", device), 4 * E * K
    offs = {torch.int32: 4 * E}
    A, B, half_A, half_B = 2 * M * K, 2 * E * N * K, padded_rows(M, E, ALIGNMENT) * K, E * N * K
    assert saved_bytes(given) == {torch.bfloat16: A + B, **offs}
    codes = torch.float8_e4m3fn
    assert saved_bytes(given, keep_fp8=("A",)) == {torch.bfloat16: B, codes: half_A, torch.float32: scales, **offs}
    assert saved_bytes(given, keep_fp8=("B_t",)) == {torch.bfloat16: A, codes: half_B, torch.float32: scales, **offs}
    assert saved_bytes(given, keep_fp8=("A", "B_t")) == {codes: half_A + half_B, torch.float32: 2 * scales, **offs}


def test_nothing_is_quantized_both_ways_that_no_gradient_asks_for(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8tune_kernels.gemm import grouped_mm, grouped_mm_operators

    called: list[str] = []
    for name in ("quantize_rowwise_colwise", "quantize_colwise_transpose_3d"):
        function = getattr(grouped_mm, name)
        monkeypatch.setattr(
            grouped_mm, name, lambda *given, _f=function, _n=name, **options: called.append(_n) or _f(*given, **options)
        )
    given, keep_fp8 = layer("balanced", device), ("A", "B_t")
    fp8_grouped_mm(given.A, given.B_t, given.offs, keep_fp8=keep_fp8)
    A, weights = given.A.clone().requires_grad_(), given.weights.clone().requires_grad_()
    with torch.no_grad():
        fp8_grouped_mm(A, weights.transpose(1, 2), given.offs, keep_fp8=keep_fp8)
    assert called == []
    fp8_grouped_mm(A, given.B_t, given.offs, keep_fp8=keep_fp8).backward(given.grad)
    assert called == ["quantize_colwise_transpose_3d"]
    called.clear()
    fp8_grouped_mm(given.A, weights.transpose(1, 2), given.offs, keep_fp8=keep_fp8).backward(given.grad)
    assert called == ["quantize_rowwise_colwise"]
    called.clear()
    ran = grouped_mm_operators.run
    monkeypatch.setattr(grouped_mm_operators, "run", lambda spec, *rest: called.append(spec.name) or ran(spec, *rest))
    fp8_grouped_mm(A, weights.transpose(1, 2), given.offs, keep_fp8=keep_fp8).backward(given.grad)
    assert called == ["quantize_colwise_transpose_3d", "quantize_rowwise_colwise", "rowwise-colwise"]


def test_an_operand_that_is_none_is_refused(device: str) -> None:
    given = layer("balanced", device)
    with pytest.raises(ValueError, match=r"^keep_fp8 has 'B', 'grad', wanted 'A' and 'B_t'"):
        fp8_grouped_mm(given.A, given.B_t, given.offs, keep_fp8=("grad", "A", "B"))
