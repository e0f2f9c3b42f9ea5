"""The operations of ``fp8tune bench --op``: a grouped GEMM in some recipe, its contenders and the parts of ours.

A step is a forward pass, or forward and backward with both gradients. A part is one kernel or GEMM of our step on
operands that are there already: the parts add up to the step but for launches and reciprocals of scales.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import fp8tune_kernels as kernels  # imports torch and Triton when a kernel is first named
from fp8tune.bench.counterparts import of_torchao
from fp8tune.errors import MachineError
from fp8tune_kernels.arches import MXFP8_GEMM_ARCHES

if TYPE_CHECKING:
    import torch

BF16, FP8, MXFP8, TORCHAO = "bf16", "fp8", "mxfp8", "torchao"
FORWARD, BOTH, GRAPH = "fwd", "fwd+bwd", "fwd+bwd in a CUDA graph"
GEMMS = ("GEMM out", "GEMM grad_A", "GEMM grad_B")
"""Parts that every operation has."""
SHAPES = "grouped-mm"
"""The shape set of all of them."""
DIMS = {"A": "MK", "B_t": "GKN", "grad": "MN", "out": "MN", "grad_A": "MK", "grad_B": "GKN"}
"""Operands and results."""

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
    """Whether groups must be padded."""


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
    """One grouped GEMM: all that tells it from the others."""

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

    def multiplication(self, contender: str, given: Operands) -> GroupedMM:
        """How a contender or a variant multiplies. Raises MachineError where it cannot take the operands."""
        return {**self.contenders, **self.variants}[contender](given)

    @property
    def forward_parts(self) -> tuple[str, ...]:
        """The parts up to the output."""
        return tuple(self.parts)[: tuple(self.parts).index(GEMMS[0]) + 1]

    def is_emulated(self, arch: str) -> bool:
        """True if times on an arch say nothing of the recipe's speed there: every table has to say so."""
        return self.native_arches is not None and arch not in self.native_arches


def _bf16(given: Operands) -> GroupedMM:
    """torch's: what every recipe is compared with."""
    import torch

    return lambda A, B_t, offs: torch._grouped_mm(A, B_t, offs=offs)


def _of_torchao(given: Operands, module: str, name: str, multiple: int) -> GroupedMM:
    """A grouped GEMM of torchao 0.18.0. Raises MachineError where it is not installed or refuses the groups."""
    if given.pad:
        raise MachineError(f"torchao takes only groups of a positive multiple of {multiple} rows")
    return of_torchao(f"torchao.prototype.moe_training.{module}", name)


# FP8, see fp8tune_kernels.gemm.grouped_mm

_FP8_MULTIPLE = 16


def _fp8(given: Operands, keep_fp8: tuple[str, ...] = ()) -> GroupedMM:
    return partial(kernels.fp8_grouped_mm, pad_token_groups=given.pad, keep_fp8=keep_fp8)


def _torchao_fp8(given: Operands) -> GroupedMM:
    """With a scale a row."""
    multiply = _of_torchao(given, "fp8_grouped_mm", "_to_fp8_rowwise_then_scaled_grouped_mm", _FP8_MULTIPLE)
    return partial(multiply, pad_token_groups_for_grouped_mm=False)


def _transposed(B_t: torch.Tensor) -> Quantized:
    codes, scales = kernels.quantize_transpose_3d_atomic(B_t)
    return codes, scales


def _fp8_rows_times_experts(rows: torch.Tensor, experts: Quantized, offs: torch.Tensor) -> Call:
    codes, scales = kernels.quantize_rowwise_2d(rows)
    return _fp8_gemm(codes, experts[0], scales.squeeze(1), experts[1].squeeze(1), offs)


def _fp8_weight_gradient(given: Operands) -> Call:
    q_grad, scales_grad, q_A, scales_A = kernels.quantize_colwise_dual(given.grad, given.A, given.offs)
    return _fp8_gemm(q_grad.t(), q_A, scales_grad, scales_A, given.offs)


def _fp8_gemm(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, offs: torch.Tensor
) -> Call:
    """On reciprocals that are there already."""
    from fp8tune_kernels.gemm.scaled_gemm import multiply

    return partial(multiply, a, b, scale_a.reciprocal(), scale_b.reciprocal(), offs)


FP8_GROUPED_MM = Operation(
    name="grouped-mm",
    recipe="fp8 rowwise",
    ours=FP8,
    multiple=_FP8_MULTIPLE,
    contenders={BF16: _bf16, FP8: _fp8, TORCHAO: _torchao_fp8},
    # operands that are read once for both passes, and grad with A
    variants={f"{FP8} keeping {', '.join(names)}": partial(_fp8, keep_fp8=names) for names in (("A",), ("A", "B_t"))},
    parts={
        "rowwise-2d A": Part(("A",), lambda given: partial(kernels.quantize_rowwise_2d, given.A)),
        "colwise-3d B_t": Part(("B_t",), lambda given: partial(kernels.quantize_colwise_3d, given.B_t)),
        "GEMM out": Part(
            ("A", "B_t"),
            lambda given: _fp8_rows_times_experts(given.A, kernels.quantize_colwise_3d(given.B_t), given.offs),
            "out",
        ),
        "rowwise-2d grad": Part(("grad",), lambda given: partial(kernels.quantize_rowwise_2d, given.grad)),
        "transpose-3d B_t": Part(("B_t",), lambda given: partial(_transposed, given.B_t)),
        "GEMM grad_A": Part(
            ("grad", "B_t"),
            lambda given: _fp8_rows_times_experts(given.grad, _transposed(given.B_t), given.offs),
            "grad_A",
        ),
        "colwise-dual grad, A": Part(
            ("grad", "A"), lambda given: partial(kernels.quantize_colwise_dual, given.grad, given.A, given.offs)
        ),
        "GEMM grad_B": Part(("grad", "A"), _fp8_weight_gradient, "grad_B"),
    },
)


