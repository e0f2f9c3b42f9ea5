"""What `torch.compile` is given beside our kernels: one graph for every kernel, and the reference's bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fp8tune.bench import plain
from fp8tune.measure import edges
from fp8tune.measure.comparing import EXACT
from fp8tune.records import NamedInts, Problem
from fp8tune.replay.loading import load_spec
from fp8tune_kernels.catalog import KERNELS, QUANTIZERS
from fp8tune_kernels.spec import ROUTINGS

SIZES = {"M": 77, "N": 40, "K": 53, "E": 3, "G": 5}
SIZES_OF_GEMMS = {"M": 77, "N": 48, "K": 64, "E": 3, "G": 5}


def inputs_of(kernel: str, routing: str, scale_mode: str, layout: str, **sizes: int) -> tuple[Any, ...]:
    spec = load_spec(kernel)
    own = SIZES if kernel in QUANTIZERS else SIZES_OF_GEMMS
    shape = NamedInts({dim: {**own, **sizes}.get(dim, size) for dim, size in next(spec.problems(own)).items()})
    in_dtype = "float8_e4m3fn" if kernel not in QUANTIZERS and "float8_e4m3fn" in spec.in_dtypes else "bfloat16"
    problem = Problem(kernel, shape, routing if spec.routed else "none", layout, in_dtype, scale_mode=scale_mode)
    inputs = spec.inputs(problem, "cpu")
    with edges.exact_values(spec, problem, inputs):  # sums of random values hang on their order
        return tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in inputs)


def assert_is_the_reference(kernel: str, outputs: tuple[Any, ...], inputs: tuple[Any, ...]) -> None:
    for output, right in zip(outputs, load_spec(kernel).reference(*inputs), strict=True):
        right = right.view(torch.uint8) if right.dtype == torch.float8_e8m0fnu else right
        assert (output.shape, output.dtype) == (right.shape, right.dtype)
        assert EXACT.difference(output, right) is None


def strides_that_count(tensor: torch.Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


@pytest.mark.parametrize("kernel", KERNELS)
def test_it_is_the_reference(kernel: str) -> None:
    spec = load_spec(kernel)
    for routing in ROUTINGS if spec.routed else ("none",):
        for scale_mode in spec.scale_modes or ("",):
            for layout in spec.input_layouts:
                inputs = inputs_of(kernel, routing, scale_mode, layout)
                assert_is_the_reference(kernel, plain.expression(spec)(*inputs), inputs)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_layout_is_the_kernels_where_columns_need_no_padding(kernel: str) -> None:
    spec = load_spec(kernel)
    inputs = inputs_of(kernel, "balanced", (*spec.scale_modes, "")[0], "contiguous", M=64, N=32, K=96)
    outputs = plain.expression(spec)(*inputs)
    assert_is_the_reference(kernel, outputs, inputs)
    assert list(map(strides_that_count, outputs)) == list(map(strides_that_count, spec.reference(*inputs)))


@pytest.mark.parametrize("kernel", KERNELS)
def test_it_is_one_graph_without_a_look_at_the_groups(kernel: str) -> None:
    """Traced, and run as traced: what would lower the graph takes five times as long as its tracing."""
    spec = load_spec(kernel)
    compiled = torch.compile(plain.expression(spec), fullgraph=True, dynamic=False, backend="eager")
    inputs = inputs_of(kernel, "empty", (*spec.scale_modes, "")[0], "contiguous")
    assert_is_the_reference(kernel, compiled(*inputs), inputs)


def test_a_kernel_of_elsewhere_has_its_reference() -> None:
    spec = replace(load_spec("colwise"), name="elsewhere")
    assert plain.expression(spec) is spec.reference
