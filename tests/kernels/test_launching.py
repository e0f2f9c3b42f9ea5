"""Launching again without asking Triton: the same binary, the same arguments, and Triton's own way where it must be."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from fp8tune_kernels.runtime import launching

STREAM = 7
CONFIG = {"BLOCK_SIZE": 32, "num_warps": 4}


@dataclass(frozen=True)
class FakeTensor:
    """Stand-in for a tensor on a GPU with the methods that a launch calls."""

    address: int
    dtype: torch.dtype = torch.bfloat16
    is_cuda: bool = True
    device: int = 0

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return self.device


@dataclass
class FakeKernel:
    """Counts what goes Triton's own way, and keeps the arguments of its binary."""

    own: list[tuple[Any, ...]] = field(default_factory=list)
    again: list[tuple[Any, ...]] = field(default_factory=list)
    arg_names: tuple[str, ...] = ("x_ptr", "q_ptr", "M", "FP8_MAX", "BLOCK_SIZE")

    @property
    def fn(self) -> int:
        return id(self)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def own_way(*arguments: Any, **config: int) -> Any:
            self.own.append((grid, *arguments, config))
            return SimpleNamespace(
                function="function", packed_metadata="packed", run=lambda *values: self.again.append(values)
            )

        return own_way


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    monkeypatch.setattr(launching, "_REMEMBERS", True)
    monkeypatch.setattr(launching, "_binaries", {})
    monkeypatch.setattr(launching, "_launches", {})
    active = SimpleNamespace(get_current_stream=lambda device: STREAM)
    monkeypatch.setattr(launching, "driver", SimpleNamespace(active=active))
    return FakeKernel()


def launch(kernel: FakeKernel, programs: int = 5, M: int = 64, x: FakeTensor | None = None, **config: int) -> None:
    tensors = [x or FakeTensor(4096), FakeTensor(8192, torch.float8_e4m3fn)]
    launching.launch_kernel(kernel, programs, tensors, (M,), (448.0,), {**CONFIG, **config})  # type: ignore[arg-type]


def test_the_second_launch_runs_the_binary_of_the_first(kernel: FakeKernel) -> None:
    launch(kernel)
    launch(kernel, programs=9, M=128, x=FakeTensor(16))
    first = ((5,), FakeTensor(4096), FakeTensor(8192, torch.float8_e4m3fn), 64, 448.0, CONFIG)
    assert kernel.own == [first]
    # the launch option is no parameter; what Triton's launcher is given is what it gives it itself
    hooks = (None, None, None)
    assert kernel.again == [(9, 1, 1, STREAM, "function", "packed", *hooks, 16, 8192, 128, 448.0, 32)]


@pytest.mark.parametrize(
    "second",
    [
        pytest.param({"x": FakeTensor(4096 + 8)}, id="a pointer that is no multiple of 16"),
        pytest.param({"x": FakeTensor(4096, torch.float32)}, id="another dtype"),
        pytest.param({"x": FakeTensor(4096, device=1)}, id="another device"),
        pytest.param({"M": 65}, id="a size that is no multiple of 16"),
        pytest.param({"M": 1}, id="a size of 1"),
        pytest.param({"M": 1 << 31}, id="a size wider than int32"),
        pytest.param({"BLOCK_SIZE": 64}, id="another constant"),
        pytest.param({"num_warps": 8}, id="another option"),
    ],
)
def test_what_triton_specializes_on_is_another_binary(kernel: FakeKernel, second: dict[str, Any]) -> None:
    launch(kernel)
    launch(kernel, **second)
    assert (len(kernel.own), len(kernel.again)) == (2, 0)
    launch(kernel, **second)
    assert (len(kernel.own), len(kernel.again)) == (2, 1)


def test_rows_that_never_repeat_run_one_binary_and_fill_no_memory(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "MOST_LAUNCHES", 8)
    for rows in range(160, 160 + 16 * 40, 16):
        launch(kernel, M=rows)
    assert (len(kernel.own), len(kernel.again)) == (1, 39)
    assert len(launching._launches) <= 8
    assert [values[11] for values in kernel.again] == list(range(176, 160 + 16 * 40, 16))


def test_profilers_debuggers_and_tensors_elsewhere_go_tritons_own_way(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(kernel)
    with monkeypatch.context() as patch:
        patch.setattr(launching.knobs.runtime.launch_enter_hook, "calls", [print])
        launch(kernel)
    with monkeypatch.context() as patch:
        patch.setattr(launching.knobs.runtime, "debug", True)
        launch(kernel)
    launch(kernel, x=FakeTensor(4096, is_cuda=False))
    monkeypatch.setattr(launching, "_REMEMBERS", False)
    launch(kernel)
    assert (len(kernel.own), len(kernel.again)) == (5, 0)


BACKEND = CUDABackend(GPUTarget("cuda", 90, 32))
SIZES = st.one_of(st.integers(0, 64), st.sampled_from([16640, 1 << 30, (1 << 31) - 1, 1 << 31, 3 << 40]))
TENSORS = st.builds(FakeTensor, st.integers(0, 64), st.sampled_from([torch.bfloat16, torch.float32, torch.int32]))


def chosen_by_triton(tensors: list[FakeTensor], sizes: list[int]) -> list[Any]:
    return [native_specialize_impl(BACKEND, argument, False, True, True) for argument in (*tensors, *sizes)]


def kinds(tensors: list[FakeTensor]) -> list[Any]:
    return [(tensor.dtype,) if tensor.address & 15 else tensor.dtype for tensor in tensors]


@given(*[st.tuples(st.lists(TENSORS, min_size=2, max_size=2), st.lists(SIZES, min_size=2, max_size=2))] * 2)
def test_arguments_that_triton_tells_apart_have_different_keys(
    single: tuple[list[FakeTensor], list[int]], second: tuple[list[FakeTensor], list[int]]
) -> None:
    keys = [
        launching._specialization(SimpleNamespace(fn=0), kinds(tensors), tuple(sizes), (), {})
        for tensors, sizes in (single, second)
    ]
    if chosen_by_triton(*single) != chosen_by_triton(*second):
        assert keys[0] != keys[1]
