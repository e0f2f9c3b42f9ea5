"""Loading of what ``bench`` times: registered operations, and kernels as operations of one launch."""

from __future__ import annotations

import functools
import importlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from fp8tune import registry
from fp8tune.errors import UsageError, unknown
from fp8tune.measure import edges
from fp8tune.measure.checking import Tensors
from fp8tune.measure.comparing import Rule
from fp8tune.records import Device, NamedInts
from fp8tune.replay.loading import load_spec
from fp8tune_kernels.operations.operation import Call, Make, Operation, Size
from fp8tune_kernels.spec import KernelSpec

if TYPE_CHECKING:
    import torch

OURS = "fp8tune"
FAULT_CHARACTERS = 120


@functools.cache
def load(reference: str, *, is_kernel: bool) -> Operation:
    """Return an operation by its name, or a kernel as ``sweep --kernel`` names it. Raises UsageError."""
    if is_kernel:
        return of_kernel(load_spec(reference))
    paths = registry.registered(registry.OPERATIONS)
    if reference not in paths:
        raise unknown("operation", reference, tuple(paths))
    module, _, attribute = paths[reference].partition(":")
    try:
        operation = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"operation {reference} cannot be imported from {paths[reference]}: {error}") from None
    if not isinstance(operation, Operation):
        raise UsageError(f"operation {reference} is no Operation: {paths[reference]} is {type(operation).__name__}")
    return operation


class _Inputs(NamedTuple):
    size: Size
    values: tuple[Any, ...]
    device: torch.device


@dataclass(frozen=True)
class KernelOperation(Operation):
    """One launch of a kernel, right by the kernel's own check."""

    spec: KernelSpec = None  # type: ignore[assignment]  # always given; a default, because the base has defaults

    def bytes_of(self, size: Size) -> int:
        """Return the bytes that the spec declares."""
        return self.spec.bytes_of(size)

    def checked_on(self, size: Size, inputs: _Inputs) -> AbstractContextManager[None]:
        """Put integers into inputs whose sums are compared byte for byte."""
        return edges.exact_values(self.spec, size, inputs.values)

    def compare(self, outputs: tuple[Any, ...], expected: tuple[Any, ...]) -> tuple[str, dict[str, float]]:
        """Return how the outputs differ from the reference, or an empty text. E8M0 scales may come as uint8."""
        import torch

        rule = Rule.from_spec(self.spec)
        if len(outputs) != len(expected):
            return f"{len(outputs)} outputs, expected {len(expected)}", {}
        for number, (output, right) in enumerate(zip(outputs, expected, strict=True)):
            if right.dtype == torch.float8_e8m0fnu and output.dtype == torch.uint8:
                right = right.view(torch.uint8)
            if output.shape != right.shape:
                return f"output {number} has shape {tuple(output.shape)}, expected {tuple(right.shape)}", {}
            if output.dtype != right.dtype and not rule.tolerance:
                return f"output {number} is {output.dtype}, expected {right.dtype}", {}
            if fault := rule.difference(output, right):
                return f"output {number}: {fault}"[:FAULT_CHARACTERS], {}
        return "", {}


def of_kernel(spec: KernelSpec) -> KernelOperation:
    """Return a kernel with the other implementations of it that are known."""

    def ours(inputs: _Inputs) -> Call:
        from fp8tune_kernels.runtime.lookup import config_for

        outputs = spec.outputs(*inputs.values)
        if spec.unwritten is not None:
            spec.unwritten(inputs.values, outputs)
        tensors = Tensors(spec, inputs.size, inputs.values, outputs, ())
        config = config_for(spec, tuple(spec.lookup_key(inputs.size).values()), inputs.device)
        return Call(tensors.launcher(NamedInts(config)), read=lambda _: tensors.written)

    def rival(name: str) -> Make:
        def make(inputs: _Inputs) -> Call:
            from fp8tune_kernels.operations.rivals import rivals

            return rivals(spec)[name](inputs.values)

        return make

    def make_inputs(size: Size, torch_device: str) -> _Inputs:
        import torch

        is_cuda = torch_device == "cuda"
        device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device(torch_device)
        return _Inputs(size, spec.inputs(size, torch_device), device)

    return KernelOperation(
        name=spec.name,
        title=f"{spec.name}, one launch",
        sizes=lambda row, label: ((shape, label) for shape in spec.problems(row)),
        inputs=make_inputs,
        reference=lambda inputs: spec.reference(*inputs.values),
        results=(),
        ours={OURS: ours},
        baseline={},
        rivals={name: rival(name) for name in ("torch.compile", "torchao")},
        flops=lambda shape: spec.flops(shape) if spec.flops else 0,
        bytes_moved=spec.bytes_moved,
        shapes="starting-line",
        spec=spec,
    )


def exported_config(operation: Operation, size: Size, device: Device) -> NamedInts | None:
    """Return the config that a kernel's launch takes: the table's, else the default. None for other operations."""
    if not isinstance(operation, KernelOperation):
        return None
    from fp8tune_kernels.runtime import lookup
    from fp8tune_kernels.runtime.user_tables import of_kernel as rows_of
    from fp8tune_kernels.runtime.user_tables import user_table
    from fp8tune_kernels.tables import overlay

    spec = operation.spec
    table = overlay(rows_of(spec, user_table(device.arch)), lookup.table(device.arch))
    return NamedInts(lookup.pick(spec, spec.lookup_key(size), table, device.name))
