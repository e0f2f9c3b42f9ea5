"""On a GPU with the memory: inputs of more than 2^31 elements, every output byte compared with the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fp8tune.measure.comparing import EXACT
from fp8tune_kernels import catalog, sum_rows_of_tokens
from fp8tune_kernels.arches import default_fp8_dtype
from fp8tune_kernels.gemm.grouped_contraction import ALIGNMENT
from fp8tune_kernels.gemm.grouped_contraction import SPEC as CONTRACTION
from fp8tune_kernels.groups import padded_rows
from fp8tune_kernels.runtime.lookup import config_for, running_arch
from fp8tune_kernels.spec import KernelSpec, NamedInts, Problem

WORKING_BYTES = 12 << 30
"""What a reference takes on one slice, and what other test processes hold."""

SLICE_ELEMENTS = 1 << 26
"""Of one matrix: what is compared at once."""


@dataclass(frozen=True)
class Large:
    """A problem of more than 2^31 elements, and how it falls into parts that do not depend on each other."""

    shape: NamedInts
    axis: int
    """Of the matrices in and out."""
    scales_axis: int
    """Of the scales; with groups, of the scales as ``(G, columns)``."""
    cuts_groups: bool = False
    """Whether parts are of rows that groups share out, so that a group ends elsewhere in each."""


QUANTIZING = tuple(
    kernel for kernel in catalog.KERNELS if catalog.load(kernel).flops is None and kernel not in catalog.MOE
)
"""The grouped GEMMs and the kernels of a layer have large tests of their own, below."""

WEIGHTS = NamedInts(E=33, N=8192, K=8200)
LARGE = {
    "rowwise-2d": Large(NamedInts(M=262_208, K=8200), axis=0, scales_axis=0),
    "colwise": Large(NamedInts(M=262_200, K=8200, G=5), axis=1, scales_axis=1),
    "rowwise": Large(NamedInts(N=8200, M=262_200, G=5), axis=0, scales_axis=1),
    "colwise-dual": Large(NamedInts(M=262_200, N=8200, K=8200, G=5), axis=1, scales_axis=1),
    "mxfp8-dim0": Large(NamedInts(M=262_208, K=8200), axis=0, scales_axis=0),
    "mxfp8-dim1": Large(NamedInts(M=262_208, K=8200), axis=1, scales_axis=0),
    "colwise-3d": Large(WEIGHTS, axis=0, scales_axis=0),
    "transpose-3d-atomic": Large(WEIGHTS, axis=0, scales_axis=0),
    "transpose-3d-reduction": Large(WEIGHTS, axis=0, scales_axis=0),
    "rowwise-factored": Large(NamedInts(M=262_200, K=8200, G=5), axis=0, scales_axis=0, cuts_groups=True),
    "swiglu-rowwise": Large(NamedInts(M=262_200, N=8200, G=5, keep=1), axis=0, scales_axis=0, cuts_groups=True),
    "swiglu-gradient": Large(NamedInts(M=262_200, N=8200, G=5), axis=0, scales_axis=0, cuts_groups=True),
    "transposed-codes": Large(NamedInts(M=262_200, K=8208, G=5), axis=1, scales_axis=1),
    "transposed-codes-3d": Large(WEIGHTS, axis=0, scales_axis=0),
    "mxfp8-dim1-3d": Large(WEIGHTS, axis=0, scales_axis=0),
    "mxfp8-dim1-3d-via-2d": Large(WEIGHTS, axis=0, scales_axis=0),
}


def last_scale_mode(spec: KernelSpec) -> str:
    """Any where it has none: nothing is scaled."""
    return spec.scale_modes[-1] if spec.scale_modes else "power-of-two"


def large_problem(spec: KernelSpec, layout: str) -> Problem:
    arch = running_arch(torch.device("cuda", torch.cuda.current_device()))
    return Problem(
        spec.name,
        LARGE[spec.name].shape,
        routing="ragged" if spec.routed else "none",
        input_layout=layout,
        in_dtype=spec.in_dtypes[0],
        fp8_dtype=default_fp8_dtype(arch),
        scale_mode=last_scale_mode(spec),
    )


def parts(
    large: Large, inputs: tuple[Any, ...], outputs: tuple[Any, ...], elements: int = SLICE_ELEMENTS
) -> Iterator[tuple[tuple[Any, ...], tuple[torch.Tensor, ...]]]:
    """(inputs, outputs) of one slice after the other, each of about so many elements a matrix."""
    length = inputs[0].shape[large.axis]
    step = max(1, elements * length // inputs[0].numel())
    for start in range(0, length, step):
        count = min(step, length - start)
        yield (
            tuple(_part(value, large, length, start, count) for value in inputs),
            tuple(
                output.narrow(large.scales_axis if index % 2 else large.axis, start, count)
                for index, output in enumerate(outputs)
            ),
        )


def is_large(value: Any, large: Large, length: int) -> bool:
    """Return True for a matrix that is cut, as opposed to factors beside it, offsets, dtypes and modes."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    return value.dim() > large.axis and value.shape[large.axis] == length


