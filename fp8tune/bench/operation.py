"""What an operation of ``fp8tune bench --op`` is: a grouped GEMM in some recipe, its contenders and the parts of ours.

A step is a forward pass, or forward and backward with both gradients. A part is one kernel or GEMM of our step on
operands that are there already, so that the parts add up to the step but for launches and reciprocals of scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fp8tune.bench.counterparts import of_torchao
from fp8tune.errors import MachineError

if TYPE_CHECKING:
    import torch

BF16, TORCHAO = "bf16", "torchao"
FORWARD, BOTH, GRAPH = "fwd", "fwd+bwd", "fwd+bwd in a CUDA graph"
GEMMS = ("GEMM out", "GEMM grad_A", "GEMM grad_B")
"""Parts that every operation has: its recipe on operands quantized before."""

SHAPES = "grouped-mm"
"""The shape set of all of them."""

DIMS = {"A": "MK", "B_t": "GKN", "grad": "MN", "out": "MN", "grad_A": "MK", "grad_B": "GKN"}
"""Operands and results."""

Call = Callable[[], Any]
GroupedMM = Callable[..., "torch.Tensor"]
"""(A, B_t, offs) -> out."""


@dataclass(frozen=True)
class Operands:
    """Tensors of a problem: those of :func:`fp8tune_kernels.fp8_grouped_mm`, and the output's gradient."""

    A: torch.Tensor
    B_t: torch.Tensor
    offs: torch.Tensor
    grad: torch.Tensor
    pad: bool
    """True if a group is empty or of no multiple of what the recipe contracts over."""


@dataclass(frozen=True)
class Part:
    """One kernel or GEMM of our step."""

    reads: tuple[str, ...]
    """Operands."""
    prepare: Callable[[Operands], Call]
    """Operands, padded -> what runs it and nothing else."""
    result: str = ""
    """Of a GEMM; what quantizes writes FP8 of all it reads."""

    def least_bytes(self, shape: Mapping[str, int]) -> int:
        """What it reads and writes at least: bfloat16 is 2, FP8 is 1. For a clock that draws its times."""
        read = sum(elements(name, shape) for name in self.reads)
        return read + 2 * elements(self.result, shape) if self.result else 3 * read


def elements(name: str, shape: Mapping[str, int]) -> int:
    """Of an operand or result."""
    return math.prod(shape[dim] for dim in DIMS[name])


@dataclass(frozen=True)
class Operation:
    """One grouped GEMM, in the one place that tells it from the others."""

    name: str
    """Of ``--op``, and the kernel of its problems."""
    recipe: str
    ours: str
    """Which of the contenders is ours."""
    multiple: int
    """Rows of a group, and K and N, are multiples of this."""
    contenders: Mapping[str, Callable[[Operands], GroupedMM]]
    """Name -> how it multiplies these operands; raises MachineError where it cannot."""
    parts: Mapping[str, Part]
    """In the order of the step: those of the forward pass end with its GEMM."""
    variants: Mapping[str, Callable[[Operands], GroupedMM]] = field(default_factory=dict)
    """Ours with other options, as contenders: timed forward and backward only."""
    native_arches: tuple[str, ...] | None = None
    """Where its GEMMs run in hardware, elsewhere being emulated; None: wherever they run."""

    def steps(self, with_torchao: bool = True) -> tuple[tuple[str, str], ...]:
        """(contender, step) of everything that is timed as a whole."""
        names = [name for name in self.contenders if with_torchao or name != TORCHAO]
        steps = [(name, step) for name in names for step in (FORWARD, BOTH)]
        return (*steps, (self.ours, GRAPH), *((name, step) for name in self.variants for step in (BOTH, GRAPH)))

    def multiplication(self, contender: str) -> Callable[[Operands], GroupedMM]:
        """How a contender or a variant multiplies."""
        return {**self.contenders, **self.variants}[contender]

    @property
    def forward_parts(self) -> tuple[str, ...]:
        """The parts up to the output."""
        names = tuple(self.parts)
        return names[: names.index(GEMMS[0]) + 1]

    def is_emulated(self, arch: str) -> bool:
        """True if times on an arch say nothing of the recipe's speed there: every table has to say so."""
        return self.native_arches is not None and arch not in self.native_arches


def bf16(given: Operands) -> GroupedMM:
    """torch's: what every recipe is compared with."""
    import torch

    return lambda A, B_t, offs: torch._grouped_mm(A, B_t, offs=offs)


def torchaos(given: Operands, module: str, name: str, multiple: int) -> GroupedMM:
    """A grouped GEMM of torchao 0.18.0. Raises MachineError where it is not installed or refuses the groups."""
    if given.pad:
        raise MachineError(f"torchao takes only groups of a positive multiple of {multiple} rows")
    return of_torchao(f"torchao.prototype.moe_training.{module}", name)