# MXFP8, see fp8tune_kernels.gemm.grouped_mxfp8. Between quantizing and each GEMM stands a part named for the scales:
# natively it lays them out in blocks, emulated it multiplies them into the codes, to operands of a bfloat16 GEMM

_MXFP8_MULTIPLE = 32


def _mxfp8(given: Operands) -> GroupedMM:
    return partial(kernels.mxfp8_grouped_mm, pad_token_groups=given.pad)


def _torchao_mxfp8(given: Operands) -> GroupedMM:
    """With ``rceil`` scales, as ours; emulated in plain torch where ours is emulated too."""
    from fp8tune_kernels.gemm.grouped_mxfp8 import mxfp8_path

    multiply = _of_torchao(given, "mxfp8_grouped_mm", "_to_mxfp8_then_scaled_grouped_mm", _MXFP8_MULTIPLE)
    preference: Any = importlib.import_module("torchao.quantization.quantize_.common").KernelPreference
    is_emulated = mxfp8_path(given.A.device) == "emulated"
    return partial(multiply, kernel_preference=preference.EMULATED if is_emulated else preference.AUTO)


def _dim0(x: torch.Tensor) -> Quantized:
    return _quantized(kernels.quantize_mxfp8_dim0, x)


def _dim1(x: torch.Tensor) -> Quantized:
    return _quantized(kernels.quantize_mxfp8_dim1, x)


def _dim1_3d(B_t: torch.Tensor) -> Quantized:
    return _quantized(kernels.quantize_mxfp8_dim1_3d, B_t.mT)


def _quantized(kernel: Callable[..., Quantized], x: torch.Tensor) -> Quantized:
    from fp8tune_kernels.gemm.grouped_mxfp8 import quantize

    return quantize(kernel, x)


def _dim0_of_experts(B_t: torch.Tensor) -> Quantized:
    """The weights with blocks along K, as the forward pass has them: all experts' rows in one matrix."""
    E, K, N = B_t.shape
    codes, scales = _dim0(B_t.mT.reshape(E * N, K))
    return codes.view(E, N, K).mT, scales.view(E, N, -1)


def _quantizing(quantized: Callable[[torch.Tensor], Quantized], operand: str) -> Part:
    return Part((operand,), lambda given: partial(quantized, getattr(given, operand)))


def _scales_out(given: Operands) -> Call:
    return _scales_of_rows(_dim0(given.A), _dim0_of_experts(given.B_t), given.offs)


def _scales_input_gradient(given: Operands) -> Call:
    return _scales_of_rows(_dim0(given.grad), _dim1_3d(given.B_t), given.offs)


def _scales_of_rows(rows: Quantized, experts: Quantized, offs: torch.Tensor) -> Call:
    from fp8tune_kernels.gemm.grouped_mxfp8 import operands

    return partial(operands, *rows, *experts, offs)


def _scales_weight_gradient(given: Operands) -> Call:
    from fp8tune_kernels.gemm.grouped_mxfp8 import operands

    q_grad, scales_grad = _dim1(given.grad)
    return partial(operands, q_grad.t(), scales_grad, *_dim1(given.A), given.offs)


def _scales_and_gemm(reads: tuple[str, ...], scales: Callable[[Operands], Call], result: str) -> dict[str, Part]:
    def gemm(given: Operands) -> Call:
        from fp8tune_kernels.gemm.grouped_mxfp8 import multiply

        return partial(multiply, scales(given)(), given.offs)

    return {f"scales {result}": Part(reads, scales), f"GEMM {result}": Part(reads, gemm, result)}


MXFP8_GROUPED_MM = Operation(
    name="mxfp8-grouped-mm",
    recipe="mxfp8",
    ours=MXFP8,
    multiple=_MXFP8_MULTIPLE,
    contenders={BF16: _bf16, MXFP8: _mxfp8, TORCHAO: _torchao_mxfp8},
    parts={
        "mxfp8-dim0 A": _quantizing(_dim0, "A"),
        "mxfp8-dim0 B_t": _quantizing(_dim0_of_experts, "B_t"),
        **_scales_and_gemm(("A", "B_t"), _scales_out, "out"),
        "mxfp8-dim0 grad": _quantizing(_dim0, "grad"),
        "mxfp8-dim1-3d B_t": _quantizing(_dim1_3d, "B_t"),
        **_scales_and_gemm(("grad", "B_t"), _scales_input_gradient, "grad_A"),
        "mxfp8-dim1 grad": _quantizing(_dim1, "grad"),
        "mxfp8-dim1 A": _quantizing(_dim1, "A"),
        **_scales_and_gemm(("grad", "A"), _scales_weight_gradient, "grad_B"),
    },
    native_arches=MXFP8_GEMM_ARCHES,
)

OPERATIONS: Mapping[str, Operation] = {operation.name: operation for operation in (FP8_GROUPED_MM, MXFP8_GROUPED_MM)}
"""What ``--op`` names."""
