"""Problems of a spec with the awkward contents every kernel must be right on, and the comparison bit for bit."""

from typing import Any

import torch

from fp8tune.measure.edges import fill
from fp8tune_kernels.arches import ARCHES
from fp8tune_kernels.runtime.lookup import running_arch
from fp8tune_kernels.spec import CONTENTS as DECLARED_CONTENTS
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

CONTENTS = (*DECLARED_CONTENTS, "zero slices")

SHORT_LEAD = 1
"""What the interpreter takes for every ``LEAD`` above 0. The grid's are longer than all pieces of a problem that it can
run: no turn would then take maxima and cast as well, and each would be waited for with hundreds of idle turns."""


def block_sizes(spec: KernelSpec) -> list[NamedInts]:
    """Every combination of block sizes in the grid, with the rest of the default."""
    return varied(spec, spec.default, [name for name in spec.axes if name not in (*LAUNCH_OPTIONS, "LEAD")])


def leads(spec: KernelSpec) -> tuple[int, ...]:
    """Whether to walk twice or to work on panels: what the interpreter takes for the values of ``LEAD``, if any."""
    return tuple(sorted({min(lead, SHORT_LEAD) for lead in spec.axes.get("LEAD", ())}))


def with_lead(config: NamedInts, lead: int | None) -> NamedInts:
    """The config with another ``LEAD``; as it is for a kernel without that axis."""
    return config if lead is None else NamedInts({**config, "LEAD": lead})


def varied(spec: KernelSpec, config: NamedInts, names: list[str]) -> list[NamedInts]:
    """The config with every combination of these axes' values."""
    configs = [config]
    for name in names:
        configs = [NamedInts({**each, name: value}) for each in configs for value in spec.axes[name]]
    return configs


def configs(spec: KernelSpec) -> list[NamedInts]:
    """Every combination of block sizes. Where kernels are compiled: with every ``LEAD``, those that the spec does not
    rule out there, each with other launch options, which the interpreter ignores."""
    if not torch.cuda.is_available():
        return block_sizes(spec)
    limits = ARCHES[running_arch(torch.device("cuda", 0))].limits()
    shape = next(spec.problems({"M": 131072, "K": 8192, "N": 8192, "E": 4}))
    options = [name for name in spec.axes if name in LAUNCH_OPTIONS]
    sizes = varied(spec, spec.default, [name for name in spec.axes if name not in options])
    found = []
    for number, blocks in enumerate(sizes):
        valid = [config for config in varied(spec, blocks, options) if spec.invalid(config, shape, limits) is None]
        found += valid[number % len(valid) :][:1] if valid else []
    return found


def factors(spec: KernelSpec) -> dict[str, Any]:
    """What the checks vary, for a covering array: every pair of values occurs, and so every config with every lead."""
    return {
        "config": configs(spec),
        "lead": (not torch.cuda.is_available() and leads(spec)) or (None,),
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
            if content == "zero slices":
                tensor[..., ::3] = 0
                tensor[..., ::3, :] = 0
            else:
                fill(tensor, content)
    return inputs


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
