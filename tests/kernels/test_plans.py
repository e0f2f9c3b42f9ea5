"""A pass that is launched again from its plan: the same results on other operands, and when it is worked out anew."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8tune_kernels.runtime import launching, lookup, plans

N = 300


@dataclass
class OnGpu:
    """A CPU tensor that says it is on a GPU."""

    tensor: torch.Tensor

    is_cuda = True
    device = torch.device("cpu")

    def get_device(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


class AddKernel:
    """Adds the first two arrays of int32 into the third, by address."""

    arg_names = ("x_ptr", "y_ptr", "sum_ptr", "n")
    fn = "add"

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def own_way(x: OnGpu, y: OnGpu, total: OnGpu, n: int) -> Any:
            add(x.data_ptr(), y.data_ptr(), total.data_ptr(), n)
            return SimpleNamespace(function=0, packed_metadata=0, run=lambda *given: add(*given[-4:]))

        return own_way


def add(x: int, y: int, total: int, n: int) -> None:
    array = ctypes.c_int32 * n
    both = zip(array.from_address(x), array.from_address(y), strict=True)
    array.from_address(total)[:] = [one + other for one, other in both]


@dataclass
class Doubling:
    """A pass: 2x + y in scratch memory, and that added to what begins as zeros."""

    calls: int = 0

    def __call__(self, x: OnGpu, y: OnGpu) -> torch.Tensor:
        self.calls += 1
        n = len(x.tensor)
        twice, both = (OnGpu(torch.full((n,), 99, dtype=torch.int32)) for _ in range(2))
        zeros = OnGpu(launching.zeros(n, torch.device("cpu")))
        result = OnGpu(torch.full((2 * n,), 9.0, dtype=torch.bfloat16))  # int32 in the memory of bfloat16
        for tensors in ((x, x, twice), (twice, y, both), (both, zeros, result)):
            launching.launch_kernel(AddKernel(), 1, tensors, (n,), (), {})  # type: ignore[arg-type]
        return result.tensor


@pytest.fixture
def doubling(monkeypatch: pytest.MonkeyPatch) -> Doubling:
    monkeypatch.setattr(launching, "_REMEMBERS", True)
    monkeypatch.setattr(launching, "_binaries", {})
    active = SimpleNamespace(get_current_stream=lambda device: 0)
    monkeypatch.setattr(launching, "driver", SimpleNamespace(active=active))
    plans._plans.clear()
    return Doubling()


def call(run: Doubling, seed: int, n: int = N, at: int = 0) -> None:
    memory = torch.randint(0, 1000, (2, n + 4), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
    x, y = (OnGpu(row.clone()[at : at + n]) for row in memory)
    found = plans.planned((n,), [x, y], lambda: run(x, y))  # type: ignore[list-item]
    assert torch.equal(found.view(torch.int32), 2 * x.tensor + y.tensor)


def test_from_the_third_call_on_nothing_is_worked_out(doubling: Doubling) -> None:
    for seed in range(6):
        call(doubling, seed)
    assert doubling.calls == 2


def test_another_shape_has_another_plan(doubling: Doubling) -> None:
    for seed in range(4):
        call(doubling, seed)
        call(doubling, seed, n=64)
    assert doubling.calls == 4


def test_tables_that_are_read_again_make_plans_anew(doubling: Doubling) -> None:
    for seed in range(3):
        call(doubling, seed)
    lookup.forget()
    call(doubling, 3)
    assert doubling.calls == 3


def test_operands_that_are_not_aligned_are_launched_as_they_are(doubling: Doubling) -> None:
    for seed in range(4):
        call(doubling, seed)
    call(doubling, 5, at=1)
    assert doubling.calls == 3


def test_one_operand_in_two_places_is_not_planned(doubling: Doubling) -> None:
    x = OnGpu(torch.arange(N, dtype=torch.int32))
    for _ in range(4):
        found = plans.planned((N,), [x, x], lambda: doubling(x, x))  # type: ignore[list-item]
        assert torch.equal(found.view(torch.int32), 3 * x.tensor)
    assert doubling.calls == 4


def test_a_profiler_that_listens_gets_every_launch(doubling: Doubling, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        call(doubling, seed)
    monkeypatch.setattr(launching, "_hooked", lambda: True)
    call(doubling, 3)
    assert doubling.calls == 3


def test_plans_do_not_pile_up(doubling: Doubling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MOST_PLANS", 3)
    for n in range(8, 16):
        call(doubling, 0, n=n)
    assert len(plans._plans) <= 3
