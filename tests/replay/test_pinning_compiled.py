"""Launches that torch traces are pinned with any torch, or one warning says why not."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from test_pinning_reach import CONFIGS, TABLE, Jitted

from fp8tune_kernels.pinning import compiled, pin, pin_report, unpin
from fp8tune_kernels.pinning.registry import pins


class Variable:
    """Stand-in for the launch of a kernel in traced code."""

    def __init__(self, kernel: Any, kernel_idx: int | None, grid: Any, **_: Any) -> None:
        self.kernel, self.kernel_idx, self.grid = kernel, kernel_idx, grid


class Tracer:
    """Stand-in for the tracer of torch 2.11."""

    def call_triton_kernel(self, variable: Any, args: Any, kwargs: Any, tx: Any) -> list[Any]:
        return [config.kwargs["BLOCK"] for config in variable.kernel.configs]


class NewerTracer(Tracer):
    """Stand-in for the tracer of torch 2.12 and later."""

    def recreate_variable(self, variable: Any, *, kernel: Any, kernel_idx: int | None, grid: Any) -> Any:
        return type(variable)(kernel, kernel_idx, grid, kernel_source="here")


class Renamed(Tracer):
    """Stand-in for an unknown tracer, whose parameters have other names."""

    def call_triton_kernel(self, launched: Any, *rest: Any) -> list[Any]:  # type: ignore[override]
        return Tracer.call_triton_kernel(self, launched, *rest)


class Refusing(Tracer):
    """Stand-in for an unknown tracer, which makes launches otherwise."""

    def recreate_variable(self, launch: Any) -> Any:
        raise AssertionError(launch)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    unpin()
    yield
    unpin()


def traced(tracer: Any, times: int = 1) -> list[Any]:
    kernel = triton.autotune(CONFIGS, key=["n"])(Jitted())
    pin(TABLE, kernel)
    kind = type(tracer.__name__, (tracer,), {"call_triton_kernel": tracer.call_triton_kernel})
    compiled._patch(lambda item: pins.get(id(item)), SimpleNamespace(TritonHOPifier=kind))  # type: ignore[arg-type]
    return [kind().call_triton_kernel(Variable(kernel, 3, (1,)), [4096], {}, None) for _ in range(times)]


@pytest.mark.parametrize("tracer", [Tracer, NewerTracer])
def test_a_traced_launch_has_the_config_of_the_table(tracer: Any) -> None:
    assert traced(tracer) == [[256]]
    assert pin_report()["unpinned"] == []


@pytest.mark.parametrize("tracer", [Renamed, Refusing])
def test_an_unknown_torch_tunes_the_kernel_and_one_warning_says_so(
    tracer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert traced(tracer, times=2) == [[config.kwargs["BLOCK"] for config in CONFIGS]] * 2
    (row,) = pin_report()["unpinned"]
    assert "inside torch.compile" in row["reason"]
    assert [record.getMessage().count("is not pinned") for record in caplog.records].count(1) == 1


@pytest.mark.parametrize("module", [SimpleNamespace(), SimpleNamespace(TritonHOPifier=object)])
def test_a_torch_without_such_a_tracer_is_a_row(module: Any) -> None:
    compiled._patch(pins.get, module)
    assert "TritonHOPifier" in pin_report()["unpinned"][0]["reason"]
