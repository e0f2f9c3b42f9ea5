"""What is timed for a kernel, as arms: ours, ``torch.compile``, torchao, the copy, and host times.

Every contender is timed as callers run it: ours launches its exported config on outputs that are there already, the
others allocate theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fp8tune_kernels
from fp8tune.bench import checking
from fp8tune.bench.cells import Contender, Timing, guarded
from fp8tune.bench.counterparts import Implementation, compiled, counterpart
from fp8tune.bench.host import host_us
from fp8tune.bench.plain import expression
from fp8tune.errors import UsageError
from fp8tune.measure import edges, tensor_cache, trial
from fp8tune.measure.arms import Arm, Work
from fp8tune.measure.checking import Tensors
from fp8tune.measure.comparing import Rule
from fp8tune.plan.problems import problems
from fp8tune.records import Device, NamedInts, Problem
from fp8tune.replay.loading import load_spec
from fp8tune_kernels import catalog
from fp8tune_kernels.spec import KernelSpec

OURS = "fp8tune"
TORCH_COMPILE = "torch.compile"
TORCHAO = "torchao"
TORCH_ADD = "torch.add"
"""What host times are compared with: the addition of two 64x64 matrices."""

WRAPPERS = {
    "grouped-rows": "multiply_rows",
    "grouped-contraction": "contract_rows",
    "transposed-codes": "transpose_codes",
    "transposed-codes-3d": "transpose_codes_3d",
    "swiglu-rowwise": "quantize_swiglu_rowwise",
    "swiglu-gradient": "quantize_swiglu_gradient",
    "expert-sort": "sort_by_expert",
    "gathered-rows": "multiply_gathered_rows",
    "gathered-transpose": "transpose_gathered_codes",
    "gather-sum": "sum_rows_of_tokens",
    "shifted-transpose-3d": "transpose_codes_to_one_scale",
    "cast-transpose-3d": "cast_and_transpose",
}
"""The wrappers that take the inputs of a kernel as they are."""

HOST_ROW = NamedInts(M=64, K=64, N=64, E=1)
COPIED_BYTES = 512 << 20


@dataclass(frozen=True)
class Copy(Arm):
    """The device-to-device copy of :mod:`fp8tune.ceiling`."""

    @property
    def work(self) -> Work:
        """Bytes read plus written."""
        return Work("copy", 2 * COPIED_BYTES)

    def launcher(self, torch_device: str) -> Callable[[], object]:
        """Copies random bytes."""
        import torch

        source = torch.randint(0, 255, (COPIED_BYTES,), dtype=torch.uint8, device=torch_device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)


@dataclass(frozen=True)
class Gemm(Arm):
    """The dense GEMM of :mod:`fp8tune.ceiling`."""

    in_dtype: str

    @property
    def work(self) -> Work:
        """Bytes of both inputs and the output, about."""
        return Work(f"GEMM {self.in_dtype}", 6 * trial.GEMM_SIZE**2)

    def launcher(self, torch_device: str) -> Callable[[], object]:
        """Raises what torch raises where there is no GEMM of the dtype."""
        return trial.gemm(self.in_dtype, torch_device)


@dataclass(frozen=True)
class KernelContender(Contender):
    """:data:`OURS`, :data:`TORCH_COMPILE` or :data:`TORCHAO` on a problem of a kernel."""

    reference: str
    """How workers load the spec."""
    bytes_moved: int
    config: NamedInts
    """What ours is launched with."""

    @property
    def work(self) -> Work:
        """The least bytes any implementation moves."""
        return Work(f"{self.name} {self.problem}", self.bytes_moved)

    def build(self, torch_device: str) -> None:
        """The problem's inputs, once. Those of another are freed, with what was compiled for its sizes."""
        import torch

        if (self.reference, self.problem) in _inputs:
            return
        _inputs.clear()
        _made.clear()
        _expected.clear()
        torch.compiler.reset()  # each problem is a first one: no recompilation limit, no dynamic sizes
        tensor_cache.give_back_memory()
        _inputs[self.reference, self.problem] = load_spec(self.reference).inputs(self.problem, torch_device)

    def launcher(self, torch_device: str) -> Callable[[], object]:
        """Raises MachineError where torchao has nothing, and what ``torch.compile`` raises."""
        if _expected:  # nothing of the check is left beside what is timed
            _expected.clear()
            tensor_cache.give_back_memory()
        return self._implementation().launch

    def check(self) -> Timing:
        """Ours is launched on spoiled outputs; the others get memory that does not hold the answer either."""
        mine, spec, given = self._implementation(), load_spec(self.reference), _inputs[self.reference, self.problem]
        rule = Rule.of(spec)
        with edges.exact_values(spec, self.problem, given):
            if not _expected:  # computed once, kept until something is timed
                _expected.extend(spec.reference(*given))
            if self.name == OURS:
                outputs = mine.read(None)
                checking.spoil(outputs, _expected, rule)
                if spec.unwritten is not None:
                    spec.unwritten(given, tuple(outputs))
            else:
                tensor_cache.give_back_memory()  # no block is left that held another contender's right answer
                checking.spoil_free_memory(_expected)
            found = checking.compared(mine.read(mine.launch()), _expected, rule)
        return Timing(reason=found.wrong, checked=found)

    def _implementation(self) -> Implementation:
        """Checks and rounds launch what the first of them has made."""
        if self.name in _made:
            return _made[self.name]
        spec, inputs = load_spec(self.reference), _inputs[self.reference, self.problem]
        if self.name == TORCHAO:
            made = counterpart(spec.name, inputs)
        elif self.name == TORCH_COMPILE:
            formulas = expression(spec)
            made = Implementation(compiled(lambda: formulas(*inputs)))
        else:
            tensors = Tensors(spec, self.problem, inputs, spec.outputs(*inputs), ())
            made = Implementation(tensors.launcher(self.config), lambda _: tensors.written)
        return _made.setdefault(self.name, made)


