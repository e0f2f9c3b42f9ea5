"""`fp8tune bench`: what is compared with what, a reason in every empty cell, and the JSON that scripts read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from places import PLANTED, hear_interrupts

from fp8tune import cli
from fp8tune.bench import cells, checking, kernel_contenders, warming
from fp8tune.bench import kernels as bench
from fp8tune.bench.cells import Cells, Contender, Timing
from fp8tune.bench.checking import Checked, Part
from fp8tune.bench.counterparts import COUNTERPARTS
from fp8tune.bench.kernel_contenders import (
    HOST_ROW,
    OURS,
    TORCH_ADD,
    TORCH_COMPILE,
    TORCHAO,
    HostCall,
    KernelContender,
    public_wrapper,
    wrapper_arguments,
)
from fp8tune.bench.kernels import Ceiling, Kernel, Row
from fp8tune.bench.options import BenchOptions
from fp8tune.errors import MachineError, UsageError
from fp8tune.measure import host
from fp8tune.measure.arms import Arm, Place, Work
from fp8tune.measure.backends.choice import backend_for
from fp8tune.measure.backends.gpu import GpuBackend
from fp8tune.measure.backends.simulated import SimulatedBackend
from fp8tune.measure.worker import Poisoned
from fp8tune.plan import problems as plan
from fp8tune.plan import shapes
from fp8tune.records import Device, NamedInts, Outcome, Problem, Status
from fp8tune.render import bench as render_bench
from fp8tune.revisions.loading import load_spec
from fp8tune_kernels.catalog import KERNELS

FAULTS = f"{PLANTED / 'faults.py'}:SPEC"


def simulated(
    *kernels: str,
    time_budget_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> list[Row | Kernel]:
    backend = SimulatedBackend("simulated:1")
    wanted = bench.planned(BenchOptions(kernels=kernels, shapes=("tiny",), **options), backend)
    return list(bench.run(backend, wanted, time_budget_s, clock))


WRONG = Checked(Part(84, 100), Part(31, 100))


def row(ours_us: float | None, copy_us: float | None, wrong: str = "", **rivals_us: float | None) -> Row:
    """A problem of 3 MB; ``wrong`` names the contender whose output is."""
    timings = {name: Timing(us, "" if us else "planted") for name, us in {"fp8tune": ours_us, **rivals_us}.items()}
    if wrong:
        timings[wrong] = replace(timings[wrong], reason=WRONG.wrong, checked=WRONG)
    problem = Problem("colwise", NamedInts(M=1000, K=1000, G=2), "jagged")
    return Row(problem, Device("sm_90", "a GPU"), 3_000_000, Timing(copy_us), timings)


COPY_US = 2 * kernel_contenders.COPIED_BYTES / 2000 / 1e3
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


def test_a_recorded_kernel_is_no_ceiling_and_has_no_least_time() -> None:
    """Its launch may address a part of its tensors."""
    recorded = Problem("module:kernel", NamedInts(n=1), input_layout="recorded-0123456789ab")
    slow, fast, gather = (replace(row(us, COPY_US), problem=recorded) for us in (2.0, 1.4, 0.2))
    ceiling = Ceiling.of([slow, fast, gather])
    assert ceiling.gb_per_s == pytest.approx(2000)
    assert [ceiling.share(each) for each in (slow, fast, gather)] == [0.75, 1.0, None]
    assert {ceiling.time_us(each) for each in (slow, fast, gather)} == {None}


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
    assert (ours.ours.time_us, ours.gb_per_s, ours.ratio("torchao"), ours.is_wrong) == (2.0, None, None, True)
    assert (theirs.timings["torchao"].time_us, theirs.ratio("torchao"), theirs.is_wrong) == (1.0, None, False)
    kernel = Kernel("colwise", [ours, theirs, row(2.0, COPY_US, torchao=6.0)])
    assert kernel.geomean("torchao") == pytest.approx(3.0)


# Whether an output is right


TorchAo = Callable[[str, Callable[..., Any]], None]


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> TorchAo:
    """Puts a function in the place of a kernel's counterpart."""

    def put(kernel: str, function: Callable[..., Any]) -> None:
        theirs = COUNTERPARTS[kernel]
        parts = theirs.module.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        setattr(sys.modules[theirs.module], theirs.name, function)

    return put


