"""`fp8tune bench --op grouped-mm`: what each cell runs, what follows from the times, and what is printed."""

from __future__ import annotations

import enum
import json
import math
import re
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from fp8tune import cli
from fp8tune.bench import grouped as bench_grouped
from fp8tune.bench import grouped_contenders as grouped_steps
from fp8tune.bench.cells import Timing
from fp8tune.bench.grouped import Row
from fp8tune.bench.grouped_contenders import PADDING, Step
from fp8tune.bench.operation import (
    BF16,
    BOTH,
    FORWARD,
    FP8,
    FP8_GROUPED_MM,
    GEMMS,
    GRAPH,
    MXFP8,
    MXFP8_GROUPED_MM,
    OPERATIONS,
    TORCHAO,
    Operands,
    Operation,
)
from fp8tune.bench.options import BenchOptions
from fp8tune.errors import MachineError, UsageError
from fp8tune.measure.backends.choice import backend_for
from fp8tune.measure.backends.simulated import SimulatedBackend
from fp8tune.options import OperationName
from fp8tune.plan import shapes
from fp8tune.records import Device, NamedInts, Problem
from fp8tune.render import grouped as render_grouped
from fp8tune.store import published as store_published

LAYER = NamedInts(M=96, N=32, K=48, G=3)


each_operation = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=list(OPERATIONS))


def timed(
    steps: Mapping[tuple[str, str], float | None],
    part_us: float | None = 10.0,
    operation: Operation = FP8_GROUPED_MM,
    arch: str = "sm_90",
) -> Row:
    timings = {step: Timing(us, "" if us else "planted") for step, us in steps.items()}
    parts = {part: Timing(part_us, "" if part_us else "planted") for part in operation.parts}
    one = Problem(operation.name, LAYER, "jagged")
    return Row(one, Device(arch, "a GPU"), False, timings, parts, {operation.ours: 1 << 30})


FAST = {(BF16, FORWARD): 50.0, (FP8, FORWARD): 40.0, (BF16, BOTH): 180.0, (FP8, BOTH): 120.0, (FP8, GRAPH): 110.0}


MXFP8_FAST = {(MXFP8 if who == FP8 else who, step): us for (who, step), us in FAST.items()}


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


def problem(operation: Operation = FP8_GROUPED_MM, routing: str = "balanced") -> Problem:
    return Problem(operation.name, NamedInts(M=96, N=32, K=64, G=3), routing)


def operands(one: Problem, torch_device: str) -> Operands:
    return grouped_steps.operands_of(one, torch_device)


@each_operation
@pytest.mark.parametrize(("routing", "padded"), [("balanced", False), ("ragged", True), ("empty", True)])
def test_groups_are_padded_where_one_needs_it(routing: str, padded: bool, operation: Operation) -> None:
    one = problem(operation, routing)
    assert grouped_steps.needs_padding(one) == padded
    assert operands(one, "cpu").pad == padded
    assert grouped_steps.parts_of(one) == (*operation.parts, *(PADDING if padded else ()))


def test_mxfp8_wants_groups_of_32_rows() -> None:
    layer = NamedInts(M=96, N=32, K=64, G=2)  # 48 rows each
    padded = {name: grouped_steps.needs_padding(Problem(name, layer, "balanced")) for name in OPERATIONS}
    assert padded == {"grouped-mm": False, "mxfp8-grouped-mm": True}


@pytest.mark.usefixtures("quantizers_in_plain_torch")
@each_operation
@pytest.mark.parametrize("routing", ["balanced", "ragged"])
def test_our_step_is_near_that_of_bf16(routing: str, operation: Operation) -> None:
    given = operands(problem(operation, routing), "cpu")
    for step in (FORWARD, BOTH):
        results = [grouped_steps.step_call(operation, who, step, given)() for who in (BF16, operation.ours)]
        pairs = [results] if step == FORWARD else list(zip(*results, strict=True))
        assert len(pairs) == (1 if step == FORWARD else 2)
        for right, ours in pairs:
            assert ours.shape == right.shape
            assert 0 < (ours.float() - right.float()).norm() < 0.06 * right.float().norm()


