"""What is timed of a grouped GEMM, as arms: a step of a contender, and each part of ours."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from fp8tune.bench.cells import Contender, Timing
from fp8tune.bench.layers import Layer
from fp8tune.bench.operation import (
    BF16,
    BOTH,
    FORWARD,
    GRAPH,
    QUANTIZE_WEIGHTS,
    Call,
    Operands,
    Operation,
    elements,
)
from fp8tune.bench.operations import OPERATIONS
from fp8tune.measure import tensor_cache
from fp8tune.measure.arms import Arm, Work
from fp8tune.records import Problem

if TYPE_CHECKING:
    import torch

PADDING = {"pad A": "A", "unpad out": "out", "pad grad": "grad", "unpad grad_A": "grad_A"}
"""Parts of a step that pads -> what they copy."""
FORWARD_PADDING = ("pad A", "unpad out")

LEAST_SQNR_DB = 20.0
"""FP8 and MXFP8 give about 28 dB on normal values, bf16 over 45, unrelated values 0 or less."""

LONG_US = 2000.0
"""A block has five samples of a launch that takes longer, after some that are thrown away. Four flushed launches say as
much in a third of the time: of the steps of the set ``models`` most take longer."""


def operation_of(problem: Problem) -> Operation:
    """What a problem is of."""
    return OPERATIONS[problem.kernel]


def needs_padding(layer: Layer) -> bool:
    """True if a group is empty or no multiple of so many rows: torch's GEMMs do not contract over it as it is."""
    return any(size <= 0 or size % operation_of(layer).multiple for size in layer.group_sizes)


def is_padded(layer: Layer) -> bool:
    """True if our step pads its groups."""
    return operation_of(layer).pads and needs_padding(layer)


def parts_of(layer: Layer) -> tuple[str, ...]:
    """The parts of our step on a layer."""
    parts = tuple(operation_of(layer).parts)
    return (*parts, *PADDING) if is_padded(layer) else parts


def timed_parts(layer: Layer) -> tuple[str, ...]:
    """Those, and the other GEMMs."""
    parts = parts_of(layer)
    return (*parts, *(part for part in operation_of(layer).all_parts if part not in parts))


@dataclass(frozen=True)
class Step(Contender):
    """A contender's forward pass, forward and backward, or these in a CUDA graph; or what quantizes weights once."""

    problem: Layer
    step: str
    long_us: ClassVar[float] = LONG_US

    @property
    def work(self) -> Work:
        """The bytes of the parts; bf16 has GEMMs alone, of values twice as wide."""
        operation = operation_of(self.problem)
        parts = operation.gemms if self.name == BF16 else parts_of(self.problem)
        if self.step == FORWARD:
            parts = tuple(part for part in parts if part in (*operation.forward_parts, *FORWARD_PADDING))
        elif self.step == QUANTIZE_WEIGHTS:
            parts = operation.weight_casts
        elif self.name in operation.once:
            parts = tuple(part for part in parts if part not in operation.weight_casts)
        least_bytes = sum(part_bytes(part, self.problem) for part in parts) * (2 if self.name == BF16 else 1)
        return Work(f"{self.name} {self.step} {self.problem}", least_bytes)

    def build(self, torch_device: str) -> None:
        """The operands."""
        operands_of(self.problem, torch_device)

    def launcher(self, torch_device: str) -> Call:
        """Raises MachineError where a contender cannot take the operands."""
        return step_call(operation_of(self.problem), self.name, self.step, operands_of(self.problem, torch_device))

    def check(self) -> Timing:
        """See :func:`accuracy_of`."""
        import torch

        torch.cuda.empty_cache()  # no result of another contender is left where this one's will be
        return accuracy_of(operation_of(self.problem), self.name, _operands[self.problem])


@dataclass(frozen=True)
class PartOfStep(Arm):
    """One of :func:`timed_parts` of a layer."""

    part: str
    problem: Layer
    long_us: ClassVar[float] = LONG_US

    @property
    def work(self) -> Work:
        """Its least bytes."""
        return Work(f"{self.part} {self.problem}", part_bytes(self.part, self.problem))

    def build(self, torch_device: str) -> None:
        """The operands."""
        operands_of(self.problem, torch_device)

    def launcher(self, torch_device: str) -> Call:
        """What runs it and nothing else."""
        return part_call(operation_of(self.problem), self.part, operands_of(self.problem, torch_device))


def part_bytes(part: str, problem: Problem) -> int:
    """The least bytes of a part; padding reads and writes bfloat16."""
    if part in PADDING:
        return 4 * elements(PADDING[part], problem.shape)
    return operation_of(problem).all_parts[part].least_bytes(problem.shape)


def accuracy_of(operation: Operation, contender: str, given: Operands) -> Timing:
    """The SQNR of a contender's output and gradients to products in float32, and whether it is too little; no time.

    The worst group of each result counts: one group of many that was left out would hardly move a mean. Groups without
    rows, and rows of no group, are not compared: what they hold is not specified.
    """
    import torch

    out = operation.multiplication(contender, given)(given.A, given.B_t, given.offs)
    grad_A, *grads = torch.autograd.grad(out, given.leaves, given.grad)
    exact = operation.exact or _exact
    sums = []  # looked at once in the end: each look waits for the device
    with torch.no_grad(), _tensor_cores():
        for group, (start, end) in enumerate(itertools.pairwise([0, *given.offs.tolist()])):
            if end <= start:
                continue
            rows = slice(start, end)
            right = exact(given, group, rows)
            got = (out[rows], grad_A[rows], *(grad[group] for grad in grads))
            sums.append(torch.stack([_signal_and_noise(*pair) for pair in zip(got, right, strict=True)]))
    found = torch.stack(sums).tolist() if sums else []
    worst = {
        name: min((_db(*group[i]) for group in found), default=math.inf) for i, name in enumerate(operation.results)
    }
    name, least = min(worst.items(), key=lambda item: item[1])
    said = f"wrong: {name} has an SQNR of {least:.1f} dB, wanted {LEAST_SQNR_DB:.0f}"
    return Timing(reason="" if least >= LEAST_SQNR_DB else said, sqnr_db=worst)