@pytest.fixture
def contender(monkeypatch: pytest.MonkeyPatch) -> Callable[..., KernelContender]:
    """A contender on a small problem on the CPU: ours on the interpreter, ``torch.compile`` without compiling."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")

    def built(name: str, kernel: str, device: str = "cpu") -> KernelContender:
        spec = load_spec(kernel)
        one = plan.problems(spec, shapes.load("tiny").rows)[-1]
        made = KernelContender(name, one, kernel, spec.bytes_moved(one.shape), spec.default)
        made.build(device)
        return made

    return built


@pytest.mark.parametrize("kernel", ["colwise", "rowwise-2d", "mxfp8-dim1"])
def test_a_right_output_passes_the_check(kernel: str, contender: Callable[..., KernelContender]) -> None:
    for name in (OURS, TORCH_COMPILE):
        timing = contender(name, kernel).check()
        assert (timing.reason, timing.time_us) == ("", None)
        assert timing.checked is not None
        assert timing.checked.codes.total
        assert timing.checked.scales.total


def test_a_wrong_output_is_named_with_its_shares(contender: Callable[..., KernelContender], torchao: TorchAo) -> None:
    spec = load_spec("rowwise-2d")

    def wrong(*inputs: Any) -> tuple[Any, ...]:
        codes, scales = spec.reference(*inputs)
        codes[: len(codes) // 2].view(torch.uint8).bitwise_not_()
        scales[0] *= 2
        return codes, scales

    torchao("rowwise-2d", wrong)
    timing = contender(TORCHAO, "rowwise-2d").check()
    assert timing.checked is not None
    assert timing.checked.codes.share == 0.5
    assert timing.checked.scales.wrong == 1
    assert timing.reason.startswith("wrong: 50 % of codes, ")


def test_an_output_that_is_not_written_is_wrong_whatever_memory_held(
    contender: Callable[..., KernelContender], torchao: TorchAo
) -> None:
    kept: list[Any] = []

    def stale(*inputs: Any) -> tuple[Any, ...]:
        """Writes the first time alone, and gives the same memory ever after."""
        if not kept:
            kept.extend(load_spec("colwise-3d").reference(*inputs))
        return tuple(kept)

    torchao("colwise-3d", stale)
    theirs = contender(TORCHAO, "colwise-3d")
    assert theirs.check().reason == ""
    checking.spoil(kept, load_spec("colwise-3d").reference(*load_spec("colwise-3d").inputs(theirs.problem, "cpu")))
    assert "100 % of codes" in theirs.check().reason


def test_what_cannot_be_checked_does_not_count() -> None:
    timed, right = Timing(5.0), Timing(checked=Checked(Part(0, 10), Part(0, 2)))
    assert timed.with_check(right).valid_us == 5.0
    unchecked = timed.with_check(Timing(reason="OutOfMemoryError: planted"))
    assert (unchecked.time_us, unchecked.valid_us) == (5.0, None)
    assert unchecked.reason == "not checked: OutOfMemoryError: planted"
    assert timed.with_check(Timing()) == timed  # a clock that runs no kernels
    assert Timing(reason="no such GPU").with_check(right).reason == "no such GPU"


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


def test_large_outputs_are_compared_in_pieces() -> None:
    right = torch.arange(63, dtype=torch.float32).reshape(7, 9).t()
    assert checking.compared((right.contiguous(),), (right,), at_once=10).scales == Part(0, 63)
    assert checking.compared((right + (right == 62),), (right,), at_once=10).scales == Part(1, 63)


# The simulated clock: the whole command, no kernel runs


def test_a_simulated_run_times_every_cell_and_repeats_itself() -> None:
    first = simulated("colwise", FAULTS)
    kernels = [event for event in first if isinstance(event, Kernel)]
    rows = [event for event in first if isinstance(event, Row)]
    assert [kernel.name for kernel in kernels] == ["colwise", load_spec(FAULTS).name]
    assert [each for kernel in kernels for each in kernel.rows] == rows
    for each in rows:
        assert list(each.timings) == [OURS, TORCH_COMPILE, TORCHAO]
        assert all(timing.time_us and not timing.reason for timing in (each.copy, *each.timings.values()))
        assert each.timings["fp8tune"].config == load_spec("colwise" if each in kernels[0].rows else FAULTS).default
    assert list(kernels[0].hosts) == ["fp8tune", "torchao", "torch.add"]
    assert simulated("colwise", FAULTS) == first


def test_a_spent_time_budget_starts_no_problem() -> None:
    assert simulated("colwise", time_budget_s=0.0) == []


def test_host_times_are_within_the_time_budget() -> None:
    count = len(simulated("colwise")) - 1
    for seconds, hosts in ((0, []), (1, ["fp8tune", "torchao", "torch.add"])):
        clock = iter(range(1000)).__next__  # a second a question
        kernel, *rows = simulated("colwise", time_budget_s=float(count + seconds), clock=clock)
        assert isinstance(kernel, Kernel)
        assert (len(rows), list(kernel.hosts)) == (count, hosts)


# Cells: who is asked what


@dataclass(frozen=True)
class Named(Contender):
    """A contender that nothing runs."""

    @property
    def work(self) -> Work:
        return Work(self.name, 1000)

    def launcher(self, torch_device: str) -> Callable[[], object]:
        raise AssertionError("no process runs it")

    def check(self) -> Timing:
        return Timing(reason=f"{self.name} is checked")


PROBLEM = Problem("colwise", NamedInts(M=1000, K=1000, G=2), "jagged")


@dataclass
class FakeGpu:
    """A back end and worker in one: answers are planned, questions are kept."""

    outcomes: Callable[[str, str, int], Outcome]
    """(step, name, round) -> outcome."""
    times: bool = True
    asked: list[tuple[str, str, int]] = field(default_factory=list)
    device: Device = field(default_factory=lambda: Device("sm_90", "a GPU"))

    def worker(self, tree: object = None) -> FakeGpu:
        return self

    def build(self, arm: Named) -> Outcome:
        return self._answer("build", arm)

    def launch(self, arm: Named) -> Outcome:
        return self._answer("launch", arm)

    def block(self, arm: Named, place: Place) -> Outcome:
        return self._answer("block", arm, place.round)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.asked.append((function.__name__, getattr(arguments[0], "name", ""), 0))
        return function(*arguments)

    def close(self) -> None:
        pass

    def _answer(self, step: str, arm: Named, round: int = 0) -> Outcome:
        self.asked.append((step, arm.name, round))
        return self.outcomes(step, arm.name, round)


def test_cells_take_turns_and_one_stalled_block_is_no_cell() -> None:
    stalled = FakeGpu(lambda step, name, round: Outcome(Status.OK, 50.0 if round == 0 else 5.0 + round / 10))
    ours, theirs = (Named(name, PROBLEM) for name in ("fp8tune", "torchao"))
    timed = Cells(stalled).in_rounds([ours, theirs])
    blocks = [(name, round) for step, name, round in stalled.asked if step == "block"]
    assert blocks == [("fp8tune", 0), ("torchao", 0), ("torchao", 1), ("fp8tune", 1), ("fp8tune", 2), ("torchao", 2)]
    assert timed == {ours: Timing(5.2), theirs: Timing(5.2)}  # another one first in each round


def test_what_fails_is_out_with_its_reason_and_the_others_go_on() -> None:
    broken = Outcome(Status.CRASHED, reason="an illegal memory access")

    def outcomes(step: str, name: str, round: int) -> Outcome:
        return broken if (step, name, round) == ("block", "torchao", 1) else Outcome(Status.OK, 5.0)

    ours, theirs = (Named(name, PROBLEM) for name in ("fp8tune", "torchao"))
    timed = Cells(FakeGpu(outcomes)).in_rounds([ours, theirs])
    assert timed == {ours: Timing(5.0), theirs: Timing(reason="an illegal memory access")}


def test_where_no_tensors_can_be_built_every_cell_says_why() -> None:
    full = Outcome(Status.OUT_OF_MEMORY, reason="OutOfMemoryError: 80 GiB")
    backend = FakeGpu(lambda step, name, round: full if step == "build" else Outcome(Status.OK, 5.0))
    arms = [Named(name, PROBLEM) for name in ("fp8tune", "torchao")]
    assert Cells(backend).in_rounds(arms) == dict.fromkeys(arms, Timing(reason=full.reason))
    assert [Cells(backend).check(arm) for arm in arms] == [Timing(reason=full.reason)] * 2


def test_a_refusal_of_ours_is_said_without_its_type() -> None:
    refused = Outcome(Status.COMPILE_ERROR, reason="MachineError: torchao is not installed: pip install it")
    assert cells.timing_of(refused).reason == "torchao is not installed: pip install it"
    assert cells.timing_of(Outcome(Status.TIMEOUT)).reason == "timeout"
    assert len(cells.timing_of(Outcome(Status.COMPILE_ERROR, reason="x" * 1000)).reason) == cells.LONGEST_REASON


def test_a_back_end_that_times_nothing_is_refused() -> None:
    with pytest.raises(MachineError, match="needs a GPU"):
        cells.check_times(FakeGpu(lambda *_: Outcome(Status.OK), times=False))


def test_rounds_launch_what_the_first_has_built(contender: Callable[..., KernelContender]) -> None:
    ours = contender(OURS, "rowwise-2d")
    assert ours.check().reason == ""
    launch = ours.launcher("cpu")
    assert launch is ours.launcher("cpu")
    ours.build("cpu")  # the same problem: nothing is made anew
    assert launch is ours.launcher("cpu")
    other = contender(OURS, "mxfp8-dim0")  # another one: all of it is
    assert launch is not other.launcher("cpu")


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
    kernel, *rows = simulated("rowwise-2d", against=("torch.compile",))
    assert all(isinstance(each, Row) and list(each.timings) == ["fp8tune", "torch.compile"] for each in rows)
    assert isinstance(kernel, Kernel)
    assert list(kernel.hosts) == ["fp8tune", "torch.add"]


@dataclass(frozen=True)
class Dying(Named):
    def build(self, torch_device: str) -> None:
        pass

    def check(self) -> Timing:
        if self.name == "dies":
            os._exit(3)
        if self.name == "fails":
            raise ValueError("planted")
        return Timing(5.0)


def without_a_gpu() -> GpuBackend:
    """Real workers, on the CPU."""
    return GpuBackend(Device("sm_90", "a GPU"), None, torch_device="cpu", timeout_s=60.0)


def test_the_worker_that_dies_costs_one_cell() -> None:
    names = ("dies", "fails", "works")
    with Cells(without_a_gpu()) as held:
        found = [held.check(Dying(name, PROBLEM)) for name in names]
    assert [timing.reason for timing in found] == ["worker exited with code 3", "ValueError: planted", ""]
    assert found[-1].time_us == 5.0


def test_a_kernel_that_torch_compile_refuses_is_compiled_once() -> None:
    refuses = Outcome(Status.COMPILE_ERROR, reason="Unsupported: no")

    def outcomes(step: str, name: str, round: int) -> Outcome:
        return refuses if (step, name) == ("launch", TORCH_COMPILE) else Outcome(Status.OK, 5.0)

    backend = FakeGpu(outcomes)
    refused: dict[str, Timing] = {}
    rows = [
        bench._row(Cells(backend), [Refusing(name, PROBLEM, "x", 8, NamedInts()) for name in names], refused, Timing())
        for names in 3 * [(OURS, TORCH_COMPILE, TORCHAO)]
    ]
    assert [row.timings[TORCH_COMPILE].reason for row in rows] == ["Unsupported: no"] * 3
    assert [row.timings[TORCHAO].time_us for row in rows] == [5.0] * 3
    assert backend.asked.count(("launch", TORCH_COMPILE, 0)) == 1


@dataclass(frozen=True)
class Refusing(KernelContender):
    def check(self) -> Timing:
        return Timing()


def test_warming_up_runs_an_autotuner_once_for_sizes_of_one_kind() -> None:
    backend = SimulatedBackend("simulated:1")
    wanted = bench.planned(BenchOptions(kernels=("colwise",)), backend)
    warmed = wanted.compiled_first(backend.device)
    names = [contender.name for contender in warmed]
    assert names == sorted(names, key=lambda name: name != "torchao")
    groups = {contender.problem.shape["G"] for contender in warmed if contender.name == "torchao"}
    assert groups == {1, 16, 8}  # a size of 1, multiples of 16, others: three binaries each
    assert names.count("fp8tune") > names.count("torchao")
    assert list(warming.in_parallel(backend, warmed, 8)) == []  # no kernel runs: nothing is said


@dataclass(frozen=True)
class Warmed(Arm):
    """An autotuner times a config, on a fake GPU, and the launch of the one it picks fails."""

    path: Path

    @property
    def work(self) -> Work:
        return Work("warmed", 0)

    def launcher(self, torch_device: str) -> Callable[[], object]:
        from triton.runtime import driver

        if self.path.name == "dies":
            os._exit(3)
        times = driver.active.get_benchmarker()(lambda: self.path.write_text(str(os.getpid())), quantiles=(0.5, 0.2))
        assert len(times) == 3
        raise ValueError("planted")

    def build(self, torch_device: str) -> None:
        from triton.runtime import driver

        driver.set_active(types.SimpleNamespace())  # type: ignore[arg-type]


def test_contenders_are_warmed_up_in_processes_that_are_thrown_away(tmp_path: Path) -> None:
    arms = [Warmed(path=tmp_path / name) for name in ("dies", "one", "two", "three")]
    seen = list(warming.in_parallel(without_a_gpu(), arms, workers=2))
    assert [(compiled.done, compiled.total) for compiled in seen] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "three", "two"]
    assert str(os.getpid()) not in {path.read_text() for path in tmp_path.iterdir()}


def test_progress_is_a_line_a_problem_after_what_is_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    with render_bench.BenchProgress(clock=lambda: 0.0) as progress:
        for done in range(1, 9):
            progress.compiled(warming.Compiled(done, 8, seconds=2.0 * done))
        for done in (1, 2):
            progress.timed("colwise M=8: 2.00 us", done, 2)
    assert capsys.readouterr().err.splitlines() == [
        "[1/8, ETA 14 s] compiling",
        "[8/8, ETA 0 s] compiling",
        "[1/2] colwise M=8: 2.00 us",
        "[2/2] colwise M=8: 2.00 us",
    ]


# What a cell does, without a GPU


def test_a_failure_is_one_line() -> None:
    def fail() -> Timing:
        raise RuntimeError("\nno such thing\n  a listing")

    assert cells.guarded(fail) == Timing(reason="RuntimeError: no such thing a listing")


def test_a_device_error_ends_the_worker() -> None:
    def fail() -> Timing:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(Poisoned) as poisoned:
        cells.guarded(fail)
    assert isinstance(poisoned.value.value, Timing)
    assert "illegal memory access" in poisoned.value.value.reason


def test_host_time_is_of_calls_after_the_first() -> None:
    calls: list[int] = []
    assert 0 < host.host_us(lambda: calls.append(1)) < 1000
    assert len(calls) == 1 + host.HOST_BATCHES * host.HOST_CALLS


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_has_a_public_wrapper_that_takes_its_tensors(kernel: str) -> None:
    spec = load_spec(kernel)
    inputs = spec.inputs(plan.problems(spec, [HOST_ROW])[0], "meta")
    outputs = public_wrapper(spec)(*wrapper_arguments(spec, inputs))
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    for output, wanted in zip(outputs, spec.outputs(*inputs), strict=True):
        assert (output.shape, output.stride(), output.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)


def test_host_calls_launch_once_on_a_small_input(torchao: TorchAo) -> None:
    torchao("rowwise-2d", load_spec("rowwise-2d").reference)
    calls = {name: HostCall(name, "rowwise-2d", "rowwise-2d").launcher("cpu") for name in bench.HOSTS}
    (ours, _), (theirs, _) = calls[OURS](), calls[TORCHAO]()
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert calls[TORCH_ADD]().shape == (64, 64)


def test_a_kernel_of_elsewhere_has_no_wrapper_to_time() -> None:
    with pytest.raises(UsageError, match="lives elsewhere"):
        public_wrapper(load_spec(FAULTS))


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
    monkeypatch.setattr(bench, "run", lambda *_: iter([kernel, *kernel.rows]))
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


def test_the_title_says_what_was_checked_and_a_column_what_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    recorded = Problem("module:kernel", NamedInts(n=1), input_layout="recorded-0123456789ab")
    plain = Kernel("softmax", [replace(row(2.0, COPY_US), flops=2 * 10**9, gemm=Timing(1e3))])
    checked = Kernel("module:kernel", [replace(row(2.0, COPY_US), problem=recorded)], check="exact-inputs")
    render_bench.print_bench([plain, checked], (), "table")
    lines = capsys.readouterr().out.splitlines()
    titles = [line for line in lines if "seed 0" in line]
    assert titles[0].endswith("seed 0")
    assert titles[1].endswith(
        "seed 0, checked for equal bytes on inputs whose sums are exact, rates as if whole tensors were moved"
    )
    headers = [lines.index(title) + 1 for title in titles]
    assert ["bound" in lines[number] for number in headers] == [True, False]
    assert lines[headers[0] + 1].endswith("compute")


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
    assert summary["check"] == "exact"
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
    backend, _ = backend_for(None, None)
    events = list(bench.run(backend, bench.planned(BenchOptions(shapes=("tiny",)), backend)))
    for each in events:
        if isinstance(each, Row):
            assert each.ours.time_us, each.ours.reason
            assert each.copy.time_us, each.copy.reason
            assert not each.is_wrong, each.timings["fp8tune"].reason
            assert all(timing.time_us or timing.reason for timing in each.timings.values())
            assert each.timings["torch.compile"].time_us, each.timings["torch.compile"].reason
        elif isinstance(each, Kernel):
            assert each.hosts["fp8tune"].time_us, each.hosts["fp8tune"].reason
            assert each.hosts["torch.add"].time_us


SUMS = f"{PLANTED / 'sums.py'}"


@pytest.mark.parametrize("kind", ["EXACT", "EXACT_INPUTS", "TOLERANCE", "PREPARED_EXACT"])
def test_a_contender_is_right_as_its_spec_says(kind: str) -> None:
    """FAULT 0 is right, 1 sums in another order, 2 drops a block, 3 adds to its output."""
    problem = Problem("planted-sums", NamedInts(M=7, K=173))
    reasons = {}
    for fault in (0, 1, 2, 3):
        arm = KernelContender(OURS, problem, f"{SUMS}:{kind}", 0, NamedInts(FAULT=fault, num_warps=4))
        arm.build("cpu")
        given = [each.clone() for each in kernel_contenders._inputs[arm.reference, problem]]
        reasons[fault] = arm.check().reason
        assert all(map(torch.equal, given, kernel_contenders._inputs[arm.reference, problem]))
        kernel_contenders._made.clear()
        kernel_contenders._expected.clear()
    wrong = {fault for fault, reason in reasons.items() if reason}
    assert wrong == {"EXACT": {1, 2, 3}, "EXACT_INPUTS": {2, 3}, "TOLERANCE": {2, 3}, "PREPARED_EXACT": {1, 2}}[kind]
    assert all(reasons[fault].endswith("% of elements") for fault in wrong)


def test_a_float64_reference_is_no_rival() -> None:
    problem, config = Problem("planted-sums", NamedInts(M=7, K=173)), NamedInts(FAULT=0, num_warps=4)
    arm = KernelContender(TORCH_COMPILE, problem, f"{SUMS}:TOLERANCE", 0, config)
    arm.build("cpu")
    assert cells.checked(arm).reason.endswith("is in float64: torch.compile would do other work")