# In the worker, of the problem in hand: a large one fills much of a GPU

_inputs: dict[tuple[str, Problem], tuple[Any, ...]] = {}
_made: dict[str, Implementation] = {}
_expected: list[Any] = []
"""What the reference gives."""


def exported_config(spec: KernelSpec, problem: Problem, device: Device) -> NamedInts:
    """What the public wrapper launches on a problem: the table's config, else the declared default."""
    from fp8tune_kernels.runtime import lookup
    from fp8tune_kernels.runtime.user_tables import of_kernel, overlay, user_table

    exported = overlay(of_kernel(spec, user_table(device.arch)), lookup.table(device.arch))
    return NamedInts(lookup.pick(spec, spec.lookup_key(problem), exported, device.name))


# Host time


@dataclass(frozen=True)
class HostCall(Arm):
    """One operator call on a 64x64 input: :data:`OURS` (the public wrapper), :data:`TORCHAO` or :data:`TORCH_ADD`."""

    name: str
    reference: str
    kernel: str

    @property
    def work(self) -> Work:
        """No bytes."""
        return Work(f"host {self.name} {self.kernel}", 0)

    def launcher(self, torch_device: str) -> Callable[[], object]:
        """The call."""
        import torch

        if self.name == TORCH_ADD:
            x = torch.randn(64, 64, dtype=torch.bfloat16, device=torch_device)
            return lambda: torch.add(x, x)
        spec = load_spec(self.reference)
        wrapper = public_wrapper(spec)
        inputs = spec.inputs(problems(spec, [HOST_ROW])[0], torch_device)
        if self.name == TORCHAO:
            return counterpart(spec.name, inputs).launch
        arguments = wrapper_arguments(spec, inputs)
        return lambda: wrapper(*arguments)


def host_time(call: Arm) -> Timing:
    """The median over calls that only enqueue. Raises Poisoned as the other cells do."""
    return guarded(lambda: Timing(host_us(call.launcher("cuda"))))


def wrapper_arguments(spec: KernelSpec, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the public wrapper is called with: a GEMM's takes all inputs, another's the tensors, and has defaults."""
    import torch

    return inputs if spec.name in WRAPPERS else tuple(x for x in inputs if isinstance(x, torch.Tensor))


def public_wrapper(spec: KernelSpec) -> Callable[..., Any]:
    """``quantize_colwise`` of ``colwise``, ``multiply_rows`` of ``grouped-rows``. Raises UsageError for a kernel that
    lives elsewhere."""
    if spec.name not in catalog.KERNELS:
        raise UsageError(f"{spec.name} lives elsewhere: its public wrapper is not known")
    name = WRAPPERS.get(spec.name) or f"quantize_{spec.name.replace('-', '_')}"
    wrapper: Callable[..., Any] = getattr(fp8tune_kernels, name)
    return wrapper
