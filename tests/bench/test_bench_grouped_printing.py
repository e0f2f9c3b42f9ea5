"""What `fp8tune bench --op` prints: tables, markdown and the JSON that scripts read."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from grouped_rows import FAST, LAYER, MXFP8_FAST, ONCE, timed

from fp8tune.bench.cells import Timing
from fp8tune.bench.operation import BF16, BOTH, FP8, QUANTIZED, TORCHAO
from fp8tune.bench.operation_fp8 import FP8_GROUPED_MM, FP8_ONCE
from fp8tune.bench.operation_mxfp8 import MXFP8_GROUPED_MM
from fp8tune.render import grouped as render_grouped

Capture = pytest.CaptureFixture[str]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")][1:-1]


def tables(said: str) -> dict[str, list[list[str]]]:
    """Of markdown: title -> header and rows."""
    found: dict[str, list[list[str]]] = {}
    title = ""
    for block in said.split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        if lines:
            found[title] = [cells(line) for line in lines if "---" not in line]
        else:
            title = block.splitlines()[0] if block else ""
    return found


def test_a_wrong_rival_is_in_no_ratio(capsys: Capture) -> None:
    row = timed({**FAST, (TORCHAO, BOTH): 20.0})
    reason = "wrong: grad_B has an SQNR of 3.1 dB, wanted 20"
    wrong = Timing(reason=reason, sqnr_db={"out": 28.0, "grad_A": math.inf, "grad_B": 3.1})
    row = replace(row, steps={s: t.with_check(wrong) if s[0] == TORCHAO else t for s, t in row.steps.items()})
    assert (row.speedup(BOTH, TORCHAO), row.wrong) == (None, {TORCHAO: reason})
    render_grouped.print_grouped([row], [], "markdown")
    said = capsys.readouterr().out
    assert "| 20.00 | wrong |" in said
    assert f"- torchao on {LAYER}: {reason}" in said
    render_grouped.print_grouped([row], [], "json")
    found, *_ = json.loads(capsys.readouterr().out)
    assert found["torchao_speedup_fwd_bwd"] is None
    assert found["sqnr_db"] == {"torchao": {"out": 28.0, "grad_A": None, "grad_B": 3.1}}
    assert {"contender": "torchao", "step": "fwd+bwd", "time_us": 20.0, "reason": reason} in found["steps"]


def test_markdown_has_a_line_a_problem_in_each_table(capsys: Capture) -> None:
    row = timed({**FAST, **ONCE}, label="Mine, up")
    render_grouped.print_grouped([row, replace(row, peak_bytes={FP8: 3 << 29})], [], "markdown")
    found = tables(capsys.readouterr().out)
    steps, parts, forward, _, weights, means = found.values()
    assert [len(table) for table in (steps, parts, forward, weights)] == [3, 3, 3, 3]
    assert all(len(line) == len(table[0]) for table in found.values() for line in table)
    assert steps[1][:2] == ["Mine, up, 96 rows", str(LAYER)]
    assert parts[0] == ["layer", *FP8_GROUPED_MM.parts, "rest", "fp8 fwd+bwd"]
    assert parts[1] == ["Mine, up, 96 rows", *["10.00"] * 8, "40", "120.0"]
    tflops = f"{2 * 96 * 32 * 48 / 10 / 1e6:,.0f}"
    assert forward[1][1:] == ["20.00", "20.00", "20.00", "10.00", "2.00x", "2.00x", tflops]
    assert means[1:3] == [
        ["fp8 over bf16", "1.50x", "2", "1.50x", "Mine, up, 96 rows"],
        ["fp8, weights once over bf16", "1.80x", "2", "1.80x", "Mine, up, 96 rows"],
    ]
    assert ["weight gradient GEMM over fp8, torch's", "2.00x"] in [line[:2] for line in means]


def test_json_has_all_that_is_derived(capsys: Capture) -> None:
    render_grouped.print_grouped([timed({**FAST, **ONCE}, label="Mine", sizes=(96, 0, 0))], [], "json")
    found, *means = json.loads(capsys.readouterr().out)
    assert (found["shape"], found["padded"], found["bound_share"]) == (dict(LAYER), False, pytest.approx(0.25))
    assert (found["layer"], found["groups"], found["auto"]) == ("Mine", [96, 0, 0], None)
    assert found["steps"][0] == {"contender": "bf16", "step": "fwd", "time_us": 50.0, "reason": ""}
    assert {"contender": FP8_ONCE, "step": QUANTIZED, "time_us": 90.0, "reason": ""} in found["steps"]
    assert (found["fwd_bwd_us"][FP8_ONCE], found["speedups_fwd_bwd"][FP8_ONCE]) == (100.0, pytest.approx(1.8))
    assert found["fwd_bwd_us"][BF16] == 180.0
    assert found["parts"]["GEMM out"] == {"time_us": 10.0, "reason": ""}
    assert found["parts"]["GEMM out (fp8, torch's)"] == {"time_us": 20.0, "reason": ""}
    assert means[0] == {
        "row": "mean",
        "operation": "grouped-mm",
        "what": "fp8 over bf16",
        "geomean": pytest.approx(1.5),
        "rows": 1,
        "worst": pytest.approx(1.5),
        "worst_layer": "Mine",
        "worst_shape": dict(LAYER),
    }
    assert len(means) == 2 + 6


def test_json_says_what_is_emulated(capsys: Capture) -> None:
    for operation, arch, emulated in (
        (MXFP8_GROUPED_MM, "sm_90", True),
        (MXFP8_GROUPED_MM, "sm_100", False),
        (FP8_GROUPED_MM, "sm_90", False),
    ):
        steps = FAST if operation is FP8_GROUPED_MM else MXFP8_FAST
        render_grouped.print_grouped([timed(steps, 10.0, operation, arch)], [], "json")
        found, *_ = json.loads(capsys.readouterr().out)
        assert (found["row"], found["emulated"]) == (operation.name, emulated)
