"""What an operation of ``fp8tune bench --op`` is: a grouped GEMM in some recipe, its contenders and the parts of ours.

A step is a forward pass, or forward and backward with both gradients. A part is one kernel or GEMM of our step on
operands that are there already: the parts add up to the step but for launches and reciprocals of scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fp8tune.records import NamedInts

if TYPE_CHECKING:
    import torch

BF16, FP8, MXFP8, TORCHAO = "bf16", "fp8", "mxfp8", "torchao"
FORWARD, BOTH, GRAPH = "fwd", "fwd+bwd", "fwd+bwd in a CUDA graph"
QUANTIZED = "fwd+bwd on quantized weights"
"""Forward and backward of a contender that is given weights that were quantized before."""
QUANTIZE_WEIGHTS = "quantize_weights"
"""What quantizes them, as a step of ours."""
MICRO_BATCHES = 4
"""Steps that share the weights which were quantized once."""
GEMMS = ("GEMM out", "GEMM grad_A", "GEMM grad_B")
"""Parts that every operation has."""
BF16_OF_TORCH, BF16_OF_OURS, FP8_OF_TORCH = "bf16, torch's", "bf16, ours", "fp8, torch's"
"""Other GEMMs than that of a part, on the same operands."""
SHAPES = "grouped-mm"
"""The shape set of all of them."""
DIMS = {"A": "MK", "B_t": "GKN", "grad": "MN", "out": "MN", "grad_A": "MK", "grad_B": "GKN"}
"""Operands and results."""
DIMS |= {"w13": "2GNK", "w2": "GNK", "y": "2MN", "h": "MN"}
"""Those of an MLP."""

Call = Callable[[], Any]
GroupedMM = Callable[..., "torch.Tensor"]
"""(A, B_t, offs) -> out."""
Quantized = tuple["torch.Tensor", "torch.Tensor"]
"""Codes and scales."""


@dataclass(frozen=True)
class Operands:
    """Tensors of a problem: those of :func:`fp8tune_kernels.fp8_grouped_mm`, and the output's gradient."""

    A: torch.Tensor
    B_t: torch.Tensor
    offs: torch.Tensor
    grad: torch.Tensor
    pad: bool
    """Whether a group is no positive multiple of the rows that torch's GEMMs of the recipe want."""
    more: tuple[torch.Tensor, ...] = ()
    """Weights beside B_t, of an operation that multiplies twice."""

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """What has gradients."""
        return self.A, self.B_t, *self.more


@dataclass(frozen=True)
class Part:
    """One kernel or GEMM of our step."""

    reads: tuple[str, ...]
    """Operands."""
    prepare: Callable[[Operands], Call]
    """Operands, padded -> what runs it and nothing else."""
    result: str = ""
    """Of a GEMM; what quantizes writes FP8 of all it reads."""
    width: int = 1
    """Bytes of an element that a GEMM reads."""
    bytes_an_element: int = 3
    """Of what is no GEMM: read and written for each element that it reads."""

    def least_bytes(self, shape: Mapping[str, int]) -> int:
        """What it reads and writes at least: bfloat16 is 2, FP8 is 1. For a clock that draws its times."""
        read = sum(elements(name, shape) for name in self.reads)
        return self.width * read + 2 * elements(self.result, shape) if self.result else self.bytes_an_element * read


def elements(name: str, shape: Mapping[str, int]) -> int:
    """Of an operand or result."""
    return math.prod(int(dim) if dim.isdigit() else shape[dim] for dim in DIMS[name])


Contenders = Mapping[str, Callable[[Operands], GroupedMM]]
"""Name -> how it multiplies these operands; raises MachineError where it cannot."""


def _shape_of(row: Mapping[str, int], label: str) -> NamedInts | None:
    """One grouped GEMM."""
    return NamedInts(M=row["M"], N=row["N"], K=row["K"], G=row["E"])


