"""`fp8tune bench --op` end to end on a simulated GPU: what is planned, timed and left out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from grouped_rows import FAST, Operation, each_operation, simulated, small, timed

from fp8tune import cli
from fp8tune.bench import grouped as bench_grouped
from fp8tune.bench import grouped_contenders as grouped_steps
from fp8tune.bench.cells import Cells, Timing
from fp8tune.bench.grouped import Extent
from fp8tune.bench.grouped_contenders import Step
from fp8tune.bench.operation import BF16, BOTH, FP8, GEMMS, TORCHAO
from fp8tune.bench.operation_fp8 import AUTO, FOLDED, FP8_GROUPED_MM
from fp8tune.bench.operation_mxfp8 import MXFP8_GROUPED_MM
from fp8tune.errors import UsageError
from fp8tune.measure.backends.simulated import SimulatedBackend


@each_operation
@pytest.mark.parametrize("variants", [False, True])
def test_a_simulated_run_times_every_cell_and_repeats_itself(variants: bool, operation: Operation) -> None:
    rows = simulated(op=operation.name, seed=1, variants=variants)
    assert len(rows) == 6
    for row in rows:
        assert set(row.steps) == set(operation.steps(with_variants=variants))
        assert tuple(row.parts) == grouped_steps.timed_parts(row.problem)
        assert all(timing.time_us and not timing.reason for timing in (*row.steps.values(), *row.parts.values()))
        assert set(row.peak_bytes.values()) == {None}
        assert row.auto is None
    assert simulated(op=operation.name, seed=1, variants=variants) == rows


def test_a_rival_that_cannot_be_checked_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may end the process each time, which takes as long as a row."""

    def check(self: Cells, contender: Step) -> Timing:
        return Timing(reason="device-side assert") if contender.name in (TORCHAO, BF16) else Timing()

    monkeypatch.setattr(Cells, "check", check)
    (row, *_) = simulated()
    assert row.steps[TORCHAO, BOTH] == Timing(reason="device-side assert")
    assert TORCHAO not in row.peak_bytes
    assert row.steps[BF16, BOTH].reason == "not checked: device-side assert"
    assert row.steps[BF16, BOTH].time_us


def test_shapes_that_no_gemm_takes_are_refused() -> None:
    with pytest.raises(UsageError, match="multiples of 16"):
        simulated(shapes=("tiny",))
    with pytest.raises(UsageError, match="multiples of 32"):
        simulated(op=MXFP8_GROUPED_MM.name, shapes=("tiny",))
    with pytest.raises(UsageError, match="unknown routing"):
        simulated(routing="sideways")
    with pytest.raises(UsageError, match="no row of rows has all of M, K, N and E"):
        simulated(shapes=("rows",))


def command_line(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["fp8tune", "bench", *arguments, "--timer", "simulated:1"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(("op", "means"), [("grouped-mm", 6 + 5), ("mxfp8-grouped-mm", 1)])
def test_the_command(op: str, means: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert command_line("--op", op, "--format", "json", "--alone", monkeypatch=monkeypatch) == 0
    found = [row["row"] for row in json.loads(capsys.readouterr().out)]
    assert found == [op] * 6 + ["mean"] * means + ["published"] * 8


@pytest.mark.parametrize(("who", "code"), [(FP8, 1), (AUTO, 1), (TORCHAO, 0)])
def test_our_own_wrong_result_is_a_finding(
    who: str, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Timing(reason="wrong: out has an SQNR of 3.1 dB, wanted 20", sqnr_db={"out": 3.1})
    row = timed({**FAST, (TORCHAO, BOTH): 20.0, (AUTO, BOTH): 20.0})
    row = replace(row, steps={s: t.with_check(wrong) if s[0] == who else t for s, t in row.steps.items()})
    monkeypatch.setattr(bench_grouped, "run", lambda *_, **__: iter([row]))
    assert command_line("--op", "grouped-mm", "--format", "json", monkeypatch=monkeypatch) == code
    assert ("our own output is wrong" in capsys.readouterr().err) == bool(code)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--op", "grouped-mm", "--kernel", "colwise"), "leave out --kernel"),
        (("--groups", "sizes.txt"), "add --op grouped-mm"),
        (("--variants",), "add --op grouped-mm"),
        (("--op", "grouped-mm", "--groups", "no/such/file"), "cannot read group sizes 'no/such/file'"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command_line(*arguments, monkeypatch=monkeypatch) == 2
    assert says in capsys.readouterr().err


def test_what_compiles_runs_once_before_anything_is_timed() -> None:
    for with_torchao in (True, False):
        extent = Extent(with_torchao, with_variants=True)
        arms = bench_grouped.compiled_first([small()], extent)
        names = [arm.name if isinstance(arm, Step) else arm.part for arm in arms]
        steps = [*([TORCHAO] if with_torchao else []), FP8, AUTO, FOLDED, *FP8_GROUPED_MM.variants]
        assert names == [*steps, *(f"{gemm} (bf16, ours)" for gemm in GEMMS)]
    assert SimulatedBackend("simulated:1").run(grouped_steps.auto_precision, small()) is None


def test_without_torchao_and_with_a_spent_budget() -> None:
    assert all(TORCHAO not in who for row in simulated(alone=True) for who in row.steps)
    assert simulated(time_budget_s=0.0) == []
