"""What our grouped GEMMs are timed beside: torch's in bf16, and torchao 0.18.0's in the same recipe."""

from __future__ import annotations

import importlib
from typing import Any

from fp8tune.bench.counterparts import of_torchao
from fp8tune.bench.operation import GroupedMM, Operands
from fp8tune.errors import MachineError

_TRAINING = "torchao.prototype.moe_training"


def bf16(given: Operands) -> GroupedMM:
    """What every recipe is compared with."""
    import torch

    return lambda A, B_t, offs: torch._grouped_mm(A, B_t, offs=offs)


def torchao_fp8(given: Operands) -> GroupedMM:
    """In FP8 with a scale a row. Raises MachineError where it is not installed or refuses the groups, as the next."""
    _refuse_padding(given, 16)
    multiply = of_torchao(f"{_TRAINING}.fp8_grouped_mm", "_to_fp8_rowwise_then_scaled_grouped_mm")
    return lambda A, B_t, offs: multiply(A, B_t, offs, pad_token_groups_for_grouped_mm=False)


def torchao_mxfp8(given: Operands) -> GroupedMM:
    """In MXFP8 with ``rceil`` scales, as ours; emulated in plain torch where ours is emulated too."""
    from fp8tune_kernels.gemm.grouped_mxfp8 import mxfp8_path

    _refuse_padding(given, 32)
    multiply = of_torchao(f"{_TRAINING}.mxfp8_grouped_mm", "_to_mxfp8_then_scaled_grouped_mm")
    preference: Any = importlib.import_module("torchao.quantization.quantize_.common").KernelPreference
    kernels = preference.EMULATED if mxfp8_path(given.A.device) == "emulated" else preference.AUTO
    return lambda A, B_t, offs: multiply(A, B_t, offs, kernel_preference=kernels)


def _refuse_padding(given: Operands, multiple: int) -> None:
    if given.pad:
        raise MachineError(f"torchao takes only groups of a positive multiple of {multiple} rows")
