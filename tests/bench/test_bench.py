"""`fp8tune bench`: what is compared with what, a reason in every empty cell, and the JSON that scripts read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from places import PLANTED, hear_interrupts

from fp8tune import cli
from fp8tune.bench import cells as benching
from fp8tune.bench import checking, rounds, warming
from fp8tune.bench import kernels as bench
from fp8tune.bench.cells import Timing
from fp8tune.bench.checking import Checked, Part
from fp8tune.bench.counterparts import Contender
from fp8tune.bench.kernels import Ceiling, Kernel, Row
from fp8tune.errors import UsageError
from fp8tune.measure import host
from fp8tune.measure.clock import Block, Trial
from fp8tune.measure.worker import Poisoned, Worker
from fp8tune.plan import problems as plan
from fp8tune.plan import shapes
from fp8tune.records import Device, NamedInts, Problem
from fp8tune.render import bench as render_bench
from fp8tune.revisions.loading import load_spec
from fp8tune.sweep import session
from fp8tune_kernels.catalog import KERNELS

FAULTS = f"{PLANTED / 'faults.py'}:SPEC"


def simulated(*kernels: str, **options: Any) -> list[Row | Kernel]:
    laboratory, _ = session.choose_laboratory(None, "simulated:1")
    wish = bench.Wish(kernels=kernels, shapes=("tiny",), **options)
    return list(bench.run(bench.prepare(wish, laboratory)))


WRONG = Checked(Part(84, 100), Part(31, 100))


def row(ours_us: float | None, copy_us: float | None, wrong: str = "", **rivals_us: float | None) -> Row:
    """A problem of 3 MB; ``wrong`` names the contender whose output is."""
    timings = {name: Timing(us, "" if us else "planted") for name, us in {"fp8tune": ours_us, **rivals_us}.items()}
    if wrong:
        timings[wrong] = replace(timings[wrong], reason=WRONG.wrong, checked=WRONG)
    problem = Problem("colwise", NamedInts(M=1000, K=1000, G=2), "jagged")
    return Row(problem, Device("sm_90", "a GPU"), 3_000_000, Timing(copy_us), timings)


COPY_US = benching.COPY_BYTES / 2000 / 1e3
"""A copy at 2,000 GB/s."""


def test_rates_shares_and_ratios() -> None:
    timed = row(2.0, COPY_US, torchao=5.0)
    ceiling = Ceiling.of([timed])
    assert timed.gb_per_s == pytest.approx(1500)
    assert ceiling.gb_per_s == pytest.approx(2000)
    assert ceiling.share(timed) == pytest.approx(0.75)
    assert ceiling.time_us(timed) == pytest.approx(1.5)
    assert timed.ratio("torchao") == pytest.approx(2.5)


def test_the_fastest_kernel_of_a_run_is_the_ceiling_where_it_is_faster_than_the_copy() -> None:
    slow, fast, cached = row(2.0, COPY_US), row(1.4, COPY_US), row(1.0, COPY_US)
    assert Ceiling.of([slow, fast]).gb_per_s == pytest.approx(3000 / 1.4)
    assert Ceiling.of([slow, fast]).share(fast) == 1.0
    assert Ceiling.of([slow, cached]).gb_per_s == pytest.approx(2000)  # no memory gives 3,000
    assert Ceiling.of([row(2.0, None), fast]) == Ceiling() == Ceiling.of([])


def test_what_was_not_timed_enters_no_share_ratio_or_mean() -> None:
    rows = [row(2.0, COPY_US, torchao=4.0), row(2.0, COPY_US, torchao=16.0), row(None, COPY_US, torchao=3.0)]
    rows.append(row(2.0, COPY_US, torchao=None))
    assert [Ceiling.of(rows).share(each) for each in rows] == [0.75, 0.75, None, 0.75]
    assert [each.ratio("torchao") for each in rows] == [2.0, 8.0, None, None]
    kernel = Kernel("colwise", rows)
    assert kernel.geomean("torchao") == pytest.approx(4.0)
    assert kernel.geomean("torch.compile") is None


def test_what_is_wrong_keeps_its_time_and_enters_no_share_ratio_or_mean() -> None:
    ours, theirs = row(2.0, COPY_US, wrong="fp8tune", torchao=4.0), row(2.0, COPY_US, wrong="torchao", torchao=1.0)
    assert (ours.time_us, ours.gb_per_s, ours.ratio("torchao"), ours.is_wrong) == (2.0, None, None, True)
    assert (theirs.timings["torchao"].time_us, theirs.ratio("torchao"), theirs.is_wrong) == (1.0, None, False)
    kernel = Kernel("colwise", [ours, theirs, row(2.0, COPY_US, torchao=6.0)])
    assert kernel.geomean("torchao") == pytest.approx(3.0)


# Whether an output is right


def on_the_cpu(monkeypatch: pytest.MonkeyPatch, kernel: str, rival: Contender | None = None) -> Problem:
    """The cells of a kernel run without a GPU, with its reference in its place; a small problem of it."""
    spec = load_spec(kernel)

    def launch(config: object, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        for output, right in zip(outputs, spec.reference(*inputs), strict=True):
            output.copy_(right)

    on_cpu = replace(spec, inputs=lambda problem, device: spec.inputs(problem, "cpu"), launch=launch)
    monkeypatch.setattr(benching, "load_spec", lambda reference: on_cpu)
    monkeypatch.setattr(benching, "make_timer", lambda name: Launching())
    monkeypatch.setattr(
        benching, "counterpart", lambda kernel, inputs: rival or Contender(lambda: on_cpu.reference(*inputs))
    )
    monkeypatch.setattr(benching, "compiled", lambda call: call)
    monkeypatch.setattr(benching, "_exported_config", lambda spec, problem, device: spec.default)
    benching._forget()
    return plan.problems(spec, shapes.load("tiny").rows)[-1]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_right_output_passes_the_check(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = on_the_cpu(monkeypatch, kernel)
    for name in (benching.OURS, benching.TORCH_COMPILE, benching.TORCHAO):
        timing = benching.check_contender(name, kernel, problem, "launching")
        assert (timing.reason, timing.time_us) == ("", None)
        assert timing.checked is not None
        assert timing.checked.codes.total
        assert timing.checked.scales.total


def test_a_wrong_output_is_named_with_its_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = load_spec("colwise")

    def rival() -> tuple[Any, ...]:
        codes, scales = spec.reference(*benching._inputs("colwise", problem))
        codes[: len(codes) // 2].view(torch.uint8).bitwise_not_()
        scales[0] *= 2
        return codes, scales

    problem = on_the_cpu(monkeypatch, "colwise", Contender(rival))
    timing = benching.check_contender(benching.TORCHAO, "colwise", problem, "launching")
    assert timing.checked is not None
    assert timing.checked.codes.share == 0.5
    assert timing.checked.scales.wrong == 1
    assert timing.reason.startswith("wrong: 50 % of codes, ")


def test_an_output_that_is_not_written_is_wrong_whatever_memory_held(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = on_the_cpu(monkeypatch, "rowwise-2d")
    assert benching.check_contender(benching.OURS, "rowwise-2d", problem, "launching").reason == ""
    ours = benching._contenders[benching.OURS]
    benching._contenders[benching.OURS] = replace(ours, launch=lambda: None)  # the right bytes are still there
    assert "100 % of codes" in benching.check_contender(benching.OURS, "rowwise-2d", problem, "launching").reason


def test_what_cannot_be_checked_does_not_count() -> None:
    timed, right = Timing(5.0), Timing(checked=Checked(Part(0, 10), Part(0, 2)))
    assert timed.judged(right).valid_us == 5.0
    unchecked = timed.judged(Timing(reason="OutOfMemoryError: planted"))
    assert (unchecked.time_us, unchecked.valid_us) == (5.0, None)
    assert unchecked.reason == "not checked: OutOfMemoryError: planted"
    assert timed.judged(Timing()) == timed  # a clock that runs no kernels
    assert Timing(reason="no such GPU").judged(right).reason == "no such GPU"


def test_the_reference_is_let_go_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = on_the_cpu(monkeypatch, "rowwise-2d")
    benching.check_contender(benching.OURS, "rowwise-2d", problem, "launching")
    assert benching._expected
    benching.time_contender(benching.OURS, "rowwise-2d", problem, "launching", 0)
    assert not benching._expected


def test_how_wrong_is_said_without_rounding_it_away() -> None:
    assert Checked(Part(0, 9), Part(0, 3)).wrong == ""
    assert Checked(Part(9, 9), Part(0, 3)).wrong == "wrong: 100 % of codes, 0 % of scales"
    assert Checked(Part(84_999, 100_000), Part(31, 100)).wrong == "wrong: 84 % of codes, 31 % of scales"
    assert Checked(Part(99_999, 100_000)).wrong == "wrong: 99.99 % of codes"
    assert Checked(Part(7, 85_196_800), Part(1, 640)).wrong == "wrong: 7 of 85,196,800 codes, 0.15 % of scales"


def test_outputs_are_compared_by_bits() -> None:
    codes, scales = torch.tensor([1.0, -0.0]).to(torch.float8_e4m3fn), torch.tensor([1.0, float("nan")])
    assert checking.compared((codes, scales), (codes.clone(), scales.clone())).wrong == ""  # any NaN is any NaN
    assert checking.compared((codes.abs(), scales), (codes, scales)).codes == Part(1, 2)  # -0 is not 0
    e8m0 = torch.tensor([120, 255], dtype=torch.uint8)
    assert checking.compared((e8m0,), (e8m0.view(torch.float8_e8m0fnu),)).scales == Part(0, 2)
    assert checking.compared((scales[:1],), (scales,)).wrong == "wrong: output 0 has shape (1,), wanted (2,)"
    assert checking.compared((scales.half(),), (scales,)).wrong.startswith("wrong: output 0 is torch.float16")
    assert checking.compared((codes,), (codes, scales)).wrong == "wrong: 1 outputs, wanted 2"


def test_large_outputs_are_compared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "CHUNK_ELEMENTS", 10)
    right = torch.arange(63, dtype=torch.float32).reshape(7, 9).t()
    assert checking.compared((right.contiguous(),), (right,)).scales == Part(0, 63)
    assert checking.compared((right + (right == 62),), (right,)).scales == Part(1, 63)


# The simulated clock: the whole command, no kernel runs


def test_a_simulated_run_times_every_cell_and_repeats_itself() -> None:
    first = simulated("colwise", FAULTS)
    kernels = [event for event in first if isinstance(event, Kernel)]
    rows = [event for event in first if isinstance(event, Row)]
    assert [kernel.name for kernel in kernels] == ["colwise", load_spec(FAULTS).name]
    assert [each for kernel in kernels for each in kernel.rows] == rows
    for each in rows:
        assert list(each.timings) == ["fp8tune", "torch.compile", "torchao"]
        assert all(timing.time_us and not timing.reason for timing in (each.copy, *each.timings.values()))
        assert each.timings["fp8tune"].config == load_spec("colwise" if each in kernels[0].rows else FAULTS).default
    assert list(kernels[0].hosts) == ["fp8tune", "torchao", "torch.add"]
    assert simulated("colwise", FAULTS) == first


def test_a_spent_time_budget_starts_no_problem() -> None:
    assert simulated("colwise", time_budget_s=0.0) == []


def test_host_times_are_within_the_time_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(1000))
    monkeypatch.setattr(bench, "time", types.SimpleNamespace(monotonic=lambda: next(seconds)))  # a second a look
    count = len(simulated("colwise")) - 1
    seconds = iter(range(1000))
    kernel, *rows = simulated("colwise", time_budget_s=float(count))
    assert isinstance(kernel, Kernel)
    assert (len(rows), kernel.hosts) == (count, {})
    seconds = iter(range(1000))
    kernel, *rows = simulated("colwise", time_budget_s=count + 1.0)
    assert isinstance(kernel, Kernel)
    assert (len(rows), list(kernel.hosts)) == (count, ["fp8tune", "torchao", "torch.add"])


def test_cells_take_turns_and_one_stalled_block_is_no_cell() -> None:
    asked: list[tuple[str, int]] = []

    def cell(name: str, round: int) -> Timing:
        asked.append((name, round))
        if name == "torchao" and round == 1:
            return Timing(reason="out of memory")
        return Timing(50.0 if round == 0 else 5.0 + round / 10, config=NamedInts(num_warps=4))

    timed = rounds.in_rounds({name: partial(cell, name) for name in ("cast", "fp8tune", "torchao")})
    assert asked[:6] == [("cast", 0), ("fp8tune", 0), ("torchao", 0), ("fp8tune", 1), ("torchao", 1), ("cast", 1)]
    assert asked[6:] == [("cast", 2), ("fp8tune", 2)]  # another one first; what failed is asked no more
    assert timed["cast"] == timed["fp8tune"] == Timing(5.2, config=NamedInts(num_warps=4))
    assert timed["torchao"] == Timing(reason="out of memory")
    assert rounds.in_rounds({}) == {}


def test_rounds_launch_what_the_first_has_built(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, built = load_spec("rowwise-2d"), []
    on_cpu = replace(spec, inputs=lambda problem, device: built.append(problem) or spec.inputs(problem, "cpu"))
    monkeypatch.setattr(benching, "load_spec", lambda reference: on_cpu)
    monkeypatch.setattr(benching, "make_timer", lambda name: Launching())
    monkeypatch.setattr(benching, "_exported_config", lambda spec, problem, device: spec.default)
    for problem in plan.problems(spec, [NamedInts(M=64, K=48, N=32, E=2)]):
        cell = partial(benching.time_contender, "fp8tune", "rowwise-2d", problem, "launching")
        assert [cell(number).time_us for number in range(3)] == [1.0, 2.0, 3.0]
        assert built.pop() == problem
        assert not built
    benching._forget()
    assert not benching._contenders


class Launching:
    """Launches, and says that it took a microsecond more than the round's number."""

    runs_kernels = True

    def block(self, launch: Callable[[], object], trial: Trial) -> Block:
        launch()
        return Block((1.0 + trial.round,), None)


