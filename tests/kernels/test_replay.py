"""Calls that are replayed: the same bytes as the calls, without their Python code, and never where that decides."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fp8tune_kernels import interpreter
from fp8tune_kernels.moe import choose_experts, fp8_steps
from fp8tune_kernels.quantize import rowwise_2d
from fp8tune_kernels.runtime.launching import replayed
from fp8tune_kernels.runtime.lookup import forget

pytestmark = pytest.mark.skipif(not interpreter.INTERPRETED, reason="needs Triton's interpreter")

FP8 = torch.float8_e4m3fn
Counted = tuple[Callable[..., Any], list[None]]


def counted(function: Callable[..., Any]) -> Counted:
    """Return a function that replays, and a list that grows with each call of its Python code."""
    calls: list[None] = []

    def call(*arguments: Any) -> Any:
        calls.append(None)
        return function(*arguments)

    return replayed(call), calls


def bits(tensors: Any) -> Iterator[tuple[Any, ...]]:
    """Yield all that two results could differ in."""
    for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
        codes = tensor.contiguous().flatten().view(torch.uint8).tolist() if tensor.numel() else []
        yield tensor.shape, tensor.stride(), tensor.dtype, codes


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Launch one kernel, and use some of torch's operators and views."""
    q, scales = rowwise_2d.SPEC(x.t().contiguous().t(), FP8, True)
    return q, scales.squeeze(1), scales.new_ones(3, 2)[1:], q.new_empty(0), (x.float() * 2)[:, 1:].t()


def test_a_layout_is_replayed_from_its_third_call_on() -> None:
    call, calls = counted(quantized)
    for number in range(5):
        x = torch.randn(6, 16).bfloat16()
        assert list(bits(call(x))) == list(bits(quantized(x)))
        assert len(calls) == min(number + 1, 2)


def test_each_layout_has_a_recording_of_its_own() -> None:
    call, calls = counted(lambda x, factor: (x * factor,))
    inputs = [torch.randn(6, 16), torch.randn(16, 6).t(), torch.randn(6, 16).double(), torch.randn(97)[1:].view(6, 16)]
    for x in inputs * 3:
        for factor in (2, 3):
            assert list(bits(call(x, factor))) == list(bits((x * factor,)))
    assert len(calls) == 2 * len(inputs) * 2


def test_a_value_of_a_tensor_decides_at_each_call() -> None:
    call, calls = counted(lambda x: (x + 1 if x.sum().item() > 0 else x - 1,))
    for sign in (1, 1, 1, -1):
        x = torch.ones(4) * sign
        assert torch.equal(call(x)[0], x + sign)
    assert len(calls) == 4


def test_arguments_that_share_memory_are_told_apart() -> None:
    def both(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + y, x.view(-1)[1:] * 2

    call, _ = counted(both)
    for shift in range(4):
        memory = torch.randn(64)
        x, y = memory[:16].view(4, 4), memory[4 * shift : 4 * shift + 16].view(4, 4)
        assert list(bits(call(x, y))) == list(bits(both(x, y)))


def test_memory_is_freed_after_its_last_use() -> None:
    alive: list[list[bool]] = []
    held: list[Any] = []

    def note(x: torch.Tensor) -> None:
        alive.append([reference() is not None for reference in held])
        held.append(weakref.ref(x))

    library = torch.library.Library("fp8tune_test_replay", "DEF")
    library.define("next(Tensor x) -> Tensor")

    def after(x: torch.Tensor) -> torch.Tensor:
        note(x)
        return x + 1

    library.impl("next", after, "CompositeExplicitAutograd")

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.ops.fp8tune_test_replay.next(x)
        return x

    call, calls = counted(chain)
    for _ in range(3):
        alive.clear()
        held.clear()
        result = call(torch.zeros(5))
        assert torch.equal(result, torch.full((5,), 3.0))
        assert alive == [[], [True], [True, False]]  # the argument is the caller's
    assert len(calls) == 2


def test_tables_that_are_read_again_end_recordings() -> None:
    call, calls = counted(lambda x: (x + 1,))
    for _ in range(3):
        call(torch.zeros(3))
    forget()
    call(torch.zeros(3))
    assert len(calls) == 3


def a_layer(seed: int, of: Callable[[str], Any]) -> list[Any]:
    """Return all that the steps of a forward and a backward pass make; ``of``: a step by its name."""
    torch.manual_seed(seed)
    T, K, N, E, top_k = 7, 32, 16, 3, 2
    w13, w2 = torch.randn(E, 2 * N, K).bfloat16(), torch.randn(E, K, N).bfloat16()
    x, grad = torch.randn(T, K).bfloat16(), torch.randn(T, K).bfloat16()
    ids, weights = choose_experts.reference(torch.randn(T, E), top_k)
    of_13, of_2 = fp8_steps.Weights(w13), fp8_steps.Weights(w2)
    gate, keeps = ("swiglu", "halves"), (True, True, True)
    made = of("_forward")(x, of_13, of_2, (ids, weights), (None, None), gate, keeps, FP8)
    *order, q_x, scales_x, q_h, scales_h, _, _, t_13, s_13, t_2, s_2, of_2_columns = made[1:]
    of_2, rows = fp8_steps.Weights(None, None, s_2, t_2, of_2_columns), (order[0], order[2])
    q, scales, dh = of("_down_gradient")(grad, rows, of_2, True, FP8)
    d_w2 = of("_down_weight_gradient")(q, scales, q_h, scales_h, rows, False)
    dy, scales_dy = rowwise_2d.SPEC(torch.randn(T * top_k, 2 * N).bfloat16(), FP8, True)
    dx = of("_input_gradient")(dy, scales_dy, order[:2], fp8_steps.Weights(None, None, s_13, t_13))
    beside = s_13, q_x, scales_x, rows, False, torch.ones(E, 2 * N, K)
    return [*made, q, scales, dh, d_w2, dx, of("_gate_up_weight_gradient")(dy, scales_dy, *beside)]


def test_steps_of_a_layer_replay_to_the_same_bytes() -> None:
    """A buffer that is added to among them."""
    names = "_forward", "_down_gradient", "_input_gradient", "_down_weight_gradient", "_gate_up_weight_gradient"
    steps = {name: counted(getattr(fp8_steps, name)) for name in names}
    for seed in range(4):
        right = list(bits(a_layer(seed, lambda name: getattr(fp8_steps, name))))
        assert list(bits(a_layer(seed, lambda name: steps[name][0]))) == right
    assert [len(calls) for _, calls in steps.values()] == [2] * len(names)
