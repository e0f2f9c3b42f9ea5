"""torchao beside our kernels: which function a kernel is held against, and what it is given."""

from __future__ import annotations

import itertools
import math
import sys
import types
from typing import Any

import pytest
import torch

from fp8tune.bench import checking, counterparts
from fp8tune.bench.kernel_contenders import HOST_ROW
from fp8tune.errors import MachineError
from fp8tune.plan import problems as plan
from fp8tune.records import NamedInts, Problem
from fp8tune.replay.loading import load_spec
from fp8tune_kernels.catalog import GEMMS, QUANTIZERS
from fp8tune_kernels.quantize import mxfp8_dim1, mxfp8_dim1_3d
from fp8tune_kernels.quantize.mxfp8_arithmetic import reference_blocks


def test_every_kernel_has_a_counterpart() -> None:
    assert {*counterparts.COUNTERPARTS, *counterparts.TWO_KERNELS} == {*QUANTIZERS} - {"rowwise-factored"}
    assert set(counterparts.GEMMS) == set(GEMMS)


@pytest.mark.parametrize("in_dtype", ["float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize("kernel", GEMMS)
def test_a_gemm_is_held_against_torchs_own(kernel: str, in_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Group by group, with what torch is given: offsets of aligned groups, reciprocals of scales."""

    def grouped(a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor, offs: torch.Tensor, **_: object) -> Any:
        out = torch.full((len(a), b.shape[-1]) if b.dim() == 3 else (len(offs), len(a), b.shape[1]), torch.nan)
        for group, (start, end) in enumerate(itertools.pairwise([0, *offs.tolist()])):
            if b.dim() == 3:
                product = a[start:end].float() @ b[group].float()
                out[start:end] = product * scales[0][start:end, None] * scales[1][group] if scales else product
            else:
                product = a[:, start:end].float() @ b[start:end].float()
                by = (
                    [scales[0].view(len(offs), -1, 1)[group], scales[1].view(len(offs), 1, -1)[group]] if scales else []
                )
                out[group] = math.prod(by, start=product)
        return out.bfloat16()

    monkeypatch.setattr(torch, "_scaled_grouped_mm" if in_dtype.startswith("float8") else "_grouped_mm", grouped)
    spec = load_spec(kernel)
    inputs = spec.inputs(Problem(kernel, NamedInts(M=300, N=32, K=48, G=3), "ragged", in_dtype=in_dtype), "cpu")
    rival = counterparts.counterpart(kernel, inputs)
    assert checking.compared(rival.read(rival.launch()), spec.reference(*inputs)).wrong == ""


def place(kernel: str) -> tuple[str, str]:
    theirs = counterparts.COUNTERPARTS[kernel]
    return theirs.module, theirs.name


def fake_torchao(monkeypatch: pytest.MonkeyPatch, module: str, **functions: Any) -> None:
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, function in functions.items():
        setattr(sys.modules[module], name, function)


@pytest.mark.parametrize("kernel", counterparts.COUNTERPARTS)
def test_a_counterpart_is_given_the_tensors_the_dtype_and_the_scale_mode(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = place(kernel)
    spec = load_spec(kernel)
    inputs = spec.inputs(plan.problems(spec, [HOST_ROW])[0], "meta")
    seen: list[object] = []

    def function(*arguments: Any, **options: Any) -> tuple[Any, Any]:
        seen.extend([*arguments, *options.values()])
        return arguments[0].t() if arguments[0].dim() == 2 else arguments[0], None

    fake_torchao(monkeypatch, module, **{name: function})
    counterparts.counterpart(kernel, inputs, is_e8m0_known=True).launch()
    tensors = sum(isinstance(value, torch.Tensor) for value in inputs)
    assert sum(isinstance(value, torch.Tensor) for value in seen) == tensors
    assert inputs[-1] in seen[tensors:]


@pytest.mark.parametrize("kernel", counterparts.TWO_KERNELS)
def test_what_torchao_reads_twice_is_both_of_its_kernels(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, dict[str, Any]] = {}
    for one in counterparts.TWO_KERNELS[kernel]:
        module, name = place(one)
        modules.setdefault(module, {})[name] = load_spec(one).reference
    for module in modules:
        fake_torchao(monkeypatch, module)
    for module, functions in modules.items():
        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**functions))
    spec = load_spec(kernel)
    shape = {"M": 33, "N": 20, "K": 24, "E": 2, "G": 2}
    inputs = spec.inputs(Problem(kernel, NamedInts({dim: shape[dim] for dim in spec_dims(kernel)}), "jagged"), "cpu")
    rival = counterparts.counterpart(kernel, inputs)
    outputs = [output for pair in rival.launch() for output in pair]
    for output, right in zip(outputs, spec.reference(*inputs), strict=True):
        assert torch.equal(output.view(torch.uint8), right.view(torch.uint8))


def test_the_two_steps_give_what_one_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: torch.Tensor, scaling_mode: str) -> tuple[torch.Tensor, torch.Tensor]:
        return mxfp8_dim1.reference(x, torch.float8_e4m3fn, scaling_mode)

    module, name = place("mxfp8-dim1-3d-via-2d")
    fake_torchao(monkeypatch, module, **{name: function})
    inputs = (torch.randn(3, 64, 48, dtype=torch.bfloat16), torch.float8_e4m3fn, "floor")
    rival = counterparts.counterpart("mxfp8-dim1-3d-via-2d", inputs, is_e8m0_known=True)
    wanted = mxfp8_dim1_3d.reference(*inputs)
    assert rival.launch()[0].stride() == wanted[0].stride()
    assert checking.compared(rival.read(rival.launch()), wanted).wrong == ""


@pytest.mark.parametrize("kernel", counterparts.IN_TORCH)
def test_where_the_hardware_knows_no_e8m0_torchao_quantizes_in_plain_torch(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def to_mx(x: torch.Tensor, dtype: torch.dtype, block: int, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
        assert x.is_contiguous()
        assert (block, mode) == (32, "rceil")
        codes, scales = reference_blocks(x, dtype, mode)
        return scales, codes

    fake_torchao(monkeypatch, "torchao.prototype.mx_formats.config", ScaleCalculationMode=str)
    fake_torchao(monkeypatch, "torchao.prototype.mx_formats.mx_tensor", to_mx=to_mx)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # under torch.compile, which compiles nothing
    spec = load_spec(kernel)
    shape = NamedInts(
        {dim: size for dim, size in (("E", 3), ("M", 64), ("N", 64), ("K", 96)) if dim in spec_dims(kernel)}
    )
    inputs = spec.inputs(Problem(kernel, shape, scale_mode="rceil"), "cpu")
    rival = counterparts.counterpart(kernel, inputs, is_e8m0_known=False)
    outputs, wanted = rival.launch(), spec.reference(*inputs)
    assert outputs[0].stride() == wanted[0].stride()
    assert checking.compared(rival.read(outputs), wanted).wrong == ""


def spec_dims(kernel: str) -> frozenset[str]:
    return frozenset(next(load_spec(kernel).problems({"M": 1, "N": 1, "K": 1, "E": 1})))


def test_without_torchao_the_reason_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(MachineError, match="torchao"):
        counterparts.counterpart("colwise", ())
    with pytest.raises(MachineError, match="no counterpart"):
        counterparts.counterpart("faults", ())
