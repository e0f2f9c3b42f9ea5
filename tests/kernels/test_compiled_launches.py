"""A compiled layer launches what an eager one launches: the same kernels with the same grids, and no copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from triton.runtime.interpreter import GridExecutor

from fp8tune_kernels import choose_experts, interpreter, moe_layer

T, K, N, E, TOP_K = 48, 64, 48, 5, 3

NO_LAUNCH = {
    "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "lift_fresh", "mT", "new_empty",
    "permute", "reshape", "resolve_conj", "result_type", "scalar_tensor", "select", "slice", "t", "to", "transpose",
    "unsqueeze", "view", "_reshape_alias", "_unsafe_view",
}  # fmt: skip
"""Operations that make a view or a number, allocate, or do nothing where they call no other operation."""

KERNEL = "kernel "


@pytest.fixture(autouse=True)
def only_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Note launches of Triton kernels in place of interpreting them. All tensors are zeros: indices stay in range."""

    def note(self: GridExecutor, *arguments: Any, **_: Any) -> None:
        with record_function(f"{KERNEL}{self.fn.__name__} {self.grid}"):
            for argument in arguments:
                if isinstance(argument, torch.Tensor):
                    argument.data.zero_()  # without a new version: autograd saved some

    monkeypatch.setattr(GridExecutor, "__call__", note)
    torch._dynamo.reset()


def launches(call: Callable[[], Any]) -> list[str]:
    """Kernels with their grids, and torch's operations that compute or copy, in the order they run."""
    call()  # compiles
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        call()
    names = []
    for event in profiled.events():
        is_launch = event.name.startswith(KERNEL)
        is_operation = event.name.startswith("aten::") and not event.cpu_children
        computes = is_operation and event.name.removeprefix("aten::") not in NO_LAUNCH
        if is_launch or (computes and not _in_kernel(event)):
            names.append(event.name)
    return names


def _in_kernel(event: Any) -> bool:
    while event is not None:
        if event.name.startswith(KERNEL):
            return True
        event = event.cpu_parent
    return False


CASES: dict[str, dict[str, Any]] = {
    "plain": {"precision": "fp8"},
    "float32": {"precision": "bf16"},
    "recomputed, weights not kept": {"precision": "fp8", "recompute": "gate-up", "keep_weights": False},
    "biases": {"precision": "fp8", "activation": "gpt-oss", "layout": "interleaved"},
    "biases in bfloat16": {"precision": "bf16", "activation": "gpt-oss", "layout": "interleaved"},
}


@pytest.mark.parametrize("case", CASES)
def test_a_compiled_layer_launches_the_same_kernels(case: str) -> None:
    assert interpreter.INTERPRETED
    dtype = torch.float32 if case == "float32" else torch.bfloat16

    def leaf(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    leaves = [leaf(T, K), leaf(E, 2 * N, K), leaf(E, K, N), leaf(T, E)]
    if "biases" in case:
        leaves += [leaf(E, 2 * N), leaf(E, K)]

    def layer(x: Any, w13: Any, w2: Any, logits: Any, b13: Any = None, b2: Any = None) -> torch.Tensor:
        chosen = choose_experts(logits, TOP_K)
        return moe_layer(x, w13, w2, *chosen, b13=b13, b2=b2, **CASES[case])

    def step(function: Callable[..., torch.Tensor]) -> Any:
        return torch.autograd.grad(function(*leaves), leaves, grad)

    grad = torch.zeros(T, K, dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=False)
    eager, traced = launches(lambda: step(layer)), launches(lambda: step(compiled))
    assert sum(name.startswith(KERNEL) for name in eager) > 7
    assert sorted(traced) == sorted(eager)  # autograd and the compiler may order independent steps in two ways