def _part(value: Any, large: Large, length: int, start: int, count: int) -> Any:
    if is_large(value, large, length):
        return value.narrow(large.axis, start, count)
    if large.cuts_groups and isinstance(value, torch.Tensor) and value.dtype == torch.int32:
        return (value - start).clamp(0, count).int()
    return value


def by_group(shape: NamedInts, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The outputs that have elements, with group-major scales as ``(G, columns)``."""
    groups = shape.get("G")
    written = (output for output in outputs if output.numel())
    return tuple(output.view(groups, -1) if groups and output.dim() == 1 else output for output in written)


def check_all(spec: KernelSpec, problem: Problem, inputs: tuple[Any, ...]) -> None:
    outputs = spec.outputs(*inputs)
    key = tuple(spec.lookup_key(problem).values())
    exported = NamedInts(config_for(spec, key, inputs[0].device))
    for config in {spec.default, exported}:
        for output in outputs:
            output.view(torch.uint8).fill_(0x5A)
        spec.launch(config, inputs, outputs)
        if spec.unwritten is not None:
            spec.unwritten(inputs, outputs)
        for arguments, results in parts(LARGE[spec.name], inputs, by_group(problem.shape, outputs)):
            expected = by_group(problem.shape, spec.reference(*arguments))
            for index, (output, right) in enumerate(zip(results, expected, strict=True)):
                assert EXACT.difference(output, right) is None, f"{spec.name}, output {index}, {config}"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "layout"),
    [(kernel, layout) for kernel in QUANTIZING for layout in catalog.load(kernel).input_layouts],
)
@pytest.mark.usefixtures("whole_gpu")
def test_more_elements_than_an_int32_counts(kernel: str, layout: str) -> None:
    spec = catalog.load(kernel)
    problem = large_problem(spec, layout)
    meta, large = spec.inputs(problem, "meta"), LARGE[kernel]
    cut = [value for value in meta if is_large(value, large, meta[0].shape[large.axis])]
    assert min(value.numel() for value in cut) > 2**31
    tensors = [value for value in (*meta, *spec.outputs(*meta)) if isinstance(value, torch.Tensor)]
    needed = sum(tensor.nbytes for tensor in tensors) + WORKING_BYTES
    free, _ = torch.cuda.mem_get_info()
    if free < needed:
        pytest.skip(f"needs {needed >> 30} GiB of GPU memory, {free >> 30} are free")
    check_all(spec, problem, spec.inputs(problem, "cuda"))


@pytest.mark.parametrize("kernel", QUANTIZING)
def test_the_parts_of_a_problem_are_all_of_it(kernel: str) -> None:
    """Each part's reference is the whole's, and together they have every element: so nothing escapes the comparison."""
    spec = catalog.load(kernel)
    shape = NamedInts({dim: min(size, 70 if dim in "MNK" else 3) for dim, size in LARGE[kernel].shape.items()})
    inputs = spec.inputs(
        Problem(
            kernel,
            shape,
            "ragged" if spec.routed else "none",
            in_dtype=spec.in_dtypes[0],
            scale_mode=last_scale_mode(spec),
        ),
        "cpu",
    )
    whole = spec.reference(*inputs)
    counts = [0] * len(whole)
    for arguments, right in parts(LARGE[kernel], inputs, by_group(shape, whole), elements=900):
        for index, (single, second) in enumerate(zip(by_group(shape, spec.reference(*arguments)), right, strict=True)):
            assert EXACT.difference(single, second) is None
            counts[index] += single.numel()
    assert [*filter(None, counts)] == [output.numel() for output in whole if output.numel()]


# The grouped GEMMs and the kernels of a layer: some rows of each end


def needs(gigabytes: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gigabytes << 30:
        pytest.skip(f"needs {gigabytes} GiB of GPU memory, {free >> 30} are free")


def ones(*shape: int, seed: int) -> torch.Tensor:
    """1 and -1, of which sums are exact."""
    made = torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda")
    made.view(torch.uint8).random_(0, 2, generator=torch.Generator("cuda").manual_seed(seed)).mul_(0x80).add_(0x38)
    return made


def launched(kernel: str, inputs: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """The first output of the default config, and of one by descriptors where there are some."""
    spec = catalog.load(kernel)
    has_descriptors = torch.cuda.get_device_capability()[0] >= 9
    for descriptors in (0, 2) if has_descriptors and "DESCRIPTORS" in spec.axes else (None,):
        outputs = spec.outputs(*inputs)
        for output in outputs:
            output.view(torch.uint8).fill_(0x5A)
        own = {} if descriptors is None else {"DESCRIPTORS": descriptors}
        spec.launch(NamedInts({**spec.default, **own}), inputs, outputs)
        yield outputs[0]
        del outputs


@pytest.mark.gpu
@pytest.mark.usefixtures("whole_gpu")
@pytest.mark.parametrize(("rows", "N", "K", "G"), [(300, 16384, 8192, 17), (2**17 + 300, 16400, 16, 2)])
def test_experts_and_outputs_of_more_elements_than_an_int32_counts(rows: int, N: int, K: int, G: int) -> None:
    needs(30)
    a, b = ones(rows, K, seed=0), ones(G, N, K, seed=1)
    assert max(b.numel(), rows * N) > 2**31
    offs = torch.tensor([7] * (G - 1) + [rows - 5], dtype=torch.int32, device="cuda")
    last = slice(max(7, rows - 2000), rows - 5)
    right = (a[last].float() @ b[-1].float().t()).bfloat16()
    first = (a[:7].float() @ b[0].float().t()).bfloat16()
    inputs = a, b, offs, torch.ones(rows, device="cuda"), torch.ones(G, N, device="cuda")
    for out in launched("grouped-rows", inputs):
        assert torch.equal(out[last], right)
        assert torch.equal(out[:7], first)
        assert not out[-5:].any()


@pytest.mark.gpu
@pytest.mark.usefixtures("whole_gpu")
@pytest.mark.parametrize(("rows", "N", "K", "G"), [(300, 16384, 8192, 17), (2**18 + 384, 8208, 16, 2)])
def test_gradients_and_operands_of_more_elements_than_an_int32_counts(rows: int, N: int, K: int, G: int) -> None:
    needs(30)
    total = padded_rows(rows, G, ALIGNMENT)
    a, b = ones(N, total, seed=0), ones(K, total, seed=1)
    assert max(a.numel(), G * N * K) > 2**31
    offs = torch.tensor([7] * (G - 1) + [rows], dtype=torch.int32, device="cuda")
    scales = torch.ones(G * N, device="cuda"), torch.ones(G * K, device="cuda")
    inputs = a.t(), b.t(), offs, *scales, ALIGNMENT, None
    CONTRACTION.constrain(inputs)
    place = ALIGNMENT * (G - 1)
    right = (a[-2000:, place:].float() @ b[:, place:].float().t()).bfloat16()
    for out in launched("grouped-contraction", inputs):
        assert torch.equal(out[-1, -2000:], right)
        assert not out[1:-1].any()


@pytest.mark.gpu
@pytest.mark.usefixtures("whole_gpu")
def test_tokens_and_rows_of_more_elements_than_an_int32_counts() -> None:
    """Rows from the end of tokens, of rows and of the output."""
    tokens, columns = 262_200, 8208
    a, b = ones(tokens, columns, seed=0), ones(2, 256, columns, seed=1)
    assert a.numel() > 2**31
    offs = torch.tensor([100, 256], dtype=torch.int32, device="cuda")
    of_rows = torch.arange(tokens - 256, tokens, dtype=torch.int32, device="cuda")
    scales = torch.ones(tokens, device="cuda"), torch.ones(2, 256, device="cuda")
    inputs = a, b, offs, of_rows, *scales
    (right,) = catalog.load("gathered-rows").reference(*inputs)
    for out in launched("gathered-rows", inputs):
        assert torch.equal(out, right)
    (right,) = catalog.load("gathered-transpose").reference(a, offs, of_rows, None)
    for out in launched("gathered-transpose", (a, offs, of_rows, None)):
        assert torch.equal(out[:384].view(torch.uint8), right[:384].view(torch.uint8))
    del a, inputs, right, out
    rows = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
    row_of = torch.arange(tokens, dtype=torch.int32, device="cuda").flip(0).view(-1, 2)
    out = sum_rows_of_tokens(rows, row_of)
    for at in (0, len(row_of) - 1):
        assert torch.equal(out[at], rows[row_of[at].long()].float().sum(0).bfloat16())
