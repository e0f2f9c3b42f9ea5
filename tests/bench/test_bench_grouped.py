"""`fp8tune bench --op grouped-mm`: what each cell runs, what follows from the times, and what is printed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8tune import cli
from fp8tune.bench import grouped as bench_grouped
from fp8tune.bench import grouped_cells as grouped_steps
from fp8tune.bench import published as published_grouped
from fp8tune.bench.cells import Timing
from fp8tune.bench.grouped import Row, Wish
from fp8tune.bench.grouped_cells import BF16, BOTH, FORWARD, FP8, GEMMS, GRAPH, PADDING, PARTS, STEPS, TORCHAO
from fp8tune.errors import MachineError, UsageError
from fp8tune.plan import shapes
from fp8tune.records import Device, NamedInts, Problem
from fp8tune.render import grouped as render_grouped
from fp8tune.sweep import session

LAYER = NamedInts(M=96, N=32, K=48, G=3)


def timed(steps: Mapping[tuple[str, str], float | None], part_us: float | None = 10.0) -> Row:
    timings = {step: Timing(us, "" if us else "planted") for step, us in steps.items()}
    parts = {part: Timing(part_us, "" if part_us else "planted") for part in PARTS}
    return Row(Problem("grouped-mm", LAYER, "jagged"), Device("sm_90", "a GPU"), False, timings, parts, {FP8: 1 << 30})


FAST = {(BF16, FORWARD): 50.0, (FP8, FORWARD): 40.0, (BF16, BOTH): 180.0, (FP8, BOTH): 120.0, (FP8, GRAPH): 110.0}


def test_speedup_bound_and_share_of_the_bound() -> None:
    row = timed(FAST)
    assert (row.speedup(FORWARD), row.speedup(BOTH)) == (pytest.approx(1.25), pytest.approx(1.5))
    assert row.gemms_us == pytest.approx(30.0)
    assert row.bound == pytest.approx(6.0)
    assert row.bound_share == pytest.approx(1.5 / 6.0)
    assert row.rest_us == pytest.approx(120.0 - 80.0)
    assert row.speedup(BOTH, TORCHAO) is None


def test_what_was_not_timed_enters_nothing() -> None:
    row = timed({**FAST, (FP8, BOTH): None})
    assert (row.speedup(BOTH), row.bound_share, row.rest_us) == (None, None, None)
    assert row.bound == pytest.approx(6.0)
    row = timed(FAST, part_us=None)
    assert (row.gemms_us, row.bound, row.rest_us) == (None, None, None)


def test_the_default_set_is_the_starting_line_end_to_end() -> None:
    rows = [(row["M"], row["N"], row["K"], row["E"]) for row in shapes.load("grouped-mm").rows]
    assert rows == [
        (16640, 8192, 5120, 1),
        (16640, 8192, 5120, 4),
        (16640, 8192, 5120, 16),
        (131072, 8192, 5120, 8),
        (131072, 2048, 7168, 8),
        (65536, 1408, 2048, 64),
    ]


# What cells run: on a CPU, where bf16 is torch's own grouped GEMM and FP8 is the reference


def problem(routing: str = "balanced", **sizes: int) -> Problem:
    return Problem("grouped-mm", NamedInts({**LAYER, **sizes}), routing)


@pytest.mark.parametrize(("routing", "padded"), [("balanced", False), ("ragged", True), ("empty", True)])
def test_groups_are_padded_where_one_needs_it(routing: str, padded: bool) -> None:
    assert grouped_steps.needs_padding(problem(routing)) == padded
    assert grouped_steps.operands(problem(routing), "cpu").pad == padded
    assert grouped_steps.parts_of(problem(routing)) == ((*PARTS, *PADDING) if padded else PARTS)


@pytest.mark.usefixtures("quantizers_in_plain_torch")
@pytest.mark.parametrize("routing", ["balanced", "ragged"])
def test_our_step_is_near_that_of_bf16(routing: str) -> None:
    given = grouped_steps.operands(problem(routing), "cpu")
    for step in (FORWARD, BOTH):
        results = [grouped_steps.step_call(contender, step, given)() for contender in (BF16, FP8)]
        pairs = [results] if step == FORWARD else list(zip(*results, strict=True))
        assert len(pairs) == (1 if step == FORWARD else 2)
        for right, ours in pairs:
            assert ours.shape == right.shape
            assert (ours.float() - right.float()).norm() < 0.06 * right.float().norm()


@pytest.mark.usefixtures("quantizers_in_plain_torch")
@pytest.mark.parametrize("routing", ["balanced", "ragged"])
def test_the_parts_put_together_are_the_step(routing: str) -> None:
    given = grouped_steps.operands(problem(routing), "cpu")
    parts = {part: grouped_steps.part_call(part, given)() for part in grouped_steps.parts_of(problem(routing))}
    out, grads = (grouped_steps.step_call(FP8, step, given)() for step in (FORWARD, BOTH))
    gemms = [parts[gemm] for gemm in GEMMS]
    assert torch.equal(gemms[2].transpose(1, 2), grads[1])
    if not given.pad:
        assert torch.equal(gemms[0], out)
        assert torch.equal(gemms[1], grads[0])


def test_torchao_is_refused_what_it_does_not_take() -> None:
    with pytest.raises(MachineError, match="positive multiple of 16 rows"):
        grouped_steps.step_call(TORCHAO, BOTH, grouped_steps.operands(problem("ragged"), "cpu"))


# The simulated clock: the whole command, no kernel runs


def simulated(**options: Any) -> list[Row]:
    laboratory, _ = session.choose_laboratory(None, "simulated:1")
    wish = Wish(**options)
    return list(bench_grouped.run(wish, laboratory, bench_grouped.prepare(wish, laboratory)))


def test_a_simulated_run_times_every_cell_and_repeats_itself() -> None:
    rows = simulated(seed=1)
    assert len(rows) == 6
    for row in rows:
        assert tuple(row.steps) == STEPS
        assert tuple(row.parts) == grouped_steps.parts_of(row.problem)
        assert all(timing.time_us and not timing.reason for timing in (*row.steps.values(), *row.parts.values()))
        assert set(row.peak_bytes.values()) == {None}
    assert simulated(seed=1) == rows


def test_without_torchao_and_with_a_spent_budget() -> None:
    assert all(TORCHAO not in who for row in simulated(with_torchao=False) for who in row.steps)
    assert simulated(time_budget_s=0.0) == []


def test_shapes_that_no_gemm_takes_are_refused() -> None:
    with pytest.raises(UsageError, match="multiples of 16"):
        simulated(shapes=("tiny",))
    with pytest.raises(UsageError, match="unknown routing"):
        simulated(routing="sideways")


# What is printed


def test_the_table_has_every_number_and_the_reason_of_an_empty_cell(capsys: pytest.CaptureFixture[str]) -> None:
    render_grouped.print_grouped([timed({**FAST, (TORCHAO, BOTH): None, (TORCHAO, FORWARD): None})], [], "table")
    said = capsys.readouterr().out
    for text in ("1.25x", "1.50x", "30.00", "6.00x", "25 %", "110.0", "1.00 GiB", "colwise-dual grad, A"):
        assert text in said
    assert f"- torchao fwd+bwd on {LAYER}: planted" in said


def test_markdown_is_a_table_for_a_pull_request(capsys: pytest.CaptureFixture[str]) -> None:
    render_grouped.print_grouped([timed(FAST)], [], "markdown")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) == 6
    assert lines[1].startswith("| --- | --- | ---: |")
    assert len({line.count("|") for line in lines[:3]}) == 1


def test_json_has_all_that_is_derived(capsys: pytest.CaptureFixture[str]) -> None:
    render_grouped.print_grouped([timed(FAST)], [], "json")
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["shape"], found["padded"], found["bound_share"]) == (dict(LAYER), False, pytest.approx(0.25))
    assert found["steps"][0] == {"contender": "bf16", "step": "fwd", "time_us": 50.0, "reason": ""}
    assert found["parts"]["GEMM out"] == {"time_us": 10.0, "reason": ""}


def test_published_rows_are_all_kept_and_the_impossible_one_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    rows = published_grouped.read(shapes.sweeps_dir() / "published" / "grouped_mm.csv")
    assert len(rows) == 8
    (impossible,) = [row for row in rows if row.impossible]
    assert (impossible.shape, impossible.note) == (NamedInts(M=16640, N=8192, K=5120, E=16), "before")
    assert impossible.impossible == "scaled forward is not below forward+backward"
    render_grouped.print_grouped([], rows, "table")
    said = capsys.readouterr().out
    assert said.count("pytorch/ao#2998") == 8
    assert said.count("is not below") == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("a,b,c,d,M=1 N=1,1,2,0,1,x", "line 2: bf16_fwd_us is 0"),
        ("a,b,c,d,M=1 N=1,1,2,soon,1,x", "line 2: could not convert"),
        ("a,b,c,d,nonsense,1,2,1,1,x", "line 2"),
        ("a,b,c", "line 2"),
    ],
)
def test_a_broken_line_is_named(line: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(",".join(published_grouped.COLUMNS) + "\n" + line + "\n")
    with pytest.raises(UsageError, match=says):
        published_grouped.read(path)
    path.write_text("source,device\n")
    with pytest.raises(UsageError, match="line 1: the header"):
        published_grouped.read(path)


def command_line(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["fp8tune", "bench", *arguments, "--timer", "simulated:1"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert command_line("--op", "grouped-mm", "--format", "json", "--alone", monkeypatch=monkeypatch) == 0
    assert [row["row"] for row in json.loads(capsys.readouterr().out)] == ["grouped-mm"] * 6 + ["published"] * 8
    assert command_line("--op", "grouped-mm", "--kernel", "colwise", monkeypatch=monkeypatch) == 2
    assert "leave out --kernel" in capsys.readouterr().err
    assert command_line("--format", "markdown", monkeypatch=monkeypatch) == 2
    assert "--op grouped-mm" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_every_step_and_part_of_ours_has_a_time() -> None:
    laboratory, _ = session.choose_laboratory(None, None)
    for routing in ("balanced", "empty"):
        one = Problem("grouped-mm", NamedInts(M=1024, N=256, K=512, G=4), routing)
        (row,) = bench_grouped.run(Wish(with_torchao=False), laboratory, (one,))
        for timing in (*row.steps.values(), *row.parts.values()):
            assert timing.time_us, timing.reason
        assert row.peak_bytes[FP8]