@dataclass(frozen=True)
class Operation:
    """One grouped GEMM: all that tells it from the others."""

    name: str
    """Of ``--op``, and the kernel of its problems."""
    recipe: str
    ours: str
    """Which of the contenders is ours."""
    multiple: int
    """Rows of a group, as torch's GEMMs of the recipe want them, and K and N, are multiples of this."""
    pads: bool
    """Whether our step pads groups that are not."""
    contenders: Contenders
    """bf16, ours, and others: timed forward and backward."""
    parts: Mapping[str, Part]
    """In the order of the step: those of the forward pass end with its GEMM."""
    once: Mapping[str, str] = field(default_factory=dict)
    """Contenders of ours on weights that were quantized once for :data:`MICRO_BATCHES` steps -> whose weights."""
    quantize_weights: Mapping[str, Callable[[Operands], Call]] = field(default_factory=dict)
    """Whose weights -> what quantizes them, which those steps share."""
    weight_casts: tuple[str, ...] = ()
    """The parts that they are spared."""
    other_gemms: Mapping[str, Mapping[str, Part]] = field(default_factory=dict)
    """Part -> whose -> another GEMM on the same operands."""
    variants: Contenders = field(default_factory=dict)
    """Ours with other options, timed only if asked for."""
    native_arches: tuple[str, ...] | None = None
    """Where its GEMMs run in hardware, elsewhere being emulated; None: wherever they run."""
    what: str = "grouped GEMM"
    """For titles."""
    gemms: tuple[str, ...] = GEMMS
    """The parts that multiply."""
    results: tuple[str, ...] = ("out", "grad_A", "grad_B")
    """The output, the gradient of the rows, and those of weights."""
    shape_of: Callable[[Mapping[str, int], str], NamedInts | None] = _shape_of
    """(a row of a shape set, its name) -> the shape of its layer; None: it is of none."""
    operands: Callable[[Any, str, bool], Operands] | None = None
    """(layer, device, pad) -> seeded random ones; None: those of one grouped GEMM."""
    exact: Callable[[Operands, int, slice], tuple[torch.Tensor, ...]] | None = None
    """(operands, group, its rows) -> the results of one group in float32; None: those of one grouped GEMM."""

    def steps(self, with_torchao: bool = True, with_variants: bool = False) -> tuple[tuple[str, str], ...]:
        """(contender, step) of everything that is timed as a whole. The forward pass alone of bf16 and ours."""
        steps = [(name, FORWARD) for name in (BF16, self.ours)]
        names = [name for name in self.contenders if with_torchao or name != TORCHAO]
        steps += [(name, QUANTIZED if name in self.once else BOTH) for name in names]
        steps += [(name, QUANTIZE_WEIGHTS) for name in self.quantize_weights]
        if with_variants:
            steps += [(name, GRAPH) for name in names if name != TORCHAO]
            steps += [(name, step) for name in self.variants for step in (BOTH, GRAPH)]
        return tuple(steps)

    def multiplication(self, contender: str, given: Operands) -> GroupedMM:
        """How a contender or a variant multiplies. Raises MachineError where it cannot take the operands."""
        return {**self.contenders, **self.variants}[contender](given)

    @property
    def compared(self) -> tuple[str, ...]:
        """All that is compared with bf16."""
        return tuple(name for name in self.contenders if name != BF16)

    @property
    def all_parts(self) -> Mapping[str, Part]:
        """The parts, and the other GEMMs as :func:`gemm_of` names them."""
        others = ((part, whose) for part, gemms in self.other_gemms.items() for whose in gemms)
        return {**self.parts, **{gemm_of(part, whose): self.other_gemms[part][whose] for part, whose in others}}

    @property
    def forward_parts(self) -> tuple[str, ...]:
        """The parts up to the output."""
        return tuple(self.parts)[: tuple(self.parts).index(GEMMS[0]) + 1]

    def is_emulated(self, arch: str) -> bool:
        """True if times on an arch say nothing of the recipe's speed there: every table has to say so."""
        return self.native_arches is not None and arch not in self.native_arches


def gemm_of(part: str, whose: str) -> str:
    """What another GEMM than that of a part is called."""
    return f"{part} ({whose})"


def of_ours(contender: str) -> bool:
    """True unless it is bf16's or torchao's."""
    return contender not in (BF16, TORCHAO)


def bf16(given: Operands) -> GroupedMM:
    """torch's: what every recipe is compared with."""
    import torch

    return lambda A, B_t, offs: torch._grouped_mm(A, B_t, offs=offs)
