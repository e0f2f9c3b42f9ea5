"""torchao's grouped GEMMs in `fp8tune bench --op`, with stand-ins: torchao is not installed here."""

from __future__ import annotations

import enum
import sys
import types
from dataclasses import replace

import pytest
import torch
from grouped_rows import operands, small

from fp8tune.bench import grouped_contenders as grouped_steps
from fp8tune.bench.operation import BOTH, FORWARD, TORCHAO
from fp8tune.bench.operation_fp8 import FP8_GROUPED_MM
from fp8tune.bench.operation_mxfp8 import MXFP8_GROUPED_MM
from fp8tune.bench.torchao_grouped import PACKAGE
from fp8tune.errors import MachineError


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **functions: object) -> None:
    """A module of torchao's, and the packages above it."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        module = sys.modules.get(".".join(parts[:depth])) or types.ModuleType(".".join(parts[:depth]))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for function, value in functions.items():
        monkeypatch.setattr(module, function, value, raising=False)


def pad(x: torch.Tensor, offs: torch.Tensor, *, alignment_size: int) -> tuple[torch.Tensor, ...]:
    """As torchao's: groups without rows stay without."""
    sizes = offs.diff(prepend=offs.new_zeros(1))
    padded = (sizes + alignment_size - 1) // alignment_size * alignment_size
    ends = padded.cumsum(0, dtype=torch.int32)
    out = x.new_zeros(len(x) + alignment_size * len(offs), x.shape[1])
    for start, end, size in zip(ends - padded, offs.tolist(), sizes.tolist(), strict=True):
        out[start : start + size] = x[end - size : end]
    return out, ends - padded, ends


def unpad(x: torch.Tensor, offs: torch.Tensor, starts: torch.Tensor, rows: int, *, alignment_size: int) -> torch.Tensor:
    sizes = offs.diff(prepend=offs.new_zeros(1)).tolist()
    out = torch.cat([x[start : start + size] for start, size in zip(starts.tolist(), sizes, strict=True)])
    assert len(out) == rows
    return out


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """torchao's FP8 GEMM multiplies in bfloat16 here, and notes the group sizes that it was given."""
    seen: list[list[int]] = []

    def multiply(A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor, **options: object) -> torch.Tensor:
        assert options == {"pad_token_groups_for_grouped_mm": False}
        seen.append(offs.diff(prepend=offs.new_zeros(1)).tolist())
        return torch._grouped_mm(A, B_t, offs=offs)

    stand_in(monkeypatch, f"{PACKAGE}.fp8_grouped_mm", _to_fp8_rowwise_then_scaled_grouped_mm=multiply)
    stand_in(monkeypatch, f"{PACKAGE}.utils", pad_token_groups=pad, unpad_token_groups=unpad)
    return seen


@pytest.mark.parametrize(("sizes", "given"), [((32, 48, 16), [32, 48, 16]), ((33, 46, 17), [48, 48, 32])])
def test_groups_are_padded_by_torchao_where_it_needs_that(
    sizes: tuple[int, ...], given: list[int], torchao: list[list[int]]
) -> None:
    layer = small(sizes=sizes)
    found = grouped_steps.accuracy_of(FP8_GROUPED_MM, TORCHAO, operands(layer))
    assert found.reason == ""
    assert found.sqnr_db is not None
    assert min(found.sqnr_db.values()) > 40  # gradients come back through the padding
    assert torchao == [given]


def test_a_group_without_rows_is_refused_before_anything_runs(torchao: list[list[int]]) -> None:
    with pytest.raises(MachineError, match="torchao pads no group without rows"):
        grouped_steps.step_call(FP8_GROUPED_MM, TORCHAO, BOTH, operands(small(sizes=(96, 0, 0))))
    assert torchao == []


def test_torchao_is_not_installed_or_has_no_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, f"{PACKAGE}.fp8_grouped_mm", _to_fp8_rowwise_then_scaled_grouped_mm=print)
    stand_in(monkeypatch, f"{PACKAGE}.utils")
    with pytest.raises(MachineError, match="pad_token_groups cannot be imported"):
        grouped_steps.step_call(FP8_GROUPED_MM, TORCHAO, BOTH, operands(small(sizes=(33, 46, 17))))
    with pytest.raises(MachineError, match="positive multiple of 32 rows"):
        grouped_steps.step_call(MXFP8_GROUPED_MM, TORCHAO, BOTH, operands(small(MXFP8_GROUPED_MM, "ragged")))


class KernelPreference(enum.Enum):
    AUTO = "auto"
    EMULATED = "emulated"


def test_torchao_is_asked_to_emulate_where_ours_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}
    stand_in(monkeypatch, "torchao.quantization.quantize_.common", KernelPreference=KernelPreference)
    stand_in(
        monkeypatch,
        f"{PACKAGE}.mxfp8_grouped_mm",
        _to_mxfp8_then_scaled_grouped_mm=lambda A, B_t, offs, **options: asked.update(options),
    )
    given = operands(replace(small(MXFP8_GROUPED_MM)))
    grouped_steps.step_call(MXFP8_GROUPED_MM, TORCHAO, FORWARD, given)()
    assert asked == {"kernel_preference": KernelPreference.EMULATED}
