"""Problems of a spec with the awkward contents every kernel must be right on, and the comparison bit for bit."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from fp8tune.measure.edges import fill
from fp8tune_kernels import catalog
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

QUANTIZING = catalog.QUANTIZERS
"""All kernels but the GEMMs, whose sums need values of their own, and those that move codes."""

CONTENTS = (*(content for content in DECLARED_CONTENTS if content != "integers"), "zero slices")
"""Integers are for kernels that add."""

SHORT_LEAD = 1
"""What the interpreter takes for every ``LEAD`` above 0. The grid's are longer than all pieces of a problem that it can
run: no turn would then take maxima and cast as well, and each would be waited for with hundreds of idle turns."""


def leads(spec: KernelSpec) -> list[dict[str, int]]:
    """What the interpreter takes for the values of ``LEAD``: walking twice, panels; nothing of a kernel without it."""
    values = sorted({min(lead, SHORT_LEAD) for lead in spec.axes.get("LEAD", ())})
    return [{"LEAD": value} for value in values] or [{}]


def varied(spec: KernelSpec, config: NamedInts, names: list[str]) -> list[NamedInts]:
    """The config with every combination of these axes' values."""
    configs = [config]
    for name in names:
        configs = [NamedInts({**each, name: value}) for each in configs for value in spec.axes[name]]
    return configs


def configs(spec: KernelSpec) -> list[NamedInts]:
    """On a GPU: every combination of block sizes and leads that the spec does not rule out there, each with other
    launch options."""
    limits = ARCHES[running_arch(torch.device("cuda", 0))].limits()
    shape = next(spec.problems({"M": 131072, "K": 8192, "N": 8192, "E": 4}))
    options = [name for name in spec.axes if name in LAUNCH_OPTIONS]
    sizes = varied(spec, spec.default, [name for name in spec.axes if name not in options])
    found = []
    for number, blocks in enumerate(sizes):
        valid = [config for config in varied(spec, blocks, options) if spec.invalid(config, shape, limits) is None]
        found += valid[number % len(valid) :][:1] if valid else []
    return found


def config_factors(spec: KernelSpec) -> dict[str, Any]:
    """On a GPU whole configs, as each is code of its own. The interpreter runs the same code for all: each block size
    is a factor, and every pair of them occurs."""
    if torch.cuda.is_available():
        return {"config": configs(spec)}
    return {
        **{name: values for name, values in spec.axes.items() if name not in (*LAUNCH_OPTIONS, "LEAD")},
        **({"LEAD": [lead["LEAD"] for lead in leads(spec)]} if "LEAD" in spec.axes else {}),
    }


def config_of(spec: KernelSpec, case: Mapping[str, Any]) -> NamedInts:
    """The config of a case of :func:`config_factors`."""
    own = {name: value for name, value in case.items() if name in spec.axes}
    return NamedInts({**case.get("config", spec.default), **own})


def factors(spec: KernelSpec) -> dict[str, Any]:
    """What the checks vary, for a covering array: every pair of values occurs."""
    return {
        **config_factors(spec),
        "routing": ROUTINGS if spec.routed else ("none",),
        "rows": tuple(ROWS),
        "content": CONTENTS,
        "input_layout": spec.input_layouts,
        "in_dtype": ("bfloat16", "float32", "float16"),
        "fp8_dtype": fp8_dtypes(),
        "scale_mode": spec.scale_modes,
    }


PROBLEM = ("rows", "routing", "input_layout", "in_dtype", "fp8_dtype", "scale_mode")
"""The factors that make a problem."""


def fp8_dtypes() -> tuple[str, ...]:
    """The formats that this machine's kernels can write."""
    on_nvidia = torch.cuda.is_available() and not torch.version.hip
    return ("float8_e4m3fn", "float8_e5m2") if on_nvidia else ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz")


CUT = {
    "colwise": {"K": "BLOCK_SIZE", "M": "BLOCK_SIZE_ITER"},
    "colwise-3d": {"N": "BLOCK_SIZE_N", "K": "BLOCK_SIZE_K"},
    "colwise-dual": {"N": "BLOCK_SIZE", "K": "BLOCK_SIZE", "M": "BLOCK_SIZE_ITER"},
    "colwise-transpose-3d": {"K": "BLOCK_SIZE", "N": "BLOCK_SIZE_ITER"},
    "mxfp8-dim0": {"M": "BLOCK_SIZE_M", "K": "BLOCK_SIZE_K"},
    "mxfp8-dim1": {"M": "BLOCK_SIZE_M", "K": "BLOCK_SIZE_K"},
    "mxfp8-dim1-3d": {"N": "BLOCK_SIZE_N", "K": "BLOCK_SIZE_K"},
    "mxfp8-dim1-3d-via-2d": {"N": "BLOCK_SIZE_M", "K": "BLOCK_SIZE_K"},
    "rowwise": {"N": "BLOCK_SIZE", "M": "BLOCK_SIZE_ITER"},
    "rowwise-2d": {"M": "BLOCK_SIZE", "K": "BLOCK_SIZE_ITER"},
    "rowwise-colwise": {"K": "BLOCK_SIZE", "M": "BLOCK_SIZE_ITER"},
    "rowwise-factored": {"M": "BLOCK_SIZE_M", "K": "TILE"},
    "transpose-3d-atomic": {"K": "BLOCK_SIZE_K", "N": "BLOCK_SIZE_N"},
    "transpose-3d-reduction": {"K": "BLOCK_SIZE_K", "N": "BLOCK_SIZE_N"},
    "transposed-codes": {"K": "BLOCK_SIZE_K", "M": "BLOCK_SIZE_M"},
    "transposed-codes-3d": {"K": "BLOCK_SIZE_K", "N": "BLOCK_SIZE_M"},
}
"""Kernel -> the dims of its problems that an axis cuts into blocks."""


def round_shape(kernel: str, config: NamedInts) -> NamedInts:
    """A shape as a sweep times them, but small: two of each block, nothing left over of any."""
    dims = next(catalog.load(kernel).problems({"M": 16, "K": 16, "N": 16, "E": 1}))
    return NamedInts([(dim, 2 * config[CUT[kernel][dim]] if dim in CUT[kernel] else 2) for dim in dims])


def problem(spec: KernelSpec, rows: str, config: NamedInts, **fields: Any) -> Problem:
    """The first problem of the spec in one of :data:`ROWS`. No dim has more than two of the config's blocks and a part
    of a third: the interpreter takes as long for each block."""
    one = spec.scaled_down(Problem(spec.name, next(spec.problems(ROWS[rows])), **fields))
    most = {dim: 2 * config[axis] + 11 for dim, axis in CUT[spec.name].items()}
    return replace(one, shape=NamedInts([(dim, min(size, most.get(dim, size))) for dim, size in one.shape.items()]))


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
    if spec.constrain is not None:
        spec.constrain(inputs)
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
