"""The benchmark of whole layers: all contenders agree, a failing one is named, and without a GPU nothing is timed."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from benchmarks import moe_layer
from benchmarks.real import torchtitan_layer

pytestmark = pytest.mark.usefixtures("quantizers_in_plain_torch")


def test_all_contenders_are_near_torchs_layer(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    results = moe_layer.compare("tiny", 64, device, 5, with_compiled=True)
    assert results[-1].name == "moe_layer, compiled"
    assert results[0].name == moe_layer.TORCH
    for result in results:
        assert result.error == ""
        assert len(result.cosines) == 5
        assert min(result.cosines) > (0.9999 if "bf16" in result.name else 0.98), result
        assert (result.step_us is None) == (device == "cpu")


def test_a_contender_that_fails_is_named_and_the_exit_code_is_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("no such layer")

    arguments = ["--layers", "tiny", "--tokens", "16", "--milliseconds", "5"]
    assert moe_layer.main(arguments) == 0
    monkeypatch.setattr(moe_layer, "fp8_moe_mlp", broken)
    capsys.readouterr()
    assert moe_layer.main(arguments) == 1
    printed = capsys.readouterr().out
    assert printed.count("RuntimeError: no such layer") == 2  # with and without weights quantized once
    assert "moe_layer, once" in printed


def test_torchtitans_experts_are_near_their_own_in_bf16() -> None:
    line = torchtitan_layer.row("tiny", 64, "cpu", 5)
    found = {part.split()[0]: float(part.split()[-1]) for part in line.split(": ")[1].split("; ")}
    assert found.keys() == {"own", "gemms", "layer", "fused"}
    assert found.pop("own") == 1
    assert min(found.values()) > 0.99