def _exact(given: Operands, group: int, rows: slice) -> tuple[torch.Tensor, ...]:
    """The output and both gradients of one expert, in float32."""
    A, grad, B = (x.float() for x in (given.A[rows], given.grad[rows], given.B_t[group]))
    return A @ B, grad @ B.t(), A.t() @ grad


@contextmanager
def _tensor_cores() -> Iterator[None]:
    """Products of float32 as TF32, which holds every bfloat16: the same sums in a tenth of the time."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def sqnr_db(got: torch.Tensor, right: torch.Tensor) -> float:
    """``10 * log10(sum of right^2 / sum of (got - right)^2)``, summed in float64."""
    return _db(*_signal_and_noise(got, right).tolist())


def _signal_and_noise(got: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    import torch

    noise = got.float() - right
    return torch.stack([x.square().sum(dtype=torch.float64) for x in (right, noise)])


def _db(signal: float, noise: float) -> float:
    if math.isnan(noise):
        return -math.inf
    return 10 * math.log10(signal / noise) if signal and noise else math.inf if not noise else -math.inf


def peak_memory(contender: str, problem: Layer) -> int:
    """Bytes that forward and backward allocate at their peak, beyond operands; those of quantized weights count.

    Raises what they raise.
    """
    import torch

    given = operands_of(problem, "cuda")
    before = torch.cuda.memory_allocated()
    call = step_call(operation_of(problem), contender, BOTH, given)
    made = torch.cuda.memory_allocated() - before
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return made + torch.cuda.max_memory_allocated() - before


def auto_precision(layer: Layer) -> str:
    """Return the precision that ``precision="auto"`` takes on this device."""
    from fp8tune_kernels.gemm.precision import is_fp8_product

    M, N, K, G = (layer.shape[dim] for dim in "MNKG")
    return "fp8" if is_fp8_product(M, K, N, G, operands_of(layer, "cuda").A.device) else "bf16"


_operands: dict[Layer, Operands] = {}
"""In the worker, of the problem in hand: a large one fills much of a GPU."""


def operands_of(problem: Layer, torch_device: str) -> Operands:
    """Seeded random operands, kept until another problem's are made."""
    if problem in _operands:
        return _operands[problem]
    import torch

    _operands.clear()
    operation = operation_of(problem)
    if operation.operands is not None:
        _operands[problem] = operation.operands(problem, torch_device, needs_padding(problem))
        return _operands[problem]
    M, N, K, G = (problem.shape[dim] for dim in "MNKG")
    generator = torch.Generator(torch_device).manual_seed(problem.seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=torch_device, generator=generator)

    # a leaf that is no view: quantize_weights sends gradients to what a view is of
    B_t = torch.empty_strided((G, K, N), (K * N, 1, K), dtype=torch.bfloat16, device=torch_device)
    B_t.mT.normal_(generator=generator)
    _operands[problem] = Operands(
        A=normal(M, K).requires_grad_(),
        B_t=B_t.requires_grad_(),
        offs=torch.tensor(problem.ends, dtype=torch.int32, device=torch_device),
        grad=normal(M, N),
        pad=needs_padding(problem),
    )
    return _operands[problem]


def step_call(operation: Operation, contender: str, step: str, given: Operands) -> Call:
    """What runs a step. Raises MachineError where the contender cannot take the operands."""
    import torch

    if step == QUANTIZE_WEIGHTS:
        return operation.quantize_weights[contender](given)
    if step == FORWARD:
        A, B_t, *more = (leaf.detach() for leaf in given.leaves)
        multiply = operation.multiplication(contender, replace(given, A=A, B_t=B_t, more=tuple(more)))
        return lambda: multiply(A, B_t, given.offs)
    multiply = operation.multiplication(contender, given)

    def forward_and_backward() -> tuple[torch.Tensor, ...]:
        out = multiply(given.A, given.B_t, given.offs)
        return torch.autograd.grad(out, given.leaves, given.grad)

    return _captured(forward_and_backward) if step == GRAPH else forward_and_backward


def _captured(call: Call) -> Call:
    """The replay of a CUDA graph of the call: what is left of it without host work."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # binaries are loaded at their first launch, which no capture may contain
            call()
    torch.cuda.current_stream().wait_stream(side)
    tensor_cache.give_back_memory()  # a capture begins so, too, and waits for nothing
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def part_call(operation: Operation, part: str, given: Operands) -> Call:
    """What runs one of :func:`timed_parts`, on operands padded as the step pads them."""
    from fp8tune_kernels.gemm import token_groups

    multiple, offs = operation.multiple, given.offs
    A, grad = given.A.detach(), given.grad
    if part in ("pad A", "pad grad"):
        return lambda: token_groups.pad(A if part == "pad A" else grad, offs, multiple)
    padded = replace(
        given, A=A, B_t=given.B_t.detach(), more=tuple(each.detach() for each in given.more)
    )  # no gradient is asked of it
    if given.pad and operation.pads:
        padded_A, ends = token_groups.pad(A, offs, multiple)
        padded = replace(padded, A=padded_A, grad=token_groups.pad(grad, offs, multiple)[0], offs=ends)
    if part in PADDING:
        taken_out = padded.grad if part == "unpad out" else padded.A  # out is as large as grad
        return lambda: token_groups.unpad(taken_out, offs, len(A), multiple)
    return operation.all_parts[part].prepare(padded)
