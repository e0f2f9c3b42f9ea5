"""Host time and graphs of layers: without a GPU every contender runs and nothing is timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import moe_layer

pytestmark = pytest.mark.usefixtures("quantizers_in_plain_torch")


def test_a_contender_that_fails_is_named_and_the_exit_code_is_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(inputs: Any) -> None:
        raise RuntimeError("no such layer")

    shapes = tmp_path / "one.toml"
    shapes.write_text("[[rows]]\nM = 96\nK = 48\nN = 64\nE = 5\ntop_k = 3\n")
    arguments = ["--shapes", str(shapes), "--contenders", "fp8tune;fp8tune, weights once;sonicmoe"]
    assert moe_layer.main(arguments) == 0
    assert "sonicmoe is not installed" in capsys.readouterr().out
    monkeypatch.setitem(moe_layer.MOE_LAYER.ours, "fp8tune", broken)  # type: ignore[arg-type]
    assert moe_layer.main(arguments) == 1
    assert capsys.readouterr().out.count("RuntimeError: no such layer") == 1


def test_the_mlp_on_rows_that_torch_orders_is_the_layer() -> None:
    torch.manual_seed(0)
    x, w13, w2 = torch.randn(24, 64), torch.randn(4, 96, 64) / 8, torch.randn(4, 64, 48) / 7
    ids, weights = torch.randint(4, (24, 2)), torch.rand(24, 2)
    x, w13, w2 = (tensor.bfloat16() for tensor in (x, w13, w2))
    out = moe_layer.mlp(x, w13, w2, ids, weights, 4)
    expected = torch.zeros(24, 64)
    for token, (experts, shares) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        for expert, share in zip(experts, shares, strict=True):
            gate, up = (x[token].float() @ w13[expert].float().t()).chunk(2)
            expected[token] += share * ((torch.nn.functional.silu(gate) * up) @ w2[expert].float().t())
    assert torch.cosine_similarity(out.float().flatten(), expected.flatten(), 0) > 0.99