@pytest.mark.parametrize(
    ("number", "code", "op"), [(signal.SIGINT, 130, ("--op", "grouped-mm")), (signal.SIGTERM, 143, ())]
)
def test_who_stops_it_gets_what_was_timed(number: int, code: int, op: tuple[str, ...], tmp_path: Path) -> None:
    rows = "".join(f"[[rows]]\nM = {1024 * n}\nK = 512\nN = 512\nE = 4\n" for n in range(1, 500))
    (tmp_path / "many.toml").write_text(rows)
    command = [sys.executable, "-m", "fp8tune.cli", "bench", "--timer", "simulated:1", "--format", "json", *op]
    command += ["--shapes", str(tmp_path / "many.toml")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hear_interrupts
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("[2/"):
            process.send_signal(number)
            break
    said, progress = process.communicate(timeout=60)
    assert process.returncode == code
    assert len([row for row in json.loads(said) if row["row"] in ("problem", "grouped-mm")]) >= 2
    assert "problems left out" in progress
    assert ("host times left out: colwise" in progress) == (not op)


def test_only_the_rivals_asked_for_are_timed() -> None:
    kernel, *rows = simulated("rowwise-2d", rivals=("torch.compile",))
    assert all(isinstance(each, Row) and list(each.timings) == ["fp8tune", "torch.compile"] for each in rows)
    assert isinstance(kernel, Kernel)
    assert list(kernel.hosts) == ["fp8tune", "torch.add"]


def test_the_worker_that_dies_costs_one_cell() -> None:
    laboratory, _ = session.choose_laboratory(None, "simulated:1")
    cells = bench._Cells(Worker(), laboratory)
    try:
        assert cells._timing(_die) == Timing(reason="worker exited with code 3")
        assert cells._timing(_fail) == Timing(reason="ValueError: planted")
        assert cells._timing(_time) == Timing(5.0)
    finally:
        cells.worker.close()


def _die() -> Timing:
    os._exit(3)


def _fail() -> Timing:
    raise ValueError("planted")


def _time() -> Timing:
    return Timing(5.0)


def test_a_reference_that_torch_compile_refuses_is_compiled_once_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    laboratory, _ = session.choose_laboratory(None, "simulated:1")
    cells = bench._Cells(Worker(), laboratory)
    asked: list[object] = []
    monkeypatch.setattr(cells, "_timing", lambda *arguments: asked.append(arguments) or Timing(reason="no"))
    problems = plan.problems(load_spec("colwise"), shapes.load("tiny").rows)
    for problem in problems:
        assert cells._contender("torch.compile", "colwise", problem, 0).reason == "no"
    assert len(asked) == 1
    for problem in problems:
        cells._contender("torchao", "colwise", problem, 0)
    assert len(asked) == 1 + len(problems)
    assert cells._check("torch.compile", "colwise", problems[0]).reason == "no"
    assert len(asked) == 1 + len(problems)


def test_warming_up_runs_an_autotuner_once_for_sizes_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[warming.Cell] = []
    monkeypatch.setattr(warming, "in_parallel", lambda cells, workers, timeout_s: iter(warmed.extend(cells) or ()))
    laboratory, _ = session.choose_laboratory(None, "simulated:1")
    assert list(bench._warm_up(bench.prepare(bench.Wish(("colwise",)), laboratory))) == []
    names = [str(arguments[0]) for _, arguments in warmed]
    assert names == sorted(names, key=lambda name: name != "torchao")
    groups = {arguments[2].shape["G"] for _, arguments in warmed if arguments[0] == "torchao"}  # type: ignore[attr-defined]
    assert groups == {1, 16, 8}  # a size of 1, multiples of 16, others: three binaries each
    assert names.count("fp8tune") > names.count("torchao")


def test_cells_are_warmed_up_in_processes_that_are_thrown_away(tmp_path: Path) -> None:
    cells: list[warming.Cell] = [(_warm, (tmp_path / name,)) for name in ("one", "two", "three")]
    seen = list(warming.in_parallel([(_die, ()), *cells], workers=2, timeout_s=60.0))
    assert [(compiled.done, compiled.total) for compiled in seen] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "three", "two"]
    processes = {path.read_text() for path in tmp_path.iterdir()}
    assert str(os.getpid()) not in processes