@pytest.mark.usefixtures("quantizers_in_plain_torch")
@each_operation
@pytest.mark.parametrize("routing", ["balanced", "ragged"])
def test_a_variant_is_our_step_to_the_bit(routing: str, operation: Operation) -> None:
    given = operands(problem(operation, routing), "cpu")
    ours = grouped_steps.step_call(operation, operation.ours, BOTH, given)()
    for name in operation.variants:
        for result, right in zip(grouped_steps.step_call(operation, name, BOTH, given)(), ours, strict=True):
            assert torch.equal(result, right)


@pytest.mark.usefixtures("quantizers_in_plain_torch")
@each_operation
@pytest.mark.parametrize("routing", ["balanced", "ragged"])
def test_the_parts_put_together_are_the_step(routing: str, operation: Operation) -> None:
    one = problem(operation, routing)
    given = operands(one, "cpu")
    parts = {part: grouped_steps.part_call(operation, part, given)() for part in grouped_steps.parts_of(one)}
    out, grads = (grouped_steps.step_call(operation, operation.ours, step, given)() for step in (FORWARD, BOTH))
    gemms = [parts[gemm] for gemm in GEMMS]
    assert torch.equal(gemms[2].transpose(1, 2), grads[1])
    if not given.pad:
        assert torch.equal(gemms[0], out)
        assert torch.equal(gemms[1], grads[0])


@each_operation
def test_torchao_is_refused_what_it_does_not_take(operation: Operation) -> None:
    given = operands(problem(operation, "ragged"), "cpu")
    with pytest.raises(MachineError, match=f"positive multiple of {operation.multiple} rows"):
        grouped_steps.step_call(operation, TORCHAO, BOTH, given)


def test_torchao_is_asked_to_emulate_where_ours_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}
    _stand_in(monkeypatch, "torchao.quantization.quantize_.common", KernelPreference=KernelPreference)
    _stand_in(
        monkeypatch,
        "torchao.prototype.moe_training.mxfp8_grouped_mm",
        _to_mxfp8_then_scaled_grouped_mm=lambda A, B_t, offs, **options: asked.update(options),
    )
    given = operands(problem(MXFP8_GROUPED_MM), "cpu")
    grouped_steps.step_call(MXFP8_GROUPED_MM, TORCHAO, FORWARD, given)()
    assert asked == {"kernel_preference": KernelPreference.EMULATED}


class KernelPreference(enum.Enum):
    AUTO = "auto"
    EMULATED = "emulated"


