"""On a GPU: kernels are compiled, and no public function waits for the device: each is captured and replayed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from triton.runtime.jit import JITFunction

from fp8tune.bench.kernel_contenders import public_wrapper
from fp8tune.measure.comparing import EXACT
from fp8tune_kernels import catalog, interpreter
from fp8tune_kernels.arches import default_fp8_dtype
from fp8tune_kernels.quantize.rowwise_2d import rowwise_2d_kernel
from fp8tune_kernels.runtime.lookup import running_arch
from fp8tune_kernels.spec import KernelSpec, NamedInts, Problem

pytestmark = pytest.mark.gpu

SIZES = {"M": 1040, "K": 520, "N": 264, "E": 3, "G": 3}

KERNELS = [(kernel, layout) for kernel in catalog.KERNELS for layout in catalog.load(kernel).input_layouts]


def first_problem(spec: KernelSpec, layout: str) -> Problem:
    shape = next(spec.problems(SIZES))
    arch = running_arch(torch.device("cuda", torch.cuda.current_device()))
    return Problem(
        spec.name,
        NamedInts(shape),
        routing="ragged" if spec.routed else "none",
        input_layout=layout,
        fp8_dtype=default_fp8_dtype(arch),
        scale_mode=spec.scale_modes[0],
    )


def test_kernels_are_compiled_here() -> None:
    assert not interpreter.INTERPRETED
    assert isinstance(rowwise_2d_kernel, JITFunction)


@pytest.mark.parametrize(("kernel", "layout"), KERNELS)
def test_a_captured_call_replays_the_right_bytes(kernel: str, layout: str) -> None:
    spec = catalog.load(kernel)
    problem = first_problem(spec, layout)
    inputs = spec.inputs(problem, "cuda")
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    wrapper = public_wrapper(spec)
    wrapper(*tensors)  # a binary is loaded at its first launch, which no capture may contain
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = wrapper(*tensors)
    for seed, routing in enumerate(("one-giant", "empty", "balanced"), 1):
        other = replace(problem, seed=seed, routing=routing if spec.routed else "none")
        for tensor, value in zip(inputs, spec.inputs(other, "cuda"), strict=True):
            if isinstance(tensor, torch.Tensor):
                tensor.copy_(value)
        expected = spec.reference(*inputs)
        for output, right in zip(outputs, expected, strict=True):
            output.view(torch.uint8).copy_(~right.view(torch.uint8))
        graph.replay()
        for output, right in zip(outputs, expected, strict=True):
            assert EXACT.difference(output, right) is None


@pytest.mark.parametrize(("kernel", "layout"), KERNELS)
def test_a_call_on_a_side_stream_is_in_that_streams_order(kernel: str, layout: str) -> None:
    """A launcher that kept the stream of an earlier launch would read the input before it is there."""
    spec = catalog.load(kernel)
    inputs = spec.inputs(first_problem(spec, layout), "cuda")
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    wrapper = public_wrapper(spec)
    wrapper(*tensors)
    expected = spec.reference(*inputs)
    right = tensors[0].clone(memory_format=torch.preserve_format)
    tensors[0].zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # about 10 ms
        tensors[0].copy_(right)
        outputs = wrapper(*tensors)
    stream.synchronize()
    for output, value in zip(outputs, expected, strict=True):
        assert EXACT.difference(output, value) is None
