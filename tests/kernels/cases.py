"""Problems of a spec with the awkward contents every kernel must be right on, and the comparison bit for bit."""

from typing import Any

import torch

from fp8tune_kernels.spec import LAUNCH_OPTIONS, ROUTINGS, KernelSpec, NamedInts, Problem

ROWS = {
    "no block divides": {"M": 157, "K": 5003, "N": 67, "E": 3},
    "blocks divide": {"M": 128, "K": 64, "N": 32, "E": 2},
    "one group": {"M": 293, "K": 1100, "N": 50, "E": 1},
    "fewer rows than groups": {"M": 2, "K": 19, "N": 50, "E": 5},
    "no rows": {"M": 0, "K": 40, "N": 33, "E": 2},
    "long experts": {"M": 5, "K": 37, "N": 1109, "E": 2},
}
"""Rows of a shape set; kernels scale them down to what the interpreter can run."""

CONTENTS = ("random", "zeros", "zero slices", "tiny", "huge", "infinite", "nan")


def block_sizes(spec: KernelSpec) -> list[NamedInts]:
    """Every combination of block sizes in the grid, with the default's launch options."""
    names = [name for name in spec.axes if name not in LAUNCH_OPTIONS]
    configs = [dict(spec.default)]
    for name in names:
        configs = [{**config, name: value} for config in configs for value in spec.axes[name]]
    return [NamedInts(config) for config in configs]


def factors(spec: KernelSpec) -> dict[str, Any]:
    """What the checks vary, for a covering array."""
    return {
        "config": block_sizes(spec),
        "routing": ROUTINGS if spec.routed else ("none",),
        "rows": tuple(ROWS),
        "content": CONTENTS,
        "input_layout": spec.input_layouts,
        "in_dtype": ("bfloat16", "float32", "float16"),
        "fp8_dtype": fp8_dtypes(),
        "scale_mode": spec.scale_modes,
    }


def fp8_dtypes() -> tuple[str, ...]:
    """The formats that this machine's kernels can write."""
    on_nvidia = torch.cuda.is_available() and not torch.version.hip
    return ("float8_e4m3fn", "float8_e5m2") if on_nvidia else ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz")


def problem(spec: KernelSpec, rows: str, **fields: Any) -> Problem:
    """The first problem of the spec in one of :data:`ROWS`."""
    shape = next(spec.problems(ROWS[rows]))
    return spec.scaled_down(Problem(spec.name, shape, **fields))


def inputs_of(spec: KernelSpec, one: Problem, content: str, device: str) -> tuple[Any, ...]:
    """The spec's inputs with ``content`` written into their matrices."""
    inputs = spec.inputs(one, device)
    for tensor in inputs:
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            _fill(tensor, content)
    return inputs


def _fill(matrix: torch.Tensor, content: str) -> None:
    limits = torch.finfo(matrix.dtype)
    flat = matrix.as_strided((matrix.numel(),), (1,))  # a view may be transposed
    some = flat[::61]  # neither a dim nor a tile divides by it, so it meets many slices and not all
    if content == "zeros":
        matrix.zero_()
    elif content == "zero slices":
        matrix[..., ::3] = 0
        matrix[..., ::3, :] = 0
    elif content == "tiny":
        matrix.mul_(limits.smallest_normal)  # subnormals and signed zeros
    elif content == "huge":
        matrix.clamp_(-1, 1).mul_(limits.max)
    elif content in ("infinite", "nan"):
        some.fill_(float(content[:3]))
        some[::2] *= -1


def poisoned(spec: KernelSpec, inputs: tuple[Any, ...], expected: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Outputs in which every bit is the opposite of what is right."""
    outputs: tuple[torch.Tensor, ...] = spec.outputs(*inputs)
    for output, right in zip(outputs, expected, strict=True):
        bits(output).copy_(~bits(right))
    return outputs


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers, in the same memory."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def assert_same_bits(outputs: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """Equal dtype, shape, strides and bits; a NaN scale may have any payload."""
    for output, right in zip(outputs, expected, strict=True):
        assert (output.dtype, output.shape, output.stride()) == (right.dtype, right.shape, right.stride())
        different = bits(output) != bits(right)
        if right.dtype == torch.float32:
            different &= ~(output.isnan() & right.isnan())
        assert not different.any(), f"{int(different.sum())} of {right.numel()} differ, first {different.nonzero()[0]}"