def test_compiling_is_shown_at_each_quarter(capsys: pytest.CaptureFixture[str]) -> None:
    for done in range(1, 9):
        render_bench.show_compiled(warming.Compiled(done, 8, seconds=2.0 * done))
    said = ["compiling 2/8, ETA 12 s", "compiling 4/8, ETA 8 s", "compiling 6/8, ETA 4 s", "compiling 8/8, ETA 0 s"]
    assert capsys.readouterr().err.splitlines() == said


def _warm(path: Path) -> None:
    """An autotuner times a config, on a fake GPU, and the launch of the one it picks fails."""
    from triton.runtime import driver

    driver.set_active(types.SimpleNamespace())  # type: ignore[arg-type]

    def launch() -> None:
        times_us = driver.active.get_benchmarker()(lambda: path.write_text(str(os.getpid())), quantiles=(0.5, 0.2, 0.8))
        assert len(times_us) == 3
        raise ValueError("planted")

    warming.run_once(lambda: launch)


# What a cell does, without a GPU


def test_a_failure_is_its_first_line() -> None:
    def fail() -> float:
        raise RuntimeError("\nno such thing\n  a listing")

    assert benching.guarded(fail) == Timing(reason="RuntimeError: no such thing")


def test_a_device_error_ends_the_worker() -> None:
    def fail() -> float:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(Poisoned) as poisoned:
        benching.guarded(fail)
    assert isinstance(poisoned.value.value, Timing)
    assert "illegal memory access" in poisoned.value.value.reason