def _stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **functions: object) -> None:
    """A module of torchao's, and the packages above it."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:depth]))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for function, value in functions.items():
        monkeypatch.setattr(module, function, value, raising=False)


# Whether a result is right


@pytest.mark.usefixtures("quantizers_in_plain_torch")
@each_operation
@pytest.mark.parametrize("routing", ["balanced", "ragged", "empty"])
def test_right_results_pass(routing: str, operation: Operation) -> None:
    given = operands(problem(operation, routing), "cpu")
    contenders = [operation.ours, *operation.variants, *([BF16] if routing == "balanced" else [])]
    for name in contenders:
        found = grouped_steps.accuracy_of(operation, name, given)
        assert found.reason == ""
        assert min(found.sqnr_db.values()) > (40 if name == BF16 else 25)


def spoiled(given: Operands) -> Callable[..., torch.Tensor]:
    """bf16 without the last expert."""

    def multiply(A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        kept = torch.ones(len(offs), 1, 1, dtype=B_t.dtype)
        kept[-1] = 0
        return torch._grouped_mm(A, B_t * kept, offs=offs)

    return multiply


def test_one_expert_that_is_left_out_is_wrong() -> None:
    operation = replace(FP8_GROUPED_MM, contenders={**FP8_GROUPED_MM.contenders, TORCHAO: spoiled})
    found = grouped_steps.accuracy_of(operation, TORCHAO, operands(problem(), "cpu"))
    assert re.fullmatch(r"wrong: \w+ has an SQNR of -?0.0 dB, wanted 20", found.reason)
    checked = Timing(5.0).with_check(found)
    assert (checked.time_us, checked.valid_us) == (5.0, None)


def test_a_contender_is_checked_on_the_operands_that_it_is_timed_on() -> None:
    right = Step(BF16, problem(), BOTH)
    right.build("cpu")
    found = right.check()
    assert found.reason == ""
    assert found.sqnr_db is not None
    assert min(found.sqnr_db.values()) > 40
    assert len(right.launcher("cpu")()) == 2


def test_nan_is_wrong_and_exact_is_not() -> None:
    right = torch.ones(2, 2)
    assert grouped_steps.sqnr_db(right, right) == math.inf
    assert grouped_steps.sqnr_db(right * math.nan, right) == -math.inf
    assert grouped_steps.sqnr_db(right, right * 0) == -math.inf
    assert grouped_steps.sqnr_db(right * 1.1, right) == pytest.approx(20, abs=0.01)


def test_a_wrong_rival_is_in_no_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    row = timed({**FAST, (TORCHAO, FORWARD): 10.0, (TORCHAO, BOTH): 20.0})
    reason = "wrong: grad_B has an SQNR of 3.1 dB, wanted 20"
    wrong = Timing(reason=reason, sqnr_db={"out": 28.0, "grad_A": math.inf, "grad_B": 3.1})
    row = replace(row, steps={s: t.with_check(wrong) if s[0] == TORCHAO else t for s, t in row.steps.items()})
    assert (row.speedup(BOTH, TORCHAO), row.wrong) == (None, {TORCHAO: reason})
    render_grouped.print_grouped([row], [], "markdown")
    said = capsys.readouterr().out
    assert "| 10.00 | 20.00 | wrong |" in said
    assert f"- torchao on {LAYER}: {reason}" in said
    render_grouped.print_grouped([row], [], "json")
    (found,) = json.loads(capsys.readouterr().out)
    assert found["torchao_speedup_fwd_bwd"] is None
    assert found["sqnr_db"]["torchao"] == {"out": 28.0, "grad_A": None, "grad_B": 3.1}
    assert {"contender": "torchao", "step": "fwd+bwd", "time_us": 20.0, "reason": reason} in found["steps"]


# The simulated clock: the whole command, no kernel runs


def simulated(*, op: str = "grouped-mm", time_budget_s: float | None = None, **options: Any) -> list[Row]:
    backend = SimulatedBackend("simulated:1")
    given = BenchOptions(op=OperationName(op), **options)
    problems = bench_grouped.problems_of(given, backend)
    return list(bench_grouped.run(backend, problems, time_budget_s, with_torchao=not given.alone))


@each_operation
def test_a_simulated_run_times_every_cell_and_repeats_itself(operation: Operation) -> None:
    rows = simulated(op=operation.name, seed=1)
    assert len(rows) == 6
    for row in rows:
        assert tuple(row.steps) == operation.steps()
        assert tuple(row.parts) == grouped_steps.parts_of(row.problem)
        assert all(timing.time_us and not timing.reason for timing in (*row.steps.values(), *row.parts.values()))
        assert set(row.peak_bytes.values()) == {None}
    assert simulated(op=operation.name, seed=1) == rows


def test_without_torchao_and_with_a_spent_budget() -> None:
    assert all(TORCHAO not in who for row in simulated(alone=True) for who in row.steps)
    assert simulated(time_budget_s=0.0) == []


def test_shapes_that_no_gemm_takes_are_refused() -> None:
    with pytest.raises(UsageError, match="multiples of 16"):
        simulated(shapes=("tiny",))
    with pytest.raises(UsageError, match="multiples of 32"):
        simulated(op=MXFP8_GROUPED_MM.name, shapes=("tiny",))
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
    assert len(lines) == 3 + 2 + len(FP8_GROUPED_MM.parts) + 2
    assert lines[1].startswith("| --- | --- | ---: |")
    assert len({line.count("|") for line in lines[:3]}) == 1


def test_variants_stand_below_ours_with_time_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    kept = "fp8 keeping A, B_t"
    row = timed({**FAST, (kept, BOTH): 90.0, (kept, GRAPH): 85.0})
    render_grouped.print_grouped([replace(row, peak_bytes={FP8: 1 << 30, kept: 3 << 29})], [], "markdown")
    *_, ours, keeping_A, both = (line for line in capsys.readouterr().out.splitlines() if line.startswith("|"))
    assert [cell.strip() for cell in ours.split("|")][2:-1] == ["fp8", "120.0", "1.50x", "25 %", "110.0", "1.00 GiB"]
    assert [cell.strip() for cell in keeping_A.split("|")][2:-1] == ["fp8 keeping A", "-", "", "", "-", "-"]
    assert [cell.strip() for cell in both.split("|")][2:-1] == [kept, "90.00", "2.00x", "33 %", "85.00", "1.50 GiB"]


def test_json_has_all_that_is_derived(capsys: pytest.CaptureFixture[str]) -> None:
    render_grouped.print_grouped([timed(FAST)], [], "json")
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["shape"], found["padded"], found["bound_share"]) == (dict(LAYER), False, pytest.approx(0.25))
    assert found["steps"][0] == {"contender": "bf16", "step": "fwd", "time_us": 50.0, "reason": ""}
    assert found["parts"]["GEMM out"] == {"time_us": 10.0, "reason": ""}


@pytest.mark.parametrize("output_format", ["table", "markdown"])
def test_every_table_says_what_is_emulated(output_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arch, times in (("sm_90", 2), ("sm_100", 0)):
        render_grouped.print_grouped([timed(MXFP8_FAST, 10.0, MXFP8_GROUPED_MM, arch)], [], output_format)
        assert capsys.readouterr().out.count("emulated") == times
    render_grouped.print_grouped([timed(FAST)], [], output_format)
    assert "emulated" not in capsys.readouterr().out


def test_json_says_what_is_emulated(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [timed(MXFP8_FAST, 10.0, MXFP8_GROUPED_MM, arch) for arch in ("sm_90", "sm_100")]
    render_grouped.print_grouped([*rows, timed(FAST)], [], "json")
    found = json.loads(capsys.readouterr().out)
    assert [row["emulated"] for row in found] == [True, False, False]
    assert [row["row"] for row in found] == ["mxfp8-grouped-mm", "mxfp8-grouped-mm", "grouped-mm"]


def test_published_rows_stand_beside_and_the_impossible_one_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    rows = store_published.read_operations(shapes.sweeps_dir() / "published" / "grouped_mm.csv")
    render_grouped.print_grouped([], rows, "table")
    said = capsys.readouterr().out
    assert said.count("pytorch/ao#2998") == 8
    assert said.count("is not below") == 1


def command_line(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["fp8tune", "bench", *arguments, "--timer", "simulated:1"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_the_options_name_every_operation() -> None:
    assert [str(operation) for operation in OperationName] == list(OPERATIONS)


@pytest.mark.parametrize("op", OPERATIONS)
def test_the_command(op: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert command_line("--op", op, "--format", "json", "--alone", monkeypatch=monkeypatch) == 0
    assert [row["row"] for row in json.loads(capsys.readouterr().out)] == [op] * 6 + ["published"] * 8


@pytest.mark.parametrize(("who", "code"), [(FP8, 1), (TORCHAO, 0)])
def test_our_own_wrong_result_is_a_finding(
    who: str, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Timing(reason="wrong: out has an SQNR of 3.1 dB, wanted 20", sqnr_db={"out": 3.1})
    row = timed({**FAST, (TORCHAO, BOTH): 20.0})
    row = replace(row, steps={s: t.with_check(wrong) if s[0] == who else t for s, t in row.steps.items()})
    monkeypatch.setattr(bench_grouped, "run", lambda *_, **__: iter([row]))
    assert command_line("--op", "grouped-mm", "--format", "json", monkeypatch=monkeypatch) == code
    assert ("our own output is wrong" in capsys.readouterr().err) == bool(code)


def test_options_that_do_not_go_with_an_operation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command_line("--op", "grouped-mm", "--kernel", "colwise", monkeypatch=monkeypatch) == 2
    assert "leave out --kernel" in capsys.readouterr().err


@pytest.mark.gpu
@each_operation
def test_on_a_gpu_every_step_and_part_of_ours_has_a_time(operation: Operation) -> None:
    backend, _ = backend_for(None, None)
    for routing in ("balanced", "empty"):
        one = Problem(operation.name, NamedInts(M=1024, N=256, K=512, G=4), routing)
        *_, row = bench_grouped.run(backend, (one,), with_torchao=False)
        for timing in (*row.steps.values(), *row.parts.values()):
            assert timing.time_us, timing.reason
        assert row.peak_bytes[operation.ours]


def test_all_but_bf16_is_compiled_before_torchao_is_timed() -> None:
    for with_torchao in (True, False):
        names = [step.name for step in bench_grouped.compiled_first([problem()], with_torchao)]
        assert names == [*([TORCHAO] if with_torchao else []), FP8, *FP8_GROUPED_MM.variants]