def test_host_time_is_of_calls_after_the_first() -> None:
    calls: list[int] = []
    assert 0 < host.host_us(lambda: calls.append(1)) < 1000
    assert len(calls) == 1 + host.HOST_BATCHES * host.HOST_CALLS


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_has_a_public_wrapper_that_takes_its_tensors(kernel: str) -> None:
    spec = load_spec(kernel)
    inputs = spec.inputs(plan.problems(spec, [benching.HOST_ROW])[0], "meta")
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    outputs = benching.public_wrapper(spec)(*tensors)
    for output, wanted in zip(outputs, spec.outputs(*inputs), strict=True):
        assert (output.shape, output.stride(), output.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)


def test_a_kernel_of_elsewhere_has_no_wrapper_to_time() -> None:
    with pytest.raises(UsageError, match="lives elsewhere"):
        benching.public_wrapper(load_spec(FAULTS))


# What is printed


@pytest.mark.parametrize(("output_format", "bullet"), [("table", ""), ("markdown", "- ")])
def test_tables_name_the_reason_of_an_empty_cell(
    output_format: str, bullet: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = Kernel(
        "colwise",
        [
            row(2.0, COPY_US, torchao=None),
            row(2.0, COPY_US, torchao=6.0),
            row(2.0, COPY_US, wrong="torchao", torchao=1.0),
        ],
        {"fp8tune": Timing(18.0)},
    )
    render_bench.print_bench([kernel], ("torchao",), output_format)
    said = capsys.readouterr().out.splitlines()
    assert f"{bullet}geometric mean: 3.00x as fast as torchao, on 1 of 3 problems" in said
    assert f"{bullet}ceiling: 2,000 GB/s, a copy in this run or the fastest kernel of it" in said
    assert any(line.rstrip(" |").endswith("wrong: 84 % of codes, 31 % of scales") for line in said)
    assert f"{bullet}host us of one call on a 64x64 input: fp8tune 18.00" in said
    assert f"{bullet}torchao on M=1000 K=1000 G=2: planted" in said
    cells = next(line for line in said if "3.00x" in line and "M=1000" in line)
    assert cells.startswith("| M=1000 K=1000 G=2 | jagged |") == (output_format == "markdown")


@pytest.mark.parametrize(("who", "code"), [("fp8tune", 1), ("torchao", 0)])
def test_our_own_wrong_output_is_a_finding(
    who: str, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel("colwise", [row(2.0, COPY_US, wrong=who, torchao=1.0)])
    monkeypatch.setattr(bench, "run", lambda request: iter([kernel, *kernel.rows]))
    command = [
        "fp8tune",
        "bench",
        "--kernel",
        "colwise",
        "--shapes",
        "tiny",
        "--timer",
        "simulated:1",
        "--format",
        "json",
    ]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert int(ended.value.code or 0) == code
    said = capsys.readouterr()
    assert ("our own output is wrong" in said.err) == bool(code)
    assert f"{who} wrong: 84 % of codes" in said.err or "us, wrong: 84 % of codes" in said.err
    assert json.loads(said.out)[0]["wrong_codes_share"] == (0.84 if code else None)


def test_json_is_a_list_of_problems_and_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    kernel = Kernel("colwise", [row(2.0, COPY_US, torchao=6.0)], {"fp8tune": Timing(18.0)})
    kernel.rows.append(row(2.0, COPY_US, wrong="torchao", torchao=1.0))
    render_bench.print_bench([kernel], ("torchao",), "json")
    problem, wrong, summary = json.loads(capsys.readouterr().out)
    assert (problem["row"], problem["time_us"], problem["ceiling_share"]) == ("problem", 2.0, 0.75)
    unchecked = {"wrong_codes_share": None, "wrong_scales_share": None}
    assert problem["rivals"] == {"torchao": {"time_us": 6.0, "ratio": 3.0, "reason": "", **unchecked}}
    shares = {"wrong_codes_share": 0.84, "wrong_scales_share": 0.31}
    reason = "wrong: 84 % of codes, 31 % of scales"
    assert wrong["rivals"] == {"torchao": {"time_us": 1.0, "ratio": None, "reason": reason, **shares}}
    assert (summary["row"], summary["geomean_ratio"]["torchao"]) == ("kernel", pytest.approx(3.0))
    assert summary["host"] == {"fp8tune": {"time_us": 18.0, "reason": ""}}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--against", "torcha", "--timer", "simulated:1"], "did you mean torchao"),
        (["--kernel", "colwse", "--timer", "simulated:1"], "did you mean colwise"),
        (["--shapes", "lama4", "--timer", "simulated:1"], "did you mean llama4"),
        pytest.param(
            [], "needs a GPU", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
        ),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], says: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "fp8tune.cli", "bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_default_set_holds_the_starting_line() -> None:
    rows = shapes.load("starting-line").rows
    held = {kernel: {p.shape for p in plan.problems(load_spec(kernel), rows)} for kernel in KERNELS}
    assert {NamedInts(M=16640, K=5120), NamedInts(M=16640, K=2048), NamedInts(M=131072, K=7168)} <= held["rowwise-2d"]
    assert {NamedInts(M=16640, K=5120, G=groups) for groups in (1, 16, 64, 128)} <= held["colwise"]
    assert {NamedInts(M=16640, K=2048, G=64), NamedInts(M=131072, K=7168, G=8)} <= held["colwise"]
    assert {NamedInts(N=8192, M=16640, G=1), NamedInts(N=2048, M=131072, G=8)} <= held["rowwise"]
    weights = {NamedInts(E=1, N=8192, K=5120), NamedInts(E=8, N=2048, K=7168), NamedInts(E=64, N=1408, K=2048)}
    assert weights <= held["transpose-3d-atomic"]
    dual = {NamedInts(M=16640, N=8192, K=5120, G=16), NamedInts(M=16640, N=1408, K=2048, G=64)}
    assert dual <= held["colwise-dual"]


@pytest.mark.gpu
def test_on_a_gpu_every_kernel_has_a_time_and_a_ceiling() -> None:
    laboratory, _ = session.choose_laboratory(None, None)
    wish = bench.Wish(KERNELS, shapes=("tiny",))
    events = list(bench.run(bench.prepare(wish, laboratory)))
    for each in events:
        if isinstance(each, Row):
            assert each.time_us, each.timings["fp8tune"].reason
            assert each.copy.time_us, each.copy.reason
            assert not each.is_wrong, each.timings["fp8tune"].reason
            assert all(timing.time_us or timing.reason for timing in each.timings.values())
            assert each.timings["torch.compile"].time_us, each.timings["torch.compile"].reason
        else:
            assert each.hosts["fp8tune"].time_us, each.hosts["fp8tune"].reason
            assert each.hosts["torch.add"].time_us
